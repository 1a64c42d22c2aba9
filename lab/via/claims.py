"""VIA-SD: what `python -m lab.measure via` stores, and the claims that it must show.

The target needs a mask in its calibration.json: python train_mask.py finds one.
"""
from dataclasses import replace
from functools import partial

import numpy

import lab.baselines                                    # noqa: F401, enters the baselines in METHODS
import train_mask
from lab.judge import BEST_SD, CLOCK, MODELLED, PLAIN, answers, over, ratio, tuned_over
from lab.measure import Record, answer_row, named, on_prompts, prepared, run_row, sd
from verify import Exact, ViaSd, decode, tokens_of

SOURCE = 'notes on the paper'
GAMMA = ViaSd.gamma
FAMILIES = 'math', 'table', 'code', 'story', 'qa', 'translate', 'summary'
GAMMAS = GAMMA, 16                              # among which each rule is given its best
THRESHOLDS = (0.1, 0.1), (0.3, 0.0), (0.3, 0.1), (0.5, 0.3), (0.8, 0.6)     # keep, escalate
LAMS = 0.02, 0.05, 0.1, 0.3                     # of the cascade
TAUS = 0.1, 0.3, 0.5, 0.7                       # of lenient sd
SWEPT = 8                       # prompts of each family that many settings write
WINDOW = 32                                     # tokens of a text that both judges read


def tuned_settings(pair):
    """{name: Setting} of sd, via, the cascade and lenient sd, each with the same lengths of blocks."""
    found = dict(ar=named('ar'), bare=named('via', slim_bonus=False))
    for gamma in GAMMAS:
        found[f'sd {gamma}'] = sd(gamma)
        for keep, escalate in THRESHOLDS:
            knobs = dict(gamma=gamma, keep=keep, escalate=escalate)
            found[f'via {gamma}, {keep:g} {escalate:g}'] = named('via', **knobs)
        found |= {f'cascade {gamma}, {lam:g}': named('cascade', gamma=gamma, lam=lam) for lam in LAMS}
        found |= {f'ratio {gamma}, {tau:g}': named('ratio', gamma=gamma, tau=tau) for tau in TAUS}
    return found


def drafting_row(pair, prompt):
    """A target without a draft model, which drafts for itself on its slim path."""
    settings = {'plain': named('ar'), 'self 2': sd(2)}
    return run_row(settings, replace(pair, draft='self'), prompt, timed=True)


def judges_row(pair, prompt):
    """At how many of the target's first WINDOW tokens the first choice of the draft, of slim is the same.

    A pair that drafts with its own slim path has two judges that are one.
    """
    engine = prepared(pair, sd(GAMMA))
    engine.open([prompt.ids])
    session = engine.start(prompt.ids, ViaSd())
    text = tokens_of(decode(session, Exact(GAMMA)))[:WINDOW]
    ids = prompt.ids + text[:-1]                        # whose last rows predict the text
    windows = train_mask.Windows(session.target.model, [ids], len(text))
    slim = windows.logps(session.slim_path)[0]
    drafter = session.drafter and session.drafter.model
    q = train_mask.Windows(drafter, [ids], len(text)).p[0] if drafter else slim
    right = [int((windows.p[0].argmax(-1) == one.argmax(-1)).sum()) for one in (q, slim)]
    return prompt.name | dict(positions=len(text), draft_right=right[0], slim_right=right[1])


RECORDS = dict(
    tuned=Record(lambda pair, n: pair.texts(FAMILIES, min(n, SWEPT)), partial(run_row, tuned_settings)),
    answers=Record(lambda pair, n: pair.texts(FAMILIES, 5 * n),
                   partial(answer_row, dict(plain=named('ar'), via=named('via')))),
    judges=on_prompts(FAMILIES, judges_row),
    drafting=on_prompts(FAMILIES, drafting_row, drafts=False, by='clock'))


# ------------------------------------------------------------------------------------------ what it must show

OVER_SD = 1.5                       # 1.50 to 1.69 of sd: the notes' table over three tasks
DEFAULT = 'via 5, 0.5 0.3'          # via at its defaults among the tuned settings
TABLE = 'notes, table: 2.32× where `sd` has 1.55×'
CLAIMS = {              # text: whose, rival, line
    'speed over plain': (
        'notes: "reaching 2.5–3× acceleration relative to non-speculative decoding"', PLAIN, 2.5),
    'speed over sd': (TABLE, BEST_SD, OVER_SD),
    'without 4 layers in a row: speed over sd': (TABLE, BEST_SD, OVER_SD),
    'without 8 layers in a row: speed over sd': (TABLE, BEST_SD, OVER_SD),
    'speed over Cascade SD': ('notes, table: 2.32× where it has 1.71×', '`cascade`, the same gamma', 1.36),
    'speed over tuned cascades and lenient sd': (
        'notes: "additional 10–20% speedup over strong speculative decoding baselines"',
        'thresholds, gamma: the fastest with as few errors', 1.05),
    'rejections of sd that via spares, share': (
        'notes: "reducing rejection rates by 0.10–0.22"; a third at least', '`sd`, the same gamma', 0.33),
    "slim's agreement with the target, less the draft's": ('ours', 'the draft', 0.01),
    'right answers won or lost, a text': ('notes: "without losing accuracy"', PLAIN, -0.01),
    '`--draft self`: speed over plain': ('ours', PLAIN, 1)}
