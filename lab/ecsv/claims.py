"""ECSV: what `python -m lab.measure ecsv` stores, and the claims that it must show: lengths, then speeds.

At temperature 0 every method here writes the target's own text, so its cycles and passes tell its speed.
Acceptance length is in the proposal's unit: draft tokens kept a target pass, checks included, where a vote
reads as many target positions a token as tuned SD-1. Speeds are modelled by pass costs.
"""
import itertools
from collections import Counter
from functools import partial

import numpy

from lab.baselines import EcsvPrefix, OracleTop1
from lab.judge import EMBEDDED, MODELLED, Claim, PageTable, number, short
from lab.measure import Record, Setting, prepared
from verify import Ecsv, EcsvSpot, Exact, decode, token_logps

FAMILIES = 'math', 'table', 'story', 'qa', 'translate', 'summary'       # tasks of short prompts
DEPTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24   # tokens of a block; on another pair the first six
FEW_DEPTHS = 2, 4, 6, 8, 10, 12         # of the falsification test
GREEDY = 'sd, greedy draft'
SD = 'sd, sampled draft'                # the proposal's SD-1

BLOCKS = {              # Settings whose method takes a depth
    GREEDY: Setting(partial(Exact, draft_temperature=0)),
    SD: Setting(partial(Ecsv, branches=1)),
    'ecsv-lite': Setting(partial(Ecsv, a_self=0)),
    'ecsv': Setting(Ecsv),
    'unweighted': Setting(partial(Ecsv, gamma_r=0)),
    'prefix': Setting(EcsvPrefix),
    'best of four': Setting(OracleTop1),
    'ecsv-soft': Setting(partial(Ecsv, soft=0.5)),
    'ecsv-lite, B = 2': Setting(partial(Ecsv, a_self=0, branches=2)),
    'ecsv-lite, B = 8': Setting(partial(Ecsv, a_self=0, branches=8))}
MATCHED = {             # of the falsification test
    **{name: BLOCKS[name] for name in (GREEDY, SD, 'ecsv-lite', 'ecsv', 'unweighted')},
    'ecsv, B = 2': Setting(partial(Ecsv, branches=2)),
    **{f'spot, R = {R}, by {by}': Setting(partial(EcsvSpot, spots=R, by=by))
       for by in ('disagreement', 'entropy') for R in (1, 2, 4)}}


def counts(pair, prompt, setting, depth):
    """What the text of a setting came to, with blocks of this depth.

    tokens written; kept, drafted: draft tokens; nats: -log p of these by the target, each after those before
    it; positions, passes: the target's; drafts: draft passes, whatever their rows. Of the best of four
    branches the passes over the others count nothing.
    """
    method = setting.method(depth)
    engine = prepared(pair, setting)
    engine.open([prompt.ids])
    totals = Counter()
    accept = method.accept

    def noting(session, draft, score):
        totals['nats'] -= float(token_logps(score.logits[:len(draft.tokens)], draft.tokens).sum())
        return accept(session, draft, score)
    method.accept = noting
    for cycle in decode(engine.start(prompt.ids, method), method):
        drafts, _ = cycle.passes.get('draft/full', (0, 0))
        passes, positions = cycle.passes['target/full']
        if isinstance(method, OracleTop1):
            passes, positions = 1, len(cycle.drafted) + 1
        totals.update(tokens=len(cycle.tokens), kept=cycle.accepted, drafted=len(cycle.drafted), cycles=1,
                      positions=positions, passes=passes, drafts=drafts)
    return totals


def block_row(settings, depths, pair, prompt):
    """A row {family, place, tokens, depths, votes: {name: {count: a number a depth}}} of one prompt."""
    depths = depths if pair.is_embedded else depths[:6]
    votes = {name: {} for name in settings}
    for name, depth in itertools.product(settings, depths):
        totals = counts(pair, prompt, settings[name], depth)
        tokens = totals.pop('tokens')
        for count, value in totals.items():
            votes[name].setdefault(count, []).append(value)
    return prompt.name | dict(tokens=tokens, depths=depths, votes=votes)


