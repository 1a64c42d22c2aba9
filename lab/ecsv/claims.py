"""ECSV: what `python -m lab.measure ecsv` stores, and the claims that it must show: lengths, then speeds.

At temperature 0 every method here writes the target's own text, so its cycles and passes tell its speed.
Acceptance length is in the proposal's unit: draft tokens kept a target pass, checks included, where a vote
reads as many target positions a token as tuned SD-1. Speeds are modelled by pass costs.
"""
import itertools
from collections import Counter
from functools import partial

import numpy

from lab.baselines import OracleTop1
from lab.judge import BEST_SD, EMBEDDED, MODELLED, number
from lab.measure import Record, Setting, prepared
from verify import Ecsv, EcsvSpot, Exact, decode, token_logps

SOURCE = 'a proposal that a model wrote, without code or experiments'
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
CLAIMS = {              # text: whose, rival, line
    'ecsv-lite: length over a greedy draft': (
        'proposal: "ECSV-lite > SD-1 in acceptance length by 5–15% with equal budget"',
        '`sd`, tuned depth and temperature: the greedy draft', 1.05),
    'ecsv-lite: length over a sampled draft': ('ours', '`sd`, tuned depth, temperature 0.8', 1.05),
    'ecsv-lite: length over a sampled draft, blocks of 4': ('ours', '`sd`, temperature 0.8', 1.05),
    'ecsv: tasks with more length and less perplexity': (
        'proposal: "improve both (i) perplexity and (ii) acceptance length ... ≥2 datasets"',
        '`sd`, tuned depth, greedy', 2),
    'weights: length over a vote without': (
        'proposal: "If Vote-unif matches ECSV, the reliability modeling is not contributing"',
        '`gamma_r=0`', 1.005),
    'two spot checks: length over none': (
        'proposal: "ECSV-spot adds further 2–5% acceptance gains with R=1–2"', '`ecsv`', 1.02),
    'B = 2, blocks of 4: length over a sampled draft': (
        'proposal: "If improvements vanish under low B ... may be impractical"',
        '`sd`, temperature 0.8', 1.005),
    'ecsv-lite: speed over sd': ('ours', BEST_SD, 1.05),
    'the best of four branches: speed over sd': ('ours', '`sd`, a greedy draft, the fastest depth', 1.05)}
LENGTHS = {             # text: record, vote, its rival, both at the positions of the tuned rival
    'ecsv-lite: length over a greedy draft': ('blocks', 'ecsv-lite', GREEDY),
    'ecsv-lite: length over a sampled draft': ('blocks', 'ecsv-lite', SD),
    'weights: length over a vote without': ('blocks', 'ecsv', 'unweighted'),
    'two spot checks: length over none': ('matched', 'spot, R = 2, by disagreement', 'ecsv')}
ALIKE = {               # the same in blocks of DEPTH tokens
    'ecsv-lite: length over a sampled draft, blocks of 4': ('blocks', 'ecsv-lite', SD),
    'B = 2, blocks of 4: length over a sampled draft': ('matched', 'ecsv, B = 2', SD)}


class Votes:
    """The votes of a record on its texts, at several depths.

    counts: {vote: {count: [texts, depths]}}, with the steps that it takes; member: {family: its texts}.
    """

    def __init__(self, records, record):
        rows = records[record].rows if record in records and records.costs else []
        self.texts = numpy.arange(len(rows))
        self.tokens = numpy.array([row['tokens'] for row in rows])
        self.depths = rows[0]['depths'] if rows else []
        self.member, self.counts = {}, {}
        for i, row in enumerate(rows):
            self.member.setdefault(row['family'], []).append(i)
        for vote, stored in rows[0]['votes'].items() if rows else ():
            counts = {}
            for key in stored:
                counts[key] = numpy.array([row['votes'][vote][key] for row in rows], float)
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

    def matched(self, figure, vote, rival):
        """A function of texts: a vote's figure over its rival's, at the target positions of tuned SD-1.

        That is the greedy draft if that is the rival, else the sampled one.
        """
        @numpy.errstate(invalid='ignore', divide='ignore')
        def of(texts):
            sums = self.sums(GREEDY if rival == GREEDY else SD, texts)
            budget = sums['read'][sums['steps'].round(9).argmin()]
            mine, other = (figure(self.at_budget(key, texts, budget)) for key in (vote, rival))
            return float(mine / other)
        return of

    def alike(self, figure, vote, rival):
        """A function of texts: a vote's figure over its rival's, both in blocks of DEPTH tokens."""
        @numpy.errstate(invalid='ignore', divide='ignore')
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
    """How many rows a draft pass of a vote has: as its name says, else one of sd, four of votes."""
    return int(vote.partition('B = ')[2] or (1 if vote.startswith('sd') else 4))


