"""How CM-ASD's claims are judged by what lab/cmasd/record.py stored; `python -m lab.claims --report cmasd`.

C1, C2, ... are the paper's claims, F1, F2, ... grounds on which the notes would reject them. What is
resampled are the places of texts in the record. They become weights of the texts: so the arrays are built
once, and a figure is a few weighted sums.
"""
import copy
import math
import statistics
from functools import cached_property, partial
from typing import Callable, NamedTuple

import numpy

from lab.common import Claim, PageTable, interval, mean
from lab.tasks import bleu_of
from model import expect

# what the embedded pair's rows hold: record.py has these from here
FAMILIES = 'math', 'table', 'story', 'translate', 'summary'
SIGNALS = 'entropy', 'margin', 'softmax'
GAINS = 0.1, 0.5, 1.0, 2.0                              # gamma_tau and k_max, as the paper sweeps them
LONGEST_WINDOWS = 5, 10, 15, 25
TAUS = 0.05, 0.15, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95   # constant thresholds; the first is SpecDec's
WINDOWS = 3, 5, 7, 9, 12                                # fixed ones that stand beside them, tokens
WARM_TAUS = 0.05, 0.15, 0.3, 0.5, 0.75, 1.0             # at temperature 1; the last is exact
STRICT_SUMS = 'kept', 'cycles', 'drafted', 'steps'      # of a replayed rule whose text is the target's
SUMS = (*STRICT_SUMS, 'looked', 'tokens', 'rolled_back', 'alike', 'chrf', 'right')      # of any other
WINDOWED_SUMS = 'kept', 'cycles', 'drafted', 'tokens', 'alike'                   # with a fixed window
WARM_SUMS = 'kept', 'cycles', 'steps', 'looked', 'tokens', 'nats', 'right'
# looked: tokens whose confidence was asked for, which has a price; steps leave that out

STRICT_ONLINE = 'strict, online'                        # of 4-bit models; replayed as online 1.0 10
MORE = 1.005                                            # a line for "better": a tie is none
SURE = 0.9                                              # C from which a token is trivially right
APART = 0.6, 0.95                                       # alignment where thresholds differ and yet keep to it
BLOCK = 12                                              # tokens of the longest block that the tables go into
SPREAD = 'C of cmasd-dropout: spread of its q(x) over their mean'
HUGGING_FACE = 'hf-confidence', 'hf-heuristic', 'hf-roc'


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

    def __init__(self, rows, rules, price):
        """rules: the row of that record; price: of one token's confidence, in steps of plain decoding."""
        self.size = len(rows)
        self.weights = numpy.ones(self.size)
        self.families = numpy.array([row['family'] for row in rows])
        self.names = list(dict.fromkeys(self.families.tolist()))            # of the families
        self.tokens = numpy.array([row['tokens'] for row in rows], dtype=float)
        self.right = numpy.array([row['right'] for row in rows], dtype=float)           # nan: not graded
        self.strict = sums_by_rule(rows, rules, 'strict', STRICT_SUMS)
        for rule, sums in self.strict.items():
            sums['tokens'] = self.tokens
            if not rule.startswith('fixed'):
                sums['steps'] += price * sums['drafted']
        self.runs = sums_by_rule(rows, rules, 'runs', SUMS)
        for sums in self.runs.values():
            sums['steps'] += price * sums['looked']
        self.windowed = sums_by_rule(rows, rules, 'windowed', WINDOWED_SUMS)
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
        unsure = self.signals['C'] < SURE
        self.rankings['unsure'] = Ranking(self.signals['C'][unsure], self.hits[unsure], self.owner[unsure],
                                          self.size)

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

    def place(self, row):
        """The place here of the text that a row of another record is of, by its family and place there."""
        return int(numpy.flatnonzero(self.families == row['family'])[row['place']])

    def total(self, sums, name):
        """The total of one of a rule's sums over the texts."""
        return float(self.weights @ sums[name])

    def per_cycle(self, sums):
        """Draft tokens kept a cycle."""
        return self.total(sums, 'kept') / self.total(sums, 'cycles')

    def positions(self, sums):
        """Positions that the target reads for a token of the text."""
        return (self.total(sums, 'drafted') + self.total(sums, 'cycles')) / self.total(sums, 'tokens')

    def pace(self, sums):
        """Modelled speed of a rule over plain decoding's: tokens to the time of a step of plain decoding."""
        return self.total(sums, 'tokens') / self.total(sums, 'steps')

    def alike(self, sums):
        """The share of tokens that are the target's own text's, a mean over texts."""
        return self.total(sums, 'alike') / self.weights.sum()

    def best(self, kind):
        """The fastest strict rule of a kind: fixed, online or alone (one signal)."""
        rules = [rule for rule in self.strict if kind in rule.split()]
        return max(rules, key=lambda rule: self.pace(self.strict[rule]))

    def best_pace(self, kind):
        return self.pace(self.strict[self.best(kind)])

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


