"""Find the mistake: reports of wrong verification in speculative decoding, each as a rule of a few lines.

`python -m lab.shipped` proves all of them (lab/prove.py); `python -m lab.shipped 47932` proves the one with
this number and prints an example. Each class says what its report says, in terms of verify.py; the reported
code was written otherwise. Two rules were accused and are right. The report OWNER/NAME#NUMBER is
https://github.com/OWNER/NAME/issues/NUMBER. The text beside it says what became of it; numbers alone are pull
requests or issues of the same repository.
"""
import copy
import sys
import time
from dataclasses import replace
from functools import partial

from torch.nn.functional import one_hot

from lab.prove import SAME, Proof
from model import require_that
from specmini import Parser, exit_status
from verify import Exact, is_greedy, probs, residual

WALKS = {'WRONG': 400, 'lossless': 15, 'not seen': 15}          # a proof ends at the first difference
RULES = {}              # OWNER/NAME#NUMBER of a report: the class of its rule


def report(where, outcome, expected='WRONG'):
    """Enters a class. It promises to be lossless, as the reported program did. expected: a key of WALKS."""
    def enter(kind):
        kind.lossless, kind.outcome, kind.expected = True, outcome, expected
        RULES[where] = kind
        return kind
    return enter


def judged_by(draft, to_probs):
    """The Draft whose q is made of its logits by this function; looked-up guesses have none."""
    return draft if draft.logits is None else replace(draft, q=to_probs(draft.logits))


@report('huggingface/transformers#47932', 'mended: 48007')
class RawQ(Exact):
    """Guesses are drawn after temperature and top-k; q is before both."""
    def guess(self, session, n):
        return judged_by(super().guess(session, n), lambda logits: logits.softmax(-1))


@report('jaymody/speculative-sampling#3', 'mended: 4; transformers#32867 is the same')
class ArgmaxGuesses(Exact):
    """Guesses are the draft's argmax; q is its softmax."""
    def draft_probs(self, session, logits):
        return session.probs(logits, 0.0)

    def guess(self, session, n):
        return judged_by(super().guess(session, n), session.probs)


@report('deepseek-ai/DeepSpec#31', 'open; the report names 30 as its fix')
class DraftInBf16(ArgmaxGuesses):
    """Guesses are drawn from logits in bf16; q is made of them in fp32."""
    def draft_probs(self, session, logits):
        return session.probs(logits.bfloat16())


@report('vllm-project/vllm#9834', 'mended: 10198')
class RawTarget(Exact):
    """q is after temperature and top-p; p is before both."""
    def score(self, session, draft):
        score = super().score(session, draft)
        score.p = score.logits.softmax(-1)
        return score


@report('lablup/mlxcel#902', 'true of two loops; the loop that it cites is SampleAndMatch (992)')
class GreedyTarget(Exact):
    """The target judges and replaces by its argmax, at any temperature."""
    def score(self, session, draft):
        score = super().score(session, draft)
        score.p = probs(score.logits, 0.0)
        return score


@report('vllm-project/vllm-ascend#6685', 'mended by it; vLLM had moved the softmax')
class LogitsAsProbs(Exact):
    """Guesses are judged by logits that are taken for probabilities."""
    def chance(self, score, i):
        temperature = score.session.temperature
        if is_greedy(temperature):
            return super().chance(score, i)
        logit = float(score.logits[i, score.block.tokens[i]]) / temperature
        return min(1.0, max(0.0, logit / score.table[i].q))


@report('vllm-project/vllm-ascend#2881', 'it copies p first; closed without a merge')
class ChangedInPlace(Exact):
    """p loses a looked-up guess, in place, before the guess is judged."""
    def score(self, session, draft):
        score = super().score(session, draft)
        looked_up = draft.tokens if draft.logits is None else []
        for i, token in enumerate(looked_up):
            if score.p[i, token] < 1:
                score.p[i, token] = 0
        return score


@report('paiml/aprender#2014', 'mended by it; only benchmarks ran this code')
class CacheForgets(Exact):
    """The verifying pass sees a cache that was emptied of the text."""
    def score(self, session, draft):
        forgetful = copy.copy(session)
        forgetful.tokens = session.tokens[-1:]
        return super().score(forgetful, draft)


@report('vllm-project/vllm-ascend#13730', 'open; 13470 is merged and draws a coin')
class AlwaysZero(Exact):
    """The coin is always 0, so every guess that p allows is kept."""
    def chance(self, score, i):
        return float(score.table[i].p > 0)


@report('sgl-project/sglang#35771', 'mended: 35798', 'not seen')
class SometimesZero(Exact):
    """A guess is kept if coin <= chance, so a coin of 0 keeps one of p = 0.

    A coin in fp32 is 0 once in 2^24 draws. The proof calls distributions equal that differ by up to 1e-6, so
    it does not see these 6e-8.
    """
    def chance(self, score, i):
        return min(1.0, super().chance(score, i) + 2.0 ** -24)


@report('vllm-project/vllm-ascend#16370', 'open')
class CoinTwice(Exact):
    """One random number rejects a guess and draws the recovered token."""
    def chance(self, score, i):
        self.above = super().chance(score, i)           # a coin that rejects is above this
        return self.above

    def recovery_distribution(self, p, q):
        sums = residual(p, q).cumsum(-1).clamp(min=self.above)
        return sums.diff(prepend=sums.new_tensor([self.above])) / (1 - self.above)


