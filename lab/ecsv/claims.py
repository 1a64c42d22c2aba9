"""ECSV's claims, by what lab/ecsv/record.py stored: acceptance lengths, then speeds.

Acceptance length is the proposal's unit: draft tokens kept a verifying pass, at the same number of positions.
Speeds at temperature 0 are modelled by pass costs.
"""
import numpy

from lab.ecsv.record import DEPTHS, GREEDY, SAMPLED, SAMPLED_DEPTHS, branches_of
from lab.judge import CLOCK, MODELLED, Claim, PageTable, Runs, number, short

BUDGET = 1.01           # the paper's: target positions a token, of those that tuned sd spends
SD = 'sd, sampled draft'
DEPTH = 4               # tokens of the blocks whose acceptance lengths are judged; the table has 8, too
LENGTHS = [             # claim on the acceptance length, whose, line, record, vote, its rival
    ('length: ecsv-lite over a sampled draft', 'paper: 1.05 to 1.15', 1.05, 'blocks', 'ecsv-lite', SD),
    ('length: ecsv-lite over a greedy draft', 'ours', 1.05, 'blocks', 'ecsv-lite', GREEDY),
    ('length: weights over none', 'paper', 1.005, 'blocks', 'ecsv', 'unweighted'),
    ('length: two spot checks over none', 'paper: 1.02 to 1.05', 1.02, 'ablations', 'spot, R = 2', 'ecsv')]
OVER = [                # claim on speed, whose, line, record, vote, its rival
    ('ecsv-lite over sd with a sampled draft', 'ours', 1.05, 'blocks', 'ecsv-lite', SD),
    ('ecsv-lite over sd with a greedy draft', 'ours', 1.05, 'blocks', 'ecsv-lite', GREEDY),
    ('the vote by prefix over sd with a greedy draft', 'ours', 1.005, 'blocks', 'prefix', GREEDY),
    ('the best of four branches over sd, greedy draft', 'ours', 1.05, 'blocks', 'best of four', GREEDY),
    ('hedge over sd with a greedy draft', 'ours', 1.02, 'hedged', 'hedge', GREEDY)]
NOISY = 'ecsv, 4-bit draft', 'sd, 4-bit sampled draft'
SWEPT = dict(           # rows of the table of sweeps, by record
    blocks=(SD, 'ecsv-lite', 'ecsv-lite, B = 2', 'ecsv-lite, B = 8', 'ecsv', 'ecsv-soft', 'prefix',
            'best of four'),
    ablations=('entropy alone', 'agreement alone', 'own q alone', 'spot, R = 1', 'spot, R = 2',
               'spot, R = 4'),
    hedged=('hedge', 'hedge, two tokens'))
RIVALS = dict(blocks=SD, ablations='ecsv')      # of the acceptance lengths in that table
HOTTER = 'ecsv, hotter draft', 'sd, hotter sampled draft'


class Votes:
    """Some votes on the texts that have them all, at several depths.

    counts: {vote: {count: [texts, depths]}}; steps: {vote: [texts, depths]}; member [families, texts].
    """

    def __init__(self, records, record, *names):
        rows = records[record].rows if record in records and records.costs else []
        rows = [row for row in rows if row['votes'].keys() >= set(names)]
        self.texts = range(len(rows))
        families = numpy.array([row['family'] for row in rows])
        self.member = numpy.equal.outer(numpy.unique(families), families)       # [families, texts]
        self.counts, self.steps = {}, {}
        self.depths = rows[0].get('depths', DEPTHS) if rows else []
        for name in names if rows else ():
            counts = {}
            for key in rows[0]['votes'][name]:
                counts[key] = numpy.array([row['votes'][name][key] for row in rows], float)
            counts.setdefault('passes', counts['cycles'])               # but for checks
            counts.setdefault('drafts', counts['positions'] - counts['passes'])
            self.counts[name] = counts
            self.steps[name] = steps(counts, records.costs, branches_of(name))

    def over(self, name, rival):
        """The figure: a vote's speed over its rival's, each at its best depth; geometric mean over tasks."""
        def figure(texts):
            often = self.member * numpy.bincount(texts, minlength=len(self.texts))
            mine, other = ((often @ self.steps[key]).min(1) for key in (name, rival))   # [families]
            there = often.any(1)
            return float(numpy.exp(numpy.log(other[there] / mine[there]).mean()))
        return figure

    def length_over(self, name, rival, depth=DEPTH):
        """The figure: a vote's acceptance length over its rival's, in blocks of so many tokens."""
        i = list(self.depths).index(depth)

        def figure(texts):
            lengths = [self.counts[vote]['kept'][texts, i].sum() / self.counts[vote]['cycles'][texts, i].sum()
                       for vote in (name, rival)]
            return lengths[0] / lengths[1] if lengths[1] else numpy.nan
        return figure

    def at_budget(self, name):
        """Draft tokens kept a pass over those of tuned greedy sd, within its target positions a token."""
        mine, greedy = ({key: table.sum(0) for key, table in self.counts[vote].items()}
                        for vote in (name, GREEDY))
        tuned = self.steps[GREEDY].sum(0).argmin()
        within = mine['positions'] <= BUDGET * greedy['positions'][tuned]
        kept, base = mine['kept'] / mine['passes'], greedy['kept'] / greedy['passes']
        return float(kept[within].max() / base[tuned]) if within.any() else None