def on_some(part, settings, depths, only=''):
    """The Record of one prompt in `part`, because every vote writes every text at every depth."""
    return Record(lambda pair, n: pair.texts(FAMILIES, max(2, n // part)),
                  partial(block_row, settings, depths), only=only)


RECORDS = dict(
    blocks=on_some(5, BLOCKS, DEPTHS),
    matched=on_some(4, MATCHED, FEW_DEPTHS, only='cheap passes'))


# ------------------------------------------------------------------------------------------ what it must show

DEPTH = 4               # tokens of the blocks that are compared at equal length
CLAIMS = [              # claim, whose, line, record, vote, its rival, which figure of claims()
    ('length: ecsv-lite over a sampled draft', 'paper: 1.05 to 1.15', 1.05, 'blocks', 'ecsv-lite', SD,
     'length'),
    ('length: ecsv-lite over a greedy draft', 'ours', 1.05, 'blocks', 'ecsv-lite', GREEDY, 'length'),
    ('length: weights over none', 'paper', 1.005, 'blocks', 'ecsv', 'unweighted', 'length'),
    ('length: two spot checks over none', 'paper: 1.02 to 1.05', 1.02, 'matched',
     'spot, R = 2, by disagreement', 'ecsv', 'length'),
    ('length: B = 2 over a sampled draft, both k = 4', 'paper', 1.005, 'matched', 'ecsv, B = 2', SD, 'alike'),
    ("perplexity of drafts: a sampled one's over ecsv's", 'paper', 1.0, 'matched', SD, 'ecsv', 'perplexity'),
    ('ecsv-lite over sd with a greedy draft', 'ours', 1.05, 'blocks', 'ecsv-lite', GREEDY, 'speed'),
    ('the vote by prefix over sd with a greedy draft', 'ours', 1.005, 'blocks', 'prefix', GREEDY, 'speed'),
    ('the best of four branches over sd, greedy draft', 'ours', 1.05, 'blocks', 'best of four', GREEDY,
     'speed'),
    ('hedge over sd with a greedy draft', 'ours', 1.02, 'hedged', 'hedge', GREEDY, 'speed')]
SWEPT = [               # rows of the table of sweeps: record, votes, their rival
    ('blocks', (GREEDY, SD, 'ecsv-lite', 'ecsv-lite, B = 2', 'ecsv-lite, B = 8', 'ecsv', 'ecsv-soft',
                'unweighted', 'prefix', 'best of four'), SD),
    ('hedged', ('hedge',), GREEDY)]


class Votes:
    """Some votes on the texts that have them all, at several depths.

    counts: {vote: {count: [texts, depths]}}, with the steps that it takes; member: {family: its texts}.
    """

    def __init__(self, records, record, *votes):
        rows = records[record].rows if record in records and records.costs else []
        rows = [row for row in rows if row['votes'].keys() >= set(votes)]
        self.texts = numpy.arange(len(rows))
        self.tokens = numpy.array([row['tokens'] for row in rows])
        self.depths = list(rows[0].get('depths', DEPTHS)) if rows else []
        self.member, self.counts = {}, {}
        for i, row in enumerate(rows):
            self.member.setdefault(row['family'], []).append(i)
        for vote in votes if rows else ():
            counts = {}
            for key in rows[0]['votes'][vote]:
                counts[key] = numpy.array([row['votes'][vote][key] for row in rows], float)
            counts.setdefault('passes', counts['cycles'])               # but for checks
            counts.setdefault('drafts', counts['positions'] - counts['passes'])
            self.counts[vote] = counts | dict(steps=steps(counts, records.costs, branches_of(vote)))

    def sums(self, vote, texts):
        """{count: its sums [depths]}; read: target positions a token."""
        sums = {key: table[texts].sum(0) for key, table in self.counts[vote].items()}
        return sums | dict(read=sums['positions'] / self.tokens[texts].sum())

    def over(self, vote, rival):
        """The figure: a vote's speed over its rival's, each at its best depth; geometric mean over tasks."""
        def figure(texts):
            mine, other = ([self.sums(key, theirs)['steps'].min() for theirs in self.by_family(texts)]
                           for key in (vote, rival))
            return float(numpy.exp(numpy.log(numpy.divide(other, mine)).mean()))
        return figure

    def by_family(self, texts):
        """These texts, a list for each family that they are of."""
        return [part for theirs in self.member.values() if len(part := texts[numpy.isin(texts, theirs)])]

    def at_budget(self, vote, texts, budget):
        """{count: its sum} where a vote reads so many positions a token; nan if its shortest blocks do more.

        Two depths are mixed where none does: the deepest within the budget and the next.
        """
        sums = self.sums(vote, texts)
        within = numpy.flatnonzero(sums['read'] <= budget)
        if not len(within):
            return dict.fromkeys(sums, numpy.nan)
        i, j = within[-1], min(within[-1] + 1, len(self.depths) - 1)
        share = (budget - sums['read'][i]) / (sums['read'][j] - sums['read'][i]) if i < j else 0.0
        return {key: table[i] + share * (table[j] - table[i]) for key, table in sums.items()}

    def matched(self, figure, vote, rival=None, base=SD):
        """A function of texts: a vote's figure over its rival's, or alone, at the budget of tuned base."""
        @numpy.errstate(invalid='ignore', divide='ignore')
        def of(texts):
            sums = self.sums(base, texts)
            budget = sums['read'][sums['steps'].round(9).argmin()]
            mine = figure(self.at_budget(vote, texts, budget))
            return float(mine / figure(self.at_budget(rival, texts, budget)) if rival else mine)
        return of

    def alike(self, figure, vote, rival):
        """A function of texts: a vote's figure over its rival's, both in blocks of DEPTH tokens."""
        def of(texts):
            mine, other = (figure(self.sums(key, texts)) for key in (vote, rival))
            return float((mine / other)[self.depths.index(DEPTH)])
        return of


def kept(sums):
    """Draft tokens kept a target pass."""
    return sums['kept'] / sums['passes']


def perplexity(sums):
    """The target's perplexity of the drafted tokens."""
    return numpy.exp(sums['nats'] / sums['drafted'])


def branches_of(vote):
    """How many rows a draft pass of a vote has: as its name says, else one of sd and hedge, four of votes."""
    return int(vote.partition('B = ')[2] or (1 if vote.startswith(('sd', 'hedge')) else 4))


def steps(counts, costs, branches):
    """[texts, depths] plain steps of target passes, by their mean positions, and of draft passes.

    Branches beyond the rows of the longest draft pass that was timed cost nothing, which favours the votes.
    """
    target, draft = (numpy.array(costs.curves[path]) / costs.step for path in ('target/full', 'draft/full'))
    mean = counts['positions'] / counts['passes']
    verifying = counts['passes'] * numpy.interp(mean, range(1, len(target)), target[1:])
    return verifying + counts['drafts'] * draft[min(branches, len(draft) - 1)]


def claims(records):
    """The Claims that a pair's records can judge."""
    for text, whose, line, record, vote, rival, which in CLAIMS:
        votes = Votes(records, record, vote, rival, rival if which == 'speed' else SD)
        figures = dict(length=votes.matched(kept, vote, rival), alike=votes.alike(kept, vote, rival),
                       perplexity=votes.matched(perplexity, vote, rival), speed=votes.over(vote, rival))
        if len(votes.texts):
            yield Claim(text, whose, line, votes.texts, figures[which], MODELLED if which == 'speed' else '')


def tested(votes, name, vote, way, rival=SD):
    """A row of the falsification test: name, passes a cycle, `kept, perplexity` in each task and in all."""
    passes = votes.matched(lambda sums: sums['passes'] / sums['cycles'], vote)(votes.texts)
    parts = [*votes.by_family(votes.texts), votes.texts]
    return name, passes, *(', '.join(number(way(figure, vote, rival)(part)) for figure in (kept, perplexity))
                           for part in parts)


def falsified(records):
    """The PageTable of the falsification test, over SD-1's figures; of SD-1 its own."""
    votes = Votes(records, 'matched', *MATCHED)
    rows = []
    if len(votes.texts):
        rows = [tested(votes, vote, vote, votes.matched, SD if vote != SD else None) for vote in MATCHED]
        rows += [tested(votes, 'ecsv, B = 2, both k = 4', 'ecsv, B = 2', votes.alike)]
    return PageTable(('kept a pass, perplexity', 'passes a cycle', *votes.member, 'all'), rows)


def swept(records):
    """{what: [speed over greedy sd, kept a pass over its rival, the same in blocks of DEPTH]} of a pair."""
    rows = {}
    for record, names, rival in SWEPT:
        for name in names:
            votes = Votes(records, record, name, GREEDY, rival)
            if len(votes.texts):
                figures = (votes.over(name, GREEDY), votes.matched(kept, name, rival, rival),
                           votes.alike(kept, name, rival))
                rows[name] = [figure(votes.texts) for figure in figures]
    return rows


def sweeps(pairs):
    """The PageTables of the falsification test and of sweeps."""
    tables = {pair: swept(records) for pair, records in pairs.items()}
    names = dict.fromkeys(name for table in tables.values() for name in table)
    lines = [(name, *sum((table.get(name, [None] * 3) for table in tables.values()), [])) for name in names]
    heads = [f'{short(pair)}: {what}' for pair in pairs for what in ('speed', 'kept', 'a cycle')]
    return [falsified(pairs[EMBEDDED]), PageTable(('what', *heads), lines)]
