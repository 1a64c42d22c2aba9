"""Whether a method keeps the target's distribution, counted out and shown: `python -m lab.prove METHOD`.

What the law tests assert, for a reader to see. Target and draft are tables, and every outcome of every draw
of a short text is followed: the figures are probabilities, not shares of samples. Whole texts are followed,
and longer blocks for one cycle, after which the target writes the rest of the text.
"""
import itertools
import sys
from collections import Counter
from dataclasses import dataclass

from lab.toys import Table, enumerate_law, exact_law, law_by_cycles, variation, write
from model import BadInput, Calibration, check_fields, knob
from specmini import Parser, add_flags, exit_status, import_file, make_methods

# (vocabulary, tokens of a text, whether the method writes all of it: else its first cycle only)
SIZES = ((2, 2, True), (2, 3, False), (2, 4, False), (2, 5, False), (2, 3, True), (2, 4, True), (4, 3, True))
SHORT = (4, 2, True), (3, 2, True)      # out of two tokens a residual has one left: here it is shared out
MOST = 1100     # ways that the draws of a text may go, so that a proof takes seconds
SAME = 1e-9     # total variation up to which two laws differ by rounding alone
ROWS = 8        # texts that are shown
# of a table, which has one layer
CALIBRATION = Calibration(mask=dict(skip=[1]), signals=dict(draft_logp=[-4, 0], draft_grounding=[0, 1]))


class TooMany(BadInput):
    """The draws of a text can go in more ways than are to be followed."""


# ---------------------------------------------------------------------------------------------- counting out

def prove(name, method, tokens=None, **sampling):
    """The Proof of a method on the largest tables where the draws can go in at most MOST ways.

    If the laws differ on some tables, it is one of these. BadInput where tables cannot run it. tokens: of the
    texts, None: as in SIZES. sampling: see Options.
    """
    lengths = range(tokens or 0, 1, -1)
    sizes = [(2, n, False) for n in lengths] + [(2, tokens, True), (4, tokens, True)] if tokens else SIZES
    proofs = []
    try:
        for size in sizes:
            proofs.append(proof_of(name, method, *size, sampling))
    except BadInput as error:
        if not proofs or not isinstance(error, TooMany):
            raise BadInput(f'{name}: {error}') from None
    proof = max(reversed(proofs), key=lambda proof: (proof.gap > SAME, proof.whole, len(proof.texts)))
    for size in SHORT if tokens is None or tokens > 2 else ():
        try:
            short = proof_of(name, method, *size, sampling)
        except TooMany:
            continue
        if short.gap > SAME >= proof.gap:
            proof = short
    proof.through = max((n for one in proofs if one.whole for n, _ in one.seen), default=0)
    proof.seen = set().union(*(proof.seen for proof in proofs))
    return proof


def proof_of(name, method, vocab, horizon, whole, sampling):
    """The Proof by texts of `horizon` tokens, on tables of so many; whole: as in SIZES."""
    target, draft = Table(1, vocab, weight=2.0), Table(2, vocab)
    letters = lambda ids: ''.join('a\nbc'[i % 4] for i in ids)      # every fourth id ends a step
    seen = set()
    enumerated = enumerate_law if whole else law_by_cycles
    law = enumerated(target, draft, method, horizon, run=limited(seen), calibration=CALIBRATION, text=letters,
                     **sampling)
    wanted, drafted = [exact_law(table, horizon, **sampling) for table in (target, draft)]
    begun = '' if whole else ', those after the first cycle by the target'
    header = (f'{name} on two tables, target and draft: texts of {counted(horizon, "token")}, a vocabulary '
              f'of {vocab}{begun}, temperature {sampling["temperature"]:g}, every outcome of every draw')
    return Proof(name, header, method.lossless, law, wanted, drafted, whole, seen)


