"""ECSV's claims, by what lab/ecsv/record.py stored. Speeds at temperature 0 are modelled by pass costs."""
import math

import numpy

from lab.ecsv.record import GREEDY, SAMPLED, branches_of
from lab.judge import CLOCK, MODELLED, Claim, PageTable, Runs, over, short

BUDGET = 1.01           # the paper's: target positions a token, of those that tuned sd spends
SD, LENGTH = 'sd, sampled draft', 'paper: 1.05 to 1.15 in length'
OVER = [                # claim, whose, line, record, vote, its rival
    ('ecsv-lite over sd with a sampled draft', LENGTH, 1.05, 'blocks', 'ecsv-lite', SD),
    ('ecsv-lite over sd with a greedy draft', LENGTH, 1.05, 'blocks', 'ecsv-lite', GREEDY),
    ('the vote by prefix over sd with a greedy draft', 'ours', 1.005, 'blocks', 'prefix', GREEDY),
    ('the best of four branches over sd, greedy draft', 'ours', 1.05, 'blocks', 'best of four', GREEDY),
    ('weights over none, vote by position', 'paper', 1.005, 'blocks', 'ecsv', 'unweighted'),
    ('weights over none, vote by prefix', 'paper', 1.005, 'blocks', 'prefix', 'prefix, unweighted'),
    ('a spot check a cycle over none', 'paper: 1.02 to 1.05 in length', 1.02, 'ablations', 'spot, R = 1',
     'ecsv'),
    ('hedge over sd with a greedy draft', 'ours', 1.02, 'hedged', 'hedge', GREEDY)]
HEADLINES = OVER[1][0], OVER[3][0], OVER[7][0]
NOISES = {'a 4-bit draft': ('ecsv, 4-bit draft', 'sd, 4-bit sampled draft'),
          'a hotter draft': ('ecsv, hotter draft', 'sd, hotter sampled draft')}
PLAIN = 'ecsv', SD
SWEPT = dict(           # rows of the table of sweeps, by record
    blocks=[SD, 'ecsv-lite', 'ecsv-lite, B = 2', 'ecsv-lite, B = 8', 'ecsv', 'ecsv-soft', 'unweighted',
            'prefix', 'prefix, unweighted', 'best of four'],
    hedged=['hedge', 'hedge, two tokens'],
    ablations=['ecsv', 'entropy alone', 'agreement alone', 'own q alone', 'spot, R = 1', 'spot, R = 2',
               'spot, R = 4', 'spot, by entropy'])


class Votes:
    """Some votes on the texts that have them all, at several depths: arrays [texts, depths]."""

    def __init__(self, records, record, *names):
        rows = records[record].rows if record in records and records.costs else []
        rows = [row for row in rows if row['votes'].keys() >= set(names)]
        self.texts = range(len(rows))
        self.tokens = numpy.array([row['tokens'] for row in rows], float)
        families = list(dict.fromkeys(row['family'] for row in rows))
        self.halves = numpy.zeros((2 * len(families), len(rows)))       # 1 where a text is in this half
        for i, row in enumerate(rows):
            self.halves[2 * families.index(row['family']) + row['place'] % 2, i] = 1
        self.counts = {}
        self.steps = {}
        for name in names if rows else ():
            tables = [row['votes'][name] for row in rows]
            counts = {key: numpy.array([table[key] for table in tables], float) for key in tables[0]}
            counts.setdefault('passes', counts['cycles'])               # but for checks
            counts.setdefault('drafts', counts['positions'] - counts['passes'])
            self.counts[name] = counts
            self.steps[name] = steps(counts, records.costs, branches_of(name))

    def pace(self, name, texts):
        """[halves] tokens a step, at the depth that is fastest on the other half of the task's texts.

        nan where a task lacks a half: lab.judge.tuned_over, for arrays, because there are many votes.
        """
        often = self.halves * numpy.bincount(texts, minlength=len(self.tokens))
        tokens, times = often @ self.tokens, often @ self.steps[name]               # [halves, depths]
        found = numpy.full(len(often), math.nan)
        for half, other in enumerate(numpy.arange(len(often)) ^ 1):
            if times[half].all() and times[other].all():
                found[half] = tokens[half] / times[half, times[other].argmin()]
        return found

    def over(self, name, rival):
        """The figure: a vote's speed over its rival's, the geometric mean over tasks and halves."""
        def figure(texts):
            ratios = self.pace(name, texts) / self.pace(rival, texts)
            ratios = ratios[numpy.isfinite(ratios)]
            return float(numpy.exp(numpy.log(ratios).mean())) if len(ratios) else math.nan
        return figure

    def total(self, name, count):
        """[depths] the sum of a count over all texts."""
        return self.counts[name][count].sum(0)

    def at_budget(self, name):
        """Draft tokens kept a pass over those of tuned greedy sd, within its target positions a token."""
        tuned = self.steps[GREEDY].sum(0).argmin()
        within = self.total(name, 'positions') <= BUDGET * self.total(GREEDY, 'positions')[tuned]
        kept, base = (self.total(key, 'kept') / self.total(key, 'passes') for key in (name, GREEDY))
        return float(kept[within].max() / base[tuned]) if within.any() else None


