"""How CM-ASD's claims are judged by what lab/cmasd/record.py stored; `python -m lab.claims --report cmasd`.

C1, C2, ... are the paper's claims, F1, F2, ... grounds on which the notes would reject them. What is
resampled are the places of texts in the record. They become weights of the texts: so the arrays are built
once, and a figure is a few weighted sums.
"""
import copy
import math
import statistics
from functools import partial
from typing import Callable, NamedTuple

import numpy

from lab.common import Claim, PageTable, interval, mean
from model import expect

# what the rows hold: record.py has these from here
FAMILIES = 'math', 'table', 'story', 'translate', 'summary'
SIGNALS = 'entropy', 'margin', 'softmax'
TAUS = 0.05, 0.15, 0.3, 0.5, 0.75, 0.95                 # constant thresholds; the first is SpecDec's
SUMS = 'kept', 'cycles', 'tokens', 'rolled_back', 'steps', 'alike', 'chrf', 'right'     # of a replayed rule

MORE = 1.005                                            # a line for "better": a tie is none
FIXED = ', fixed 7'                                     # of the rules with a fixed window, behind their names
STRICT_FIXED = f'strict{FIXED}'
STRICT_ONLINE = 'strict, online'
SPREAD = 'C of cmasd-dropout: spread of its q(x) over their mean'


# ------------------------------------------------------------------------------------------- areas and bins

def flags(text):
    """Array [n] of bools from a stored text of 1 and 0."""
    return numpy.array(list(text)) == '1'


class Ranking:
    """Scores of good and bad tokens, whose AUROC for any weights of their texts is a few sums.

    won [texts, texts]: in how many pairs, of a good token of one text and a bad one of another, the good one
    has the higher score; ties half.
    """

    def __init__(self, scores, good, owner, size):
        """scores [n]; good [n] bool; owner [n]: the place of each token's text in the record; size: texts."""
        bad = scores[~good]
        bad_owner = owner[~good]
        self.good = numpy.bincount(owner[good], minlength=size)
        self.bad = numpy.bincount(bad_owner, minlength=size)
        self.won = numpy.zeros((size, size))
        for text in range(size):
            mine = numpy.sort(scores[good & (owner == text)])
            not_above = numpy.searchsorted(mine, bad, 'right')              # of mine, for each bad token
            below = numpy.searchsorted(mine, bad, 'left')
            won = len(mine) - (not_above + below) / 2
            self.won[text] = numpy.bincount(bad_owner, won, minlength=size)

    def area(self, weights):
        """The chance that a good token scores above a bad one, ties half; nan where either kind is absent.

        weights: how often each text is there.
        """
        pairs = (weights @ self.good) * (weights @ self.bad)
        if not pairs:
            return math.nan
        return float(weights @ self.won @ weights / pairs)


def reliability(sure, hits, bins=10):
    """([(mean confidence, share of hits, tokens) of each bin in use], expected calibration error).

    sure [n] in 0..1, hits [n] bool: whether the strict rule keeps the token.
    """
    place = numpy.minimum((sure * bins).astype(int), bins - 1)
    curve = []
    error = 0.0
    for b in range(bins):
        inside = place == b
        count = int(inside.sum())
        if count:
            confidence, rate = float(sure[inside].mean()), float(hits[inside].mean())
            curve.append((confidence, rate, count))
            error += count * abs(confidence - rate)
    return curve, error / max(1, len(sure))


# -------------------------------------------------------------------------------------------- replayed texts