SPEEDS = {              # text: setting, rival
    'speed over plain': ('via', 'ar'), 'speed over sd': ('via', 'sd '),
    'without 4 layers in a row: speed over sd': ('via, without 4', 'sd '),
    'without 8 layers in a row: speed over sd': ('via, without 8', 'sd ')}
SHOWN = {               # settings that the page shows without verdicts, of the timed runs and of `tuned`
    'via': 'via', 'via, without 4': '4 layers in a row left out',
    'via, without 8': '8 layers in a row left out', 'cascade': 'Cascade SD',
    'via 5, 0.5 0.3': 'via, gamma 5', 'bare': 'via, gamma 5, slim_bonus=false',
    'via 5, 0.8 0.6': 'via, gamma 5, keep 0.8, escalate 0.6',
    'via 5, 0.3 0.1': 'via, gamma 5, keep 0.3, escalate 0.1'}


def figures(records):
    """Yields (text of a claim, its texts, its figure, its kind) of what the records of a pair allow."""
    yield from records.speeds(SPEEDS)
    best = records.best
    if best and 'via' in best.names:
        if 'cascade' in best.names:
            yield 'speed over Cascade SD', best.every, over(best, 'via', 'cascade', CLOCK), CLOCK
        look_up, *_ = best.starting('look up, else')                # has via's gamma there
        name = look_up.replace('look up, else', 'sd')

        def spared(texts):
            via, rival = 1 - best.share('accepted', 'judged', ['via', name], texts)
            return 1 - via / rival if rival else numpy.nan
        yield 'rejections of sd that via spares, share', best.every, spared, ''
    if 'tuned' in records:
        # all families together, because four texts seldom have a wrong token
        runs = records.runs('tuned')
        figure = tuned_over(runs, runs.starting('via'), runs.starting('cascade', 'ratio', 'sd'), MODELLED,
                            runs.agreement(DEFAULT, runs.every))
        yield 'speed over tuned cascades and lenient sd', runs.every, figure, MODELLED
    if 'judges' in records:
        yield "slim's agreement with the target, less the draft's", *better_judge(records['judges'].rows), ''
    yield from answers(records, 'right answers won or lost, a text', 'via', 'plain')
    if 'drafting' in records:
        runs = records.runs('drafting')
        yield '`--draft self`: speed over plain', runs.every, over(runs, 'self 2', 'plain', CLOCK), CLOCK


def better_judge(rows):
    """(texts, figure) of slim's agreement less the draft's."""
    better = [row['slim_right'] - row['draft_right'] for row in rows]
    return numpy.arange(len(rows)), ratio(better, [row['positions'] for row in rows])


def sweeps(pairs):
    """Slim beside the draft, thresholds, other masks, the cascade, without verdicts."""
    rows = []
    for pair, records in pairs.items():
        if 'judges' in records:
            judges = records['judges'].rows
            positions = sum(row['positions'] for row in judges)
            right = [sum(row[f'{who}_right'] for row in judges) for who in ('slim', 'draft')]
            shares = ', '.join(f'{share / positions:.1%}' for share in right)
            rows.append((pair, "first choices: slim's, the draft's", None, None, None, shares))
        for runs in filter(None, (records.best, records.runs_if('tuned'))):
            for name, label in SHOWN.items():
                if name in runs.names and 'steps' in runs.sums:
                    kind = CLOCK if 'seconds' in runs.sums else MODELLED
                    speed = over(runs, name, runs.starting('ar'), kind)(runs.every)
                    rejected = 1 - runs.share('accepted', 'judged', name, runs.every)
                    rows.append((pair, label, f'{speed:.2f} {kind}', f'{rejected:.1%}',
                                 runs.share('full', 'cycles', name, runs.every),
                                 f'{runs.agreement(name, runs.every):.1%}'))
    head = 'pair', 'what', 'over plain', 'rejected', 'full passes a cycle', 'agreement'
    return [(head, rows)]
