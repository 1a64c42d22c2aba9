"""Whether a method keeps the target's distribution, counted out in the states of random walks.

`python -m lab.prove METHOD`. Target and draft are tables (toys.py). In a random setting the method writes
some cycles with real draws. From the state that it reaches, every outcome of every draw of ONE further cycle
is followed: what it commits, continued by the target, must have the target's own law. A method that keeps to
this in every state is lossless. A fault in a state that no walk has reached is not seen.
"""
import copy
import random
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from math import prod
from unittest.mock import patch

import torch

from lab.baselines import slim_draft
from lab.toys import Branch, Near, Table, checked, exact_law, session, variation
from model import BadInput, Calibration, check_fields, knob, require_that
from specmini import Parser, add_flags, exit_status, import_file, make_methods
from verify import Exact, Sparse, decode, draft_model, probs, prompt_lookup, read_prompt

MOST = 600      # ways that the draws of one cycle may go, so that a state takes a second
LEAST = 1e-9    # chance of a way below which it is not followed, but added up
SAME = 1e-6     # total variation up to which two laws differ by rounding alone, in fp32
CYCLES = 8      # of a walk, at most
ROWS = 8        # texts that are shown
CALIBRATION = Calibration(              # of a table, which has one layer
    mask=dict(skip=[1]), signals=dict(draft_logp=[-4, 0], draft_grounding=[0, 1]))
PARTS = {'propose', 'guess', 'draft_probs', 'keep_drafting', 'score', 'chance', 'recovery_distribution',
         'accept'}
SAMPLING = 'temperature', 'top_k', 'top_p'
KEPT = *SAMPLING, 'eos', 'proposer', 'begin', 'generator'       # of a session, by any method


# ------------------------------------------------------------------------------------- where a walk begins

def setting_of(r, gamma, fixed):
    """{name: value} of a walk by a random.Random; gamma: the knob; fixed: values that all walks have."""
    V = r.choice([2, 2, 2, 2, 3, 4, 12, 18])
    made = dict(
        temperature=r.choice([1.0, 1.0, 1.0, 1.0, 0.7, 1.5, 0.0, 0.0]),
        top_k=r.choice([0, 0, 0, 0, 0, 0, 2]), top_p=r.choice([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8]),
        prompt=[r.randrange(V) for _ in range(r.choice([1, 2, 4]))] * r.choice([1, 2]),
        drafts=r.choice(['draft'] * 6 + ['look-up, else draft'] * 2 + ['look-up', 'target']),
        noise=r.choice([None, 0.3, 0.3, 1.0, 1.0]),     # of a draft near the target; None: another table
        gamma=6 if 0 < gamma < 6 and r.random() < 0.3 else gamma,           # a longer block, too
        ends=[V - 1] if r.random() < 0.3 else [], sparse=r.random() < 0.1, fp32=r.random() < 0.2,
        whole=r.random() < 0.5)         # cycles that may write all tokens left, or as few as a block needs
    made |= {name: value for name, value in fixed.items() if value is not None}
    return made | dict(vocabulary=max(V, *made['prompt'], 1) + bool(fixed.get('prompt')))


def begun(made, method, number, met):
    """(a Session in this setting, the method as it is walked); met: takes 'a look-up' that finds a guess."""
    dtype = torch.float32 if made['fp32'] else torch.float64
    target = Table(2 * number + 1, made['vocabulary'], 2.0, dtype)
    draft = Table(2 * number + 2, target.vocab, dtype=dtype)
    if made['noise']:                                   # or sure: branches rarely part, and can be followed
        draft = Near(2 * number + 2, target, made['noise'], sharp=1 if made['noise'] < 1 else 5)
    draft = draft if 'draft' in made['drafts'] else None

    def look_up(session, n, method):
        found = prompt_lookup(session, n)
        met.update(['a look-up'] * bool(found.tokens))
        return found if found.tokens or not draft else draft_model(session, n, method)
    proposers = {'draft': draft_model, 'target': slim_draft}            # the others look up
    s = session(target, draft, made['prompt'], 40, proposers.get(made['drafts'], look_up), seed=number,
                calibration=CALIBRATION, eos=frozenset(made['ends']),
                text=lambda ids: ''.join('a\nbc'[i % 4] for i in ids),      # every fourth id ends a step
                sparse=Sparse(rho=1.0, moe_skip=0) if made['sparse'] else None,
                **{name: made[name] for name in SAMPLING})
    read_prompt(s)
    return s, replace(method, gamma=made['gamma']) if made['gamma'] else replace(method)