class Texts:
    """The replayed texts with a weight each: how often it is there. Figures are of their weighted sums."""

    def __init__(self, rows):
        self.size = len(rows)
        self.weights = numpy.ones(self.size)
        self.families = numpy.array([row['family'] for row in rows])
        self.tokens = numpy.array([row['tokens'] for row in rows], dtype=float)
        self.right = numpy.array([row['right'] for row in rows], dtype=float)           # nan: not graded
        self.strict = {}                                # {strict rule: steps of each text}
        for rule in rows[0]['strict']:
            self.strict[rule] = numpy.array([row['strict'][rule] for row in rows])
        self.runs = {}                                  # {rule: {name of a sum: its value in each text}}
        for rule in rows[0]['runs']:
            sums = numpy.array([row['runs'][rule] for row in rows], dtype=float)        # [texts, sums]
            self.runs[rule] = dict(zip(SUMS, sums.T))
        self.read_tokens(rows)

    def read_tokens(self, rows):
        """Takes in the signals and hits of all tokens of all texts; C is the signals' mean."""
        self.owner = numpy.repeat(range(self.size), [len(row['hits']) for row in rows])
        self.hits = flags(''.join(row['hits'] for row in rows))
        self.signals = {}
        for name in SIGNALS:
            self.signals[name] = numpy.concatenate([row['signals'][name] for row in rows])
        self.signals['C'] = sum(self.signals.values()) / len(SIGNALS)
        self.rankings = {}
        for name, scores in self.signals.items():
            self.rankings[name] = Ranking(scores, self.hits, self.owner, self.size)

    def weighted(self, weights):
        """The same texts with other weights."""
        other = copy.copy(self)
        other.weights = weights
        return other

    def drawn(self, places):
        """The texts at these places, some of them several times, others not at all."""
        return self.weighted(numpy.bincount(places, minlength=self.size).astype(float))

    def of(self, family):
        return self.weighted(self.weights * (self.families == family))

    def total(self, rule, name):
        """The sum of a rule's sums over the texts."""
        return float(self.weights @ self.runs[rule][name])

    def mean(self, rule, name):
        return self.total(rule, name) / self.weights.sum()

    def per_cycle(self, rule):
        """Draft tokens kept a cycle."""
        return self.total(rule, 'kept') / self.total(rule, 'cycles')

    def rolled_back(self, rule):
        """The share of cycles in which a draft token was rejected."""
        return self.total(rule, 'rolled_back') / self.total(rule, 'cycles')

    def alike(self, rule):
        """The share of tokens that are the target's own text's, a mean over texts."""
        return self.mean(rule, 'alike')

    def pace(self, rule):
        """Modelled speed of a rule over plain decoding's: tokens to the time of a step of plain decoding."""
        return self.total(rule, 'tokens') / self.total(rule, 'steps')

    def strict_pace(self, rule):
        """The same of a strict rule, whose text is the target's own."""
        return float(self.weights @ self.tokens / (self.weights @ self.strict[rule]))

    def best(self, kind):
        """The fastest strict rule of a kind: fixed, online or alone (one signal)."""
        return max((rule for rule in self.strict if kind in rule.split()), key=self.strict_pace)

    def won(self, rule):
        """Right answers of a rule minus plain decoding's, as a share of the graded texts."""
        graded = ~numpy.isnan(self.right)
        weights = self.weights[graded]
        if not weights.sum():
            return math.nan
        difference = self.runs[rule]['right'][graded] - self.right[graded]
        return float(weights @ difference / weights.sum())

    def area(self, name):
        """AUROC of C, or of one of its signals, for whether the draft's token is the target's."""
        return self.rankings[name].area(self.weights)


# -------------------------------------------------------------------------------------- figures of the texts

def speed(texts):
    return texts.pace('default')


def kept_over_fixed(texts):
    return texts.per_cycle('default') / texts.per_cycle(STRICT_FIXED)


def alignment(texts):
    return texts.alike('default')


def confidence_area(texts):
    return texts.area('C')


def over_best_signal(texts):
    return texts.area('C') - max(texts.area(name) for name in SIGNALS)


def speed_over_best_signal(texts):
    return texts.strict_pace('online 1.0 10') / texts.strict_pace(texts.best('alone'))


def beside_best_fixed(texts):
    """Mean over the families of the tuned controller's pace over the best fixed window's."""
    found = []
    for family in FAMILIES:
        theirs = texts.of(family)
        if theirs.weights.any():
            found.append(theirs.strict_pace(theirs.best('online')) / theirs.strict_pace(theirs.best('fixed')))
    return mean(found)


def at_equal_alignment(points, aim):
    """Kept a cycle at an alignment, linear between the points (alignment, kept a cycle) about it.

    Beyond the points it is the nearest one's.
    """
    points = sorted(points)
    for (lower, begin), (upper, end) in zip(points, points[1:]):
        if lower <= aim <= upper and lower < upper:
            return begin + (end - begin) * (aim - lower) / (upper - lower)
    _, kept = points[0] if aim < points[0][0] else points[-1]
    return kept