def sums_by_rule(rows, rules, part, names):
    """{rule: {name of a sum: array of its value in each text}} of one part of the rows."""
    table = numpy.array([row[part] for row in rows], dtype=float)                       # [texts, rules, sums]
    found = {}
    for i, rule in enumerate(rules[part]):
        found[rule] = dict(zip(names, table[:, i].T.copy()))
    return found


# -------------------------------------------------------------------------------------- figures of the texts

def speed(texts):
    return texts.pace(texts.runs['default'])


def quotient(a, b):
    """a / b; nan where b is 0, as where a rule kept nothing."""
    return a / b if b else math.nan


def between(points, aim):
    """y at x = aim, linear between the points (x, y) about it; beyond them the nearest one's."""
    points = sorted(points)
    for (lower, begin), (upper, end) in zip(points, points[1:]):
        if lower <= aim <= upper and lower < upper:
            return begin + (end - begin) * (aim - lower) / (upper - lower)
    _, nearest = points[0] if aim < points[0][0] else points[-1]
    return nearest


def over_fixed(texts):
    """Kept a cycle over that of a strict fixed window, at as many target positions a token."""
    points = []
    for rule, sums in texts.strict.items():
        if rule.startswith('fixed'):
            points.append((texts.positions(sums), texts.per_cycle(sums)))
    default = texts.runs['default']
    return quotient(texts.per_cycle(default), between(points, texts.positions(default)))


def alignment(texts):
    return texts.alike(texts.runs['default'])


def confidence_area(texts):
    return texts.area('C')


def unsure_area(texts):
    return texts.area('unsure')


def over_best_signal(texts):
    return texts.area('C') - max(texts.area(name) for name in SIGNALS)


def speed_over_best_signal(texts):
    return texts.pace(texts.strict['online 1.0 10']) / texts.best_pace('alone')


def beside_best_fixed(texts):
    """Mean over the families of the tuned controller's pace over the best fixed window's."""
    found = []
    for family in texts.names:
        theirs = texts.of(family)
        if theirs.weights.any():
            found.append(theirs.best_pace('online') / theirs.best_pace('fixed'))
    return mean(found)


def constant_taus(texts, window=None):
    """The sums of the rules with a constant threshold; window: a fixed one's tokens."""
    ending = f', fixed {window}' if window else ''
    rules = texts.windowed if window else texts.runs
    names = [f'tau {tau}{ending}' for tau in TAUS]
    return [rules[name] for name in names if name in rules]


def at_equal_alignment(texts, aim, window=None):
    """(kept a cycle, positions a token) of a constant tau at this alignment; window: a fixed one's tokens."""
    kept = []
    positions = []
    for sums in constant_taus(texts, window):
        alike = texts.alike(sums)
        kept.append((alike, texts.per_cycle(sums)))
        positions.append((alike, texts.positions(sums)))
    return between(kept, aim), between(positions, aim)


def adaptive_threshold(texts, rule='default'):
    sums = texts.runs[rule]
    kept, _ = at_equal_alignment(texts, texts.alike(sums))
    return quotient(texts.per_cycle(sums), kept)


def adaptive_apart(texts):
    """[(family, rule)] of the adaptive thresholds whose alignment on that family is in APART."""
    least, most = APART
    found = []
    for family in texts.names:
        theirs = texts.of(family)
        for rule, sums in theirs.runs.items():
            adaptive = rule.startswith('gamma_tau') and rule.endswith('k_max 10')
            if adaptive and least <= theirs.alike(sums) <= most:
                found.append((family, rule))
    return found


def mean_threshold(rules, texts):
    """Mean of adaptive_threshold over these [(family, rule)], each on its family's texts."""
    found = []
    for family, rule in rules:
        theirs = texts.of(family)
        if theirs.weights.any():
            found.append(adaptive_threshold(theirs, rule))
    return mean(found)


def adaptive_threshold_alone(texts):
    sums = texts.windowed['adaptive tau, fixed 7']
    kept, _ = at_equal_alignment(texts, texts.alike(sums), 7)
    return quotient(texts.per_cycle(sums), kept)


def over_neither(texts):
    """Kept a cycle over a fixed window and a constant tau of equal alignment and equal positions a token."""
    points = []
    for window in WINDOWS:
        kept, positions = at_equal_alignment(texts, alignment(texts), window)
        points.append((positions, kept))
    default = texts.runs['default']
    return quotient(texts.per_cycle(default), between(points, texts.positions(default)))


def transferred(texts, source, to):
    """The share of the best strict gain on one family that the knobs tuned on another give; 0: no gain."""
    theirs = texts.of(source)
    ours = texts.of(to)
    if not (theirs.weights.any() and ours.weights.any()):
        return math.nan
    gain = ours.best_pace('online') - 1
    if gain <= 0:
        return 0.0
    return (ours.pace(ours.strict[theirs.best('online')]) - 1) / gain