# ------------------------------------------------------------------------------------- one further cycle

def copied(s):
    """The Session in its state, with caches of its own; models are not copied."""
    twin = copy.copy(s)
    twin.tokens = list(s.tokens)
    for role in 'target', 'drafter':
        reader = copy.copy(getattr(s, role))
        if reader:
            reader.cache = copy.deepcopy(reader.cache)
        setattr(twin, role, reader)
    return twin


def next_cycle(s, method, left):
    """(law, lost, met, ways) of one cycle from this state with so many tokens left; None for too many ways.

    law: {tokens: chance}; lost: chance of what is not followed; met: (drafted, accepted), and 'an end'.
    """
    law, lost, met, scripts = Counter(), 0.0, set(), [[]]
    for ways in range(1, MOST + 1):
        branch, mine = Branch(scripts.pop()), copied(s)
        own = copy.deepcopy(method, {id(s): mine})
        mine.tokens_left, mine.draw, mine.generator = left, branch.draw, None
        cycle = checked(next(decode(mine, own)))
        written = s.tokens + cycle.tokens, left - len(cycle.tokens)
        require_that((mine.tokens, mine.tokens_left) == written, "it changes the session's text")
        law[tuple(cycle.tokens)] += branch.chance
        met.update([(len(cycle.drafted), cycle.accepted)], ['an end'] * mine.ended)
        chances = [prod(chance for _, chance in script) for script in branch.others]
        lost += sum(chance for chance in chances if chance < LEAST)
        scripts += [script for script, chance in zip(branch.others, chances) if chance >= LEAST]
        if not scripts:
            total = sum(law.values()) + lost
            require_that(abs(total - 1) < SAME, f'the chances of its cycles sum to {total:.6g}; expected 1')
            return law, lost, met, ways
    return None


def longest_cycle(s, method, top, whole):
    """next_cycle with the most tokens left, up to `top`, that can be followed; whole: all instead of top."""
    found, before = None, 1
    for left in range(1, top + 1):
        if found and found[3] ** 2 / before > MOST:     # as the ways grow, the next would be too many
            break
        more = next_cycle(s, method, s.tokens_left if whole and left == top else left)
        if not more:
            break
        found, before = more, found[3] if found else 1
    return found


def gap(law, s):
    """Total variation of these next tokens, continued by the target, from the target's own."""
    beyond = Counter()                                  # chance of what goes on after these tokens
    for tokens, chance in law.items():
        beyond.update({tokens[:n]: chance for n in range(len(tokens))})
    total, nodes = 0.0, [((), 0.0, 1.0)]                # tokens, the chance that arrived there, the target's
    while nodes:
        tokens, arrived, p = nodes.pop()
        arrived += law[tokens]
        if s.eos.intersection(tokens) or not beyond[tokens]:
            total += abs(arrived - p) + beyond[tokens]
        else:
            row = probs(s.target.model.row((*s.tokens, *tokens)), s.temperature, s.top_k, s.top_p).tolist()
            nodes += [((*tokens, token), arrived * chance, p * chance) for token, chance in enumerate(row)]
    return total / 2


# ------------------------------------------------------------------------------------------------- the proof

