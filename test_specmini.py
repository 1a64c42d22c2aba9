"""What must hold of the network, of exact decoding and of the five methods, and why. Read it from the top.

transformers says what a network computes, exact enumeration how a rule's texts are distributed, plain
decoding what a greedy text is, and a fresh cache what a cache should hold. A *law test* compares
distributions: in states that random walks reach (lab/prove.py) it follows every outcome of every draw of the
next cycle, so rounding is its only error.
Ids begin with the method: `pytest -k "law and cmasd"` selects the laws of CM-ASD. `-m "not slow"` leaves out
what takes more than about a second. The rest of what the project promises (checkpoints, flags, pages) is
tested in lab/tests/.
"""
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

import kernels
import specmini
import train_mask
import verify
from lab import tasks
from lab.baselines import DraftVerify, slim_draft
from lab.prove import SAME, Proof
from lab.tests.helpers import (EMBEDDED, HOME, LINE, MIXED, RANGES, SMALL, Coin, case, full_session, letters,
                               refuses, thin)
from lab.shipped import ReplacedByP
from lab.toys import (Table, apart, enumerate_law, exact_law, fresh, network, plain, seeded, session,
                      slim_session, variation, write)
from model import Reader, knob, load, read_calibration, shared_length
from verify import (Autoregressive, Ballot, CmAsd, Draft, Ecsv, EcsvSpot, Exact, Judged, Sparse, SpecGuard,
                    ViaSd, decode, lookup_then_draft, probs, prompt_lookup, read_prompt, residual,
                    token_logps)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

STEPS = dict(text=letters, calibration=dict(signals=RANGES))        # what a Session of SpecGuard needs


def valid_prefix(reader, tokens):
    """How many of these tokens the full path need not read again; asserts that a fresh cache agrees."""
    full = reader.model.full
    count = reader.cache.valid_prefix(tokens, full)
    other = Reader(reader.model, len(tokens))
    other.read(tokens, full, 1)
    for held, wanted in zip(reader.cache.stores, other.cache.stores):
        assert torch.allclose(held[:, :, :count], wanted[:, :, :count], rtol=0, atol=1e-9)
    return count


# ----------------------------------------------------------- a law, counted out; then the laws of all methods

class DropsUnverified(Exact):
    """Wrong: drops a token that it has sampled, because its own q is low."""

    def propose(self, s):
        draft = super().propose(s)
        count = 0
        while count < len(draft.tokens) and draft.q[count, draft.tokens[count]] >= 0.3:
            count += 1
        return Draft(draft.tokens[:count], draft.q[:count])


class JudgedByQ(Ecsv):
    """Wrong: judges the fused token as if it had been drawn from the branches' q."""

    def draft_branches(self, session, n):
        self.drawn = super().draft_branches(session, n)
        return self.drawn

    def guess(self, session, n):
        draft = super().guess(session, n)
        return replace(draft, q=probs(self.drawn.logits.mean(0)[:len(draft.tokens)]))


def test_a_law_is_counted_out():
    """A target is a table: a known distribution p after each text. So is a draft. Then all can be counted.

    The law of texts of two tokens is p(x) p(y | x). Every outcome of every draw of `sd` is followed: its
    texts have this law. Those of two rules that look right have another one: a rule that drops an unlikely
    guess unseen, and one that replaces a rejected guess by a draw from p, not from the residual.
    """
    target, draft = Table(1), Table(2)
    p = probs(target.row((0,)))                                     # after the prompt, which is token 0
    law = exact_law(target, 2, temperature=1.0)
    for (x, y), chance in law.items():
        assert chance == pytest.approx(float(p[x] * probs(target.row((0, x)))[y]))
    assert variation(enumerate_law(target, draft, Exact(2), 2, temperature=1.0), law) < 1e-12
    for wrong in DropsUnverified(2), ReplacedByP(2):
        assert variation(enumerate_law(target, draft, wrong, 2, temperature=1.0), law) > 0.01


OFF = dict(rho=1.0, moe_skip=0)                         # knobs of Sparse that leave nothing out
TWO = dict(gamma=2, branches=2, draft_temperature=1.0, draft_top_p=0.8)
FOUR = TWO | dict(gamma=4)
CHECKED = dict(spots=2, a_spot=1.0)                     # ECSV that checks positions with the target
ALWAYS = dict(keep=2.0, escalate=1.5)                   # VIA-SD escalates every token,
NEVER = dict(keep=1.0, escalate=0.0, max_lag=99)        # and none
STRICT = dict(alpha=2, tau_base=1)                      # CM-ASD judges exactly: only its window is its own
SKIP = dict(mask=dict(skip=[1]))                        # of a Table: its feed-forward


@pytest.mark.parametrize('method, walks', [
    case('ar', Autoregressive(), 9),
    case('sd', Exact(4), 5),
    case('sd-many', Exact(4), 25, slow=True),
    case('sd-gamma-1', Exact(1), 4),
    case('sd-cool-draft', Exact(3, draft_temperature=0.5), 4),
    case('sd-greedy-draft', Exact(draft_temperature=0), 4),
    case('cmasd-tau-1', CmAsd(4, **STRICT), 5),
    case('cmasd-tau-1-fixed', CmAsd(4, k_min=4, **STRICT), 4),
    case('cmasd-lossy', CmAsd(4), 9),
    case('ecsv', Ecsv(**TWO), 6),
    case('ecsv-four-branches', Ecsv(), 9, slow=True),
    case('ecsv-soft', Ecsv(**TWO, soft=0.5), 4, slow=True),
    case('ecsv-spot', EcsvSpot(**TWO, **CHECKED), 4),
    case('ecsv-spot-four', EcsvSpot(**FOUR, **CHECKED), 5, slow=True),
    case('ecsv-spot-by-entropy', EcsvSpot(**TWO, **CHECKED, by='entropy'), 4, slow=True),
    case('ecsv-spot-budget', EcsvSpot(**FOUR, **CHECKED, budget=3), 6, slow=True),
    case('ecsv-wrong-judged-by-q', JudgedByQ(**TWO), 9),
    case('via-always', ViaSd(4, **ALWAYS), 5),
    case('via-lossy', ViaSd(4), 9),
    case('specguard-tau-inf', SpecGuard(tau=inf, k=2, max_step=2), 5),
    case('specguard-tau-inf-gamma', SpecGuard(2, tau=inf, k=2, max_step=2), 4, slow=True),
    case('specguard-lossy', SpecGuard(k=2, tau=0.5, max_step=2), 9),
    case('sparse-off', Sparse(4, **OFF), 4)])
def test_law(method, walks):
    """A method that calls itself lossless has the target's law in every state of some walks; others have not.

    The other direction counts as much: a test that a wrong rule passes proves nothing about a right one.
    """
    proof = Proof('method', method, range(walks), seed=6)
    assert (proof.gap <= SAME) == method.lossless, proof.sentence()
    assert walks < 25 or proof.sentence().startswith('lossless in all')


def test_a_changed_rule_is_not_called_lossless():
    """A subclass that overrides a part of the rule, or drafts, is lossy unless it says when it is lossless.

    So is one of two classes. What is asked before a token is drawn is free.
    """
    for part in 'propose', 'guess', 'score', 'chance', 'recovery_distribution', 'accept':
        assert not type('Bad', (Exact,), {part: lambda *_: 1.0})().lossless
    for part in 'draft_probs', 'signals', 'keep_drafting', 'learn':
        assert type('Free', (Exact,), {part: lambda *_: 1.0})().lossless
    assert type('Kept', (Exact,), dict(accept=Exact.accept, lossless=True))().lossless
    assert not type('Bad', (CmAsd,), dict(threshold=lambda *_: 0.5))(tau_base=1).lossless
    assert not type('Both', (Ecsv, type('Other', (Exact,), dict(chance=None))), {})().lossless