def answers_of_default(texts):
    return texts.won('default')


# ------------------------------------------------------------------------------- blocks along a replayed text

def strict_blocks(hits, gamma):
    """[(draft tokens judged, of them kept)] of each cycle of a fixed window, from a text's hits [n] bool.

    The last block may be a token longer than a real one, which leaves room for the token behind it.
    """
    found = []
    begin = 0
    while begin < len(hits):
        block = hits[begin:begin + gamma]
        wrong = numpy.flatnonzero(~block)
        kept = int(wrong[0]) if len(wrong) else len(block)
        found.append((min(kept + 1, len(block)), kept))
        begin += kept + 1
    return found


def accepted_by_place(texts, gamma=BLOCK):
    """[(draft tokens judged at this place of the block, of them kept)] of each place; see strict_blocks."""
    judged = numpy.zeros(gamma)
    kept = numpy.zeros(gamma)
    for text in numpy.flatnonzero(texts.weights):
        for looked, right in strict_blocks(texts.hits[texts.owner == text], gamma):
            judged[:looked] += texts.weights[text]
            kept[:right] += texts.weights[text]
    return list(zip(judged, kept))


# ----------------------------------------------------------------------------------------- the other records

class Sampled:
    """Runs at temperature 1: of each rule its sums [texts, seeds], of those texts that it has written."""

    def __init__(self, rows, price):
        self.rules = {}                                 # {rule: {name of a sum: array [texts, seeds]}}
        for rule in rows[0]:
            found = {}
            for name in WARM_SUMS:
                found[name] = numpy.array([row[rule][name] for row in rows if rule in row], dtype=float)
            found['steps'] += price * found['looked']
            self.rules[rule] = found
        self.half = numpy.array(['plain' in row for row in rows])   # texts that all rules have written

    def first_seed(self, rule):
        """{name of a sum: [texts]} of the texts that all rules have written, with the first seed."""
        sums = self.rules[rule]
        everywhere = self.half if rule == 'default' else slice(None)
        return {name: values[everywhere][:, 0] for name, values in sums.items()}

    def totals(self, rule, places):
        """{name of a sum: its total} over these of the texts that all rules have written."""
        return {name: float(numpy.nansum(values[places])) for name, values in self.first_seed(rule).items()}

    def evenness(self, places):
        """1 minus the relative spread of a text's kept a cycle over its seeds, mean over the texts."""
        sums = self.rules['default']
        each = sums['kept'][places] / sums['cycles'][places]                            # [texts, seeds]
        average = each.mean(1)
        written = average > 0                           # a text without a kept token has no spread
        return float(1 - (each.std(1, ddof=1)[written] / average[written]).mean())

    def speed(self, rule, places):
        """Tokens to the modelled time of a step of plain decoding."""
        sums = self.totals(rule, places)
        return sums['tokens'] / sums['steps']

    def nats(self, rule, places):
        """The target's nats a token of a rule's texts."""
        sums = self.totals(rule, places)
        return sums['nats'] / sums['tokens']

    def per_cycle(self, rule, places):
        sums = self.totals(rule, places)
        return sums['kept'] / sums['cycles']

    def over_exact(self, places):
        return self.speed('default', places) / self.speed('tau 1.0', places)

    @property
    def seeds(self):
        """With how many the default has written each text."""
        return self.rules['default']['kept'].shape[1]

    def over_constant(self, places):
        """Kept a cycle over that of a constant tau whose texts have as many of the target's nats a token."""
        points = []
        for rule in self.rules:
            if rule.startswith('tau'):
                points.append((self.nats(rule, places), self.per_cycle(rule, places)))
        return quotient(self.per_cycle('default', places), between(points, self.nats('default', places)))

    def won(self, places, rule='default'):
        """Right answers of a rule minus plain sampling's, as a share of the graded texts."""
        difference = (self.first_seed(rule)['right'] - self.first_seed('plain')['right'])[places]
        graded = difference[~numpy.isnan(difference)]
        return float(graded.mean()) if len(graded) else math.nan


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
        plain = self.plain.drawn(places)
        sums = plain.strict['online 1.0 10'] if self.rule == STRICT_ONLINE else plain.runs[self.rule]
        return float(rounded / plain.per_cycle(sums))


class Dropout:
    """What one pass and what dropout say of each judged token, as Rankings for its verdict."""

    def __init__(self, rows, texts):
        begins = numpy.concatenate([[0], numpy.cumsum(texts.tokens)]).astype(int)       # of each text
        same = []
        places = []                                                                     # among all tokens
        for i, row in enumerate(rows):
            text = texts.place(row) if 'place' in row else i
            at = begins[text] + numpy.array(row['places'], dtype=int)
            if row['tokens'] != texts.tokens[text]:     # rounding has bent the run away from its replay
                continue
            if numpy.array_equal(flags(row['kept']), texts.hits[at]):
                same.append(row)
                places.append(at)
        expect(2 * len(same) > len(rows),
               'the records dropout and replayed are not of the same texts: measure both anew')
        rows = same
        places = numpy.concatenate(places)
        self.size = len(rows)
        self.tokens = sum(row['tokens'] for row in rows)
        self.usual, self.more = numpy.sum([row['positions'] for row in rows], 0)
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