class Proof:
    """What the walks of a method met, and what is to be said of it."""

    def __init__(self, name, method, numbers, seed=0, **fixed):
        """numbers: of walks, up to the first that meets a difference; fixed: see setting_of."""
        self.name, self.method, self.seed, self.fixed = name, method, seed, fixed
        self.gap, self.walks, self.states, self.drafted = -1.0, 0, 0, 0
        self.fp64 = 1e-16                               # the largest gap in fp64
        self.met = Counter()                            # {(drafted, accepted) or words: states}
        self.refused = {}                               # {drafts: why}
        kind = type(method)
        self.own = {part for part in PARTS if getattr(kind, part, None) not in (None, getattr(Exact, part))}
        self.asked = set()                              # of them
        with ExitStack() as stack:
            for part in self.own:
                stack.enter_context(patch.object(kind, part, self.noted(part)))
            for number in numbers:
                try:
                    self.walk(number)
                except BadInput as error:
                    raise BadInput(f'{name}: {error} (walk {number}: {self.made})') from None
                except Exception as error:
                    error.add_note(f'walk {number}: {self.made}')
                    raise
                if self.gap > SAME:
                    break

    def noted(self, part):
        """This part of the method, which notes that it is asked."""
        real = getattr(type(self.method), part)

        def call(*args, **more):
            self.asked.add(part)
            return real(*args, **more)
        return call

    def walk(self, number):
        """Writes some cycles in a random setting, and follows the next one from some of the states."""
        r, met = random.Random(f'{self.seed} {number}'), set()
        made = self.made = setting_of(r, getattr(self.method, 'gamma', 0), self.fixed)
        try:
            s, method = begun(made, self.method, number, met)
            next(decode(copied(s), copy.deepcopy(method)))
        except BadInput as error:                       # it takes no such drafts
            if made['drafts'] == 'draft':
                raise
            self.refused[made['drafts']] = error
            made['drafts'] = 'draft'
            s, method = begun(made, self.method, number, met)
        self.walks += 1
        kept = [getattr(s, name) for name in KEPT]
        top, stop = max(made['gamma'], 2) + 1, r.randrange(CYCLES)
        for cycles in range(stop + 1):
            if s.ended or not s.tokens_left or self.gap > SAME:
                break
            if cycles == stop or r.random() < (0.2 if made['temperature'] else 0.6):
                met.clear()
                left = top if r.random() < 0.7 else r.randint(1, top)
                found = longest_cycle(s, method, left, made['whole'] and made['gamma'])
                if found:
                    self.judge(f'walk {number} after {cycles} cycles, text {s.tokens}', made, s, *found[:2])
                    kinds = dict(greedy=not made['temperature'], sparse=made['sparse'], fp32=made['fp32'])
                    met |= {kind for kind, holds in kinds.items() if holds} | {f'by {made["drafts"]}'}
                    self.met.update(met | found[2])
            drafted = next(decode(s, method)).drafted
            require_that([getattr(s, name) for name in KEPT] == kept, 'it changes a setting of the session')
            self.drafted = max(self.drafted, len(drafted) if made['gamma'] else 0)

    def judge(self, where, made, s, law, lost):
        """Counts a state, and keeps that in which the laws differ most, by the fewest tokens that show it."""
        self.states += 1
        apart = max(0.0, gap(law, s) - lost)
        self.fp64 = max(self.fp64, 0 if made['fp32'] else apart)
        if apart > self.gap:
            setting = ', '.join(f'{key} {value}' for key, value in made.items())
            self.gap, self.where = apart, f'{where} ({setting})'
            rest = dict(eos=s.eos, prompt=s.tokens) | {name: made[name] for name in SAMPLING}
            for n in range(1, 9):
                self.wanted, self.law = exact_law(s.target.model, n, **rest), Counter()
                for tokens, chance in law.items():
                    self.law.update(exact_law(s.target.model, n, tokens, chance, **rest))
                enough = 999 if apart > SAME else ROWS
                if len(self.wanted) > enough or variation(self.law, self.wanted) > SAME:
                    break

    def lines(self):
        """What is printed: what follows in the state with the largest gap, and the verdict."""
        require_that(self.states, f'{self.name}: no state could be followed; give more --walks')
        yield f'{self.where}: what follows'
        width = max(9, len(self.name))
        yield f'{"text":12}  {self.name:>{width}}     target  difference'
        for text in sorted(self.law.keys() | self.wanted.keys(), key=lambda text: -self.wanted[text])[:ROWS]:
            own, wanted = self.law[text], self.wanted[text]
            apart = f'{own - wanted:+.5f}' if abs(own - wanted) > SAME else '0'
            yield f'{" ".join(map(str, text)):12}  {own:{width}.5f}  {wanted:9.5f}  {apart:>10}'
        yield from (f'not walked with drafts by {source}: {why}' for source, why in self.refused.items())
        yield self.sentence()

    def sentence(self):
        """What it comes to."""
        off = f'off by {self.gap:.3g} in this state; --walk {self.where.split()[1]} repeats it'
        if self.gap > SAME:
            promise = f'WRONG: {self.name} calls itself lossless at these knobs, and is '
            return (promise if self.method.lossless else 'LOSSY: ') + off
        blocks = {block for block in self.met if isinstance(block, tuple)}
        longest = max(n for n, _ in blocks)
        whole = max(n for n in range(longest + 1) if n == 0 or {(n, kept) for kept in range(n + 1)} <= blocks)
        counts = [f'{n} {word}' for word, n in self.met.most_common() if isinstance(word, str)]
        never = [word for word in ('a look-up', 'an end') if not self.met[word]]
        never += ['a block that was kept whole'] * (not any(n == kept > 0 for n, kept in blocks))
        holds = (f'in all {self.states} states of {self.walks} walks, in fp64 to {self.fp64:.0e}, all to '
                 f'{max(self.gap, 1e-16):.0e} (blocks of up to {longest} guesses, of {whole} kept and cut '
                 f'at each place; {", ".join(counts)})')
        holds += f'; never met: {", ".join(never)}' * bool(never)
        lacking = f'no state asks its {", ".join(sorted(self.own - self.asked))}' * (self.asked < self.own)
        if self.drafted > longest:
            lacking = f'blocks of {self.drafted} guesses can go in more than {MOST} ways'
        if lacking:
            return f'NOT PROVED: {lacking}. No difference {holds}'
        if not self.method.lossless:
            return f'no difference found {holds}; {self.name} does not promise it at these knobs'
        return f'lossless {holds}'