@pytest.mark.parametrize('method', [Exact(3), ViaSd(3), SpecGuard(k=1, tau=0.5), Autoregressive()], ids=str)
def test_a_cycle_has_its_distributions_until_the_next_one(method):
    """p and q of a block, as the rule had them; None where no target pass has run; never in a trace."""
    s = full_session(16, temperature=1.0)
    read_prompt(s)
    before = []
    for cycle in decode(s, method):
        assert not any(vars(old).get('score') for old in before) and 'score' not in asdict(cycle)
        before.append(cycle)
        asked = not isinstance(method, SpecGuard) and bool({'target/full'} & cycle.passes.keys())
        assert (cycle.score is not None) == asked
        if asked:
            n = len(cycle.drafted)
            assert len(cycle.score.p) == n + 1 and len(cycle.score.block.tokens) == n
            for i, row in enumerate(cycle.judged):
                x = cycle.drafted[i]
                assert row.p in (None, float(cycle.score.p[i, x]))
                assert row.q == float(cycle.score.block.q[i, x])
    assert before[-1].score is None and len(before) > 2


def test_knobs_of_a_users_method_are_checked(monkeypatch):
    """By their types, also where these are texts, as `from __future__ import annotations` makes them."""
    @dataclass
    class Own(Exact):
        share: 'float' = knob(0.5, 'a share', 0, 1)
    monkeypatch.setitem(verify.METHODS, 'own', Own)
    made = specmini.make_methods(['own share=0.25'], '2')
    assert made['own share=0.25'] == Own(2, share=0.25) and Own(share=1).share == 1
    for wrong in ('0.5', None, True, 2):
        refuses(f'share is {wrong!r}; expected a number 0 to 1', partial(Own, share=wrong))


# laws of lossy rules, by hand

@pytest.mark.parametrize('tau', [1.0, 0.8, 0.5, 0.2])
def test_law_of_cmasd_lenience(tau):
    """A lenience of tau keeps min(q, p / tau) and draws the rest from the residual."""
    target = Table(1)
    p, q = probs(target.row((0,))), probs(Table(2).row((0,)))
    kept = torch.minimum(q, p / tau)
    wanted = kept + (1 - kept.sum()) * residual(p, q)
    method = CmAsd(1, tau_base=tau, gamma_tau=0.0)
    found = enumerate_law(target, Table(2), method, 2, temperature=1.0)
    for (first, second), chance in found.items():
        after = probs(target.row((0, first)))
        assert chance == pytest.approx(float(wanted[first] * after[second]))


@pytest.mark.parametrize('tau', [0.6, 0.4])
def test_law_of_steps_that_specguard_judges(tau):
    """A step of three tokens stays if its weakest token is likely enough; else the target writes it."""
    target, draft = Table(1, 2), Table(2, 2, 0.7)
    method = SpecGuard(k=1, beta=1.0, tau=tau, max_step=3)
    drafted = exact_law(draft, 3, temperature=method.draft_temperature)
    written = exact_law(target, 3, temperature=1.0)
    wanted = Counter()
    for step, chance in drafted.items():
        rows = [draft.row((0, *step[:i])).log_softmax(-1) for i in range(3)]
        weakest = min(float(row[token]) for row, token in zip(rows, step))
        kept = 1 + weakest / 4 >= tau                   # its scale is -4..0
        for text, share in ({step: 1.0} if kept else written).items():
            wanted[text] += chance * share
    settings = STEPS | dict(text=lambda ids: 'a' * len(ids), temperature=1.0)
    assert variation(wanted, written) > 0.01
    assert variation(enumerate_law(target, draft, method, 3, **settings), wanted) < 1e-9


@pytest.mark.parametrize('bonus', [True, False])
def test_law_of_via_slim_bonus(bonus):
    """After a block that slim kept, slim writes a token; without slim_bonus the draft goes on."""
    target, draft = Table(1, 3), Table(2, 3)
    method = ViaSd(1, keep=0.0, escalate=0.0, slim_bonus=bonus)
    found = enumerate_law(target, draft, method, 2, temperature=1.0, calibration=SKIP)
    for (first, second), chance in found.items():
        before = probs(draft.row((0,)))
        # a Table marks what slim has read
        after = probs(target.row((0.5, first + 0.5)) if bonus else draft.row((0, first)))
        assert chance == pytest.approx(float(before[first] * after[second]))


# the same with the real generator: what enumeration replaces, `draw`, is tested too