class Costs:
    """What controllers themselves take, in steps of plain decoding: of each kind the least of the rounds.

    So are passes measured: what other programs add to a round is not its own.
    """

    def __init__(self, rows):
        step = min(row['target_pass'] for row in rows)
        self.token = {}                                 # {controller: of a draft token}
        self.cycle = {}                                 # {controller: of a cycle}
        for name in rows[0]['token']:
            self.token[name] = min(row['token'][name] for row in rows) / step
            self.cycle[name] = min(row['cycle'][name] for row in rows) / step

    def of(self, row, name):
        """Of a controller's run; nothing for the oracle, which knows."""
        if name == 'oracle':
            return 0.0
        return self.token[name] * row[name]['drafted'] + self.cycle[name] * row[name]['cycles']

    def pace(self, rows, name):
        """Tokens to the modelled time of a step of plain decoding, with what the controller itself takes."""
        steps = sum(row[name]['steps'] + self.of(row, name) for row in rows)
        return sum(row[name]['tokens'] for row in rows) / steps

    def online_over(self, name, rows):
        return self.pace(rows, 'online') / self.pace(rows, name)


def spared(rows):
    """1 minus what the online controller takes for a block of 4, in target passes; the median of the rows."""
    return 1 - statistics.median(4 * row['token']['online'] / row['target_pass'] for row in rows)


def by_family(rows):
    """{family: its rows}."""
    found = {}
    for row in rows:
        found.setdefault(row['family'], []).append(row)
    return found


def faster_online(rows):
    """Mean over the tasks of the best fixed window's seconds over the best controller's, measured."""
    found = []
    for theirs in by_family(rows).values():
        found.append(sum(row['fixed'] for row in theirs) / sum(row['online'] for row in theirs))
    return mean(found)


def answers_won(rows):
    """Right answers of the default minus plain decoding's, as a share of the texts."""
    return mean(row['default'] - row['plain'] for row in rows)


def corpus_bleu(rows, name):
    return bleu_of(numpy.sum([row['bleu'][name] for row in rows], 0).tolist())


def bleu_won(rows):
    return corpus_bleu(rows, 'default') - corpus_bleu(rows, 'plain')


def bleu_alike(rows):
    """BLEU of the default's texts with plain decoding's as references."""
    return corpus_bleu(rows, 'alike')


def rouge_won(rows):
    return mean(row['rouge']['default'] - row['rouge']['plain'] for row in rows)


class Lengths:
    """Strict rules that differ in their blocks' lengths: of each its time for every text of `product`."""

    def __init__(self, rows, passes, prices):
        """passes: a row of pass_costs, in any unit; prices: {first word of a rule: steps a draft token}."""
        self.families = numpy.array([row['family'] for row in rows])
        self.names = list(dict.fromkeys(self.families.tolist()))            # of the families
        self.tokens = numpy.array([row['tokens'] for row in rows], dtype=float)
        self.steps = {}                                 # {rule: [texts] steps of plain decoding}
        for rule in rows[0]['rules']:
            price = prices.get(first_word(rule), 0.0)
            counts = [row['rules'][rule][1] for row in rows]
            self.steps[rule] = numpy.array([steps_of_blocks(blocks, passes, price) for blocks in counts])

    def pace(self, kind, weights):
        """Modelled speed over plain decoding's of a rule, or of the fastest whose first word it is."""
        rules = [rule for rule in self.steps if kind in (rule, first_word(rule))]
        return max(weights @ self.tokens / (weights @ self.steps[rule]) for rule in rules)

    def over(self, kind, other, places):
        """Mean over the tasks of a rule's, or of the fastest one's, speed over another's."""
        weights = numpy.bincount(places, minlength=len(self.tokens)).astype(float)
        found = []
        for family in self.names:
            theirs = weights * (self.families == family)
            if theirs.any():
                found.append(float(self.pace(kind, theirs) / self.pace(other, theirs)))
        return mean(found)

    def share(self, kind, places):
        """What a rule gains over the tasks' best fixed windows, as a share of what the oracle does."""
        return quotient(self.over(kind, 'fixed', places) - 1, self.over('oracle', 'fixed', places) - 1)

    def of(self, family):
        """The places of a task's texts."""
        return numpy.flatnonzero(self.families == family).tolist()


def first_word(rule):
    """What a rule's name begins with: its kind. A word with a comma is a kind of its own."""
    return rule.split()[0]