def over_constant(texts, rule, more=''):
    """Kept a cycle of a rule over that of a constant tau that is tuned to the same alignment."""
    points = []
    for tau in TAUS:
        constant = f'tau {tau}{more}'
        points.append((texts.alike(constant), texts.per_cycle(constant)))
    return texts.per_cycle(rule) / at_equal_alignment(points, texts.alike(rule))


def adaptive_threshold(texts):
    return over_constant(texts, 'default')


def adaptive_threshold_alone(texts):
    return over_constant(texts, f'adaptive tau{FIXED}', FIXED)


def over_neither(texts):
    return over_constant(texts, 'default', FIXED)


def transferred(texts, source, to):
    """The share of the best strict gain on one family that the knobs tuned on another give; 0: no gain."""
    theirs = texts.of(source)
    ours = texts.of(to)
    if not (theirs.weights.any() and ours.weights.any()):
        return math.nan
    gain = ours.strict_pace(ours.best('online')) - 1
    if gain <= 0:
        return 0.0
    return (ours.strict_pace(theirs.best('online')) - 1) / gain


def story_to_math(texts):
    return transferred(texts, 'story', 'math')


def translate_to_summary(texts):
    return transferred(texts, 'translate', 'summary')


def won_on_math(texts):
    return texts.of('math').won('default')


# ----------------------------------------------------------------------------------------- the other records

class Sampled:
    """Runs at temperature 1: {draft tokens kept, cycles} of each text and seed."""

    def __init__(self, rows):
        self.kept = numpy.array([row['kept'] for row in rows])                          # [texts, seeds]
        self.cycles = numpy.array([row['cycles'] for row in rows])

    def evenness(self, places):
        """1 minus the relative spread of kept a cycle over the seeds."""
        each = self.kept[places].sum(0) / self.cycles[places].sum(0)
        return float(1 - each.std(ddof=1) / each.mean())


class FourBits:
    """What a rule keeps a cycle where one of the models has 4 bits, beside what it keeps else."""

    def __init__(self, rows, texts, role, rule):
        counts = numpy.array([row[role][rule] for row in rows])                         # [texts, 2]
        self.kept, self.cycles = counts.T
        self.plain = texts
        self.rule = rule

    def change(self, places):
        """Kept a cycle over that of the unrounded pair."""
        rounded = self.kept[places].sum() / self.cycles[places].sum()
        return float(rounded / self.plain.drawn(places).per_cycle(self.rule))


class Dropout:
    """What one pass and what dropout say of each judged token, as Rankings for its verdict."""

    def __init__(self, rows, texts):
        self.size = len(rows)
        self.tokens = sum(row['tokens'] for row in rows)
        self.usual, self.more = numpy.sum([row['positions'] for row in rows], 0)
        same = [row['tokens'] for row in rows] == texts.tokens.tolist()
        expect(same, 'the records dropout and replayed are not of the same texts: measure both anew')
        begins = numpy.concatenate([[0], numpy.cumsum(texts.tokens)]).astype(int)       # of each text
        places = numpy.concatenate([begin + numpy.array(row['places'], dtype=int)
                                    for begin, row in zip(begins, rows)])               # among all tokens
        owner = numpy.repeat(range(self.size), [len(row['places']) for row in rows])
        kept = flags(''.join(row['kept'] for row in rows))
        confidence = numpy.concatenate([row['confidence'] for row in rows])
        average = numpy.concatenate([row['mean'] for row in rows])
        scores = {'C of one pass': texts.signals['C'][places]}
        for name in SIGNALS:
            scores[name] = texts.signals[name][places]
        scores[SPREAD] = confidence
        scores['their spread'] = (confidence - 1) * average
        scores['their mean'] = average
        self.rankings = {name: Ranking(score, kept, owner, self.size) for name, score in scores.items()}

    def area(self, name, places):
        return self.rankings[name].area(numpy.bincount(places, minlength=self.size))

    def over_entropy(self, places):
        """AUROC of the confidence by dropout minus that of the entropy of one pass."""
        return self.area(SPREAD, places) - self.area('entropy', places)


