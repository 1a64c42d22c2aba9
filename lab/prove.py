"""Whether a method keeps the target's distribution, counted out and shown: `python -m lab.prove METHOD`.

What the law tests assert, for a reader to see. Target and draft are tables, and every outcome of every draw
of a short text is followed: the figures are probabilities, not shares of samples.
"""
import itertools
import sys
from collections import Counter
from dataclasses import dataclass

from lab.toys import Table, enumerate_law, exact_law, first_cycle, law_by_cycles, variation, write
from model import BadInput, Calibration, check_fields, knob, require_that
from specmini import Parser, add_flags, exit_status, import_file, make_methods
from verify import Ecsv, Exact

SIZES = (2, 1), (2, 2), (2, 3), (3, 3), (4, 3)      # (vocabulary, tokens of a text)
LONGER = (2, 2), (2, 4)                             # of a method that ends its blocks: of 0 to 3 tokens
UNSURE = 1.0    # deviation of the draft's logits there, so that it has reason to
MOST = 700      # ways that the draws of a text may go, so that a proof takes seconds
SAME = 1e-9     # total variation up to which two laws differ by rounding alone
ROWS = 8        # texts that are shown
RANGES = dict(draft_logp=[-4, 0], draft_grounding=[0, 1])
CALIBRATION = Calibration(mask=dict(skip=[1]), signals=RANGES)      # of one layer


class TooMany(BadInput):
    """The draws of a text can go in more ways than are to be followed."""


# ---------------------------------------------------------------------------------------------- counting out

def prove(name, method, **sampling):
    """The Proof of a method on the largest tables where the draws can go in at most MOST ways.

    BadInput where tables cannot run it. sampling: see Sampling.
    """
    proof = None
    try:
        sizes = LONGER if varies(method) else SIZES
        if getattr(method, 'reserved', 0):
            sizes = [size for size in sizes if size[1] > 1]     # of one token it drafts nothing: no proof
        for vocab, horizon in sizes:
            proof = proof_of(name, method, vocab, horizon, sampling)
    except BadInput as error:
        if proof is None or not isinstance(error, TooMany):
            raise BadInput(f'{name}: {error}') from None
    return proof


def varies(method):
    """Whether the method ends its blocks itself, by what it drafts or by what it has learned."""
    learns = type(method).learn is not Exact.learn
    return learns or isinstance(method, Exact) and type(method).keep_drafting is not Exact.keep_drafting


def proof_of(name, method, vocab, horizon, sampling):
    """The Proof by texts of `horizon` tokens, on tables of so many."""
    target = Table(1, vocab, weight=2.0)
    draft = Table(2, vocab, UNSURE) if varies(method) else Table(2, vocab)
    letters = lambda ids: ''.join('a\nbc'[i % 4] for i in ids)      # every fourth id ends a step
    settings = dict(calibration=CALIBRATION, text=letters, **sampling)
    law = law_of(method, target, draft, horizon, settings)
    total = sum(law.values())
    require_that(abs(total - 1) < SAME, f'the chances of its texts sum to {total:.6g}, not 1: it draws from '
                 'what is no distribution')
    wanted = exact_law(target, horizon, **sampling)
    drafted = exact_law(draft, horizon, **sampling)
    header = (f'{name} on two tables, target and draft: texts of {counted(horizon, "token")} out of {vocab}, '
              f'temperature {sampling["temperature"]:g}, every outcome of every draw')
    return Proof(name, header, method.lossless, law, wanted, drafted)


def law_of(method, target, draft, horizon, settings):
    """{tokens: probability} of all texts that the method can write."""
    if isinstance(method, Ecsv) and not getattr(method, 'budget', None):        # its cycles are independent
        return law_by_cycles(target, draft, method, horizon, run=limited(first_cycle), **settings)
    return enumerate_law(target, draft, method, horizon, run=limited(write), **settings)