def steps_of_blocks(blocks, passes, price):
    """Steps of plain decoding for {draft tokens of a block: cycles}; longest passes in proportion."""
    longest = len(passes['target']) - 1
    seconds = 0.0
    tokens = 0
    for length, cycles in blocks.items():
        n = int(length)
        measured = min(n + 1, longest)
        seconds += cycles * (n * passes['draft'] + passes['target'][measured] * (n + 1) / measured)
        tokens += cycles * n
    return seconds / passes['target'][1] + price * tokens


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
BENT = "A token kept against the target's choice may be what the answer hangs on"
LENGTHS = 'A fixed window near the best length loses little, and the confidences have a price'

REPLAYED = [
    Judgement('C1 speed over plain decoding, modelled', 'paper', 4.0, speed,
              "A draft pass costs more beside a target pass than the paper's drafter of two parallel layers"),
    Judgement('C2 draft tokens kept a cycle, over a strict fixed window of equal positions a token', 'paper',
              4.27 / 2.91, over_fixed, 'Most blocks of the fixed window are kept whole already'),
    Judgement('C3, F4 alignment with the greedy text', 'paper', 0.87, alignment,
              'One token that the target would not write turns all that follows'),
    Judgement('F1 AUROC of C for strict acceptance', 'notes', 0.65, confidence_area,
              'The draft is sure where it is wrong: C sees its doubt, not its ignorance'),
    Judgement(f'F1 the same of tokens of C below {SURE}', 'notes', 0.65, unsure_area,
              'The draft is sure where it is wrong: C sees its doubt, not its ignorance'),
    Judgement(f'F1 AUROC of C of tokens below {SURE}: the line for real models', 'ours', 0.75,
              unsure_area, 'Where the draft is in doubt, its doubt says less'),
    Judgement('C4, F1 AUROC of C minus that of the best single signal', 'paper', 0.001, over_best_signal,
              RANKS_ALIKE),
    Judgement('C4 strict speed with C over the best single signal', 'paper', MORE, speed_over_best_signal,
              f'{RANKS_ALIKE}; what differs is their size, which alpha sets as well'),
    Judgement('F2 strict speed over the best fixed window of each task, alpha and k_max tuned; their mean',
              'notes', 1.02, beside_best_fixed, LENGTHS),
    Judgement('F3 kept a cycle over a constant tau of equal alignment', 'notes', MORE, adaptive_threshold,
              FEW_TURN),
    Judgement('F3 the same with a fixed window of 7 on both sides: the threshold alone', 'notes', MORE,
              adaptive_threshold_alone, FEW_TURN),
    Judgement('F5 over a constant tau of equal alignment and a fixed window of equal positions a token',
              'notes', 1.2, over_neither, 'Most blocks of the fixed window are kept whole already')]
WINDOWED = adaptive_threshold_alone, over_neither       # figures that need thresholds with fixed windows
TRANSFERS = ('story', 'math', 'C5, F6'), ('translate', 'summary', 'C5')     # knobs of one task on another


def of_drawn(texts, figure, places):
    """A figure of the texts at these places."""
    return figure(texts.drawn(places))


def replayed_claims(texts):
    every = range(texts.size)
    for text, whose, line, figure, why in REPLAYED:
        if figure not in WINDOWED or texts.windowed:
            yield Claim(text, whose, line, every, partial(of_drawn, texts, figure), why, f'n = {texts.size}')
    rules = adaptive_apart(texts)
    if rules:
        note = ', '.join(f'{rule} on {family}' for family, rule in rules)
        yield Claim('F3 kept a cycle over a constant tau of equal alignment, where it is 0.6 to 0.95; mean',
                    'ours', MORE, every, partial(of_drawn, texts, partial(mean_threshold, rules)), FEW_TURN,
                    f'{note}; n = {texts.size}')
    graded = numpy.flatnonzero(~numpy.isnan(texts.right)).tolist()
    if graded:
        yield Claim('F4 right answers won or lost, all graded texts', 'notes', -0.02, graded,
                    partial(of_drawn, texts, answers_of_default), BENT, f'n = {len(graded)}')
    for source, to, number in TRANSFERS:
        if source in texts.names and to in texts.names:
            text = f'{number} share of the strict gain on {to} kept when tuned on {source}'
            figure = partial(transferred, source=source, to=to)
            yield Claim(text, 'paper', 0.95, every, partial(of_drawn, texts, figure), KNOBS_DIFFER,
                        f'n = {texts.size}')
    for family in texts.names:
        places = numpy.flatnonzero(texts.families == family).tolist()
        yield Claim(f'F2 {family}: strict speed over its best fixed window, alpha and k_max tuned', 'notes',
                    1.02, places, partial(of_drawn, texts, beside_best_fixed), LENGTHS, f'n = {len(places)}')


