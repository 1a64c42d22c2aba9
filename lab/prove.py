"""Whether a method keeps the target's distribution, counted out in the states of random walks.

`python -m lab.prove METHOD`. Target and draft are tables (toys.py). In a setting drawn from the ranges of
real runs the method writes some cycles with real draws. From the state that it reaches, every outcome of
every draw of ONE further cycle is followed: what it commits, continued by the target, must have the target's
own law. A method that keeps to this in every state is lossless. A fault in a state that no walk has reached
is not seen.
"""
import copy
import random
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod
from unittest.mock import patch

import torch

from lab import at_least
from lab.toys import Branch, checked, exact_law, variation
from lab.walks import SAMPLING, Spread, begun, setting_of
from model import BadInput, require_that
from specmini import Parser, exit_status, import_file, make_methods
from verify import Exact, decode, is_greedy, probs

MOST = 300      # ways that the draws of one cycle may go, so that a state takes a second
LEAST = 1e-9    # chance of a way below which it is not followed, but added up
SAME = 1e-6     # total variation up to which two laws differ by rounding alone, in fp32
ENOUGH = 3      # guesses of a sampled block that must be followed, of longer ones the first
ODD = 10        # states whose cycle differs that are looked at
LONGEST = 8     # tokens of a whole text
ROWS = 8        # texts that are shown
PARTS = {'propose', 'guess', 'draft_probs', 'keep_drafting', 'score', 'chance', 'recovery_distribution',
         'accept'}
KEPT = *SAMPLING, 'eos', 'proposer', 'begin', 'generator'       # of a session, by any method


# ------------------------------------------------------------------------------------ one further cycle

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


def copied_method(method, s, twin):
    """The method as it is now, for a copy of its Session: its fields are copied, however it copies itself."""
    own = object.__new__(type(method))
    try:
        vars(own).update(copy.deepcopy(vars(method), {id(s): twin}))
    except TypeError as error:
        raise BadInput(f'its memory cannot be copied ({error}); expected fields that copy.deepcopy '
                       'takes, as a number in the place of a generator') from None
    return own


def next_cycle(s, method, left, length=None, most=MOST):
    """(law, lost, met, ways) of one cycle from this state with so many tokens left; None for too many ways.

    length: of the first so many tokens, in as many cycles as these take. law: {tokens: chance}; lost: chance
    of what is not followed; met: (drafted, accepted) of the first cycle, and words.
    """
    law, lost, met, scripts = Counter(), 0.0, set(), [[]]
    others = torch.get_rng_state(), random.getstate()
    for ways in range(1, most + 1):
        branch, mine = Branch(scripts.pop()), copied(s)
        own = copied_method(method, s, mine)
        mine.tokens_left, mine.draw, mine.generator = left, branch.draw, None
        tokens = []
        for cycle in map(checked, decode(mine, own)):
            tokens += cycle.tokens
            require_that((mine.tokens, mine.tokens_left) == (s.tokens + tokens, left - len(tokens)),
                         "it changes the session's text")
            if len(tokens) == len(cycle.tokens):
                met |= words_of(cycle, mine)
            if len(tokens) >= (length or 1):
                break
        law[tuple(tokens[:length])] += branch.chance
        chances = [prod(chance for _, chance in script) for script in branch.others]
        lost += sum(chance for chance in chances if chance < LEAST)
        scripts += [script for script, chance in zip(branch.others, chances) if chance >= LEAST]
        if not scripts:
            require_that(torch.equal(others[0], torch.get_rng_state()) and others[1] == random.getstate(),
                         'it draws random numbers of torch or Python; expected session.draw or session.flip')
            total = sum(law.values()) + lost
            require_that(abs(total - 1) < SAME, f'the chances of its cycles sum to {total:.6g}; expected 1')
            return law, lost, met, ways
    return None


def words_of(cycle, s):
    """{(drafted, accepted), words for what this cycle has}."""
    block = cycle.score and cycle.score.block
    looked_up = cycle.drafted and block and block.logits is None and bool((block.q.amax(-1) == 1).all())
    return {(len(cycle.drafted), cycle.accepted), *['a look-up'] * bool(looked_up), *['an end'] * s.ended}


def longest_cycle(s, method, top, whole):
    """(left, *next_cycle) with the most tokens left, up to top, that can be followed; whole: all for top."""
    found, before = None, 1
    for left in range(1, top + 1):
        if left > 2 and found[-1] ** 2 / before > MOST:     # as the ways grow, the next would be too many
            break
        left = s.tokens_left if whole and left == top else left
        more = next_cycle(s, method, left)
        if not more:
            break
        found, before = (left, *more), found[-1] if found else 1
    return found


