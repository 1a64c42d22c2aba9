"""ECSV's claims, by what lab/ecsv/record.py stored: acceptance lengths, then speeds.

Acceptance length is in the proposal's unit: draft tokens kept a target pass, checks included, where a vote
reads as many target positions a token as tuned SD-1. Speeds at temperature 0 are modelled by pass costs.
"""
import numpy

from lab.ecsv.record import DEPTHS, GREEDY, MATCHED, SD
from lab.judge import MODELLED, Claim, PageTable, number, short

DEPTH = 4               # tokens of the blocks that are compared at equal length
CLAIMS = [              # claim on acceptance length or speed, whose, line, record, vote, its rival, kind
    ('length: ecsv-lite over a sampled draft', 'paper: 1.05 to 1.15', 1.05, 'blocks', 'ecsv-lite', SD, ''),
    ('length: ecsv-lite over a greedy draft', 'ours', 1.05, 'blocks', 'ecsv-lite', GREEDY, ''),
    ('length: weights over none', 'paper', 1.005, 'blocks', 'ecsv', 'unweighted', ''),
    ('length: two spot checks over none', 'paper: 1.02 to 1.05', 1.02, 'matched',
     'spot, R = 2, by disagreement', 'ecsv', ''),
    ('ecsv-lite over sd with a greedy draft', 'ours', 1.05, 'blocks', 'ecsv-lite', GREEDY, MODELLED),
    ('the vote by prefix over sd with a greedy draft', 'ours', 1.005, 'blocks', 'prefix', GREEDY, MODELLED),
    ('the best of four branches over sd, greedy draft', 'ours', 1.05, 'blocks', 'best of four', GREEDY,
     MODELLED),
    ('hedge over sd with a greedy draft', 'ours', 1.02, 'hedged', 'hedge', GREEDY, MODELLED)]
SWEPT = [               # rows of the table of sweeps: record, votes, their rival
    ('blocks', (SD, 'ecsv-lite', 'ecsv-lite, B = 2', 'ecsv-lite, B = 8', 'ecsv', 'ecsv-soft', 'unweighted',
                'prefix', 'best of four'), SD),
    ('blocks', ('ecsv, hotter draft',), 'sd, hotter sampled draft'),
    ('blocks', ('ecsv, 4-bit draft',), 'sd, 4-bit sampled draft'),
    ('ablations', ('entropy alone', 'agreement alone', 'own q alone'), 'ecsv'),
    ('hedged', ('hedge', 'hedge, two tokens'), GREEDY)]


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
        parts = [texts[numpy.isin(texts, theirs)] for theirs in self.member.values()]
        return [part for part in parts if len(part)]

    def at_budget(self, vote, texts, budget):
        """{count: its sum} where a vote reads so many positions a token; nan if its shortest blocks do more.

        Two depths are mixed where none does: the deepest within the budget and the next.
        """
        sums = self.sums(vote, texts)
        within = numpy.flatnonzero(sums['read'] <= budget)
        if not len(within):
            return dict.fromkeys(sums, numpy.nan)
        i, j = within[-1], min(within[-1] + 1, len(self.depths) - 1)
        more = sums['read'][j] - sums['read'][i]
        share = (budget - sums['read'][i]) / more if more else 0.0
        return {key: table[i] + share * (table[j] - table[i]) for key, table in sums.items()}

    def matched(self, figure, vote, rival, base=SD, depth=None):
        """A function of texts: figure(a vote's sums, its rival's), both at the budget of `base`.

        That is what base reads at its best depth, or at this one.
        """
        def of(texts):
            sums = self.sums(base, texts)
            best = self.depths.index(depth) if depth else sums['steps'].round(9).argmin()
            return float(figure(*(self.at_budget(key, texts, sums['read'][best]) for key in (vote, rival))))
        return of

    def betters(self, vote):
        """The figure: families in which a vote keeps more than SD-1 and surprises the target less."""
        longer, stranger = (self.matched(figure, vote, SD) for figure in (kept_over, surprise_over))
        return lambda texts: float(sum(longer(part) > 1 > stranger(part) for part in self.by_family(texts)))


def kept_over(mine, other):
    """Draft tokens kept a target pass over the rival's."""
    return mine['kept'] / mine['passes'] / (other['kept'] / other['passes'])


def surprise_over(mine, other):
    """The target's perplexity of drafted tokens over that of the rival's."""
    return numpy.exp(mine['nats'] / mine['drafted'] - other['nats'] / other['drafted'])


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
    for text, whose, line, record, vote, rival, kind in CLAIMS:
        votes = Votes(records, record, vote, rival, rival if kind else SD)
        figure = votes.over(vote, rival) if kind else votes.matched(kept_over, vote, rival)
        if len(votes.texts):
            yield Claim(text, whose, line, votes.texts, figure, kind)
    votes = Votes(records, 'matched', 'ecsv', 'ecsv, B = 2', SD)
    if len(votes.texts):
        yield Claim('length: B = 2, k = 4 over a sampled draft', 'paper', 1.005, votes.texts,
                    votes.matched(kept_over, 'ecsv, B = 2', SD, 'ecsv, B = 2', DEPTH))
        yield Claim('tasks: longer and less perplexing than a sampled draft', 'paper: 2', 2, votes.texts,
                    votes.betters('ecsv'))


def falsified(records):
    """The PageTable of the falsification test: `kept, perplexity` over SD-1 in each task and in all."""
    votes = Votes(records, 'matched', *MATCHED)

    def row(name, vote, base=SD, depth=None):
        figures = [votes.matched(figure, vote, SD, base, depth) for figure in (kept_over, surprise_over)]
        passes = votes.matched(lambda mine, _: mine['passes'] / mine['cycles'], vote, vote, base, depth)
        parts = [*votes.by_family(votes.texts), votes.texts]
        return name, passes(votes.texts), *(', '.join(number(figure(part)) for figure in figures)
                                            for part in parts)
    rows = [row(vote, vote) for vote in MATCHED if len(votes.texts)]
    rows += [row('ecsv, B = 2, k = 4', 'ecsv, B = 2', 'ecsv, B = 2', DEPTH) for _ in rows[:1]]
    return PageTable(('kept a pass, perplexity', 'passes a cycle', *votes.member, 'all'), rows)


def swept(records):
    """{what: [speed over greedy sd, kept a pass over its rival, the same in blocks of DEPTH]} of a pair."""
    found = {}
    for record, names, rival in SWEPT:
        for name in names:
            votes = Votes(records, record, name, GREEDY, rival)
            if len(votes.texts):
                mine, other = (votes.sums(vote, votes.texts) for vote in (name, rival))
                found[name] = [votes.over(name, GREEDY)(votes.texts),
                               votes.matched(kept_over, name, rival, rival)(votes.texts),
                               kept_over(mine, other)[votes.depths.index(DEPTH)]]
    return found


def sweeps(pairs):
    """The PageTables of the falsification test and of sweeps."""
    tables = {pair: swept(records) for pair, records in pairs.items()}
    names = dict.fromkeys(name for table in tables.values() for name in table)
    lines = [(name, *sum((table.get(name, [None] * 3) for table in tables.values()), [])) for name in names]
    heads = [f'{short(pair)}: {what}' for pair in pairs for what in ('speed', 'kept', 'a cycle')]
    return [falsified(next(iter(pairs.values()))), PageTable(('what', *heads), lines)]