OVER_TASKS = [          # (claim, line, rule or kind, what it is compared with, why it may fail)
    ('product, h = 0.5, over the best fixed window of each task', 1.02, 'product 0.5', 'fixed',
     'A token that the draft doubts is right nearly always on one task, in half the cases on another'),
    ('product over online, both tuned for each task', 1.02, 'product', 'online', LENGTHS),
    ('payoff over the best fixed window of each task', 1.02, 'payoff', 'fixed', LENGTHS),
    ('payoff over online as it comes', MORE, 'payoff', 'online 1.0 10', LENGTHS),
    ('payoff over product, h = 0.5', MORE, 'payoff', 'product 0.5',
     'A text ends before it has shown how far its draft can be trusted')]


def length_claims(lengths, by_bytes):
    """On blocks' lengths: by measured costs of passes and of what controllers take, then by weight bytes."""
    every = range(len(lengths.tokens))
    note = f'strict, modelled; n = {len(every)}'
    for text, line, kind, other, why in OVER_TASKS:
        yield Claim(f'{text}; mean', 'ours', line, every, partial(lengths.over, kind, other), why, note)
    for family in lengths.names:
        places = lengths.of(family)
        for timed, ending in ((lengths, ''), (by_bytes, ', passes by weight bytes')):
            yield Claim(f'payoff over the best fixed window of {family}{ending}', 'ours', 1.0, places,
                        partial(timed.over, 'payoff', 'fixed'), 'It begins each text knowing nothing',
                        f'strict, modelled; n = {len(places)}')
    yield Claim("payoff's share of what the oracle gains over the best fixed window of each task", 'ours',
                0.25, every, partial(lengths.share, 'payoff'), 'Most misses come without a doubt', note)
    yield Claim('payoff over the best fixed window of each task, passes by weight bytes; mean', 'ours', 1.02,
                every, partial(by_bytes.over, 'payoff', 'fixed'), LENGTHS, note)


def sampled_claims(sampled):
    half = range(int(sampled.half.sum()))
    every = range(len(sampled.half))
    note = f'temperature 1; n = {len(half)}'
    yield Claim('speed over the exact rule, modelled', 'paper', MORE, half, sampled.over_exact,
                'Where draft and target nearly agree, little is rejected that could be forgiven', note)
    yield Claim('F3 kept a cycle over a constant tau of equal nats a token', 'notes', MORE, half,
                sampled.over_constant, FEW_TURN, note)
    if not math.isnan(sampled.won(half)):
        yield Claim('F4 right answers won or lost beside plain sampling', 'notes', -0.02, half, sampled.won,
                    BENT, note)
    if sampled.seeds > 1:
        yield Claim("C5 1 - relative spread of a text's kept a cycle over 3 seeds", 'paper', 0.95, every,
                    sampled.evenness, 'Short texts: what is sampled early decides how easy the rest is',
                    f'temperature 1; n = {len(every)}')


def word_claims(rows):
    translated = [row for row in rows if row['family'] == 'translate']
    summed_up = [row for row in rows if row['family'] == 'summary']
    return [
        Claim("C3 BLEU on translate minus plain decoding's", 'paper', -0.005, translated, bleu_won, BENT,
              f'n = {len(translated)}'),
        Claim("C3 ROUGE-L on summary minus plain decoding's", 'paper', -0.005, summed_up, rouge_won, BENT,
              f'n = {len(summed_up)}'),
        Claim("C3 BLEU of the texts with plain decoding's as references", 'paper', 0.87, rows, bleu_alike,
              BENT, f'n = {len(rows)}')]


def rounded_claims(rows, texts):
    for role in ('draft', 'target'):
        for rule, word in ((STRICT_ONLINE, 'strict '), ('default', '')):
            pair = FourBits(rows, texts, role, rule)
            yield Claim(f'{word}kept a cycle with a 4-bit {role} over the plain one', 'ours', 0.95,
                        range(len(rows)), pair.change,
                        "Rounding one of the two moves its favourites away from the other's",
                        f'n = {len(rows)}')


def controller_claims(rows, costs):
    for name in HUGGING_FACE:
        yield Claim(f'strict speed of online over {name}, modelled, both with their own cost', 'ours', MORE,
                    rows, partial(costs.online_over, name),
                    "Many blocks are right for longer than online's longest", f'n = {len(rows)}')