def whole_texts(s, method, left):
    """(n, total variation) of the first n tokens from here by an object without memory: n as far as followed.

    A method may draw in one cycle what it writes in the next; its cycles differ then, and its texts do not.
    """
    followed = apart = 0
    for n in range(1, min(left, LONGEST) + 1):
        found = next_cycle(s, replace(method), left, n, 4 * MOST)
        if not found or apart > SAME:
            break
        followed, apart = n, max(0.0, gap(found[0], s) - found[1])
    return followed, apart


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

    def __init__(self, name, method, numbers, seed=0, temperature=None):
        """numbers: of walks, up to the first that meets a difference; temperature: of all of them."""
        self.name, self.method, self.seed, self.temperature = name, method, seed, temperature
        self.gap = self.walks = self.states = 0
        self.drafted, self.followed = Counter(), Counter()      # {is it greedy: guesses of the longest block}
        self.fp64 = 1e-16                               # the largest gap in fp64
        self.met = Counter()                            # {(drafted, accepted) or words: states}
        self.ranges = {}                                # {words: its values in the states}
        self.refused = {}                               # {drafts: why}
        self.odd = self.texts = 0       # states whose cycle differs, tokens of whole texts that do not
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
        draw = Spread(self.seed, number)
        made = self.made = setting_of(draw, getattr(self.method, 'gamma', 0), self.temperature)
        try:
            s, method = begun(made, self.method, number)
            next(decode(copied(s), replace(method)))
        except BadInput as error:                       # it takes no such drafts
            if made['drafts'] in ('by draft', 'by short draft'):
                raise
            self.refused[made['drafts']] = error
            made['drafts'] = 'by draft'
            s, method = begun(made, self.method, number)
        self.walks += 1
        if made['second_text']:                         # what its class keeps of the first is there
            list(islice(decode(copied(s), replace(method)), 8))
        if made['after_other_knobs']:                   # which leave caches as these knobs alone never do
            list(islice(decode(s, type(method)()), 1 + number % 4))
        kept = [getattr(s, name) for name in KEPT]
        top, stop = max(made['gamma'], 2) + 1, made['cycles']
        counted = {stop // 2, stop}
        has_one_way = is_greedy(s.temperature)          # then all cycles are counted
        for cycles in range(stop + 1):
            if s.ended or not s.tokens_left or self.gap > SAME:
                break
            left = top if draw.random.random() < 0.7 else draw.random.randint(min(1, top), top)
            found = has_one_way and next_cycle(s, method, s.tokens_left, most=1)
            has_one_way = bool(found)
            if found:
                found = s.tokens_left, *found
            elif cycles in counted:
                found = longest_cycle(s, method, left, made['full_blocks'] and made['gamma'])
                if not found or found[0] < left:
                    top = found[0] if found else 0      # longer ones have too many ways in this walk
            if found:
                self.note(made, s, found[3])
                self.judge(f'walk {number} after {cycles} cycles', s, method, *found[:3])
            drafted = next(decode(s, method)).drafted
            require_that([getattr(s, name) for name in KEPT] == kept, 'it changes a setting of the session')
            if 0 < made['gamma'] <= self.method.gamma:
                self.drafted[not s.temperature] = max(self.drafted[not s.temperature], len(drafted))

    def note(self, made, s, met):
        """Counts a state, and what it has."""
        self.states += 1
        words = {value for value in made.values() if isinstance(value, str)} - {''}
        words |= {name.replace('_', ' ') for name, value in made.items() if value is True}
        self.met.update(met | words | {'greedy'} if not s.temperature else met | words)
        numbers = {name: len(made[name]) for name in ('prompt', 'ends')} | {'text': len(s.tokens)}
        for name, number in (made | numbers).items():
            if type(number) in (int, float):
                self.ranges.setdefault(name.replace('_', '-'), set()).add(number)
        longest = max(block[0] for block in met if isinstance(block, tuple))
        self.followed[not s.temperature] = max(self.followed[not s.temperature], longest)

    def judge(self, where, s, method, left, law, lost):
        """Keeps the largest difference of two laws, and the state in which they are not the same."""
        made = self.made
        apart = max(0.0, gap(law, s) - lost)
        if apart > SAME and method.lossless and not self.is_wrong(s, method, left):
            return
        self.gap = max(self.gap, apart)
        self.fp64 = max(self.fp64, apart if made['dtype'] == 'fp64' else 0)
        if apart > SAME:
            setting = ', '.join(f'{key} {value}' for key, value in made.items()
                                if value != '' and value is not False)
            self.where = f'{where}, text {s.tokens} ({setting})'
            self.show(law, s, dict(eos=s.eos, prompt=s.tokens) | {name: made[name] for name in SAMPLING})

    def show(self, law, s, settings):
        """Keeps the two laws of the fewest tokens that show the difference."""
        self.wanted = ()
        for n in range(1, LONGEST + 1):
            before = max(1, len(self.wanted))
            self.wanted, self.law = exact_law(s.target.model, n, **settings), Counter()
            for tokens, chance in law.items():
                self.law.update(exact_law(s.target.model, n, tokens, chance, **settings))
            if variation(self.law, self.wanted) > SAME or len(self.wanted) ** 2 / before > 999:
                break

    def is_wrong(self, s, method, left):
        """Whether whole texts differ, too, where a cycle does; else notes how long those are that do not."""
        self.odd += 1
        shorter = [replace(method, gamma=1)] if getattr(method, 'gamma', 0) > 1 else []
        for own in [method, *shorter] if self.odd < ODD else []:    # shorter blocks have fewer ways
            n, apart = whole_texts(s, own, left)
            if apart > SAME:
                return True
            self.texts = max(self.texts, n)
        return False

    def lines(self):
        """What is printed: what follows in a state that differs, or what was met; and the verdict."""
        require_that(self.states, f'{self.name}: no state could be followed; give more --walks')
        yield from (f'not walked with drafts {source}: {why}' for source, why in self.refused.items())
        yield from self.difference() if self.gap > SAME else self.limits()
        yield self.sentence()

    def difference(self):
        """The state in which texts differ, and their chances there, as lines."""
        yield f'{self.where}: what follows'
        width = max(9, len(self.name))
        yield f'{"text":12}  {self.name:>{width}}     target  difference'
        for text in sorted(self.law.keys() | self.wanted.keys(), key=lambda text: -self.wanted[text])[:ROWS]:
            own, wanted = self.law[text], self.wanted[text]
            apart = f'{own - wanted:+.5f}' if abs(own - wanted) > SAME else '0'
            yield f'{" ".join(map(str, text)):12}  {own:{width}.5f}  {wanted:9.5f}  {apart:>10}'

    def sentence(self):
        """What it comes to."""
        if self.gap > SAME:
            promise = f'WRONG: {self.name} calls itself lossless at these knobs, and is '
            off = f'off by {self.gap:.3g} in this state; --walk {self.where.split()[1]} repeats it'
            return (promise if self.method.lossless else 'LOSSY: ') + off
        holds = (f'in all {self.states} states of {self.walks} walks; largest difference {self.fp64:.0e} in '
                 f'fp64, {max(self.gap, 1e-16):.0e} in all (below {SAME:.0e} nothing is seen)')
        lacking = f'no state asks its {", ".join(sorted(self.own - self.asked))}' * (self.asked < self.own)
        for greedy, drafted in self.drafted.items():
            wanted = drafted if greedy else min(drafted, ENOUGH)
            if wanted > self.followed[greedy]:
                lacking = f'blocks of {wanted} guesses can go in more than {MOST} ways'
        if self.odd:
            lacking = (f'a cycle is not exact by itself, and whole texts are, as far as they can be followed '
                       f'({self.texts} tokens)')
        if lacking:
            return f'NOT PROVED: {lacking}. No other difference {holds}'
        if not self.method.lossless:
            return f'no difference found {holds}; {self.name} does not promise it at these knobs'
        return f'lossless {holds}'

    def limits(self):
        """Between which limits that was, and what was never met, as lines."""
        blocks = {block for block in self.met if isinstance(block, tuple)}
        longest = max(n for n, _ in blocks)
        whole = max(n for n in range(longest + 1) if n == 0 or {(n, kept) for kept in range(n + 1)} <= blocks)
        off = {'top-p': 1.0}                            # of the others 0
        ranges = {name: sorted(numbers - {off.get(name, 0)}) for name, numbers in self.ranges.items()}
        shown = [f'{name} {found[0]:.3g} to {found[-1]:.3g}' for name, found in ranges.items() if found]
        yield f'met: {", ".join(shown)}; blocks of {whole} guesses kept and cut at each place'
        counts = [f'{n} {word}' for word, n in self.met.most_common() if isinstance(word, str)]
        yield f'states: {", ".join(counts)}'
        never = [word for word in ('a look-up', 'an end', 'greedy') if not self.met[word]]
        never += ['a block that was kept whole'] * (not any(n == kept > 0 for n, kept in blocks))
        yield from [f'never met: {", ".join(never)}'] * bool(never)


# --------------------------------------------------------------------------------------------- the program

def run():
    """Prints what walks find of a method that promises: returns 1 if it is wrong, 3 if it is not proved."""
    parser = Parser(prog='python -m lab.prove', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('method', help='one of specmini.py --list, or a baseline, and its knobs: "via escalate=1.1"')
    add('--import', metavar='FILE.py', nargs='+', action='extend', default=[],
        help='run these files first, which enter methods')
    add('--walks', type=at_least(1), default=50, help='random walks (default: 50)')
    add('--walk', type=at_least(0), metavar='NUMBER', help='this one alone')
    add('--seed', type=at_least(0), default=0, help='of the walks (default: 0)')
    add('--temperature', type=at_least(0, float), help='of all walks; 0 is greedy (default: of each its own)')
    args = parser.parse_args()
    for path in getattr(args, 'import'):
        import_file(path)
    (method,) = make_methods([args.method]).values()
    numbers = range(args.walks) if args.walk is None else [args.walk]
    proof = Proof(args.method, method, numbers, args.seed, args.temperature)
    print(*proof.lines(), sep='\n')
    return {'WRONG': 1, 'NOT PROVED': 3}.get(proof.sentence().split(':')[0], 0) if method.lossless else 0


main = partial(exit_status, 'lab.prove', run)           # returns the exit status

if __name__ == '__main__':
    import lab.baselines                                # noqa: F401, enters the baselines in METHODS
    sys.exit(main())