def steps(counts, costs, branches):
    """[texts, depths] plain steps of target passes, by their mean positions, and of draft passes.

    Branches beyond the rows of the longest draft pass that was timed cost nothing, which favours the votes.
    """
    target, draft = (numpy.array(costs.curves[path]) / costs.step for path in ('target/full', 'draft/full'))
    mean = counts['positions'] / counts['passes']
    verifying = counts['passes'] * numpy.interp(mean, range(1, len(target)), target[1:])
    return verifying + counts['drafts'] * draft[min(branches, len(draft) - 1)]


def gain_by_noise(votes, noisy):
    """The figure: ecsv over sampled sd with these noisy votes, minus the same without noise."""
    more, less = votes.over(*noisy), votes.over(*PLAIN)
    return lambda texts: more(texts) - less(texts)


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
    for text, whose, line, record, name, rival in OVER:
        votes = Votes(records, record, name, rival)
        if votes.texts:
            yield Claim(text, whose, line, votes.texts, votes.over(name, rival), MODELLED, text in HEADLINES)
    for noise, noisy in NOISES.items():
        votes = Votes(records, 'blocks', *PLAIN, *noisy)
        if votes.texts:
            yield Claim(f'gain over sampled sd with {noise}, minus without', 'paper', 0.0, votes.texts,
                        gain_by_noise(votes, noisy), MODELLED)
    if 'errors' in records:
        rows = records['errors'].rows
        yield Claim("1 - correlation of two branches' errors", 'paper', 0.95, range(len(rows)),
                    independence(rows))
    if 'sampled' in records:
        runs = Runs(records['sampled'].rows)
        yield Claim('ecsv over sd, temperature 1, both of 8 tokens', 'ours', 1.005, range(runs.size),
                    over(runs, 'ecsv 8', 'sd 8', CLOCK))


def swept(records):
    """{what: (speed over greedy sd, kept a pass over it, perplexity of the text)} of a pair."""
    found = {}
    for record, names in SWEPT.items():
        for name in names:
            votes = Votes(records, record, name, GREEDY)
            if votes.texts:
                few = record == 'ablations'             # two depths, which meet no budget
                figures = votes.over(name, GREEDY)(votes.texts), None if few else votes.at_budget(name)
                found[f'{name}, of 4 or 8 tokens' if few else name] = *figures, None
    if 'sampled' in records:
        runs = Runs(records['sampled'].rows)
        texts = numpy.arange(runs.size)
        for name in SAMPLED:
            kept, base = (runs.share('accepted', 'cycles', f'{key} 8', texts) for key in (name, 'sd'))
            perplexity = math.exp(runs.share('nats', 'tokens', f'{name} 8', texts))
            speed = over(runs, f'{name} 8', 'sd 8', CLOCK)(texts)
            found[f'{name} at temperature 1 over sd there, 8 tokens, clock'] = speed, kept / base, perplexity
    return found


def sweeps(pairs):
    """The PageTable of sweeps and ablations."""
    found = {pair: swept(records) for pair, records in pairs.items()}
    lines = []
    for row in dict.fromkeys(row for table in found.values() for row in table):
        lines.append((row, *(cell for table in found.values() for cell in table.get(row, (None,) * 3))))
    heads = [f'{short(pair)}: {what}' for pair in pairs for what in ('speed', 'kept', 'perplexity')]
    return PageTable(('over sd with a greedy draft', *heads), lines)