def spared(rows):
    """1 minus what the confidences of a block of 4 cost, in target passes; the median of the rows."""
    return 1 - statistics.median(row['confidences'] / row['target_pass'] for row in rows)


# -------------------------------------------------------------------------------------------------- claims

class Judgement(NamedTuple):
    """A Claim about the replayed texts, before it is joined with them."""
    text: str
    whose: str
    line: float
    figure: Callable    # function of a Texts
    why: str = ''


RANKS_ALIKE = 'The signals are functions of one q and rank its tokens alike'
FEW_TURN = 'Tokens of low C fail a constant threshold too: a higher one for them turns few verdicts'
KNOBS_DIFFER = 'The best alpha and k_max of the two families differ'

REPLAYED = [
    Judgement('C1 speed over plain decoding, modelled from pass costs', 'paper', 4.0, speed,
              "A draft pass costs more beside a target pass than the paper's drafter of two parallel layers"),
    Judgement('C2 draft tokens kept a cycle, over a strict fixed window of 7', 'paper', 4.27 / 2.91,
              kept_over_fixed,
              'Most blocks of the fixed window are kept whole already, which leaves less to gain'),
    Judgement('C3, F4 alignment with the greedy text', 'paper', 0.87, alignment,
              'One token that the target would not write turns all that follows'),
    Judgement('F1 AUROC of C for strict acceptance', 'notes', 0.65, confidence_area,
              'The draft is sure where it is wrong: C sees its doubt, not its ignorance'),
    Judgement('C4, F1 AUROC of C minus that of the best single signal', 'paper', 0.001, over_best_signal,
              RANKS_ALIKE),
    Judgement('C4 strict speed with C over the best single signal', 'paper', MORE, speed_over_best_signal,
              f'{RANKS_ALIKE}; what differs is their size, which alpha sets as well'),
    Judgement('F2 strict speed over the best fixed window of each family, alpha and k_max tuned', 'notes',
              1.02, beside_best_fixed, "A window tuned to the family is near most blocks' best length"),
    Judgement('F3 kept a cycle over a constant tau of equal alignment', 'notes', MORE, adaptive_threshold,
              FEW_TURN),
    Judgement('F3 the same with a fixed window of 7 on both sides: the threshold alone', 'notes', MORE,
              adaptive_threshold_alone, FEW_TURN),
    Judgement('F5 over a fixed window of 7 and a constant tau of equal alignment', 'notes', 1.2, over_neither,
              'Only blocks that a window of 7 cuts off gain, and C closes others too early'),
    Judgement('C5, F6 share of the strict gain on math kept when tuned on story', 'paper', 0.95,
              story_to_math, KNOBS_DIFFER),
    Judgement('C5 share of the strict gain on summary kept when tuned on translate', 'paper', 0.95,
              translate_to_summary, KNOBS_DIFFER)]


def of_drawn(texts, figure, places):
    """A figure of the texts at these places."""
    return figure(texts.drawn(places))


def replayed_claims(texts):
    for text, whose, line, figure, why in REPLAYED:
        yield Claim(text, whose, line, range(texts.size), partial(of_drawn, texts, figure), why,
                    f'n = {texts.size}')
    places = numpy.flatnonzero(texts.families == 'math').tolist()
    yield Claim('F4 right answers lost or won on math', 'notes', -0.02, places,
                partial(of_drawn, texts, won_on_math),
                "A token kept against the target's choice may be what the answer hangs on",
                f'n = {len(places)}')


def rounded_claims(rows, texts):
    for role in ('draft', 'target'):
        for rule, word in ((STRICT_ONLINE, 'strict '), ('default', '')):
            pair = FourBits(rows, texts, role, rule)
            yield Claim(f'{word}kept a cycle with a 4-bit {role} over the plain one', 'ours', 0.95,
                        range(len(rows)), pair.change,
                        "Rounding one of the two moves its favourites away from the other's",
                        f'n = {len(rows)}')