def steps(counts, costs, branches):
    """[texts, depths] plain steps of target passes, by their mean positions, and of draft passes.

    Branches beyond the rows of the longest draft pass that was timed cost nothing, which favours the votes.
    """
    target, draft = (numpy.array(costs.curves[path]) / costs.step for path in ('target/full', 'draft/full'))
    mean = counts['positions'] / counts['passes']
    verifying = counts['passes'] * numpy.interp(mean, range(1, len(target)), target[1:])
    return verifying + counts['drafts'] * draft[min(branches, len(draft) - 1)]


def independence(rows):
    """The figure: 1 - the mean correlation of two branches' errors; a branch that never errs counts as 0."""
    together = numpy.array([row['wrong_together'] for row in rows], float)      # [texts, B, B]
    tokens = numpy.array([row['tokens'] for row in rows], float)

    def figure(texts):
        shares = together[texts].sum(0) / tokens[texts].sum()
        rates = shares.diagonal()
        covariance = shares - numpy.outer(rates, rates)
        spread = numpy.sqrt(numpy.outer(covariance.diagonal(), covariance.diagonal()))
        correlation = numpy.divide(covariance, spread, out=numpy.zeros_like(spread), where=spread > 0)
        return 1 - correlation[numpy.triu_indices(len(rates), 1)].mean()
    return figure


def claims(records):
    """The Claims that a pair's records can judge."""
    for text, whose, line, record, name, rival in LENGTHS:
        votes = Votes(records, record, name, rival)
        if votes.texts:
            yield Claim(text, whose, line, votes.texts, votes.length_over(name, rival))
    for text, whose, line, record, name, rival in OVER:
        votes = Votes(records, record, name, rival)
        if votes.texts:
            yield Claim(text, whose, line, votes.texts, votes.over(name, rival), MODELLED)
    votes = Votes(records, 'blocks', 'ecsv', SD, *NOISY)
    if votes.texts:
        more, less = votes.length_over(*NOISY), votes.length_over('ecsv', SD)
        yield Claim('length: gain over sampled sd, 4-bit draft, minus without', 'paper', 0.0, votes.texts,
                    lambda texts: more(texts) - less(texts))
    if 'errors' in records:
        rows = records['errors'].rows
        yield Claim("1 - correlation of two branches' errors", 'paper', 0.95, range(len(rows)),
                    independence(rows))


def fastest_over(runs, name):
    """The figure: tokens a second at temperature 1 over those of sd, each at its fastest depth."""
    def fastest(key, texts):
        return max(runs.pace(f'{key} {depth}', texts, CLOCK) for depth in SAMPLED_DEPTHS)
    return lambda texts: fastest(name, texts) / fastest('sd', texts)


def lengths(records, record, name, rival):
    """A cell: a vote's acceptance length over its rival's in blocks of DEPTH and of 8 tokens."""
    votes = Votes(records, record, name, rival)
    both = [votes.length_over(name, rival, depth)(votes.texts) for depth in (DEPTH, 8) if votes.texts]
    return ', '.join(map(number, both)) or None


def swept(records):
    """{what: [speed over greedy sd, kept a pass over it, lengths, perplexity of the text]} of a pair."""
    found = {}
    for record, names in SWEPT.items():
        for name in names:
            votes = Votes(records, record, name, GREEDY)
            longer = lengths(records, record, name, RIVALS[record]) if record in RIVALS else None
            if votes.texts:
                found[name] = [votes.over(name, GREEDY)(votes.texts), votes.at_budget(name), longer, None]
    found[HOTTER[0]] = [None, None, lengths(records, 'blocks', *HOTTER), None]
    runs = Runs(records['sampled'].rows if 'sampled' in records else [])
    texts = numpy.arange(runs.size)
    for name in SAMPLED if runs.size else ():
        kept, base = (runs.share('accepted', 'cycles', f'{key} 4', texts) for key in (name, 'sd'))
        nats = runs.share('nats', 'tokens', f'{name} 4', texts)
        row = f'{name}, temperature 1, clock, over sd'
        found[row] = [fastest_over(runs, name)(texts), kept / base, None, float(numpy.exp(nats))]
    return found


def sweeps(pairs):
    """The PageTable of sweeps and ablations."""
    tables = {pair: swept(records) for pair, records in pairs.items()}
    names = dict.fromkeys(name for table in tables.values() for name in table)
    lines = [(name, *sum((table.get(name, [None] * 4) for table in tables.values()), [])) for name in names]
    heads = [f'{short(pair)}: {what}' for pair in pairs for what in ('speed', 'kept', 'length', 'perplexity')]
    return PageTable(('over sd with a greedy draft', *heads), lines)