class Evidence:
    """The records that there are, {name: Stored}, and what is made of them: None where they do not do."""

    def __init__(self, stored):
        self.stored = stored

    def rows(self, name):
        """The rows of a record; none where it was not measured."""
        return self.stored[name].rows if name in self.stored else []

    @cached_property
    def costs(self):
        return Costs(self.rows('own_cost')) if self.rows('own_cost') else None

    @cached_property
    def texts(self):
        """The replayed texts, where it is known what a confidence takes."""
        if not (self.costs and self.rows('rules') and self.rows('replayed')):
            return None
        rules, = self.rows('rules')
        return Texts(self.rows('replayed'), rules, self.costs.token['online'])

    @cached_property
    def lengths(self):
        """(Lengths by measured passes, by weight bytes): a draft pass has its share of a target pass."""
        rows = self.rows('product')
        if not (self.costs and rows and self.rows('pass_costs')):
            return None
        token = self.costs.token
        prices = dict(online=token['online'])
        for kind in ('hf-confidence', 'product', 'payoff', 'payoff,'):
            prices[kind] = token['hf-confidence']       # a softmax, its largest: the same work
        passes, = self.rows('pass_costs')
        streamed = dict(draft=rows[0]['bytes'], target=[1.0] * len(passes['target']))
        return Lengths(rows, passes, prices), Lengths(rows, streamed, {})

    @cached_property
    def sampled(self):
        if not (self.costs and self.rows('sampled')):
            return None
        return Sampled(self.rows('sampled'), self.costs.token['online'])

    @cached_property
    def dropout(self):
        if not (self.texts and self.rows('dropout')):
            return None
        return Dropout(self.rows('dropout'), self.texts)


def cost_claims(rows):
    yield Claim('1 - what the controller takes for a block of 4, over a target pass', 'notes', 0.95, rows,
                spared, 'Five tensor operations a token are a price that does not shrink with the target',
                f'time; n = {len(rows)}')


def paired_claims(rows):
    yield Claim('F2 the same means, measured: the time of real runs', 'notes', 1.02, rows,
                faster_online, LENGTHS, f'n = {len(rows)}')


def answer_claims(rows):
    yield Claim('F4 right answers won or lost on math', 'notes', -0.02, rows, answers_won, BENT,
                f'n = {len(rows)}')


def dropout_claims(dropout):
    more = dropout.more / dropout.tokens
    usual = dropout.usual / dropout.tokens
    note = f'the draft reads {more:.2f} positions a token more, {usual:.2f} as usual; n = {dropout.size}'
    yield Claim('C by dropout: its AUROC for strict acceptance minus that of the entropy of one pass', 'ours',
                0.001, range(dropout.size), dropout.over_entropy,
                'The draft was trained without dropout: no channel spares another', note)


def claims(stored):
    """The Claims, of {name: Stored}; of those records that there are."""
    there = Evidence(stored)
    judged = [
        (replayed_claims, there.texts),
        (length_claims, *(there.lengths or [None])),
        (answer_claims, there.rows('answers')),
        (word_claims, there.rows('words')),
        (sampled_claims, there.sampled),
        (controller_claims, there.costs and there.rows('controllers'), there.costs),
        (rounded_claims, there.texts and there.rows('rounded'), there.texts),
        (paired_claims, there.rows('paired')),
        (cost_claims, there.rows('own_cost')),
        (dropout_claims, there.dropout)]
    found = []
    for judge, evidence, *beside in judged:
        if evidence:
            found += judge(evidence, *beside)
    return found


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


def unsure_table(texts):
    """Where C tells right tokens from wrong ones, in each task."""
    rows = []
    for family in (*texts.names, 'all'):
        ours = texts if family == 'all' else texts.of(family)
        tokens = ours.weights[ours.owner]
        unsure = float(tokens @ (texts.signals['C'] < SURE) / tokens.sum())
        hits = float(tokens @ texts.hits / tokens.sum())
        rows.append((family, hits, unsure, ours.area('C'), ours.area('unsure')))
    head = ('task', "tokens that are the target's", f'of C below {SURE}', 'AUROC of C', 'of those below')
    return PageTable(head, rows)


def rule_table(texts):
    rows = []
    for rule, sums in texts.runs.items():
        chrf = texts.total(sums, 'chrf') / texts.weights.sum()
        rolled_back = texts.total(sums, 'rolled_back') / texts.total(sums, 'cycles')
        rows.append((rule, texts.alike(sums), chrf, texts.per_cycle(sums), rolled_back, texts.positions(sums),
                     texts.pace(sums), texts.won(rule)))
    head = ('rule', 'alignment', 'n-gram F1', 'kept a cycle', 'cycles rolled back', 'positions a token',
            'x plain, modelled', 'right won')
    return PageTable(head, rows)


def sampled_table(sampled):
    every = range(int(sampled.half.sum()))
    rows = []
    for rule in sampled.rules:
        rows.append((rule, sampled.per_cycle(rule, every), sampled.speed(rule, every),
                     sampled.nats(rule, every), sampled.won(every, rule)))
    head = ('temperature 1', 'kept a cycle', 'x plain, modelled', "the target's nats a token", 'right won')
    return PageTable(head, rows)


def word_table(rows):
    cells = []
    for family in ('translate', 'summary'):
        ours = [row for row in rows if row['family'] == family]
        for rule in ('plain', 'default', 'alike'):
            rouge = mean(row['rouge'][rule] for row in ours)
            cells.append((family, rule, corpus_bleu(ours, rule), rouge))
    head = 'task', "text; alike: the default's against plain decoding's", 'BLEU', 'ROUGE-L'
    return PageTable(head, cells)