def steps(counts, costs, branches):
    """[texts, depths] plain steps of target passes, by their mean positions, and of draft passes.

    Branches beyond the rows of the longest draft pass that was timed cost nothing, which favours the votes.
    """
    target, draft = (numpy.array(costs.curves[path]) / costs.step for path in ('target/full', 'draft/full'))
    mean = counts['positions'] / counts['passes']
    verifying = counts['passes'] * numpy.interp(mean, range(1, len(target)), target[1:])
    return verifying + counts['drafts'] * draft[min(branches, len(draft) - 1)]


def figures(records):
    """Yields (text of a claim, its texts, its figure, its kind) of what the records of a pair allow."""
    votes = {record: Votes(records, record) for record in ('blocks', 'matched')}
    for table, way in (LENGTHS, 'matched'), (ALIKE, 'alike'):
        for text, (record, vote, rival) in table.items():
            if vote in votes[record].counts:
                yield text, votes[record].texts, getattr(votes[record], way)(kept, vote, rival), ''
    matched, blocks = votes['matched'], votes['blocks']
    if matched.counts:
        yield ('ecsv: tasks with more length and less perplexity', matched.texts,
               lambda texts: better_tasks(matched, texts), '')
    yield from records.speeds({'ecsv-lite: speed over sd': ('ecsv-lite', 'sd ')})
    if 'best of four' in blocks.counts:
        yield ('the best of four branches: speed over sd', blocks.texts, blocks.over('best of four', GREEDY),
               MODELLED)


def better_tasks(votes, texts):
    """On how many tasks ecsv keeps more than greedy SD-1 and drafts what the target finds more likely."""
    both = [[votes.matched(figure, 'ecsv', GREEDY)(part) for figure in (kept, perplexity)]
            for part in votes.by_family(texts)]
    return float(sum(length > 1 > surprise for length, surprise in both))


def falsified(votes):
    """The table of the falsification test, over greedy SD-1, in each task and in all."""
    rows = []
    for vote in [vote for vote in votes.counts if vote != GREEDY]:
        passes = votes.sums(vote, votes.texts)
        parts = [*votes.by_family(votes.texts), votes.texts]
        cells = [', '.join(number(votes.matched(figure, vote, GREEDY)(part)) for figure in (kept, perplexity))
                 for part in parts]
        rows.append((vote, float((passes['passes'] / passes['cycles']).mean()), *cells))
    return ('kept a pass, perplexity', 'passes a cycle', *votes.member, 'all'), rows


def sweeps(pairs):
    """The tables of the falsification test; of each vote's length over both drafts."""
    rows = []
    for pair, records in pairs.items():
        votes = Votes(records, 'blocks')
        for vote in [vote for vote in votes.counts if vote != GREEDY]:
            lengths = [votes.matched(kept, vote, rival)(votes.texts) for rival in (GREEDY, SD)]
            sums, rival = (kept(votes.sums(key, votes.texts)) for key in (vote, SD))
            alike = ', '.join(number(mine / other) for k, mine, other in zip(votes.depths, sums, rival)
                              if k in (2, 4, 8))
            rows.append((pair, vote, *lengths, alike, votes.over(vote, GREEDY)(votes.texts)))
    head = ('pair', 'vote', 'length over a greedy draft', 'over a sampled one', 'that in blocks of 2, 4, 8',
            'speed over greedy `sd`, modelled')
    return [falsified(Votes(pairs[EMBEDDED], 'matched')), (head, rows)]