def limited(seen):
    """toys.write, which raises TooMany when it is called more than MOST times.

    It adds the (drafted, accepted) of each cycle to `seen`.
    """
    left = itertools.count(MOST, -1)

    def limited_write(s, method, **most):
        if next(left) == 0:
            raise TooMany(f'more than {MOST} ways to draw {counted(s.tokens_left, "token")}: set fewer '
                          'branches or candidates, or --tokens')
        tokens, cycles = write(s, method, **most)
        seen.update((len(cycle.drafted), cycle.accepted) for cycle in cycles)
        return tokens, cycles
    return limited_write


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
    whole: bool         # whether the method wrote all tokens of the texts, not the first cycle alone
    seen: set           # (drafted, accepted) of the cycles that were followed

    def __post_init__(self):
        self.gap = variation(self.law, self.wanted)
        self.status = int(self.promised and self.gap > SAME)    # 1: a broken promise
        texts = self.law.keys() | self.wanted.keys()
        self.texts = sorted(texts, key=lambda text: (-self.wanted[text], text))     # likeliest first

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
        yield self.followed()
        yield self.sentence()

    def followed(self):
        """Which blocks were followed, on the smaller tables, too."""
        longest = max(self.seen)[0]
        missing = [f'{kept} of {n} kept' for n in range(1, longest + 1) for kept in range(n + 1)
                   if (n, kept) not in self.seen]
        missing[3:] = ['...'] * (len(missing) > 3)
        where = f' (none with {", ".join(missing)})' if missing else ', kept and cut at each place'
        blocks = f'blocks of up to {longest} guess{"es" * (longest != 1)}{where if longest else ""}'
        return f'followed: {blocks}; through whole texts of up to {self.through}'

    def sentence(self):
        """What it comes to."""
        if len(self.texts) == 1:
            return f'nothing to prove at temperature 0 or top-k 1: {self.name} and the target write one text'
        texts = f'{counted(len(self.texts), "text")} of {counted(len(self.texts[0]), "token")}'
        same = f'{texts} agree to {max(self.gap, 1e-16):.0e}'   # the last digit of a number in fp64
        other = f'{texts} have total variation {self.gap:.3g}'
        if self.status:
            return f'WRONG: {self.name} calls itself lossless at these knobs, and is not: {other}'
        if self.gap > SAME:
            return f'LOSSY: {other}'
        if self.promised:
            return f'lossless: {same}'
        return f'no difference found: {same}, which {self.name} does not promise at these knobs'


def counted(n, word):
    return f'{n} {word}' + 's' * (n != 1)


# --------------------------------------------------------------------------------------------- the program

@dataclass
class Options:
    """How long texts are, and how they are sampled; the fields are flags."""
    tokens: int = knob(None, 'tokens of a text; None: 2 to 5', 1, 10)
    temperature: float = knob(1.0, 'at 0 a law is one text', 0, 1e6)
    top_k: int = knob(0, 'sample from this many likeliest tokens; 0: from all', 0)
    top_p: float = knob(1.0, 'sample from the likeliest tokens of this mass', 1e-9, 1)


def run():
    """Prints a method's law beside the target's; returns 1 where it promises what is not so, else 0."""
    parser = Parser(prog='python -m lab.prove', description=__doc__.split('\n')[0])
    add = parser.add_argument
    add('method', help='one of those that specmini.py --list shows, or a baseline')
    add('--set', nargs='+', action='extend', default=[], metavar='KNOB=VALUE', help="the method's knobs")
    add('--import', metavar='FILE.py', nargs='+', action='extend', default=[],
        help='run these files first, which enter methods')
    add_flags(parser, Options)
    args = parser.parse_args()
    for path in getattr(args, 'import'):
        import_file(path)
    options = Options(args.tokens, args.temperature, args.top_k, args.top_p)
    check_fields(options)
    (method,) = make_methods([args.method], args.set).values()
    proof = prove(args.method, method, **vars(options))
    print(*proof.lines(), sep='\n')
    return proof.status


def main():
    return exit_status('lab.prove', run)


if __name__ == '__main__':
    import lab.baselines                                # noqa: F401, enters the baselines in METHODS
    sys.exit(main())