# --------------------------------------------------------------------------------------------- the program

@dataclass
class Options:
    """How many walks, and what all of them have; the fields are flags."""
    walks: int = knob(50, 'random walks', 1)
    walk: int = knob(None, 'this one alone', 0)
    seed: int = knob(0, 'of the walks', 0)
    prompt: str = knob(None, 'ids, as "0 1 1"; None: of each walk its own')
    temperature: float = knob(None, 'the same for all walks; 0 is greedy', 0, 1e6)
    top_k: int = knob(None, 'sample from this many likeliest tokens', 0)
    top_p: float = knob(None, 'sample from the likeliest tokens of this mass', 1e-9, 1)


def run():
    """Prints what walks find of a method; returns 1 where it promises what is not so, else 0."""
    parser = Parser(prog='python -m lab.prove', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('method', help='one of specmini.py --list, or a baseline, and its knobs: "via escalate=1.1"')
    add('--import', metavar='FILE.py', nargs='+', action='extend', default=[],
        help='run these files first, which enter methods')
    add_flags(parser, Options)
    args = parser.parse_args()
    for path in getattr(args, 'import'):
        import_file(path)
    options = Options(**{one.name: getattr(args, one.name) for one in fields(Options)})
    check_fields(options)
    prompt = (options.prompt or '').split()
    require_that(all(map(str.isdecimal, prompt)), f'--prompt {options.prompt}: expected ids, as "0 1 1"')
    (method,) = make_methods([args.method]).values()
    proof = Proof(args.method, method, range(options.walks) if options.walk is None else [options.walk],
                  options.seed, prompt=list(map(int, prompt)) or None,
                  **{name: getattr(options, name) for name in SAMPLING})
    print(*proof.lines(), sep='\n')
    return int(method.lossless and proof.gap > SAME)


def main():
    return exit_status('lab.prove', run)


if __name__ == '__main__':
    import lab.baselines                                # noqa: F401, enters the baselines in METHODS
    sys.exit(main())