def limited(run):
    """The same function, which raises TooMany when it is called more than MOST times."""
    left = itertools.count(MOST, -1)

    def limited_run(s, method):
        if next(left) == 0:
            raise TooMany(f'more than {MOST} ways to draw {counted(s.tokens_left, "token")}: set fewer '
                          'branches or candidates')
        return run(s, method)
    return limited_run


# --------------------------------------------------------------------------------------------------- showing

@dataclass
class Proof:
    """Three laws, each {tokens: probability} of all texts of one length, and what is to be said of them."""
    name: str
    header: str
    promised: bool      # whether the method calls itself lossless
    law: Counter        # of the method
    wanted: Counter     # of the target alone
    drafted: Counter    # of the draft alone

    def __post_init__(self):
        self.gap = variation(self.law, self.wanted)
        texts = self.law.keys() | self.wanted.keys()
        self.texts = sorted(texts, key=lambda text: (-self.wanted[text], text))     # likeliest first

    @property
    def status(self):
        """1 where the method promises the target's distribution and has another, else 0."""
        return int(self.promised and self.gap > SAME)

    def lines(self):
        """What is printed."""
        width = max(9, len(self.name))
        yield self.header
        yield f'{"text":12}  {self.name:>{width}}     target  difference  draft alone'
        for text in self.texts[:ROWS]:
            own, wanted, drafted = self.law[text], self.wanted[text], self.drafted[text]
            apart = f'{own - wanted:+.5f}' if abs(own - wanted) > SAME else '0'
            shown = ' '.join(map(str, text))
            yield f'{shown:12}  {own:{width}.5f}  {wanted:9.5f}  {apart:>10}  {drafted:11.5f}'
        if len(self.texts) > ROWS:
            yield f'and {len(self.texts) - ROWS} more'
        away = variation(self.drafted, self.wanted)
        yield f'total variation from the target: {self.name} {self.gap:.3g}, draft alone {away:.3g}'
        yield self.sentence()

    def sentence(self):
        """What it comes to."""
        found = f'{counted(len(self.texts), "text")} of {counted(len(self.texts[0]), "token")}'
        if self.gap <= SAME:
            found += f' agree to {max(self.gap, 1e-16):.0e}'    # the last digit of a number in fp64
            if self.promised:
                return f'lossless: {found}'
            return f'no difference found: {found}, which {self.name} does not promise at these knobs'
        found += f' have total variation {self.gap:.3g}'
        if self.promised:
            return f'WRONG: {self.name} calls itself lossless at these knobs, and is not: {found}'
        return f'LOSSY: {found}'


def counted(n, word):
    return f'{n} {word}' if n == 1 else f'{n} {word}s'


# --------------------------------------------------------------------------------------------- the program

@dataclass
class Sampling:
    """How texts are sampled; the fields are flags."""
    temperature: float = knob(1.0, 'at 0 a law is one text', 0, 1e6)
    top_k: int = knob(0, 'sample from this many likeliest tokens; 0: from all', 0)
    top_p: float = knob(1.0, 'sample from the likeliest tokens of this mass', 1e-9, 1)


def parse():
    parser = Parser(prog='python -m lab.prove', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('method', help='one of those that specmini.py --list shows, or a baseline')
    add('--set', nargs='+', action='extend', default=[], metavar='KNOB=VALUE', help="the method's knobs")
    add('--import', metavar='FILE.py', nargs='+', action='extend', default=[],
        help='run these files first, which enter methods')
    add_flags(parser, Sampling)
    return parser.parse_args()


def run():
    """Prints a method's law beside the target's; returns 1 where it promises what is not so, else 0."""
    args = parse()
    for path in getattr(args, 'import'):
        import_file(path)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    check_fields(sampling)
    (method,) = make_methods([args.method], args.set).values()
    proof = prove(args.method, method, **vars(sampling))
    for line in proof.lines():
        print(line)
    return proof.status


def main():
    return exit_status('lab.prove', run)


if __name__ == '__main__':
    import lab.baselines                                # noqa: F401, enters the baselines in METHODS
    sys.exit(main())
