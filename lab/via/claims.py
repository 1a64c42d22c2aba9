"""VIA-SD's claims, judged by what lab/via/record.py stored."""
import math

import numpy

from lab.best.claims import over_plain
from lab.judge import CLOCK, EMBEDDED, Claim, PageTable, Records, gap, number, over, ratio, tuned_over

SPARED = 0.33                       # of sd's rejections; by the paper 0.48, 0.33 and 0.38 on three pairs
OVER_SD = 1.5                       # by the notes 1.50 to 1.69
OVER_CASCADE = 1.36                 # 2.32 / 1.71, by the paper; 1.51 and 1.38 on its other two tasks
USUAL = 'via 5, 0.5 0.3'            # via at its defaults among the tuned settings
SHOWN = dict(                       # of each record the settings that the page shows without verdicts
    usual={'sd': 'sd', 'via': 'via', 'bare': 'via, slim_bonus=false'},
    tuned={'via 5, 0.8 0.6': 'via, conservative: keep 0.8, escalate 0.6',
           'via 5, 0.3 0.1': 'via, aggressive: keep 0.3, escalate 0.1'},
    compositions={'sd 8': 'sd, gamma 8', 'sd 3': 'sd, gamma 3', 'cascade': 'Cascade SD (`cascade`), gamma 8',
                  'via': 'via, the same gamma', 'via, without 4': 'via without 4 layers in a row',
                  'via, without 8': 'via without 8 layers in a row'},
    masks={'found': '* mask found, 4 layers', 'random': '* random masks of 4 layers'}
    | {f'skip {k}': f'* best block of {k} layers' for k in (5, 8)}
    | {'mid': '* a model of its own', 'up': '* an upscaled drafter'})


def claims(records):
    """The Claims of one pair's Records."""
    timed = Records('best', records.pair, records.cost, records.position).runs_if('compositions')
    if 'usual' in records:
        usual = records.runs('usual')
        yield from speed_claims(usual)
        is_timed = timed and records.pair != EMBEDDED
        yield spared_claim(timed, 'sd 3') if is_timed else spared_claim(usual, 'sd')
    if 'tuned' in records:
        yield equal_claim(records.runs('tuned'))
    judges = judges_of(records)
    if judges:
        yield from worth_claims(judges)
    if 'answers' in records:
        graded = [row for row in records['answers'].rows if row['plain'] is not None]
        if graded:
            yield Claim('right answers won or lost, a text', 'paper', -0.01, numpy.arange(len(graded)),
                        gap([row['via'] - row['plain'] for row in graded]))
    if 'drafting' in records:
        runs = records.runs('drafting')
        yield Claim('`--draft self` over plain', 'ours', 1, numpy.arange(runs.size),
                    over(runs, 'self 2', 'plain', runs.kind), runs.kind)
    if timed and timed.kind == CLOCK:
        if 'cascade' in timed.names:
            yield Claim('over Cascade SD, the same gamma', 'paper: 1.36 to 1.51', OVER_CASCADE,
                        timed.having('cascade'), over(timed, 'via', 'cascade', CLOCK), CLOCK)
        yield Claim('without 4 or 8 layers in a row over `sd`', 'notes: 1.50 to 1.69', OVER_SD,
                    numpy.arange(timed.size),
                    tuned_over(timed, timed.starting('via, without 4', 'via, without 8'),
                               timed.starting('sd '), CLOCK), CLOCK)


def speed_claims(runs):
    """via at its defaults against plain decoding and sd, five tokens a block."""
    timed = runs.having('plain', 'sd', 'via', figure='seconds' if runs.kind == CLOCK else 'steps')
    yield Claim('over plain decoding', 'paper: 2.5 to 3', 2.5, timed, over(runs, 'via', 'plain', runs.kind),
                runs.kind)
    yield Claim('over `sd`', 'notes: 1.50 to 1.69', OVER_SD, timed, over(runs, 'via', 'sd', runs.kind),
                runs.kind)