def upper_tail(observed, expected):
    """The chance of a chi-square at least as large as that of these counts."""
    statistic = sum((observed[cell] - n) ** 2 / n for cell, n in expected.items())
    halves = torch.tensor([len(expected) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


@pytest.mark.slow
@pytest.mark.parametrize('method, right, n', [
    case('sd', Exact(2), True, 2000),
    case('cmasd', CmAsd(3, **STRICT), True, 2000),
    case('ecsv', Ecsv(**TWO), True, 1200),
    case('sd-wrong-residual', ReplacedByP(2), False, 1200),
    case('ecsv-wrong-judged-by-q', JudgedByQ(**TWO), False, 1200)])
def test_law_by_chi_square(method, right, n):
    """The first two of five tokens follow the law, and fewer texts suffice to find a wrong rule (power).

    9,999 of 10,000 seeds should pass, all five cases together. Cells that expect fewer than five texts are
    pooled.
    """
    target, draft = Table(2, 5), Table(7, 5)
    cells = {}
    expected = Counter()
    for text, chance in exact_law(target, 2, temperature=1.0).items():
        cells[text] = text if n * chance >= 5 else 'rare'
        expected[cells[text]] += n * chance
    assert len(expected) > 10
    s = session(target, draft, [0], 4, temperature=1.0)
    observed = Counter()
    for _ in range(n):
        s.tokens, s.tokens_left = [0], 4
        cycles = decode(s, replace(method))             # a method serves one text
        while len(s.tokens) < 3:
            next(cycles)
        observed[cells[tuple(s.tokens[1:3])]] += 1
    assert (upper_tail(observed, expected) > 1e-4 / 5) == right


# ----------------------------------------------------------------------- the network: as transformers has it

BASE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None,
            eos_token_id=1)
MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
ORIGINAL = 'original_max_position_embeddings'


def rope(kind, theta=10000.0, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


LLAMA3 = rope('llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **{ORIGINAL: 32})
YARN = rope('yarn', factor=4.0, **{ORIGINAL: 16})
YARN_KNOBS = rope('yarn', factor=4.0, attention_factor=0.7, beta_fast=16, beta_slow=2, **{ORIGINAL: 16})
NETWORKS = [
    case('llama', 'Llama', {}),
    case('llama-tied-linear-rope', 'Llama',
         dict(tie_word_embeddings=True, num_key_value_heads=4, **rope('linear', factor=4.0))),
    case('llama-biases', 'Llama',
         dict(attention_bias=True, mlp_bias=True, rms_norm_eps=0.1, **rope('default', 500.0))),
    case('llama-llama3-rope', 'Llama', dict(head_dim=16, **LLAMA3)),
    case('mistral', 'Mistral', dict(sliding_window=None)),
    case('qwen2', 'Qwen2', {}),
    case('qwen2-yarn', 'Qwen2', YARN),
    case('qwen3', 'Qwen3', dict(head_dim=16)),
    case('qwen3-biases', 'Qwen3', dict(head_dim=24, attention_bias=True)),
    case('qwen3-yarn-knobs', 'Qwen3', YARN_KNOBS),
    case('qwen3moe', 'Qwen3Moe', MOE),
    case('qwen3moe-renormalised', 'Qwen3Moe', dict(norm_topk_prob=True, **MOE))]


@pytest.mark.parametrize('kind, changes', NETWORKS)
def test_parity(kind, changes, tmp_path):
    """Our logits are those of transformers, in one pass, a token at a time, and up to rounding in bf16.

    Norms and biases are random. transformers begins with ones and zeros, which would hide one that is left
    out.
    """
    torch.manual_seed(len(str(changes)))
    settings = getattr(transformers, f'{kind}Config')(**BASE | changes)
    theirs = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    for name, weight in theirs.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0 if 'norm' in name else 0.0, 0.3)
    theirs.save_pretrained(tmp_path, max_shard_size='20KB')
    words = {f't{i}': i for i in range(64)}
    Tokenizer(models.WordLevel(words, unk_token='t0')).save(str(tmp_path / 'tokenizer.json'))
    ids = torch.randint(0, 64, (40,)).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert wanted.std() > 0.5                           # logits that are all alike would prove nothing

    model, _, _ = load(tmp_path)
    assert apart(fresh(model, ids), wanted) < 1e-4
    rounded, _, _ = load(tmp_path, dtype=torch.bfloat16)
    assert (fresh(rounded, ids) - wanted).std() < 0.1 * wanted.std()
    precise, _, _ = load(tmp_path, dtype=torch.float64)
    reader = Reader(precise, 40)
    rows = [reader.read(ids[:end], precise.full, 1)[0] for end in range(1, 41)]
    assert apart(torch.stack(rows), fresh(precise, ids)) < 1e-9


@pytest.mark.parametrize('T, S', [(1, 9), (3, 9), (9, 9), (1, 1030), (3, 1030)])
def test_attention_without_a_mask_is_causal(T, S):
    """The T queries are of the last T keys, in every form that attention takes."""
    shapes = (2, 4, T, 8), (2, 2, S, 8), (2, 2, S, 8)
    q, k, v = [torch.randn(shape, dtype=torch.float64, generator=seeded(i)) for i, shape in enumerate(shapes)]
    hidden = torch.arange(S) > torch.arange(S - T, S)[:, None]
    scores = q @ k.repeat_interleave(2, 1).mT / 8 ** 0.5
    wanted = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    mask = kernels.causal_mask(T, S, q)
    assert torch.equal(mask == 0, ~hidden)
    for given in (None, mask):
        out, _ = kernels.attend(q, k, v, given, None)
        assert apart(out, wanted) < 1e-12
    assert apart(kernels.attend_grouped(q, k, v, mask), wanted) < 1e-12


# ------------------------------------------------------------------------------------------------- the maths

@pytest.mark.parametrize('temperature', [0.5, 1.3])
@pytest.mark.parametrize('top_k', [0, 5])
@pytest.mark.parametrize('top_p', [1.0, 0.8, 0.3])
def test_probs_are_transformers(temperature, top_k, top_p):
    """Temperature comes first, then top-k, then top-p, as in transformers' warpers."""
    from transformers.generation import logits_process as theirs
    logits = torch.randn(50, 30, generator=seeded(), dtype=torch.float64)
    warped = theirs.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = theirs.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = theirs.TopPLogitsWarper(top_p)(None, warped)
    assert apart(probs(logits, temperature, top_k, top_p), warped.softmax(-1)) < 1e-12


def test_probs_at_the_limits():
    """Temperature 0 is a one-hot distribution, and so is top-p near 0, because the likeliest always stays."""
    logits = torch.randn(50, 30, generator=seeded(), dtype=torch.float64)
    greedy = torch.nn.functional.one_hot(logits.argmax(-1), 30).double()
    assert torch.equal(probs(logits, 0), greedy)
    assert torch.allclose(probs(logits, 1, top_p=1e-9), greedy)
    assert torch.allclose(probs(logits, 1e-6), greedy)
    assert probs(logits.bfloat16(), 0.7).dtype == torch.float32


@pytest.mark.parametrize('p', [
    case('first-and-last', [0.0, 0.3, 0.0, 0.7, 0.0]),
    case('one-hot', [0.0, 0.0, 1.0]),
    case('less-than-1', [0.0, 0.1, 0.0, 0.2, 0.0]),
    case('more-than-1', [0.0, 0.9, 0.0, 0.9, 0.0]),
    case('one-is-tiny', [0.0, 1e-15, 0.0, 1.0, 0.0])])
def test_sample_at_its_ends(p, monkeypatch):
    """The smallest uniform number draws the first token that has a chance, the largest draws the last."""
    p = torch.tensor(p, dtype=torch.float64)
    possible = p.nonzero()[:, 0].tolist()
    for uniform, wanted in ((0.0, possible[0]), (1 - 2 ** -53, possible[-1])):
        number = torch.tensor([uniform], dtype=torch.float64)
        monkeypatch.setattr(torch, 'rand', lambda *_, number=number, **__: number)
        assert int(verify.sample(p)) == wanted


# ----------------------------------------------------------- greedy text: plain decoding's, wherever it ends

IDENTICAL = [       # methods and settings whose greedy text has to be plain decoding's
    case('sd', Exact(4), {}),
    case('sd-gamma-0', Exact(0), {}),
    case('sd-lookup', Exact(8), dict(proposer=prompt_lookup)),
    case('draft-verify', DraftVerify(3), dict(drafter=None)),
    case('sd-lookup-first', Exact(8), dict(proposer=lookup_then_draft)),
    case('cmasd-tau-1', CmAsd(tau_base=1.0), {}),
    case('cmasd-strict-gamma-1', CmAsd(1, tau_base=1), {}),
    case('ecsv', Ecsv(3), {}),
    case('ecsv-soft', Ecsv(3, soft=1.0), {}),
    case('ecsv-spot', EcsvSpot(4, draft_temperature=1.5, a_spot=1.0, budget=4), {}),
    case('ecsv-spot-entropy', EcsvSpot(4, draft_temperature=0.5, by='entropy'), {}),
    case('via-always', ViaSd(3, **ALWAYS), {}),
    case('via-sparse-off', ViaSd(3, **ALWAYS), dict(sparse=Sparse(**SMALL | OFF))),
    case('specguard', SpecGuard(tau=inf, k=2), {}),
    case('specguard-sd', SpecGuard(4, tau=inf, k=1), {}),
    case('sparse-off', Sparse(3, **SMALL | OFF), {})]


@pytest.mark.parametrize('method, settings', IDENTICAL)
def test_greedy_identity_of_every_method(method, settings):
    """A lossless setting writes plain decoding's text, also where the end of room or of text cuts a block.

    After the short prompt the draft is the target itself, so that an end may stand among accepted tokens.
    """
    assert method.lossless and (not settings.get('sparse') or settings['sparse'].lossless)
    for length in (1, 23):
        s = full_session(20, length=length)
        twin = s.target.model
        wanted = plain(twin, s.tokens, 20)
        cuts = [(1, []), (2, []), (7, []), (20, []), *((20, wanted[i:i + 1]) for i in (0, 5, 6, 9))]
        for tokens_left, eos in cuts:
            line = wanted[:tokens_left]
            cut = next((i + 1 for i, token in enumerate(line) if token in eos), tokens_left)
            own = dict(drafter=Reader(twin, 64)) if length == 1 else {}
            s = full_session(tokens_left, eos, length, **own | settings)
            tokens, _ = write(s, method)
            assert tokens == line[:cut], (length, tokens_left, eos)
            assert s.ended == (line[cut - 1] in eos)


def test_nothing_is_judged_after_an_end():
    """A block that was looked up may go on after an end of sequence that the target writes, too."""
    target = network(0)
    wanted = plain(target, [1, 2, 3], 3)
    s = session(target, None, [1, 2, 3], 9, prompt_lookup, eos=frozenset(wanted[:1]))
    draft = Draft.points(wanted, target)
    tokens, labels, judged = Exact().accept(s, draft, Exact().score(s, draft))
    assert tokens == wanted[:1] and labels == ['draft'] and len(judged) == 1


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_draft_that_is_the_target(temperature):
    """All its tokens are kept, with one target pass a cycle; the prompt is not counted."""
    target = network(3)
    _, cycles = write(session(target, target, [1, 2, 3], 30, temperature=temperature), Exact(4))
    for cycle in cycles:
        assert cycle.passes['target/full'] == [1, 5] and len(cycle.tokens) == 5
    # the first cycle feeds the root and three drafts, the next one the unread fourth and the bonus first
    assert cycles[0].passes['draft/full'] == [4, 4]
    assert cycles[1].passes['draft/full'] == [4, 5]


@pytest.mark.parametrize('text, found', [
    case('three-in-common', '123459123', '459'),
    case('three-beat-two', '12340235123', '402'),
    case('the-latest-of-two', '12312412', '412'),
    case('never-seen', '123', ''),
    case('too-short', '1', '')])
def test_lookup(text, found):
    """It drafts what followed the last occurrence of the text's last three tokens, else of its last two."""
    s = session(network(), None, [int(digit) for digit in text], 9, prompt_lookup)
    draft = prompt_lookup(s, 3)
    assert ''.join(map(str, draft.tokens)) == found
    assert draft.q.tolist() == [[float(token == x) for x in range(11)] for token in draft.tokens]


# ------------------------------------------------------------------------- the cache: whatever is done to it

def test_caches_after_each_cycle():
    """After any commit both caches agree with fresh ones, except for tokens that the next pass reads."""
    s = session(network(0), network(1), [1, 2, 3], 30, temperature=1.0)
    read_prompt(s)
    for _ in decode(s, Exact(4)):
        for reader in (s.target, s.drafter):
            assert valid_prefix(reader, s.tokens) >= len(s.tokens) - 2


def test_means_of_blocks_that_were_overwritten_are_made_anew():
    """Sparse attention chooses blocks by the mean keys of this text, and not of one that was here before."""
    model = network()
    path = thin(model, rho=0.1, block=2)
    found = []
    for texts in ([7] * 45, LINE), (LINE,):
        reader = Reader(model, 64)
        for text in texts:
            reader.read(text[:40], model.full, 0)
            rows = reader.read(text[:45], path, 1)
        found.append(rows)
    assert apart(*found) < 1e-9


def test_a_fork_averages_its_own_keys():
    """Means of blocks that an earlier text left in a kept fork are made anew."""
    reader = Reader(network(), 24)
    for text in LINE[:12], LINE[5:17]:
        reader.read(text, reader.model.full, 0)
        twin = reader.fork(2)
        keys = twin.cache.stores[0][:, :2, :12]
        means = twin.cache.average(4, 12)[0][:, :, :3]
        assert apart(means, keys.unflatten(2, (3, 4)).mean(3)) < 1e-12


# ------------------------------------------------------------ CM-ASD: confidence, window, threshold, by hand

def test_cmasd_signals_by_formula():
    """1 - H / log V, tanh of half the logit margin, and q1 - q2: in 0..1, and higher where q is sharper."""
    logits = torch.randn(50, 9, generator=seeded(), dtype=torch.float64)
    q = logits.softmax(-1)
    first, second = logits.topk(2).values.T
    likeliest = q.topk(2).values
    wanted = torch.stack([1 + (q * q.log()).sum(-1) / math.log(9), ((first - second) / 2).tanh(),
                          likeliest[:, 0] - likeliest[:, 1]], 1)
    found = torch.tensor([verify.confidence_signals(row[None]) for row in logits], dtype=torch.float64)
    assert torch.allclose(found, wanted)
    assert (torch.tensor([verify.confidence_signals(row[None] * 1.1) for row in logits]) > found).all()
    assert verify.confidence_signals(torch.zeros(1, 9)) == pytest.approx([0, 0, 0], abs=1e-6)
    assert verify.confidence_signals(torch.eye(9)[:1] * 1e4) == pytest.approx([1, 1, 1])
    uneven = [CmAsd(lam_entropy=2).signals(None, row[None])['confidence'] for row in logits]
    assert uneven == pytest.approx((wanted @ torch.tensor([0.5, 0.25, 0.25]).double()).tolist())


def test_cmasd_window_by_hand():
    """floor(alpha C gamma), C the mean so far, from k_min to gamma; a C that is not a number is refused."""
    def window(*confidences, alpha=0.9):
        return CmAsd(10, k_min=2, alpha=alpha).window([dict(confidence=C) for C in confidences])
    assert [window(C) for C in (0, 0.1, 0.5, 1)] == [2, 2, 4, 9]
    assert window(1, 0.5, 0) == 4 and window(1, alpha=3) == 10
    refuses('NaN', window, 1, math.nan)


def test_cmasd_block_ends_after_the_token_that_fills_its_window():
    """The window is that of the block's mean confidence so far, so no token is dropped unverified."""
    method = CmAsd(8, alpha=1.5, tau_base=1.0)
    model = network(0, vocab=30)                        # it is its own draft: every token is kept
    _, cycles = write(session(model, model, [1], 60, temperature=1.0), method)
    lengths = set()
    for cycle in cycles[:-2]:                           # the room cuts the last ones
        sure = [noted['confidence'] for noted in cycle.signals]
        for i in range(1, len(sure) + 1):
            full = i >= min(8, max(1, math.floor(1.5 * 8 * sum(sure[:i]) / i)))
            assert full == (i == len(cycle.drafted))
        lengths.add(len(cycle.drafted))
    assert len(lengths) > 2


@pytest.mark.parametrize('tau, wanted', [(0.59, [1, 1, 1, 0]), (0.61, [1, 0, 1, 0]), (1.0, [1, 0, 0, 0])])
def test_cmasd_rule_by_hand(tau, wanted):
    """p(x) / max p is 1, 0.6, 1 and 0.05. A tie with the best is kept, except at tau = 1."""
    draft = Draft([0, 1, 2, 3], torch.ones(4, 4), signals=[dict(confidence=1.0)] * 4)
    score = verify.Score(session(network(), None, [1], 2), draft, network().full)
    score.logits = torch.tensor([[3.0, 3.0 + math.log(0.6), 3.0, 0.0]] * 5, dtype=torch.float64)
    assert [CmAsd(tau_base=tau).chance(score, i) for i in range(4)] == wanted
    taus = [CmAsd(tau_base=0.2, gamma_tau=2.0).threshold(C) for C in (1.0, 0.75, 0.0)]
    assert taus == pytest.approx([0.2, 0.7, 1.0])       # tau_base + gamma_tau (1 - C), at most 1,
    assert CmAsd(tau_base=0.0).threshold(1.0) == 0.01                           # and at least 0.01


def test_cmasd_means_one_thing_by_greedy():
    """A temperature too small to divide by counts as 0: the lenient text is the same."""
    texts = []
    for temperature in (0.0, 1e-7):
        s = session(network(0), network(1), [1, 2, 3], 30, temperature=temperature)
        texts.append(write(s, CmAsd(tau_base=0.1))[0])
    assert texts[0] == texts[1] != plain(network(0), [1, 2, 3], 30)


# ----------------------------------------------------------------------------------- ECSV: the vote, by hand

UNWEIGHTED = dict(gamma_r=0.0)


def ballot(tokens, logits=None):
    """A Ballot of branches (lists of ids below 6), which share random logits at each position."""
    if logits is None:
        logits = torch.randn(1, len(tokens[0]), 6, generator=seeded(), dtype=torch.float64)
    return Ballot.of(torch.tensor(tokens), logits.expand(len(tokens), -1, -1), True)


def hand_ballot():
    """A Ballot of three branches of two tokens whose features are round numbers."""
    return Ballot(
        tokens=torch.tensor([[5, 1], [5, 2], [4, 3]]),
        entropy=torch.tensor([[0.0, 0.5], [0.2, 0.5], [0.4, 0.9]], dtype=torch.float64),
        logq=torch.tensor([[-1.0, -3.0], [-2.0, -3.0], [0.0, -4.0]]).double(),
        candidates=torch.tensor([[5, 5, 4], [1, 2, 3]]), q=torch.zeros(3, 2, 3), tie_break=[[0] * 3] * 2)


def fused(method, votes):
    """The tokens that a ballot elects; method.weights are those of its votes."""
    method.ballot = votes
    return Ecsv.vote(method, SimpleNamespace(eos=frozenset()))


def test_ecsv_vote_by_hand():
    """The token of most branches wins; ties go to the verifier's logit where it was asked, else to mean q."""
    method = Ecsv(**UNWEIGHTED)
    assert fused(method, ballot([[0, 1, 2], [0, 2, 3], [3, 2, 2]])) == [0, 2, 2]
    assert fused(method, ballot([[0, 1], [0, 2], [3, 2]])) == [0, 2]
    assert [[*tally.items()][:2] for tally in method.tallies] == [[(0, 2), (3, 1)], [(2, 2), (1, 1)]]
    for likelier in (1, 2):                             # two branches disagree
        logits = torch.zeros(1, 2, 6).index_fill(2, torch.tensor(likelier), 1.0)
        tied = ballot([[0, 1], [0, 2]], logits)
        assert fused(method, tied) == [0, likelier]
        tied.tie_break[1] = (9.0 * (tied.candidates[1] == 3 - likelier)).tolist()       # see EcsvSpot.ask
        assert fused(method, tied) == [0, 3 - likelier]
    assert fused(Ecsv(**UNWEIGHTED, soft=1.0), ballot([[0], [1], [1]], torch.eye(6)[:1] * 9)) == [0]


@pytest.mark.parametrize('knobs, wanted', [
    (dict(a_entropy=2), [[0, -1], [-0.4, -1], [-0.8, -1.8]]),
    (dict(a_agree=1), [[0.5, 0], [0.5, 0], [0, 0]]),    # with the other two branches
    (dict(a_self=0.5, gamma_r=2), [[-1, -3], [-2, -3], [0, -4]]),
    (dict(a_spot=1), [[0, -2], [0, -7], [0, -3]])])
def test_ecsv_reliability_by_hand(knobs, wanted):
    """A sign turned round would leave the text lossless, so that nobody would see it in the text."""
    votes = hand_ballot()
    method = EcsvSpot(**dict(a_entropy=0, a_agree=0, a_self=0, a_spot=0) | knobs)
    method.unanimous = {}
    method.ask(votes, torch.tensor([[0.0, 0, 0, 0, 3, 1], [0.0, 7, 2, 6, 9, 0]]), [1])  # favourite: 4
    assert votes.tie_break[1] == [7, 2, 6]
    fused(method, votes)
    for found, row in zip(method.weights.log().tolist(), wanted):
        assert found == pytest.approx(row, abs=1e-9)


@pytest.mark.parametrize('method', [Ecsv(), Ecsv(soft=0.5)])
def test_ecsv_order_of_branches_changes_nothing(method):
    """Branches have no order; and a single branch is its own vote."""
    for seed in range(20):
        rows = torch.randint(0, 6, (4, 3), generator=seeded(seed)).tolist()
        assert fused(method, ballot(rows)) == fused(method, ballot(rows[::-1]))
        assert fused(replace(method, soft=0.0), ballot(rows[:1])) == rows[0]


def test_ecsv_spot_checks_go_where_branches_disagree_or_doubt():
    """`reach` bounds a check. Where all agree there is no disagreement, but there may be doubt."""
    votes = hand_ballot()                               # at position 1 all three differ
    method = EcsvSpot(4)
    assert [method.doubtful(votes, R, 2) for R in (0, 1, 2)] == [[], [1], [0, 1]]
    assert method.doubtful(votes, 2, 1) == [0]
    votes = replace(votes, tokens=torch.tensor([[5, 1], [5, 1], [5, 2]]), entropy=votes.entropy.flip(1))
    assert method.doubtful(votes, 2, 2) == [1]
    assert EcsvSpot(4, by='entropy').doubtful(votes, 1, 2) == [0]


def test_ecsv_spot_flips_what_all_branches_have():
    """No weight can: every vote is for one token. The target's favourite takes a checked position."""
    votes = ballot([[0, 1], [0, 2], [0, 1]])
    method = EcsvSpot()
    method.unanimous = {}
    method.ask(votes, torch.tensor([[0.0, 0, 0, 5, 0, 0], [0.0, 0, 9, 0, 0, 0]]), [0, 1])
    assert fused(method, votes) == [3, 2]


@pytest.mark.parametrize('R, budget', [
    (1, None), (2, 4), case('4-6', 4, 6, slow=True), case('3-3', 3, 3, slow=True)])
def test_ecsv_spot_checks_keep_the_budget_and_the_text(R, budget, monkeypatch):
    """Target positions stay within the budget, and positions that a check has read are not read twice.

    If a cycle leaves some of its budget, the next one may check one position more.
    """
    asked = []
    doubtful = EcsvSpot.doubtful
    monkeypatch.setattr(EcsvSpot, 'doubtful', lambda *args: asked.append(args[2]) or doubtful(*args))
    target = network(0)
    method = EcsvSpot(4, draft_temperature=1.5, spots=R, a_spot=1.0, budget=budget)
    checks = free = 0
    for draft, prompt in itertools.product((network(0), network(1)), ([1, 2], [3])):
        tokens, cycles = write(session(target, draft, prompt, 40, seed=1), method)
        assert tokens == plain(target, prompt, 40)
        left = 0
        for cycle in cycles:
            passes, positions = cycle.passes['target/full']
            block = len(cycle.drafted) + 1
            if cycle.drafted:
                assert asked.pop(0) == R + (left > 0)
                left = budget - positions if budget else 0
            assert positions <= (budget or block)
            checks += passes == 2
            free += passes == 2 and positions == block
    assert checks > 0 and free > 0


@pytest.mark.parametrize('eos, knobs, wanted', [
    ([3], dict(a_spot=0), [1, 3]), ([4], dict(a_spot=0), [1, 3, 2, 2]),
    ([3], dict(a_spot=4), [1, 4, 2, 2]), ([4], dict(a_spot=4), [1, 4])])
def test_ecsv_block_ends_where_an_end_is_elected(eos, knobs, wanted):
    """Tokens after an end would be read for nothing. A second vote may take an end back, or elect one."""
    class Scripted(EcsvSpot):
        def draft_branches(self, session, n):
            tokens = torch.tensor([[1, 3, 2, 2], [1, 3, 5, 2], [1, 4, 2, 6]])
            logits = torch.randn(1, 4, 11, generator=seeded()).expand(3, -1, -1)
            return verify.Branches(tokens, logits, {})
    target = network(0)                                 # it would write 4 where two of three branches have 3
    s = session(target, target, [1], 9, eos=frozenset(eos))
    assert Scripted(4, a_entropy=0, a_self=0, spots=1, **knobs).propose(s).tokens == wanted


def test_ecsv_of_one_branch_proposes_what_sd_samples():
    drafts = []
    for method in (Ecsv(4, branches=1, draft_temperature=1.0, draft_top_p=1.0), Exact(4)):
        s = session(network(0), network(1), [1, 2], 30, temperature=1.0, seed=3)
        drafts.append(method.propose(s).tokens)
    assert drafts[0] == drafts[1]


@pytest.mark.slow
def test_ecsv_with_map_weights_is_map_decoding():
    """If errors are independent, weights of log((1 - e) (V - 1) / e) elect the likeliest symbol."""
    rates = [0.1, 0.5, 0.55, 0.55, 0.6]                 # of errors of five branches, among four symbols
    generator = seeded()
    wrong = torch.rand(5, 5000, generator=generator) < torch.tensor(rates)[:, None]
    seen = torch.where(wrong, torch.randint(1, 4, wrong.shape, generator=generator), 0)     # 0 is true
    votes = Ballot.of(seen, torch.zeros(5, 5000, 4), False)
    unweighted = fused(Ecsv(**UNWEIGHTED), votes)
    weights = torch.tensor([[math.log((1 - e) * 3 / e)] for e in rates]).double()
    votes.logq = weights.log().expand(seen.shape)
    found = fused(Ecsv(a_entropy=0, a_agree=0, a_self=1), votes)        # whose weights are exp(log q)
    decided = {}
    for said in itertools.product(range(4), repeat=5):
        chances = [math.prod(1 - e if symbol == truth else e / 3 for e, symbol in zip(rates, said))
                   for truth in range(4)]
        decided[said] = chances.index(max(chances))
    assert found == [decided[tuple(said)] for said in seen.T.tolist()]
    assert found.count(0) > unweighted.count(0) + 150                   # of 5,000; 5 standard errors


# -------------------------------------------------------------------------------- VIA-SD: regions and limits

class Stage:
    """A Score of three draft tokens with given ratios and p; its own tokens tell who wrote, and where."""
    path = network().full

    def __init__(self, draft, ratios, p, name):
        self.name = name
        self.table = [Judged([x], *row) for x, *row in zip(draft.tokens, p, [1.0] * 3, ratios)]

    def next_token(self, i):
        return self.name + i


@pytest.mark.parametrize('ratios, p, knobs, wanted', [
    case('kept', [0.9, 0.5, 1], [0, 0, 0], {}, [1, 2, 3, 53]),                  # slim's bonus,
    case('kept-without-bonus', [0.9, 0.5, 1], [0, 0, 0], dict(slim_bonus=False), [1, 2, 3]),
    case('rewritten', [0.9, 0.49, 1], [1, 1, 1], {}, [1, 51]),                  # slim's own token,
    case('at-the-bound', [0.9, 0.3, 1], [1, 1, 1], {}, [1, 51]),
    case('escalated', [0.9, 0.29, 0.9], [1, 1, 1], {}, [1, 2, 3, 73]),          # the target's bonus,
    case('the-target-judges-the-rest', [0.9, 0.1, 0.9], [1, 1, 0], {}, [1, 2, 72]),
    case('refused', [0.1, 0.9, 0.9], [0, 1, 1], {}, [70]),                      # the target's residual
    case('always', [1, 1, 1], [1, 0, 1], ALWAYS, [1, 71]),
    case('never', [1, 0.9, 1], [0, 0, 0], NEVER, [1, 51])])
def test_via_regions_by_hand(ratios, p, knobs, wanted, monkeypatch):
    """A ratio from `keep` on stays, below `escalate` the target decides, between them slim writes its own."""
    method = ViaSd(3, **knobs)
    draft = Draft([1, 2, 3], None)
    s = slim_session()
    monkeypatch.setattr(method, 'slim_score', lambda *_: Stage(draft, ratios, p, 50))
    tokens, labels, judged = method.accept(s, draft, Stage(draft, ratios, p, 70))
    assert tokens == wanted
    writers = {5: 'slim', 7: 'target'}
    assert labels == ['bonus' if token == 73 else writers.get(token // 10, 'draft') for token in tokens]
    assert [row.kept for row in judged] == [token < 50 for token in tokens[:3]]


@pytest.mark.parametrize('gamma', [1, 5])
@pytest.mark.parametrize('who, knobs', [
    case('keeps-all', 'draft', dict(keep=0.0, escalate=0.0, slim_bonus=False)),
    case('keeps-all-lag-0', 'draft', dict(keep=0.0, escalate=0.0, slim_bonus=False, max_lag=0)),
    case('never', 'slim', NEVER),
    case('never-without-bonus', 'slim', NEVER | dict(slim_bonus=False)),
    case('always', 'target', ALWAYS),
    case('slim-is-the-target', 'target', dict(keep=1.0))])
def test_via_limits(who, knobs, gamma):
    """At the ends of its knobs VIA-SD writes the greedy text of the draft, of slim or of the target."""
    skip = () if knobs == dict(keep=1.0) else (2, 3, 4)
    alone = slim_session()
    read_prompt(alone)
    texts = dict(draft=plain(alone.drafter.model, [1, 2, 3], 24),
                 target=plain(alone.target.model, [1, 2, 3], 24))
    texts['slim'] = slim_draft(alone, 24, Exact()).tokens
    assert texts['draft'] != texts['slim'] != texts['target'] != texts['draft']
    tokens, cycles = write(slim_session(skip=skip), ViaSd(gamma, **knobs))
    assert tokens == texts[who]
    assert who != 'slim' or not any('target/full' in cycle.passes for cycle in cycles)


@pytest.mark.parametrize('knobs', [
    dict(escalate=0.01, max_lag=3), dict(), dict(keep=0.9, escalate=0.2)])
def test_via_pays_for_its_lag(knobs):
    """A full pass runs only to escalate or at the lag's limit, and reads all that slim kept without it."""
    method = ViaSd(4, **knobs)
    s = slim_session(3, 40, temperature=1.0)
    read_prompt(s)
    lag = reads_of_lag = 0
    by = Counter()
    for cycle in decode(s, method):
        asked = any(row.signals['by'] == 'target' for row in cycle.judged)
        late = lag > method.max_lag
        positions = lag * (late or asked) + asked * (len(cycle.drafted) + 1)
        assert cycle.passes.get('target/full', [0, 0])[:2] == [late + asked, positions]
        assert cycle.passes['target/slim'][:2] == [1, len(cycle.drafted) + 1]
        by.update((row.signals['by'], row.kept) for row in cycle.judged)
        reads_of_lag += late
        lag = max(0, len(s.tokens) - 1 - valid_prefix(s.target, s.tokens))
    assert (reads_of_lag > 0) == (method.max_lag == 3)
    assert by['target', True] and by['target', False] and by['slim', True] and by['slim', False]


def test_via_tells_slims_nan_as_slims():
    """The target's weights are whole, so a user must not look there."""
    s = slim_session()
    s.slim_path = replace(s.slim_path, ffns=(lambda x, mlp: x * math.nan,) * 4)
    refuses('the slim target computed NaN', next, decode(s, ViaSd()))


def test_via_violation_by_hand():
    """R is 0 for equal distributions and, at 1/2 and 1/2, within a factor of 2; it is never below 0."""
    q, p = torch.randn(2, 50, 6, generator=seeded()).double().log_softmax(-1)
    assert (train_mask.violation(p, p) == 0).all() and (train_mask.violation(p, q) >= 0).all()
    a, b = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.4, 0.6]).log()
    assert train_mask.violation(b, a) == 0
    assert float(train_mask.violation(b, a, 0, 1)) == pytest.approx(1.1 * math.log(1.75))  # (.7 + .4) log 7/4


# ------------------------------------------------------------------ SpecGuard: rollout, score, steps, limits

def guarded(method, seed=0, tokens_left=30, **settings):
    """(tokens, cycles) of a method on a random pair whose texts have steps."""
    s = session(network(0, 12), network(1, 12), [3, 2], tokens_left, seed=seed, **STEPS | settings)
    return write(s, method)


def whole_rollout(model, line, layers, sparsify):
    """[N, N] attention rollout as the paper has it: whole matrices of these layers, multiplied."""
    seen = []                               # of each layer: attention [N, N], the mean over its heads

    def watch(q, k, v, mask, carry):
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ keys.mT / q.shape[-1] ** 0.5
        weights = (scores + kernels.causal_mask(len(line), len(line), q)).softmax(-1)
        kept = torch.where(weights < sparsify, 0, weights)
        kept = torch.where(kept.sum(-1, keepdim=True) == 0, weights, kept)      # an empty row stays whole
        seen.append((kept / kept.sum(-1, keepdim=True)).mean(1)[0])
        return kernels.attend(q, k, v, mask, carry)
    path = replace(model.full, attends=(watch,) * len(model.full.attends))
    Reader(model, len(line)).read(line, path, 1)
    product = torch.eye(len(line), dtype=torch.float64)
    for i in layers:
        product = seen[i] @ product
    return product


@pytest.mark.parametrize('n, chosen', [(1, [4]), (3, [2, 3, 4]), (9, [0, 1, 2, 3, 4])])
@pytest.mark.parametrize('sparsify', [0, 0.04, 0.3, 1])
def test_specguard_rollout_is_the_product_of_whole_matrices(n, chosen, sparsify):
    """Each token's share on the whole prefix is right, though only the new rows of weights are made.

    The observed pass is an ordinary one: its logits are the same, and the cache holds what full would write.
    """
    model = network(num_hidden_layers=5)
    line, begin = LINE[:20], 4
    path = model.full.grounded(n, begin, sparsify)
    reader = Reader(model, 64)
    logits = reader.read(line, path, 16)
    grounding = reader.carry['rollout'][0].sum(-1)
    wanted = whole_rollout(model, line, chosen, sparsify)[begin:, :begin].sum(-1)
    assert apart(grounding, wanted) < 1e-9 and grounding.std() > 0.01 and grounding.max() < 1 + 1e-9
    assert apart(logits, fresh(model, line, 16)) < 1e-12 and valid_prefix(reader, line) == 20


def test_specguard_log_probabilities_are_of_each_token_itself():
    """A shift by one row would show. A score is at least 0: at tau = -1 the draft writes its greedy text."""
    found = []

    class Watched(SpecGuard):
        def verdict(self, session, draft, pairs):
            found.extend(logp for logp, _ in pairs)
            return super().verdict(session, draft, pairs)
    text, _ = guarded(Watched(tau=-1.0, k=1, draft_temperature=0.0))
    assert text == plain(network(1, 12), [3, 2], 30)
    logits = fresh(network(1, 12), [3, 2] + text)[1:-1]
    assert found == pytest.approx(token_logps(logits, text).tolist())


def test_specguard_score_by_hand():
    """The score is beta L + (1 - beta) G, of the weakest tokens.

    Signals outside of the calibrated percentiles count as their ends. A tie is kept.
    """
    s = session(network(0, 12), network(1, 12), [3, 2], 12, **STEPS)
    draft = Draft([4, 5], torch.full((2, 12), 1 / 12), signals=[dict(candidate=1)] * 2)
    writers = []
    for tau in (-inf, 0.49, 0.5, 0.51, inf):
        pairs = None if math.isinf(tau) else [(-2.0, 0.7), (-1.0, 0.5)]
        _, labels, (step,) = SpecGuard(tau=tau).accept(s, draft, pairs)
        assert step.tokens == [4, 5] and step.kept == step.chance and step.threshold == tau
        writers.append(labels[0])
    assert writers == ['draft', 'draft', 'draft', 'target', 'target']
    s.calibration = dict(signals=dict(draft_logp=[-4, 0], draft_grounding=[0.2, 0.6]))
    seen = [(-1.0, 0.5), (-3.0, 0.6), (-0.1, 0.3)]      # L = 1/4, G = 1/4
    for beta, low, score in ((0.3, 0.3, 0.25), (0.3, 0.5, 0.6), (1.0, 0.5, 0.25)):
        seen[2] = -0.1, low
        assert SpecGuard(beta=beta).verdict(s, draft, seen).signals['score'] == pytest.approx(score)
    assert SpecGuard().verdict(s, draft, [(-9.0, 0.4)]).signals['score'] == pytest.approx(0.25)


@pytest.mark.parametrize('tau', [-inf, 0.5, inf])
def test_specguard_passes_of_a_step(tau):
    """A draft pass a token, one observed pass, and a target pass a token only where the target writes.

    No pass is observed where tau is infinite, because no score decides. Greedy candidates are one candidate,
    and it changes no text whether the draft helps the target to write.
    """
    greedy = dict(tau=tau, draft_temperature=0.0)
    text, cycles = guarded(SpecGuard(k=1, **greedy))
    scored = math.isfinite(tau)
    for cycle in cycles:
        T = len(cycle.drafted)
        wrote = cycle.labels[0] == 'target'
        assert cycle.passes['draft/full'][0] == T
        assert cycle.passes.get('draft/grounded', [0, 0])[:2] == [scored, scored * T]
        assert cycle.passes.get('target/full', [0])[0] == wrote * len(cycle.tokens)
        assert len(cycle.passes) == 1 + scored + wrote
    same, others = guarded(SpecGuard(4, k=4, **greedy))
    assert text == same and [cycle.labels for cycle in cycles] == [cycle.labels for cycle in others]


@pytest.mark.parametrize('tau', [-inf, 0.5, inf])
def test_specguard_steps_end(tau):
    """At the delimiter, at max_step, at the end of sequence or of the text, whoever writes them."""
    line, cycles = guarded(SpecGuard(tau=tau), temperature=1.0)
    for cycle in cycles[:-1]:                           # the end of the text may cut the last
        assert '\n' in letters(cycle.tokens).lstrip() and '\n' not in letters(cycle.tokens)[:-1].lstrip()
    _, cycles = guarded(SpecGuard(tau=tau, max_step=7), text=lambda ids: 'x' * len(ids))
    assert [len(cycle.tokens) for cycle in cycles] == [7, 7, 7, 7, 2]
    for eos in {*line[::9]}:
        cut, cycles = guarded(SpecGuard(tau=tau), temperature=1.0, eos=frozenset([eos]))
        assert eos not in cut[:-1] and (len(cut) == 30 or cut[-1] == eos)
        for cycle in cycles:
            (step,) = cycle.judged
            assert cycle.accepted == step.kept * len(step.tokens)


@pytest.mark.parametrize('kind, marked', [             # | stands where a step ends
    ('line', '## Sum\n|\\[\n 3.5 + 4 = 7.5\n|\\]\nSo it is 7.5. Hence 8!\n|1. Add. Done'),
    ('sentence', '## Sum\n|\\[\n 3.5 + 4 = 7.5\n|\\]\nSo it is 7.5. Hence 8!|\n1. Add.| Done'),
    ('paragraph', '## Sum\n\\[\n 3.5 + 4 = 7.5\n\n|\\]\nSo it is 7.5. Hence 8!\n1. Add. Done'),
    ('7.5', '## Sum\n\\[\n 3.5 + 4 = 7.5|\n\\]\nSo it is 7.5|. Hence 8!\n1. Add. Done')])
def test_specguard_kinds_of_steps_by_hand(kind, marked):
    """Brackets alone are no step; neither a decimal point nor the number of a list's item ends one."""
    s = session(network(), None, [1], 999, text=lambda ids: ''.join(map(chr, ids)))
    method = SpecGuard(delimiter=kind, max_step=999)
    steps = ['']
    for letter in marked.replace('|', ''):
        steps[-1] += letter
        if method.has_ended(s, list(map(ord, steps[-1]))):
            steps.append('')
    assert '|'.join(steps) == marked


# ------------------------------------------------------- sparse verification: gathered is masked, and limits

def block_means(keys, block):
    """[B, G, N, D]: the mean key of each whole block of keys [B, G, S, D]."""
    count = keys.shape[2] // block
    return keys[:, :, :count * block].unflatten(2, (count, block)).mean(3)


def attend_by_hand(q, k, v, mask):
    """Attention under a mask [B, G, T, S] of each key head."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / q.shape[-1] ** 0.5 + mask.repeat_interleave(group, 1)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


@pytest.mark.parametrize('block', [1, 4, 7])
@pytest.mark.parametrize('start, T', [(40, 1), (43, 5), (30, 3), (9, 6), (kernels.MANY, kernels.FEW)])
def test_sparse_attention_gathered_is_masked(block, start, T):
    """Gathered blocks give what all keys give under a mask that hides the other blocks, by hand.

    A compiled pass has the whole cache in view, also what lies after the text: the result is the same.
    """
    rule = Sparse(**SMALL | dict(rho=0.3, block=block))
    sizes = dict(dtype=torch.float64, generator=seeded(1))
    q, wide_k, wide_v = [torch.randn(2, heads, length, 6, **sizes) for heads, length in (
        (4, T), (2, start + 50), (2, start + 50))]
    k, v = wide_k[:, :, :start + T], wide_v[:, :, :start + T]
    wide_mask = kernels.causal_mask(T, start + T, q)
    wide_mask = torch.cat([wide_mask, torch.full((T, 50 - T), -inf)], 1)
    mask = wide_mask[:, :start + T]
    carry = dict(start=torch.tensor(start), means=block_means(wide_k, block))
    dense, _ = kernels.attend(q, k, v, mask, None)
    got, chosen = kernels.sparse_attend(q, k, v, mask, carry, True, rule)
    wide, _ = kernels.sparse_attend(q, wide_k, wide_v, wide_mask, carry, True, rule)
    assert apart(wide, got) < 1e-12
    kept = math.ceil((8 + (start - 8) * 0.3 // 1) / block) + 2          # the budget, a sink and a local block
    whole = start // block
    if whole <= kept:
        assert 'blocks' not in chosen and torch.equal(got, dense)
        return
    asked = q[:, :, 0].unflatten(1, (2, 2)).mean(2)
    scores = (block_means(k, block)[:, :, :whole] @ asked[..., None])[..., 0]
    scores[:, :, 0] = scores[:, :, whole - 1] = inf
    hidden = torch.ones(2, 2, whole, dtype=torch.bool).scatter(2, scores.topk(kept).indices, False)
    masks = mask.expand(2, 2, T, -1).clone()
    masks[..., :whole * block].masked_fill_(hidden.repeat_interleave(block, 2)[:, :, None], -inf)
    assert apart(got, attend_by_hand(q, k, v, masks)) < 1e-12 and apart(got, dense) > 1e-3
    positions, seen = chosen['reads']
    rows = positions[..., None].expand(-1, -1, -1, 6)
    on_cuda = kernels.attend_grouped(q, k.gather(2, rows), v.gather(2, rows), seen)
    assert apart(on_cuda, got) < 1e-12


def test_sparse_budget_by_hand():
    """N = ceil((floor((L - L0) rho) + L0) / block), beside the sinks and the locals; it never falls."""
    rule = Sparse(rho=0.25, dense_below=128, block=16, locals=1)
    for length, blocks in {128: 8, 129: 8, 131: 8, 132: 9, 512: 14}.items():
        assert kernels.kept_blocks(length, rule) == blocks + 2
    shares = [replace(rule, rho=percent / 100) for percent in range(0, 101, 5)]
    rows = [[kernels.kept_blocks(length, share) for share in shares] for length in range(128, 900, 37)]
    table = torch.tensor(rows)
    assert (table.diff(dim=0) >= 0).all() and (table.diff(dim=1) >= 0).all()


@pytest.mark.parametrize('knobs, dense', [
    case('budget-of-all', dict(rho=0.2, dense_below=60), True),
    case('rho-below-1', dict(rho=0.999), True),
    case('sinks-of-all', dict(rho=0.0, sinks=60), True),
    case('betas-of-0', dict(moe_skip=2, moe_quantile=0.0), True),
    case('few-keys', dict(rho=0.0), False),
    case('quantile', dict(ffn_quantile=1.0), False),
    case('experts', dict(moe_skip=1, moe_quantile=1.0), False)])
def test_sparse_limits(knobs, dense):
    """A knob at its end leaves nothing out: dense logits by sparse kernels. A knob that is moved shows."""
    model = network(**MIXED)
    assert thin(model, **OFF) == model.full
    path = thin(model, **OFF | knobs)
    reader = Reader(model, 64)
    reader.read(LINE[:-1], model.full, 0)
    got = reader.read(LINE + [1, 2, 3], path, 4)
    wanted = Reader(model, 64).read(LINE + [1, 2, 3], model.full, 4)
    assert apart(got, wanted) < 1e-9 if dense else apart(got, wanted) > 1e-3
    writers = reader.cache.writers[:len(reader.cache.ids)]
    assert path.name == writers[-1] == 'sparse' and writers[-5] == 'full'


def test_sparse_draft_changes_no_logits_before_it():
    """A guess does not change what it and the guesses before it are judged by: the root chooses."""
    model = network(**MIXED)
    path = thin(model, rho=0.1, ffn_quantile=1.0, moe_skip=1, moe_quantile=1.0)
    found = []
    for last in range(11):
        reader = Reader(model, 64)
        reader.read(LINE[:-1], model.full, 0)
        found.append(reader.read(LINE + [1, 2, last], path, 4))
    spread = (torch.stack(found).amax(0) - torch.stack(found).amin(0)).amax(-1)
    assert (spread[:3] < 1e-12).all() and spread[3] > 1e-3


@pytest.mark.parametrize('anchors, skip, equal', [
    (2, set(), [(0, 1), (2, 3)]), (1, set(), [(0, 3)]), (2, {0, 1}, [(2, 3)])])
def test_sparse_layers_read_their_anchors_blocks(anchors, skip, equal):
    """The anchors are layers 0 and 2; a layer after one reads the same blocks. An anchor may be skipped."""
    model = network(num_hidden_layers=4)
    path = thin(model, **OFF | dict(rho=0.1), anchors=anchors).without(skip)
    reader = Reader(model, 64)
    reader.read(LINE[:-1], model.full, 0)
    chosen = {}                                         # layer: its blocks

    def watched(layer, attend):
        def run(*args):
            out, added = attend(*args)
            chosen[layer] = (args[-1] | added)['blocks'].sort().values
            return out, added
        return attend and run
    watches = tuple(watched(layer, attend) for layer, attend in enumerate(path.attends))
    reader.read(LINE + [1, 2], replace(path, attends=watches), 3)
    for layer, anchor in equal:
        assert torch.equal(chosen[layer], chosen[anchor])
    assert anchors == 1 or not torch.equal(chosen[1], chosen[2])


@pytest.mark.parametrize('bias', [False, True])
def test_sparse_channels_by_hand(bias):
    """A channel below the threshold adds nothing."""
    mlp = network(mlp_bias=bias).model.layers[1].mlp
    x = torch.randn(1, 5, 16, dtype=torch.float64, generator=seeded())
    gate, up = mlp.gate_up_proj(x).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate)
    wanted = mlp.down_proj(torch.where(hidden.abs() < 0.1, 0, hidden) * up)
    got = kernels.sparse_swiglu(x, mlp, 0.1)
    assert apart(got, wanted) < 1e-12 and 0 < (hidden.abs() < 0.1).sum() < hidden.numel()


@pytest.mark.parametrize('renormalise', [True, False])
@pytest.mark.parametrize('betas, threshold', [((0.2,), 0), ((0.25, 0.6), 0.1), ((0.0, 0.9), 0.3)])
def test_sparse_experts_by_hand(betas, threshold, renormalise):
    """A token skips its m lowest experts, m the most whose share of its weight is below beta_m.

    In the experts that are left, a channel below the threshold adds nothing.
    """
    moe = network(**MIXED).model.layers[0].mlp
    moe.renormalise = renormalise
    x = torch.randn(5, 16, dtype=torch.float64, generator=seeded())
    got = kernels.sparse_moe_forward(x, moe, betas, threshold)
    counts = set()
    for t in range(5):
        p, experts = moe.gate(x[t]).softmax(-1).topk(3)
        skipped = max([m for m, beta in enumerate(betas, 1) if p[3 - m:].sum() / p.sum() < beta], default=0)
        p = p[:3 - skipped]
        p = p / p.sum() if renormalise else p
        wanted = 0
        for weight, expert in zip(p, experts):
            gate, up = (moe.gate_up_proj[expert] @ x[t]).chunk(2)
            hidden = torch.nn.functional.silu(gate)
            hidden = torch.where(hidden.abs() < threshold, 0, hidden)
            wanted = wanted + weight * (moe.down_proj[expert] @ (hidden * up))
        assert apart(got[t], wanted) < 1e-12
        counts.add(skipped)
    assert counts != {0}


# --------------------------------------------------------------- the README, and the pair that comes with it

@pytest.mark.parametrize('gamma, vocab, horizon', [(1, 3, 2), (2, 2, 3)])
def test_readme_algorithm_is_exact(gamma, vocab, horizon, monkeypatch, capsys):
    """The block of code in the README runs as it stands, and has the target's law."""
    shown = re.search(r'```python\n(# speculative\.py\n.*?)```', (HOME / 'README.md').read_text(), re.DOTALL)
    names = {}
    exec(compile(shown[1], 'README.md', 'exec'), names)
    assert len(json.loads(capsys.readouterr().out)) == 21
    tables = Table(1, vocab), Table(2, vocab)

    def rows(ids, table):
        return torch.stack([table.row(tuple(ids[:i + 1].tolist())) for i in range(len(ids))])

    def run(s, method):
        with monkeypatch.context() as patch:
            patch.setattr(torch, 'rand', lambda *_: Coin(s.draw))
            patch.setattr(torch, 'multinomial', lambda p, _: s.draw(p))
            models = [partial(rows, table=table) for table in tables]
            return names['speculative'](*models, [0], gamma, horizon)[1:], None
    found = enumerate_law(*tables, Exact(gamma), horizon, run=run)
    assert variation(found, exact_law(tables[0], horizon, temperature=1.0)) < 1e-9


@pytest.mark.parametrize('task', [case(name, name, slow=name != 'qa') for name in tasks.TASKS])
def test_embedded_pair_is_lossless(task):
    """Exact decoding writes plain decoding's text in fp32, up to where two logits are within 1e-4."""
    target, tokenizer, eos = load(EMBEDDED / 'target')
    draft, _, _ = load(EMBEDDED / 'draft')
    ids = tokenizer.encode(next(tasks.rows(task, 0))['prompt']).ids
    wanted = plain(target, ids, 80, eos=eos)
    got, cycles = write(session(target, draft, ids, 80, eos=eos), Exact(4))
    if got != wanted:
        same = shared_length(got, wanted)
        best, second = fresh(target, ids + wanted[:same], 1)[0].topk(2).values
        assert best - second < 1e-4
    judged = [row.kept for cycle in cycles for row in cycle.judged]
    assert sum(judged) / len(judged) > 0.4              # the draft knows the task


def test_calibrations_are_of_the_embedded_weights():
    """What was measured on other weights is left out, so retrained models need new ones."""
    assert read_calibration(EMBEDDED / 'target', EMBEDDED / 'draft').keys() == {'mask', 'signals', 'sparse'}
    assert 'sparse' in read_calibration(EMBEDDED / 'moe')