def claims(stored):
    """The Claims, of {name: Stored}."""
    texts = Texts(stored['replayed'].rows)
    sampled = stored['sampled'].rows
    times = stored['own_cost'].rows
    dropout = Dropout(stored['dropout'].rows, texts)
    more = dropout.more / dropout.tokens
    usual = dropout.usual / dropout.tokens
    return [
        *replayed_claims(texts),
        Claim('C5 1 - relative spread of kept a cycle over 3 seeds, temperature 1', 'paper', 0.95,
              range(len(sampled)), Sampled(sampled).evenness,
              'Short texts: what is sampled early decides how easy the rest is', f'n = {len(sampled)}'),
        *rounded_claims(stored['rounded'].rows, texts),
        Claim('1 - cost of the confidences of a block of 4 over a target pass', 'notes', 0.95, times, spared,
              'Five tensor operations a token are a price that does not shrink with the target',
              f'time; n = {len(times)}'),
        Claim('C by dropout: its AUROC for strict acceptance minus that of the entropy of one pass', 'ours',
              0.001, range(dropout.size), dropout.over_entropy,
              'The draft was trained without dropout: no channel spares another',
              f'the draft reads {more:.2f} positions a token more, {usual:.2f} as usual; n = {dropout.size}')]


# -------------------------------------------------------------------------------------------------- tables

def area_table(dropout):
    rows = []
    for name in dropout.rankings:
        rows.append((name, *interval(range(dropout.size), partial(dropout.area, name))))
    return PageTable(('AUROC for strict acceptance, of judged tokens', 'figure', 'low', 'high'), rows)


def reliability_table(texts):
    curve, error = reliability(texts.signals['C'], texts.hits)
    head = f'mean C (expected calibration error {error:.3f})', 'kept by the strict rule', 'tokens'
    return PageTable(head, curve)


def rule_table(texts):
    rows = []
    for rule in texts.runs:
        rows.append((rule, texts.alike(rule), texts.mean(rule, 'chrf'), texts.per_cycle(rule),
                     texts.rolled_back(rule), texts.pace(rule), texts.won(rule)))
    head = ('rule', 'alignment', 'n-gram F1', 'kept a cycle', 'cycles rolled back', 'x plain, modelled',
            'right won')
    return PageTable(head, rows)


def family_table(texts):
    rows = []
    for family in FAMILIES:
        ours = texts.of(family)
        fixed = ours.best('fixed')
        online = ours.best('online')
        rows.append((family, fixed, ours.strict_pace(fixed), online, ours.strict_pace(online),
                     ours.per_cycle('default'), ours.alike('default'), ours.pace('default')))
    head = ('family', 'best fixed window', 'x plain, strict', 'best alpha and k_max', 'x plain, strict',
            'default: kept a cycle', 'alignment', 'x plain')
    return PageTable(head, rows)


def controller_table(rows):
    def total(name, key):
        return sum(row[name][key] for row in rows)

    plain = total('plain', 'tokens') / total('plain', 'seconds')
    cells = []
    for name in rows[0]:
        if name == 'plain':
            continue
        tokens = total(name, 'tokens')
        cycles = total(name, 'cycles')
        positions = total(name, 'drafted') + cycles
        modelled = tokens / total(name, 'steps')
        measured = tokens / total(name, 'seconds') / plain
        cells.append((name, total(name, 'kept') / cycles, positions / tokens, modelled, measured))
    head = ('controller, strict', 'kept a cycle', 'positions a token', 'x plain, modelled',
            'measured, with what the oracle looks up')
    return PageTable(head, cells)


def cost_table(costs):
    """Of the one row of pass_costs: its seconds in milliseconds, and in steps of plain decoding."""
    step = costs['target'][1]
    rows = [('draft, 1', 1000 * costs['draft'], costs['draft'] / step)]
    for n in (1, 2, 4, 8, 11, 16):
        seconds = costs['target'][n]
        rows.append((f'target, {n}', 1000 * seconds, seconds / step))
    return PageTable(('pass, positions', 'milliseconds', 'in steps of plain decoding'), rows)


def tables(stored):
    """The Tables behind the claims, of {name: Stored}."""
    texts = Texts(stored['replayed'].rows)
    return [area_table(Dropout(stored['dropout'].rows, texts)), reliability_table(texts), rule_table(texts),
            family_table(texts), controller_table(stored['controllers'].rows),
            cost_table(stored['pass_costs'].rows[0])]