def spared_claim(runs, sd):
    """The paper's own unit; sd: the setting with as long blocks as via has."""
    def spared(texts):
        via, rival = 1 - runs.share('accepted', 'judged', ['via', sd], texts)
        return 1 - via / rival if rival else math.nan
    return Claim("share of `sd`'s rejections that via spares", 'paper: 0.33 to 0.48', SPARED,
                 numpy.arange(runs.size), spared)


def equal_claim(runs):
    """Each side at its best thresholds and blocks, with no more wrong tokens than via has by default.

    Settings are chosen on all families together, because four texts seldom have a wrong token.
    """
    runs.families[:] = 'all'
    texts = numpy.arange(runs.size)
    agreement = runs.agreement(USUAL, texts)
    figure = tuned_over(runs, runs.starting('via'), runs.starting('cascade', 'sd'), runs.kind,
                        agreement, agreement)
    return Claim('over tuned cascades, lenient `sd`, equal errors', 'paper: 1.1 to 1.2', 1.05, texts,
                 figure, runs.kind)


def judges_of(records):
    """The rows that compare slim with the draft as judges, of the record `worth` or of an earlier one."""
    stored = records.get('worth', records.get('slim'))
    return stored.rows if stored else []


def worth_claims(rows):
    """Whether slim knows the target better than the draft does, and the paper's criterion."""
    texts = numpy.arange(len(rows))
    positions = [row['positions'] for row in rows]
    better = [row['slim_right'] - row['draft_right'] for row in rows]
    yield Claim("slim's agreement less the draft's", 'ours', 0, texts, ratio(better, positions))
    yield Claim('mean Delta by R, nats', 'paper', 0, texts, ratio([row['delta'] for row in rows], positions))


def sweeps(pairs):
    """Slim beside the draft, thresholds, baselines, skip shares, middle models, without verdicts."""
    rows = []
    for pair, records in pairs.items():
        judges = judges_of(records)
        if judges:
            positions = sum(row['positions'] for row in judges)
            right = [sum(row[f'{who}_right'] for row in judges) for who in ('slim', 'draft')]
            shares = ', '.join(f'{share / positions:.1%}' for share in right)
            rows.append(("first choices: slim's, the draft's", pair, None, None, None, shares, None, None))
        timed = Records('best', pair)
        for name, settings in SHOWN.items():
            runs = (timed if name == 'compositions' else records).runs_if(name)
            if runs:
                rows += [row_of(pair, runs, setting, label) for setting, label in settings.items()
                         if setting in runs.names]
    head = 'what', 'pair', 'over plain', 'rejected', 'full passes a cycle', 'agreement', 'right', 'memory'
    return PageTable(head, rows)


def row_of(pair, runs, name, label):
    """The row of a setting on all its texts; None for figures that are not stored."""
    texts = runs.having(name)
    figures = dict.fromkeys(('full', 'right', 'memory'))
    for figure in figures.keys() & runs.sums.keys():
        values = runs.sums[figure][texts, runs.number[name]]
        if numpy.isfinite(values).any():                # no text of some pairs is graded
            figures[figure] = float(numpy.nanmean(values))
    speed, rejected = runs.share('tokens', 'steps', name, texts), None
    if 'ar' in runs.names:
        speed = f'{number(over_plain(runs, name)(texts))} {CLOCK}'
    if 'judged' in runs.sums:
        rejected = f"{1 - runs.share('accepted', 'judged', name, texts):.1%}"
    cycles = figures['full'] and runs.share('full', 'cycles', name, texts)
    right = figures['right'] and f"{figures['right']:.1%}"
    memory = figures['memory'] and figures['memory'] / runs.sums['memory'][texts, 0].mean()
    return label, pair, speed, rejected, cycles, f'{runs.agreement(name, texts):.1%}', right, memory