@report('ohdearquant/lattice#243', 'mended: 258')
class FirstIsFree(Exact):
    """The first token of a looked-up block is committed without being judged."""
    def chance(self, score, i):
        looked_up = score.block.logits is None
        return 1.0 if looked_up and i == 0 else super().chance(score, i)


@report('vllm-project/vllm-ascend#7807', 'mended: 7808, as Sun et al. 2024 have it')
class BlockOfTokens(Exact):
    """Block verification with the acceptance and the residual of single tokens.

    That code compared products of ratios and of coins. Here the last guess that passes keeps all before it.
    """
    def accept(self, session, draft, score):
        kept = 0
        for i in range(len(draft.tokens)):
            if session.flip(self.chance(score, i)):
                kept = i + 1
        tokens = draft.tokens[:kept] + [score.next_token(kept)]
        return tokens, ['draft'] * kept + ['target'], score.table[:kept]


@report('ShopeeLLM/Spec-RL#14', 'meant so, for training; MCSD#5 suspects it of code that is right')
class ReplacedByP(Exact):
    """The recovered token is drawn from p."""
    def recovery_distribution(self, p, q):
        return p


@report('xLLM-AI/xllm#2175', 'mended by it; EAGLE#20 of 2023 is the same')
class LeavesOneOut(Exact):
    """The recovered token is drawn from p without the rejected one."""
    def chance(self, score, i):
        self.rejected = score.block.tokens[i]           # if it is
        return super().chance(score, i)

    def recovery_distribution(self, p, q):
        rest = p.clone()
        rest[self.rejected] = 0
        return rest / rest.sum()


@report('openvinotoolkit/openvino.genai#4190', 'open; 4490 is its fix')
class NextRow(Exact):
    """The recovered token is drawn from the row of the next position."""
    def accept(self, session, draft, score):
        tokens, labels, judged = super().accept(session, draft, score)
        if judged and not judged[-1].kept:
            tokens[-1] = int(session.draw(score.p[len(tokens)]))
        return tokens, labels, judged


@report('huggingface/transformers#47912', 'mended: 47931, 48981; koboldcpp#1276 is the same')
class PastTheEnd(Exact):
    """An end of sequence that is kept inside a block does not end the text.

    Here the end itself is dropped, as a reader sees it, because `commit` cuts a text at its end.
    """
    def accept(self, session, draft, score):
        tokens, labels, judged = super().accept(session, draft, score)
        if labels[-1] == 'draft':                       # an end that was kept: no token came after it
            tokens[-1], labels[-1] = int(session.draw(score.p[len(tokens)])), 'bonus'
        return tokens, labels, judged


@report('sgl-project/sglang#31599', 'mended: 33758')
class LimitBeforeEnd(PastTheEnd):
    """A block that reaches the limit of tokens is not searched for an end."""
    def accept(self, session, draft, score):
        at_limit = len(draft.tokens) + 1 >= session.tokens_left
        return (PastTheEnd if at_limit else Exact).accept(self, session, draft, score)


@report('ml-explore/mlx-swift-lm#459', 'open; it replaces this rule by that of sd', 'lossless')
class SampleAndMatch(Exact):
    """RIGHT: a guess is kept if the target's own sample is the same token.

    Each token is a sample of p. A guess is kept with chance sum p q, where sd has sum min(p, q).
    """
    def chance(self, score, i):
        self.own = score.session.draw(score.p[i])
        return float(self.own == score.block.tokens[i])

    def recovery_distribution(self, p, q):
        return one_hot(self.own, len(p)).to(p)


@report('SafeAILab/EAGLE#183', 'also 329; answered in 93: guesses are the top k, so q is 1', 'lossless')
class QIsOne(LeavesOneOut):
    """RIGHT: a guess x is kept with p(x), else drawn from p without x.

    Whatever x is, and however it was drawn, the token then follows p. It, too, keeps sum p q.
    """
    def chance(self, score, i):
        super().chance(score, i)
        return score.table[i].p


def run():
    """Prints the table of all reports, or the proof of one; returns 1 if one comes out otherwise."""
    parser = Parser(prog='python -m lab.shipped', description=__doc__.split('\n')[0])
    parser.add_argument('number', nargs='?', help='of a report, to prove this one alone')
    args = parser.parse_args()
    chosen = {where: kind for where, kind in RULES.items() if args.number in (None, where.split('#')[1])}
    require_that(chosen, f'no report has the number {args.number}; without a number, all are listed')
    others = []
    row = '{:24}  {:74}  {:13}  {:>7}  {:>7}'
    print(row.format('report', 'what is wrong', 'the proof', 'by', 'seconds'))
    for where, kind in chosen.items():
        begin, name = time.perf_counter(), where.split('/')[1]
        proof = Proof(name, kind(), range(WALKS[kind.expected]))
        quiet = 'no difference' if kind.expected == 'WRONG' else kind.expected
        verdict, seconds = 'WRONG' if proof.gap > SAME else quiet, time.perf_counter() - begin
        words = kind.__doc__.split('\n')[0]
        print(row.format(name, words, verdict, f'{proof.gap:.1g}', f'{seconds:.1f}'), flush=True)
        if verdict != kind.expected:
            others.append(f'{name}: {verdict}; expected {kind.expected}')
        if args.number:
            print(f'{where}: {kind.outcome}', *proof.lines(), sep='\n')
    print(*others, sep='\n', end='\n' * bool(others))
    return int(bool(others))


main = partial(exit_status, 'lab.shipped', run)

if __name__ == '__main__':
    sys.exit(main())