def family_table(texts):
    rows = []
    for family in texts.names:
        ours = texts.of(family)
        fixed = ours.best('fixed')
        online = ours.best('online')
        default = ours.runs['default']
        rows.append((family, fixed, ours.best_pace('fixed'), online, ours.best_pace('online'),
                     ours.pace(ours.strict['online 1.0 10']), ours.per_cycle(default), ours.alike(default),
                     ours.pace(default)))
    head = ('family', 'best fixed window', 'x plain, strict', 'best alpha and k_max', 'x plain, strict',
            'alpha 1, k_max 10', 'default: kept a cycle', 'alignment', 'x plain')
    return PageTable(head, rows)


def controller_table(rows, costs):
    def total(name, key):
        return sum(row[name][key] for row in rows)

    plain = total('plain', 'tokens') / total('plain', 'seconds')
    cells = []
    for name in rows[0]:
        if name in ('family', 'plain'):
            continue
        tokens = total(name, 'tokens')
        cycles = total(name, 'cycles')
        positions = total(name, 'drafted') + cycles
        own = sum(costs.of(row, name) for row in rows) / total(name, 'drafted')
        measured = tokens / total(name, 'seconds') / plain
        cells.append((name, total(name, 'kept') / cycles, positions / tokens, own, costs.pace(rows, name),
                      measured))
    head = ('controller, strict', 'kept a cycle', 'positions a token', 'own cost a draft token, steps',
            'x plain, modelled', 'measured, with what the oracle looks up')
    return PageTable(head, cells)


def paired_table(rows):
    cells = []
    for family, theirs in by_family(rows).items():
        cells.append((family, len(theirs), faster_online(theirs)))
    return PageTable(('task', 'texts', 'its best controller over its best fixed window, measured'), cells)


def cost_table(costs):
    """Of the one row of pass_costs: its seconds in milliseconds, and in steps of plain decoding."""
    step = costs['target'][1]
    rows = [('draft, 1', 1000 * costs['draft'], costs['draft'] / step)]
    for n in (*range(1, BLOCK + 2), 16, 20, 26):
        seconds = costs['target'][n]
        rows.append((f'target, {n}', 1000 * seconds, seconds / step))
    return PageTable(('pass, positions', 'milliseconds', 'in steps of plain decoding'), rows)


def length_table(lengths, what):
    """Of every rule but the fixed windows its speed over each task's best fixed window."""
    every = range(len(lengths.tokens))
    rows = []
    for rule in lengths.steps:
        if rule.startswith('fixed'):
            continue
        cells = [lengths.over(rule, 'fixed', lengths.of(family)) for family in lengths.names]
        rows.append((rule, *cells, lengths.over(rule, 'fixed', every)))
    return PageTable((f'over the best fixed window, {what}', *lengths.names, 'mean'), rows)


def place_table(texts):
    """Of each family how often a draft token is kept, by its place in the block, given that it was judged."""
    rows = []
    for family in (*texts.names, 'all'):
        ours = texts if family == 'all' else texts.of(family)
        cells = []
        for judged, kept in accepted_by_place(ours):
            cells.append(float(kept / judged) if judged else '-')
        rows.append((family, *cells))
    return PageTable((f'kept by the strict rule, place in a block of {BLOCK}', *range(1, BLOCK + 1)), rows)


def gamma_table(texts):
    """Of each fixed window tokens a cycle and modelled speed of every family, strict."""
    rows = []
    for gamma in range(1, BLOCK + 1):
        cells = []
        for family in texts.names:
            ours = texts.of(family)
            sums = ours.strict[f'fixed {gamma}']
            cells += [ours.total(sums, 'tokens') / ours.total(sums, 'cycles'), ours.pace(sums)]
        rows.append((gamma, *cells))
    head = ['gamma']
    for family in texts.names:
        head += [f'{family}: tokens a cycle', 'x plain, modelled']
    return PageTable(head, rows)


def tables(stored):
    """The Tables behind the claims, of {name: Stored}; of those records that there are."""
    there = Evidence(stored)
    found = []
    if there.texts:
        found.append(unsure_table(there.texts))
    if there.dropout:
        found.append(area_table(there.dropout))
    if there.texts:
        found += [reliability_table(there.texts), rule_table(there.texts), family_table(there.texts),
                  place_table(there.texts), gamma_table(there.texts)]
    if there.lengths:
        lengths, by_bytes = there.lengths
        found += [length_table(lengths, 'passes as measured'), length_table(by_bytes, 'by weight bytes')]
    if there.sampled:
        found.append(sampled_table(there.sampled))
    if there.rows('words'):
        found.append(word_table(there.rows('words')))
    if there.costs and there.rows('controllers'):
        found.append(controller_table(there.rows('controllers'), there.costs))
    if there.rows('paired'):
        found.append(paired_table(there.rows('paired')))
    for costs in there.rows('pass_costs'):
        found.append(cost_table(costs))
    return found
