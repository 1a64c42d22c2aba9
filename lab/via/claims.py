"""VIA-SD's claims, judged by stored rows: real runs, replayed gates, masks, distances between laws.

Modelled speed: a pass costs the weight bytes that it reads, in passes of the full path; nothing else costs
anything. Compute-bound: each position of a pass costs them. p is the target's distribution, q the draft's,
s the slim verifier's.
"""
import functools
import itertools
import math
import operator
import statistics
from typing import NamedTuple

import numpy
import scipy.stats

from lab.common import Claim, PageTable, mean, roc_area
from lab.via.rivals import blended_law
from specmini import stage_limit

MORE = 1.005                    # a line for "better": a tie is none
ABOVE_ZERO = 1e-9               # a line for "above 0"
USUAL = 0.5, 0.3                # keep and escalate by default
CONSERVATIVE, AGGRESSIVE = (0.8, 0.6), (0.3, 0.1)
MOST_WRONG = 0.01               # share of wrong tokens that a tuned rule may write
POINT = 0.01                    # of right answers, which a claim of quality is to resolve
CASCADES = 'cascade', 'cascade-opt', 'cascade-tokenv3'
LENIENT = 'cascade-tokenv3'     # greedy, it is lenient sd
LAMS = {                        # at which cascades run, to be compared where they agree as via does
    'cascade': (0.02, 0.05, 0.1, 0.3), 'cascade-opt': (0.02, 0.05, 0.1, 0.3),
    'cascade-tokenv3': (0.3, 0.5, 0.7, 0.9)}
BARE = 'via without slim_bonus'
RANDOM, EVENLY, CONTIGUOUS = 'via, random masks', 'via, evenly spaced', 'via, contiguous'
DRAFTED = {'ar': 0, 'lookup': 4, 'self, gamma 2': 2, 'self, gamma 4': 4}    # without a draft model: gamma
SPEEDS = dict(seconds='measured', work='modelled')      # figure of a Run: how its speed is called
MIDDLES = dict(                 # models for the middle
    mid='a model of its own', up='an upscaled drafter')
MEMORY_LINES = dict(mid=1.38 / 1.04, up=MORE)           # by the paper, of a model in the middle over slim
SPEED_LINES = dict(mid=2.32 / 2.08, up=MORE)            # of slim over a model in the middle
MEASURES = dict(KL='KL', R='R, alpha = beta = 1/2', strict='R, alpha 0, beta 1')     # of Delta
SPARED = dict(sd=1 - 0.14 / 0.27, cascades=1 - 0.14 / 0.22)     # of a rival's rejections, by the paper


def tuned(name):
    """What a rival is called at the knobs that are best for it."""
    return f'{name}, tuned'


def at(rule, lam):
    """What a cascade is called at this lam."""
    return f'{rule}, lam {lam:g}'


def bounded(name, most_wrong):
    """What via is called at this bound; 1: none."""
    return name if most_wrong == 1 else f'{name}, most_wrong {most_wrong:g}'


SWEPT = [at(rule, lam) for rule, lams in LAMS.items() for lam in lams]


def like(role):
    """What via is called with a slim path whose pass costs as much as one of this model."""
    return f'via, slim as dear as {role}'


TUNED = tuned('via')
ASKING = 'via, tuned, escalate above 0'
FORGIVING = 'sd, lenient', at('cascade-opt', 0.1), at('cascade-tokenv3', 0.5)
USUAL_BOUND = 0.05              # of most_wrong, whose cost is judged
BOUNDS = 1.0, 0.1, 0.05, 0.01, 0.0      # of most_wrong
BLIND = {32: 'every draft kept', 8: 'every draft kept, max_lag 8'}      # max_lag: via without its gate
SAMPLED = 'ar', 'sd', *FORGIVING, 'via', BARE, TUNED, ASKING

# why a claim may fail, where several share the reason
SLIM_IS_PAID = 'Every cycle pays for a slim pass, whether or not it spares the full one'
CALLS = 'in small models a pass costs its calls rather than its weights'
ALSO_FORGIVES = 'The rival forgives too, without a slim pass'
MANY_MASKS = ('Many masks serve a target almost as well; the embedded one was trained with layers left out '
              'at random')
SOME_MASKS = 'The search tries only some of the masks, and may miss a better one'
NEVER_READ = 'What slim keeps last the target never reads: the audit is of the tokens before'
EARNED = 'Lenience has to be earned first, token by token, and texts are short'
TASKS_DIFFER = 'Tasks differ in the layers that they need: what is best over all may be poor on one'


# ----------------------------------------------------------------------------------- rows, as they are stored

class Run(NamedTuple):
    """What a rival did with a text. Passes and positions are by reader; middle: slim, or another model."""
    tokens: int
    judged: int                 # draft tokens that were looked at
    accepted: int
    cycles: int
    bare: int                   # cycles to whose kept tokens none was added; the last of a text not counted
    right: int                  # None where nothing is graded
    alike: float                # share of places with plain decoding's token
    seconds: float
    work: float                 # modelled cost, in full passes
    compute: float              # the same, if it is positions that cost
    draft_passes: int
    draft_positions: int
    middle_passes: int
    middle_positions: int
    target_passes: int
    target_positions: int


class Sampled(NamedTuple):
    """What a rival did with a text at temperature 1."""
    tokens: int
    judged: int
    accepted: int
    work: float
    nats: float                 # -log p of the whole text by the target
    right: int                  # None where nothing is graded


class Audited(NamedTuple):
    """What via at some most_wrong did with a text, and what the target says of it."""
    tokens: int
    cycles: int
    others: int                 # tokens that another judged
    heard: int                  # of these, those that the target has read by the end
    heard_wrong: int            # and would not have written
    heard_nats: float           # -log p of those heard of
    wrong: int                  # of all tokens, by the target behind the whole text
    right: int                  # None where nothing is graded
    draft_passes: int
    draft_positions: int
    middle_passes: int
    middle_positions: int
    target_passes: int
    target_positions: int


class Drafted(NamedTuple):
    """What a target without a draft model did with a text."""
    tokens: int
    cycles: int
    judged: int
    accepted: int
    slim: int                   # passes
    full: int
    work: float                 # modelled cost, in full passes
    seconds: float
    right: int                  # None where nothing is graded


class Sums(NamedTuple):
    """What a replayed rule makes of a text."""
    tokens: int
    wrong: int                  # tokens that the target would not have written
    passes: int                 # full ones
    cycles: int
    cost: float                 # modelled, in full passes


def settings_of(stored):
    """What the rows of all records are of."""
    return stored['settings'].rows[0]


def by_name(columns, names, kind):
    """{name: kind} of columns {field of kind: [a value for each of the names]}, or None for None in all."""
    lists = []
    for field in kind._fields:
        values = columns[field]
        lists.append([None] * len(names) if values is None else values)
    return {name: kind(*values) for name, values in zip(names, zip(*lists))}


def runs_of(stored):
    """[{rival: Run}], a dict a text, of the rivals that wrote it."""
    rivals = settings_of(stored)['rivals']
    found = []
    for row in stored['runs'].rows:
        names = [rivals[number] for number in row['who']]
        found.append(by_name(row, names, Run))
    return found


def having(runs, *names):
    """The texts that all of these wrote."""
    return [run for run in runs if run.keys() >= set(names)]


def by_task(stored, runs):
    """{task: its runs}."""
    found = {}
    for row, run in zip(stored['runs'].rows, runs):
        found.setdefault(row['task'], []).append(run)
    return found


def with_cost(tokens, wrong, passes, cycles, others):
    """The Sums of a text; others: what all its passes but the full ones cost."""
    return Sums(tokens, wrong, passes, cycles, others + passes)


def replayed(rows, settings):
    """{(keep, escalate): [Sums a text]} of via at all thresholds that were swept."""
    found = {tuple(pair): [] for pair in settings['pairs']}
    for row in rows:
        others = row['places'] * settings['draft_cost'] + row['cycles'] * settings['costs']['slim']
        columns = row['via']
        for i, sums in enumerate(found.values()):
            numbers = columns['tokens'][i], columns['wrong'][i], columns['passes'][i]
            sums.append(with_cost(*numbers, row['cycles'], others))
    return found


def exact(rows, settings):
    """[Sums a text] of sd."""
    found = []
    for row in rows:
        cycles = row['cycles']
        found.append(with_cost(row['sd'], 0, cycles, cycles, row['places'] * settings['draft_cost']))
    return found


def at_masks(stored):
    """{mask: [Sums a text]} of via at its usual thresholds with every mask that was tried."""
    settings = settings_of(stored)
    found = {}
    for i, (mask, cost) in enumerate(settings['mask_costs'].items()):
        found[mask] = []
        for row in stored['masks'].rows:
            others = row['places'] * settings['draft_cost'] + row['cycles'] * cost
            numbers = row['tokens'][i], row['wrong'][i], row['passes'][i]
            found[mask].append(with_cost(*numbers, row['cycles'], others))
    return found


# ---------------------------------------------------------------------------------------- figures of the rows

def total(rows, figure):
    """The sum of this figure of all rows."""
    return sum(map(operator.attrgetter(figure), rows))


def ratio(rows, figure, other):
    """The sum of one figure over the sum of another."""
    return total(rows, figure) / total(rows, other)


def pace(sums):
    """Tokens for each full pass's cost, of Sums."""
    return ratio(sums, 'tokens', 'cost')


def wrong_share(sums):
    """The share of tokens that the target would not have written."""
    return ratio(sums, 'wrong', 'tokens')


def of(runs, name):
    """[Run] of one rival."""
    return [run[name] for run in runs]


def speed(runs, name, by):
    """A rival's tokens for each unit of seconds, work or compute."""
    return ratio(of(runs, name), 'tokens', by)


def over(runs, name, others, by):
    """A rival's speed over that of the fastest of the others."""
    return speed(runs, name, by) / max(speed(runs, other, by) for other in others)


def rejected(runs, name):
    """The share of judged draft tokens that were rejected."""
    return 1 - ratio(of(runs, name), 'accepted', 'judged')


def right_share(runs, name):
    """The share of graded texts that are right; nan if none is graded."""
    return mean(run.right for run in of(runs, name) if run.right is not None)


def alike(runs, name):
    """The mean share of places with plain decoding's token."""
    return total(of(runs, name), 'alike') / len(runs)


def at_agreement(runs, rule, figure):
    """A cascade's figure, a function of runs and rival, where it agrees with plain decoding as via does.

    Interpolated between the lam that were run and lam = 0, which is sd and agrees in all; beyond the largest
    lam: what it is there.
    """
    wanted = alike(runs, 'via')
    names = ['sd', *(at(rule, lam) for lam in LAMS[rule] if at(rule, lam) in runs[0])]
    points = sorted((alike(runs, name), figure(runs, name)) for name in names)
    return float(numpy.interp(wanted, *zip(*points)))


def per_token(runs, name, who):
    """'calls, positions' a token of the passes of draft, middle or target."""
    calls = ratio(of(runs, name), f'{who}_passes', 'tokens')
    positions = ratio(of(runs, name), f'{who}_positions', 'tokens')
    return f'{calls:.2f}, {positions:.2f}'


def listed(figures, form='.3f'):
    """'name: figure, ...' of {name: figure}."""
    return ', '.join(f'{name}: {figure:{form}}' for name, figure in figures.items())


def per_place(rows, *keys):
    """The mean over places of what rows hold as sums under these keys."""
    sums = rows
    for key in keys:
        sums = [row[key] for row in sums]
    return sum(sums) / sum(row['places'] for row in rows)


# ---------------------------------------------------------------------------- knobs, chosen on the even texts

class Option(NamedTuple):
    """A rule at some knobs, by its sums over all even texts."""
    knobs: dict
    pace: float
    wrong: float                # share of the tokens


def options(rows, settings):
    """{rule: [Option]} of sd, via and the cascades; rows: of `gammas`."""
    found = dict(sd=[], via=[])
    for row in rows:
        gamma = row['gamma']
        drafting = row['drafted'] * settings['draft_cost']
        found['sd'].append(Option(dict(gamma=gamma), row['sd'] / (drafting + row['cycles']), 0.0))
        for i, (keep, escalate) in enumerate(settings['pairs']):
            tokens = row['via']['tokens'][i]
            cost = drafting + row['cycles'] * settings['costs']['slim'] + row['via']['passes'][i]
            knobs = dict(gamma=gamma, keep=keep, escalate=escalate)
            found['via'].append(Option(knobs, tokens / cost, row['via']['wrong'][i] / tokens))
        for rule, columns in row['cascades'].items():
            for i, (tokens, wrong) in enumerate(zip(columns['tokens'], columns['wrong']), 1):
                knobs = dict(gamma=gamma, lam=1 - i / 100)
                option = Option(knobs, tokens / (drafting + row['cycles']), wrong / tokens)
                found.setdefault(rule, []).append(option)
    return found


def fastest(found, most):
    """The fastest Option with at most this share of wrong tokens; where there is none, the least wrong."""
    fair = [option for option in found if option.wrong <= most]
    if not fair:
        return min(found, key=lambda option: option.wrong)
    return max(fair, key=lambda option: option.pace)


def choose(rows, settings):
    """{rival: knobs} of those whose knobs are chosen on even texts.

    The tuned via is the fastest at MOST_WRONG; other rules may be wrong as often as it is.
    """
    found = options(rows, settings)
    asking = [option for option in found['via'] if option.knobs['escalate'] > 0]
    best = fastest(found['via'], MOST_WRONG)
    chosen = {TUNED: best.knobs, ASKING: fastest(asking, MOST_WRONG).knobs,
              tuned('sd'): fastest(found['sd'], 0).knobs}
    for rule in CASCADES:
        chosen[tuned(rule)] = fastest(found[rule], best.wrong).knobs
    return chosen


# -------------------------------------------------------------------------------------- claims: the real runs

def claims(stored):
    """The claims of VIA-SD that these records tell something of; of the embedded pair all."""
    found = []
    for needed, judged in CLAIMS:
        if all_there(stored, needed):
            found += judged(stored)
    return found


def all_there(stored, needed):
    """Whether these records were measured, and have rows."""
    return all(name in stored and stored[name].rows for name in needed)


def rejection_claims(stored):
    """The share of a rival's rejections that via spares, since sd rejects little here."""
    runs = runs_of(stored)
    swept = having(runs, *SWEPT)

    def below_sd(runs):
        return spared_share(rejected(runs, 'via'), rejected(runs, 'sd'))

    def below_cascades(runs):
        rates = [at_agreement(runs, rule, rejected) for rule in CASCADES]
        return spared_share(rejected(runs, 'via'), min(rates))
    few = "where sd itself rejects little, most of what it rejects is slim's own doubt as well"
    found = [
        Claim("share of sd's rejections that via spares", 'paper', SPARED['sd'], runs, below_sd,
              note=f"{rejected(runs, 'sd'):.3f} to {rejected(runs, 'via'):.3f}; the paper's 0.27 to 0.14",
              why=f'By definition a lenient gate rejects less; {few}')]
    if swept:
        rates = {rule: at_agreement(swept, rule, rejected) for rule in CASCADES}
        found.append(Claim(
            "share of the best cascade's rejections that via spares, at equal agreement", 'paper',
            SPARED['cascades'], swept, below_cascades,
            note=f"{listed(rates)}; via {rejected(swept, 'via'):.3f}; the paper's 0.22 to 0.14",
            why='A cascade forgives too, wherever the draft is sure enough'))
    for name in list(settings_of(stored).get('drafters', ()))[:2]:      # poorer ones
        found.append(poorer_claim(stored, name))
    return found


def spared_share(ours, theirs):
    """The share of a rejection rate that another spares; nan where there is none."""
    return 1 - ours / theirs if theirs else math.nan


def poorer_claim(stored, name):
    """What via spares with a drafter that is rejected more often, replayed."""
    rows = [row[name] for row in stored['drafters'].rows]

    def rate(rows, rule):
        kept = judged = 0
        for row in rows:
            kept += row[rule]['kept']
            judged += row[rule]['judged']
        return 1 - kept / judged

    def spared(rows):
        return spared_share(rate(rows, 'via'), rate(rows, 'sd'))
    text = f"share of sd's rejections that via spares, with {name}"
    return Claim(text, 'paper', SPARED['sd'], rows, spared,
                 note=f'replayed; {rate(rows, "sd"):.2f} to {rate(rows, "via"):.2f}',
                 why='What the target rejects slim mostly rejects as well: it is nearer to the target than '
                     'the draft is')


def speed_claims(stored):
    runs = runs_of(stored)
    found = []
    swept = having(runs, *SWEPT)
    for by, words in SPEEDS.items():
        extra = f'; {CALLS}' if by == 'seconds' else ''
        found += [
            speed_claim(f'{words} speed of via over plain decoding', runs, ['ar'], by, 2.5,
                        why=f"Every cycle pays for the draft's passes and a slim one{extra}"),
            speed_claim(f'{words} speed of via over sd', runs, ['sd'], by, 1.10, why=SLIM_IS_PAID + extra),
            lenient_claim(stored, by, words, ALSO_FORGIVES + extra)]
        if swept:
            found.append(cascades_claim(swept, by, words, ALSO_FORGIVES + extra))
    calls = per_token(runs, 'via', 'target')
    calls_of_sd = per_token(runs, 'sd', 'target')
    found.append(speed_claim(
        'modelled speed of via over sd, compute-bound: a pass costs its positions', runs, ['sd'], 'compute',
        MORE, whose='ours', note=f'target calls, positions a token: {calls}; of sd {calls_of_sd}',
        why='What slim kept the target reads later all the same, as the lag'))
    bare = having(runs, BARE)
    if bare:
        found.append(Claim(
            'modelled speed of via without slim_bonus over sd', 'paper', 1.10, bare,
            faster(BARE, ['sd'], 'work'), note=agreements(bare, 'via', BARE),
            why=f'{SLIM_IS_PAID}, and a block that it kept ends one token earlier than one of sd'))
    return found


def lenient_claim(stored, by, words, why):
    """via's speed over that of lenient sd where it agrees as often with plain decoding."""
    rivals = settings_of(stored)['rivals']
    swept = [at(LENIENT, lam) for lam in LAMS[LENIENT] if at(LENIENT, lam) in rivals]
    runs = having(runs_of(stored), *swept)

    def figure(runs):
        return speed(runs, 'via', by) / at_agreement(runs, LENIENT, lambda runs, name: speed(runs, name, by))
    asked = ratio(of(runs, 'via'), 'target_passes', 'cycles')
    note = (f'agreement {alike(runs, "via"):.3f}, lam swept; {asked:.2f} full passes of via a cycle, lags '
            f'included; {longest_text(runs)} tokens at most')
    return Claim(f'{words} speed of via over lenient sd at equal agreement', 'ours', 1.05, runs, figure,
                 note=note, why=why)


def longest_text(runs):
    """Tokens of the longest text of plain decoding."""
    return max(run['ar'].tokens for run in runs)


def cascades_claim(runs, by, words, why):
    """via's speed over that of the fastest cascade where it agrees as often with plain decoding."""
    def paces(runs):
        found = {}
        for rule in CASCADES:
            found[rule] = at_agreement(runs, rule, lambda runs, name: speed(runs, name, by))
        return found

    def figure(runs):
        return speed(runs, 'via', by) / max(paces(runs).values())
    over_each = {rule: speed(runs, 'via', by) / pace for rule, pace in paces(runs).items()}
    note = f'over each: {listed(over_each)}; agreement {alike(runs, "via"):.3f}, lam swept'
    return Claim(f'{words} speed of via over the fastest cascade at equal agreement', 'paper', 1.10, runs,
                 figure, note=note, why=why)


def faster(name, others, by):
    """A function of runs: the rival's speed over that of the fastest of the others."""
    def figure(runs):
        return over(runs, name, others, by)
    return figure


def agreements(runs, *names):
    """Shares of tokens as plain decoding's, in words."""
    return "tokens as plain decoding's: " + listed({name: alike(runs, name) for name in names})


def speed_claim(text, runs, others, by, line, whose='paper', **more):
    """A Claim on via's speed over that of the fastest of the others."""
    return Claim(text, whose, line, runs, faster('via', others, by), **more)


def quality_claims(stored):
    runs = runs_of(stored)
    graded = [run for run in runs if run['ar'].right is not None]
    if not graded:
        return []

    def gained(other):
        def figure(runs):
            return right_share(runs, 'via') - right_share(runs, other)
        return figure
    right = right_share(graded, 'ar')
    note = f'{right:.3f} of {len(graded)} right; {agreements(runs, "via")}; {texts_needed(graded)}'
    found = [
        Claim('share of right texts, via minus plain decoding', 'paper', -POINT, graded, gained('ar'),
              note=note,
              why="A token that slim kept against the target's choice may be what the answer hangs on")]
    if having(graded, RANDOM):
        found.append(Claim(
            'share of right texts, mask found minus random masks', 'paper', 0.32 - 0.29, graded,
            gained(RANDOM),
            why='What a poorer slim doubts goes to the target, so that a poor mask costs speed rather than '
                'answers'))
    return found


def texts_needed(graded):
    """In words: on how many texts via and plain decoding differ, and the n that resolves one POINT.

    Paired: a difference of right answers is -1, 0 or 1 a text; 95 % of its mean within POINT.
    """
    apart = [run['via'].right - run['ar'].right for run in graded]
    discordant = sum(map(abs, apart))
    spread = statistics.pvariance(apart)
    needed = math.ceil(spread * (1.96 / POINT) ** 2)
    return f'{discordant} texts differ, so that one point takes {needed} texts'


def tier_claims(stored):
    """How many stages."""
    tiers = having(runs_of(stored), 'via-tiers')
    if not tiers:
        return []
    speeds = []
    for name in ('sd', 'via', 'via-tiers'):
        speeds.append(f'{over(tiers, name, ["ar"], "work"):.2f}')
    return [speed_claim(
        'modelled speed of 3 stages over the better of 2 and 4', tiers, ['sd', 'via-tiers'], 'work', 1.0,
        note='2, 3, 4 stages of nested masks: ' + ', '.join(speeds),
        why='Each stage costs a pass in every cycle that asks it, and stages are alike in what they doubt')]


def which_mask_claims(stored):
    """The mask found against others, in real runs."""
    others = (
        ('modelled speed with the mask found over random masks', RANDOM, 2.32 / 1.62, 'paper'),
        ('F2 modelled speed with the mask found over evenly spaced layers', EVENLY, MORE, 'ours'),
        ('F2 modelled speed with the mask found over the best contiguous block', CONTIGUOUS, MORE, 'ours'))
    found = []
    for text, other, line, whose in others:
        runs = having(runs_of(stored), other)
        if runs:
            found.append(speed_claim(text, runs, [other], 'work', line, whose=whose, why=MANY_MASKS))
    return found


def equal_claims(stored):
    """F1 end to end: every rule at the knobs that were chosen for it on even texts, run on odd ones."""
    odd = having(runs_of(stored), TUNED)
    choice = settings_of(stored)['choice']
    rivals = [tuned('sd'), tuned(LENIENT)]
    cascades = [tuned(rule) for rule in CASCADES]
    right = {name: right_share(odd, name) for name in (TUNED, *rivals)}
    over_each = [f'{over(odd, TUNED, [name], "work"):.3f}' for name in rivals]
    knobs = knob_words(choice, TUNED, *rivals)
    notes = dict(seconds=f'right {listed(right)}', work=f'over each: {", ".join(over_each)}. {knobs}')
    if choice[TUNED]['escalate'] == 0:
        notes['work'] += '. So tuned via never asks the target, which reads lags and nothing else'

    def closer(runs):
        return alike(runs, TUNED) - alike(runs, tuned(LENIENT))
    found = []
    for by, words in SPEEDS.items():
        text = f'F1 {words} speed of tuned via over the better of tuned sd and tuned lenient sd'
        found.append(Claim(text, 'ours', 1.05, odd, faster(TUNED, rivals, by), note=notes[by],
                           why=ALSO_FORGIVES))
    found += [
        Claim("F1 share of tokens as plain decoding's, tuned via minus tuned lenient sd", 'ours', -0.01, odd,
              closer, note=agreements(odd, TUNED, *cascades),
              why="Both were tuned on the target's own text; behind a wrong token each goes its own way"),
        Claim('F1 modelled speed of tuned via that may ask the target over tuned sd and tuned lenient sd',
              'ours', 1.05, odd, faster(ASKING, rivals, 'work'),
              note=f'{knob_words(choice, ASKING)}; {agreements(odd, ASKING)}', why=ALSO_FORGIVES),
        Claim('modelled speed of tuned via over the fastest tuned cascade', 'paper', 1.10, odd,
              faster(TUNED, cascades, 'work'),
              note=knob_words(choice, *cascades), why=ALSO_FORGIVES)]
    return found


def knob_words(choice, *names):
    """Rivals and their chosen knobs, in words."""
    words = []
    for name in names:
        knobs = ' '.join(f'{knob} {value:g}' for knob, value in choice[name].items())
        words.append(f'{name}: {knobs}')
    return '; '.join(words)


def sampled_claims(stored):
    """Temperature 1: modelled speed; the target's nats a token say what it is paid with."""
    texts = sampled_of(stored)
    nats = {name: ratio(of(texts, name), 'nats', 'tokens') for name in SAMPLED}
    right = {name: right_share(texts, name) for name in SAMPLED}
    return [
        Claim('T = 1: modelled speed of via over sd', 'paper', 1.10, texts, faster('via', ['sd'], 'work'),
              note=f'nats a token by the target: {listed(nats, ".2f")}', why=SLIM_IS_PAID),
        Claim('T = 1: modelled speed of via without slim_bonus over sd', 'paper', 1.10, texts,
              faster(BARE, ['sd'], 'work'), note=f'right: {listed(right, ".2f")}', why=SLIM_IS_PAID),
        Claim('T = 1: modelled speed of via over the fastest of lenient sd and the cascades', 'paper', 1.10,
              texts, faster('via', FORGIVING, 'work'), why=ALSO_FORGIVES)]


def sampled_of(stored):
    """[{rival: Sampled}], a dict a text."""
    return [by_name(row, SAMPLED, Sampled) for row in stored['sampled'].rows]


def all_middle_claims(stored):
    found = []
    for role in settings_of(stored)['middles']:
        found += middle_claims(stored, role)
    return found


def middle_claims(stored, role):
    """F3: the slim path against a model of its own in the middle, at equal cost of a pass and equal gate."""
    settings = settings_of(stored)
    words = MIDDLES[role]
    name = f'via-{role}'
    runs = having(runs_of(stored), name, like(role))

    def more_memory(rows):
        return rows[0][name] / rows[0]['sd']
    costs = settings['costs']
    right = {rival: right_share(runs, rival) for rival in (like(role), name, 'via')}
    mixed = over(runs, 'via', [name], 'work')
    note = (f'a pass costs {costs[f"slim like {role}"]:.2f}, {costs[role]:.2f}; right {listed(right)}; '
            f'{agreements(runs, like(role), name)}; with the slim of {costs["slim"]:.2f} it is {mixed:.3f}')
    return [
        Claim(f'memory with {words} over that with slim', 'paper', MEMORY_LINES[role], [settings['memory']],
              more_memory, note='weights and caches over those of sd; slim shares both with the target: 1.00',
              sampled=False,
              why='A model in the middle is smaller than the target, which both ways keep in memory'),
        distance_claim(stored['replays'].rows, 'TV', role, costs),
        distance_claim(stored['replays'].rows, 'R', role, costs),
        Claim(f'modelled speed of via over the same with {words}, a pass as dear', 'paper',
              SPEED_LINES[role], runs, faster(like(role), [name], 'work'), note=note,
              why='At equal cost a gate of ratios lets pass about as much of either')]


def distance_claim(rows, measure, role, costs):
    """That slim is nearer to the target than a model in the middle whose pass is as dear."""
    near = f'slim like {role}'

    def further(rows):
        return per_place(rows, 'apart', measure, role) - per_place(rows, 'apart', measure, near)
    ours = per_place(rows, 'apart', measure, near)
    theirs = per_place(rows, 'apart', measure, role)
    note = f'{theirs:.4f}, {ours:.4f}; a pass costs {costs[role]:.2f}, {costs[near]:.2f} of the target'
    return Claim(f'F3 {measure} to the target, {MIDDLES[role]} minus slim', 'paper', ABOVE_ZERO, rows,
                 further, note=note,
                 why='A model that was trained at its size may be nearer than one with layers taken out')


# -------------------------------------------------------------------------------- claims: masks, their search

def cost_of(row, objective):
    """A mask's cost on all calibration texts."""
    return mean(itertools.chain.from_iterable(row[objective].values()))


def mask_claims(stored):
    """F2: the mask that was found against all masks of its size, and what it is on each task."""
    settings = settings_of(stored)
    rows = stored['search'].rows
    found = settings['mask']
    costs = {row['mask']: cost_of(row, 'violation') for row in rows}
    least = min(costs, key=costs.get)

    def best(rows):
        by_mask = {row['mask']: row for row in rows}
        return cost_of(by_mask[least], 'violation') / cost_of(by_mask[found], 'violation')

    def typical(rows):
        """{task: the median mask's cost over that of the mask found}."""
        return {task: typical_cost(rows, task, found) for task in rows[0]['violation']}

    def worst(rows):
        return min(typical(rows).values())
    by_task = ', '.join(f'{task} {cost:.2g}' for task, cost in typical(rows).items())
    return [
        Claim(f'F2 cost of the best of all {len(rows)} masks over the mask found', 'ours', 1 / 1.05, rows,
              best, note='within 5 % of the optimum', sampled=False, why=SOME_MASKS),
        Claim('one mask for all: cost of the median mask over the one found, worst task', 'paper', 1, rows,
              worst, note=by_task, sampled=False, why=TASKS_DIFFER)]


def typical_cost(rows, task, found):
    """The median mask's cost on a task's calibration texts over that of the mask found."""
    costs = {row['mask']: mean(row['violation'][task]) for row in rows}
    return statistics.median(costs.values()) / max(costs[found], 1e-9)


def search_claims(stored):
    """The search among all masks of half of the sublayers, where the optimum is known."""
    rows = stored['searches'].rows
    every = stored['sublayers'].rows[0]

    def better(rows):
        return mean(row['random'] for row in rows) / mean(row['bayesian'] for row in rows)

    def near(rows):
        return rows[0]['least'] / mean(row['bayesian'] for row in rows)
    ranks = {}
    for name in ('bayesian', 'random'):
        ranks[name] = ', '.join(str(row[f'{name}_rank']) for row in rows)
    return [
        Claim('F2 cost by random search over Bayesian, 60 evaluations', 'ours', 1.0, rows, better,
              note=f'{rows[0]["skipped"]} of {rows[0]["sublayers"]} sublayers, {len(rows)} seeds',
              why='Half of the Bayesian masks are random too, and the costs of a few say little of how '
                  'sublayers work together'),
        Claim(f'F2 cost of the best of all {every["masks"]} sublayer masks over the one found', 'ours',
              1 / 1.05, rows, near,
              note=f'60 evaluations; ranks among all: Bayesian {ranks["bayesian"]}; random {ranks["random"]}',
              why='60 evaluations are one mask in two hundred; each seed ends in another valley')]


# ---------------------------------------------------------------------------------- claims: the replayed gate

def leads(rows):
    """The first rule's modelled speed over the fastest other one's; rows: {rule: Sums}, a dict a text."""
    rules = list(rows[0])
    paces = [pace(of(rows, rule)) for rule in rules]
    return paces[0] / max(paces[1:])


def side_by_side(**rules):
    """[{rule: Sums}], a dict a text, of the [Sums a text] of each rule."""
    return [dict(zip(rules, sums)) for sums in zip(*rules.values())]


def threshold_claims(stored):
    """The paper's thresholds among others, replayed."""
    settings = settings_of(stored)
    rows = stored['replays'].rows
    swept = replayed(rows, settings)
    plain = exact(rows, settings)
    paces = []
    for pair in (USUAL, CONSERVATIVE, AGGRESSIVE):
        paces.append(f'{pace(swept[pair]) / pace(plain):.3f} ({wrong_share(swept[pair]):.2%})')
    published = side_by_side(usual=swept[USUAL], conservative=swept[CONSERVATIVE],
                             aggressive=swept[AGGRESSIVE])
    return [
        Claim('modelled speed at 0.5, 0.3 over 0.8, 0.6 (conservative) and 0.3, 0.1 (aggressive)', 'paper',
              1.0, published, leads, note='over sd (wrong tokens): ' + ', '.join(paces),
              why='A laxer gate asks the target less: by speed alone the laxest wins')]


def break_even_claims(stored):
    """F5: what a cycle spends on slim and full passes, against what it may, in full passes."""
    every = runs_of(stored)
    slim_cost = settings_of(stored)['costs']['slim']
    draft_cost = settings_of(stored)['draft_cost']

    def spent(runs, name):
        cycles = total(of(runs, name), 'cycles')
        passes = total(of(runs, name), 'target_passes') / cycles
        return slim_cost * total(of(runs, name), 'middle_passes') / cycles + passes

    def published(name):
        def figure(runs):
            return 1 - spent(runs, name)
        return figure

    def counted(name):
        def figure(runs):
            columns = of(runs, name)
            drafting = draft_cost * ratio(columns, 'draft_passes', 'cycles')
            tokens = ratio(columns, 'tokens', 'cycles')
            bare = ratio(columns, 'bare', 'cycles')
            return stage_limit(drafting, tokens, bare) - spent(runs, name)
        return figure

    def words(name, runs):
        asked = ratio(of(runs, name), 'target_passes', 'cycles')
        return f'a slim pass costs {slim_cost:.2f}; full passes a cycle {asked:.2f}, lags included'
    why = 'A slim pass is a large part of a full one, and one doubtful token in a block asks for both'
    found = []
    for name in ('via', BARE):
        runs = having(every, name)
        if not runs:
            return found
        found.append(Claim(f'F5 {name}: 1 minus (slim / full + full passes a cycle), as published', 'ours',
                           ABOVE_ZERO, runs, published(name), note=words(name, runs), why=why))
    bare = ratio(of(runs, BARE), 'bare', 'cycles')
    found.append(Claim(f'F5 {BARE}: the same, counting that kept blocks add no token', 'ours', ABOVE_ZERO,
                       runs, counted(BARE), note=f'{bare:.0%} of the cycles add none',
                       why='What a kept block spares in full passes it loses in tokens'))
    return found


def ratio_claims(stored):
    """F4: is there a best skip ratio inside? F6: does Delta foretell which of 20 random masks is fast?"""
    settings = settings_of(stored)
    done = at_masks(stored)
    sweep = settings['sweep']                                       # {layers skipped: mask}
    texts = side_by_side(**{k: done[mask] for k, mask in sweep.items()})

    def inside(texts):
        speeds = [pace(of(texts, k)) for k in sweep]
        return max(speeds[1:-1]) / max(speeds[0], speeds[-1])
    speeds = []
    for k, mask in sweep.items():
        speeds.append(f'{k}: {pace(done[mask]):.2f} ({wrong_share(done[mask]):.1%})')
    return [
        Claim('F4 modelled speed of the best inner skip ratio over the ends', 'paper', MORE, texts, inside,
              note='layers skipped: tokens a full pass (wrong): ' + ', '.join(speeds),
              why='Every layer less makes slim cheaper, and a gate that trusts a poor slim goes on sparing '
                  'full passes'),
        plainer_claim(settings, done),
        foretold_claim(stored, done, 'R', '(0.5, 0.5)'),
        foretold_claim(stored, done, 'strict', '(0, 1)'),
        one_mask_claim(stored, done)]


def plainer_claim(settings, done):
    """F2: masks that need no search."""
    plainer = settings['plainer']
    ours = settings['mask']
    texts = side_by_side(found=done[ours], **{how: done[mask] for how, mask in plainer.items()})
    speeds = {how: pace(done[mask]) for how, mask in plainer.items()}
    same = [how for how, mask in plainer.items() if mask == ours]
    note = f'{pace(done[ours]):.3f} tokens a full pass; {listed(speeds)}'
    if same:
        note += f'. The mask found is the one of: {", ".join(same)}'
    return Claim('F2 modelled speed with the mask found over the fastest that needs no search', 'ours', MORE,
                 texts, leads, note=note, why=MANY_MASKS)


def foretold_claim(stored, done, form, words):
    """F6 for one form of Delta: the rows are masks."""
    order = list(settings_of(stored)['mask_costs'])
    texts = stored['masks'].rows
    rows = []
    for mask in settings_of(stored)['random']:
        gain = per_place(texts, form, order.index(mask))
        rows.append(dict(gain=gain, pace=pace(done[mask])))

    def correlation(rows):
        gains = [row['gain'] for row in rows]
        paces = [row['pace'] for row in rows]
        return scipy.stats.spearmanr(gains, paces).statistic
    above = sum(row['gain'] > 0 for row in rows)
    return Claim(f'F6 rank correlation of Delta{words} and modelled speed', 'ours', 0.3, rows, correlation,
                 note=f'{len(rows)} random masks; {above} above 0',
                 why='Delta compares whole laws, the gate asks for the ratio of one token')


def one_mask_claim(stored, done):
    """Whether the mask that was found on all tasks is as fast on each as the fastest of the random ones."""
    settings = settings_of(stored)
    places = {}                                                     # of the texts of each task
    for i, row in enumerate(stored['masks'].rows):
        places.setdefault(row['task'], []).append(i)

    def on_task(mask, task):
        return pace([done[mask][i] for i in places[task]])
    beside = {}
    for task in places:
        fastest = max(on_task(mask, task) for mask in settings['random'])
        beside[task] = on_task(settings['mask'], task) / fastest

    def worst(rows):
        return min(row['beside'] for row in rows)
    rows = [dict(task=task, beside=x) for task, x in beside.items()]
    note = ', '.join(f'{task} {x:.2f}' for task, x in beside.items())
    return Claim('one mask for all: modelled speed over the fastest of 20 masks for a task, worst task',
                 'paper', 0.95, rows, worst, note=note, sampled=False, why=TASKS_DIFFER)


# --------------------------------------------------------------------------------------- claims: the geometry

def geometry_claims(stored):
    """The paper's argument: by TV no stage shortens the way from q to p, by KL one can. Does it then pay?"""
    rows = stored['replays'].rows
    found = []
    for name, words in MEASURES.items():
        found.append(gain_claim(rows, name, words))
    texts = paying_texts(stored)
    paid = mean(text['paid'] for text in texts)

    def area(name):
        def figure(texts):
            return roc_area([text[name] for text in texts], [text['paid'] for text in texts])
        return figure
    others = ', '.join(f'{name} {area(name)(texts):.2f}' for name in ('R', 'strict', 'TV'))
    found.append(Claim('AUROC of Delta by KL for the texts where slim pays', 'ours', 0.65, texts, area('KL'),
                       note=f'it pays in {paid:.1%}, modelled; by {others}',
                       why='Delta knows nothing of what a pass costs, nor of the gate'))
    return found


def gain_claim(rows, name, words):
    """That Delta by one measure is above 0 on average."""
    def figure(rows):
        return per_place(rows, 'gains', name)
    above = per_place(rows, 'above', name)
    above_tv = per_place(rows, 'above', 'TV')
    return Claim(f'mean Delta by {words}', 'paper', ABOVE_ZERO, rows, figure,
                 note=f'nats; above 0 at {above:.1%} of places, by TV at {above_tv:.1%}',
                 why='Slim errs in ways of its own, a detour wherever the draft was near the target')


def paying_texts(stored):
    """A dict a text: its mean Delta by each measure, and whether via is faster than sd there (modelled)."""
    settings = settings_of(stored)
    rows = stored['replays'].rows
    via = replayed(rows, settings)[USUAL]
    texts = []
    for row, ours, theirs in zip(rows, via, exact(rows, settings)):
        text = {name: x / row['places'] for name, x in row['gains'].items()}
        text['paid'] = pace([ours]) > pace([theirs])
        texts.append(text)
    return texts


def hand_over_claims(stored):
    """The blended law pi: delta 1 and 2, the shares that the gates hand on, and what pi then foretells."""
    rows = stored['replays'].rows

    def deltas(rows):
        """(share handed to slim of what the target does not decide, share that the target decides)."""
        late = per_place(rows, 'gates', 'late')
        return per_place(rows, 'gates', 'early') / max(1 - late, 1e-9), late

    def earlier(rows):
        early, late = deltas(rows)
        return early - late

    def selected(rows):
        """How much oftener the token is the target's own than under pi, whose hand-over is blind."""
        draft_share = per_place(rows, 'gates', 'draft_right')
        slim_share = per_place(rows, 'gates', 'slim_right')
        blind = blended_law(draft_share, slim_share, 1.0, *deltas(rows))
        return per_place(rows, 'gates', 'chosen_right') - blind
    early, late = deltas(rows)
    note = f'delta 1 {early:.3f}, delta 2 {late:.3f}; the paper has the first much larger'
    return [
        Claim('hand-over: the early share (to slim) minus the late one (to the target)', 'paper', ABOVE_ZERO,
              rows, earlier, note=note,
              why='A token whose ratio is low mostly falls below both thresholds: the band between them is '
                  'narrow'),
        Claim("share of the target's own tokens minus that under the blended law pi", 'ours', ABOVE_ZERO,
              rows, selected, note='above 0, the gates hand on where it is needed',
              why='Slim is a part of the target and may doubt what the target does not')]


# ------------------------------------------------------------------------------ claims: drafters of each size

def drafter_texts(stored, name):
    """[dict(sd, via)] of Sums, a dict a text, with one drafter."""
    settings = settings_of(stored)
    texts = []
    for row in stored['drafters'].rows:
        found, cycles = row[name], row['cycles']
        drafting = found['drafted'] * settings['drafters'][name]
        sd = with_cost(found['sd']['tokens'], 0, cycles, cycles, drafting)
        ours = found['via']
        via = with_cost(ours['tokens'], ours['wrong'], ours['passes'], cycles,
                        drafting + cycles * settings['costs']['slim'])
        texts.append(dict(via=via, sd=sd))
    return texts


def gap_claims(stored):
    """The gap between draft and target: what slim adds to sd with drafters of several sizes."""
    names = list(settings_of(stored)['drafters'])
    small, large = 'the draft', names[-1]               # those before were not trained as they are
    texts = side_by_side(small=drafter_texts(stored, small), large=drafter_texts(stored, large))

    def wider(texts):
        return leads(of(texts, 'small')) / leads(of(texts, 'large'))
    return [Claim(f'gain of via over sd with {small} over that with {large}', 'paper', MORE, texts, wider,
                  note='modelled; by the paper wide gaps gain most',
                  why='Where the draft is often wrong slim asks the target, and the cycle pays both')]


# --------------------------------------------------------------------------------- claims: any pair's own

def lenient_replays(stored):
    """Lenient sd where it errs as often as via at its usual thresholds: blocks replayed, another pair's."""
    settings = settings_of(stored)
    rows = stored['replays'].rows
    if 'lenient' not in rows[0]:
        return []
    texts = []
    for row, ours in zip(rows, replayed(rows, settings)[USUAL]):
        drafting = row['places'] * settings['draft_cost']
        columns = row['lenient']
        lenient = []
        for tokens, wrong in zip(columns['tokens'], columns['wrong']):
            lenient.append(with_cost(tokens, wrong, row['cycles'], row['cycles'], drafting))
        texts.append(dict(via=ours, lenient=lenient, late=row['gates']['late'], places=row['places']))

    def figure(texts):
        """via's pace over that of the laxest lenient sd with no more wrong tokens."""
        ours = [text['via'] for text in texts]
        best = 0.0
        for sums in zip(*(text['lenient'] for text in texts)):
            if wrong_share(sums) <= wrong_share(ours):
                best = max(best, pace(sums))
        return pace(ours) / best if best else math.nan
    ours = [text['via'] for text in texts]
    late = sum(text['late'] for text in texts) / sum(text['places'] for text in texts)
    note = (f'replayed; {wrong_share(ours):.1%} wrong; {late:.1%} of the draft tokens go to the target, '
            f'{ratio(ours, "passes", "cycles"):.2f} full passes a cycle')
    return [Claim('modelled speed of via over lenient sd at as many wrong tokens', 'ours', 1.05, texts,
                  figure, note=note, why=ALSO_FORGIVES)]


def unseen_costs(rows):
    """{found, evenly, contiguous: R a token}; contiguous: the block that is best on these very rows."""
    tokens = sum(row['scored'] for row in rows)

    def cost(values):
        return sum(row['scored'] * value for row, value in zip(rows, values)) / tokens
    blocks = [cost(values) for values in zip(*(row['blocks'] for row in rows))]
    return dict(found=cost(row['found'] for row in rows), evenly=cost(row['evenly'] for row in rows),
                contiguous=min(blocks))


def unseen_claims(stored):
    """Whether the search pays: its mask against those that need none, on texts that it has not seen."""
    rows = stored['unseen'].rows

    def figure(rows):
        costs = unseen_costs(rows)
        return 1 - costs['found'] / min(costs['evenly'], costs['contiguous'])
    note = f'R a token: {listed(unseen_costs(rows))}; {len(rows[0]["blocks"])} blocks, the best in hindsight'
    return [Claim('F2 share of R that the mask found spares, of the best contiguous block or evenly spaced '
                  'layers, unseen texts', 'ours', 0.10, rows, figure, note=note, why=MANY_MASKS)]


def drafted_of(stored):
    """[{way of drafting: Drafted}], a dict a text."""
    return [by_name(row, DRAFTED, Drafted) for row in stored['drafting'].rows]


def drafting_claims(stored):
    """A target that drafts for itself, or looks up, against plain decoding."""
    texts = drafted_of(stored)
    ways = dict(
        lookup=(['lookup'], 'What was written before seldom comes again'),
        self=(['self, gamma 2', 'self, gamma 4'], 'A slim pass is a large part of a full one'))
    found = []
    for by, words in SPEEDS.items():
        for way, (names, why) in ways.items():
            best = max(names, key=functools.partial(speed, texts, by=by))
            note = f'{best}: {ratio(of(texts, best), "tokens", "cycles"):.2f} tokens a cycle'
            text = f'{words} speed of sd, --draft {way}, over plain decoding'
            figure = functools.partial(best_speed, names=names, by=by)
            found.append(Claim(text, 'ours', MORE, texts, figure, note=note, why=why))
    return found


def best_speed(texts, names, by):
    """The speed of the fastest of these over plain decoding's; which that is each resample says anew."""
    return max(speed(texts, name, by) for name in names) / speed(texts, 'ar', by)


# ------------------------------------------------------------------------------------------ claims: the audit

def audited_of(stored):
    """[{name: Audited}], a dict a text."""
    return [by_name(row, row['who'], Audited) for row in stored['audited'].rows]


def audit_names(texts):
    """The settings that run without a bound, too."""
    return [name for name in ('via', *BLIND.values()) if name in texts[0]]


def bounds_of(texts, name):
    """The bounds between 0 and 1 that this setting has run at."""
    return [bound for bound in BOUNDS[1:-1] if bounded(name, bound) in texts[0]]


def true_share(texts, name, among='tokens'):
    """The share of wrong tokens, of all or of those that another judged; 0 of none."""
    columns = of(texts, name)
    return total(columns, 'wrong') / max(1, total(columns, among))


def audited_share(texts, name):
    """What the audit says of those that another judged."""
    columns = of(texts, name)
    return total(columns, 'heard_wrong') / max(1, total(columns, 'heard'))


def audited_pace(texts, name, costs):
    """Tokens in the modelled time of a full pass; costs: of a draft pass and of a slim one."""
    columns = of(texts, name)
    draft, slim = costs
    spent = (total(columns, 'target_passes') + slim * total(columns, 'middle_passes')
             + draft * total(columns, 'draft_passes'))
    return total(columns, 'tokens') / spent


def audit_claims(stored):
    """What the audit is worth as an estimate, what a bound on it promises, and what that costs."""
    texts = audited_of(stored)
    settings = settings_of(stored)
    costs = settings['draft_cost'], settings['costs']['slim']
    found = []
    for name in audit_names(texts):
        found += audit_claims_of(texts, name, costs)
    return found


def audit_claims_of(texts, name, costs):
    """Those of via at one setting, by [{name: Audited}] a text."""
    bounds = bounds_of(texts, name)
    usual = bounded(name, USUAL_BOUND)

    def near(rows):
        return 1 - abs(audited_share(rows, name) - true_share(rows, name, 'others'))

    def kept(rows):
        return min(1.5 - true_share(rows, bounded(name, bound)) / bound for bound in bounds)

    def speed(other):
        return lambda rows: audited_pace(rows, usual, costs) / audited_pace(rows, other, costs)
    columns = of(texts, name)
    heard = total(columns, 'heard') / max(1, total(columns, 'others'))
    shares = {f'at {bound:g}': true_share(texts, bounded(name, bound)) for bound in bounds}
    return [
        Claim(f'audit, {name}: 1 less the distance of the audited share of wrong tokens from the true one',
              'ours', 0.98, texts, near,
              note=f'{audited_share(texts, name):.4f}, {true_share(texts, name, "others"):.4f}; it has '
                   f'read {heard:.0%} of the tokens that another judged', why=NEVER_READ),
        Claim(f'audit, {name}: 1.5 less the share of wrong tokens over most_wrong, the worst bound', 'ours',
              0.0, texts, kept, note=f'{listed(shares, ".4f")}; no bound: {true_share(texts, name):.4f}',
              why=NEVER_READ),
        Claim(f'audit, {name}: modelled speed at most_wrong {USUAL_BOUND:g} over none', 'ours', 0.95, texts,
              speed(name), why=EARNED),
        Claim(f'audit, {name}: modelled speed at most_wrong {USUAL_BOUND:g} over sd', 'ours', 1.0, texts,
              speed(bounded('via', 0)), why=EARNED)]


CLAIMS = (      # (records that are judged, function of {name: Stored} -> Claims)
    (('settings', 'runs'), rejection_claims), (('settings', 'runs'), speed_claims),
    (('settings', 'runs'), quality_claims), (('settings', 'runs'), tier_claims),
    (('settings', 'runs'), which_mask_claims), (('runs', 'gammas'), equal_claims),
    (('sampled',), sampled_claims), (('runs', 'replays'), all_middle_claims), (('search',), mask_claims),
    (('searches',), search_claims), (('unseen',), unseen_claims),
    (('settings', 'replays'), threshold_claims), (('settings', 'replays'), lenient_replays),
    (('settings', 'runs'), break_even_claims), (('masks',), ratio_claims),
    (('settings', 'replays'), geometry_claims), (('settings', 'replays'), hand_over_claims),
    (('drafters',), gap_claims), (('drafting',), drafting_claims), (('settings', 'audited'), audit_claims))


# ------------------------------------------------------------------------------------------------- the tables

def tables(stored):
    """The numbers behind the claims, of the records that are there."""
    found = []
    for needed, table in TABLES:
        if all_there(stored, needed):
            found.append(table(stored))
    return found


def task_table(stored):
    """The paper's first table: methods by task."""
    runs = runs_of(stored)
    parts = by_task(stored, runs)
    lines = []
    shown = 'sd', at('cascade', 0.1), at('cascade-opt', 0.1), at(LENIENT, 0.5), 'via', BARE
    for name in shown:
        if not having(runs, name):
            continue
        cells = []
        for every in parts.values():
            part = having(every, name)
            if not part:                                # too few texts were measured
                cells.append('')
                continue
            cell = f'{rejected(part, name):.2f}, {over(part, name, ["ar"], "work"):.2f}'
            if part[0]['ar'].right is not None:
                cell += f', {right_share(part, name):.2f}'
            cells.append(cell)
        lines.append((name, *cells, over(having(runs, name), name, ['ar'], 'seconds')))
    return PageTable(('rejection rate, modelled speed over ar, right', *parts, 'measured speed'), lines)


def cost_table(stored):
    """The paper's second table: what each method costs, wherever its middle stage is from."""
    runs = runs_of(stored)
    memory = settings_of(stored)['memory']
    lines = []
    for name in settings_of(stored)['rivals'][1:]:      # the first is ar
        texts = having(runs, name)
        speeds = [over(texts, name, ['ar'], by) for by in ('work', 'compute', 'seconds')]
        passes = [per_token(texts, name, who) for who in ('draft', 'middle', 'target')]
        quality = [rejected(texts, name), right_share(texts, name), alike(texts, name)]
        lines.append((name, len(texts), memory[name] / memory['sd'], *speeds, *quality, *passes))
    head = ('method', 'texts', 'peak memory: weights and caches, over those of sd', 'modelled speed over ar',
            'the same, compute-bound', 'measured', 'rejection rate', 'right', 'tokens as ar',
            'draft calls, positions a token', 'slim or middle', 'target')
    return PageTable(head, lines)


def sampled_table(stored):
    """Temperature 1."""
    texts = sampled_of(stored)
    lines = []
    for name in SAMPLED:
        columns = of(texts, name)
        nats = ratio(columns, 'nats', 'tokens')
        judged = total(columns, 'judged')
        rate = 1 - total(columns, 'accepted') / judged if judged else 0.0
        lines.append((name, over(texts, name, ['sd'], 'work'), rate, nats, right_share(texts, name)))
    head = ('at temperature 1', 'modelled speed over sd', 'rejection rate', 'nats a token, by the target',
            'right')
    return PageTable(head, lines)


def gamma_table(stored):
    """The fastest of each rule for each gamma, at MOST_WRONG wrong tokens on the even texts."""
    settings = settings_of(stored)
    found = options(stored['gammas'].rows, settings)
    lines = []
    for row in stored['gammas'].rows:
        line = [row['gamma']]
        for rule in found:
            of_gamma = [option for option in found[rule] if option.knobs['gamma'] == row['gamma']]
            best = fastest(of_gamma, MOST_WRONG)
            line.append(f'{best.pace:.2f} ({best.wrong:.1%})')
        lines.append(line)
    return PageTable(('gamma: tokens a full pass (wrong)', *found), lines)


def threshold_table(stored):
    """Replayed speed over sd, and the share of wrong tokens, at all thresholds."""
    settings = settings_of(stored)
    rows = stored['replays'].rows
    swept = replayed(rows, settings)
    plain = pace(exact(rows, settings))
    shown = [pair for pair in swept if pair[0] <= 1]    # the last is the target's text
    late = sorted({escalate for _, escalate in shown})
    lines = []
    for keep in sorted({keep for keep, _ in shown}):
        line = [keep]
        for escalate in late:
            sums = swept.get((keep, escalate))
            line.append(f'{pace(sums) / plain:.2f} ({wrong_share(sums):.1%})' if sums else '')
        lines.append(line)
    return PageTable(('keep', *(f'escalate {escalate}' for escalate in late)), lines)


def mask_table(stored):
    """Masks of as many layers as the one found, with a search and without."""
    settings = settings_of(stored)
    rows = {row['mask']: row for row in stored['search'].rows}
    done = at_masks(stored)
    matching = min(rows, key=lambda mask: cost_of(rows[mask], 'argmax'))
    chosen = dict(found=settings['mask']) | settings['plainer'] | {"best by SWIFT's objective": matching}
    ours = cost_of(rows[settings['mask']], 'violation')
    lines = []
    for how, mask in chosen.items():
        cost = cost_of(rows[mask], 'violation')
        speed = pace(done[mask]) if mask in done else math.nan
        lines.append((how, mask, cost, cost / ours, 1 - cost_of(rows[mask], 'argmax'), speed))
    costs = [cost_of(row, 'violation') for row in rows.values()]
    paces = [pace(done[mask]) for mask in settings['random']]
    alike = mean(1 - cost_of(row, 'argmax') for row in rows.values())
    lines.append((f'random, mean of {len(paces)}; cost: of all {len(rows)}', '', mean(costs),
                  mean(costs) / ours, alike, mean(paces)))
    head = (f'mask (the search: {settings["search_seconds"]} s, {settings["search_masks"]} masks)',
            'sublayers skipped', 'R a token', 'over the one found', 'likeliest tokens alike',
            'tokens a full pass, replayed')
    return PageTable(head, lines)


def sublayer_table(stored):
    """Where masks of half of the free sublayers lie among all of them."""
    every = stored['sublayers'].rows[0]
    seeds = stored['searches'].rows
    lines = [('best of all', every['quantiles'][0], '1')]
    for name in ('bayesian', 'random'):
        ranks = ', '.join(str(row[f'{name}_rank']) for row in seeds)
        lines.append((f'found by 60 evaluations, {name} (mean of {len(seeds)} seeds)',
                      mean(row[name] for row in seeds), ranks))
    for how, mask in every['layers'].items():
        lines.append((f'whole layers: {how}', mask['cost'], str(mask['rank'])))
    for share, place in ((5, 1), (25, 5), (50, 10), (75, 15)):
        lines.append((f'{share} % of all are cheaper than', every['quantiles'][place], ''))
    head = (f'{every["masks"]} masks, {every["windows"]} windows of {every["window"]} tokens', 'R a token',
            'rank')
    return PageTable(head, lines)


def drafter_table(stored):
    """Drafters of several sizes, replayed."""
    drafters = settings_of(stored)['drafters']
    lines = []
    for name, cost in drafters.items():
        texts = drafter_texts(stored, name)
        sd = of(texts, 'sd')
        via = of(texts, 'via')
        lines.append((name, cost, ratio(sd, 'tokens', 'cycles'), pace(sd), pace(via), leads(texts),
                      wrong_share(via)))
    head = ('drafter', 'size of the target', 'sd: tokens a cycle', 'tokens a pass', 'via: the same',
            'over sd', 'wrong')
    return PageTable(head, lines)


def unseen_table(stored):
    """Masks on texts that the search has not seen."""
    rows = stored['unseen'].rows
    lines = []
    for name, cost in unseen_costs(rows).items():
        lines.append((name, cost))
    head = (f'mask, on {len(rows)} texts', 'R a token')
    return PageTable(head, lines)


def drafting_table(stored):
    """A target without a draft model."""
    texts = drafted_of(stored)
    lines = []
    for name in DRAFTED:
        runs = of(texts, name)
        judged = total(runs, 'judged')
        rate = total(runs, 'accepted') / judged if judged else math.nan
        passes = [ratio(runs, kind, 'tokens') for kind in ('slim', 'full')]
        speeds = [over(texts, name, ['ar'], by) for by in ('work', 'seconds')]
        lines.append((name, len(texts), rate, ratio(runs, 'tokens', 'cycles'), *passes, *speeds,
                      right_share(texts, name)))
    head = ('without a draft model', 'texts', 'accepted', 'tokens a cycle', 'slim passes a token',
            'full passes a token', 'modelled speed over ar', 'measured', 'right')
    return PageTable(head, lines)


def audit_table(stored):
    """What the target read late, what it said, what is true; passes."""
    texts = audited_of(stored)
    settings = settings_of(stored)
    costs = settings['draft_cost'], settings['costs']['slim']
    one = audited_pace(texts, bounded('via', 0), costs)
    lines = []
    for name in texts[0]:
        columns = of(texts, name)
        tokens = total(columns, 'tokens')
        heard = total(columns, 'heard')
        nats = total(columns, 'heard_nats') / heard if heard else math.nan
        lines.append((name, heard / tokens, audited_share(texts, name), true_share(texts, name, 'others'),
                      true_share(texts, name), nats, total(columns, 'target_passes') / tokens,
                      total(columns, 'target_positions') / tokens, total(columns, 'middle_passes') / tokens,
                      audited_pace(texts, name, costs) / one, right_share(texts, name)))
    head = ('audit', 'tokens audited', 'wrong of these', 'wrong of all that another judged', 'wrong of all',
            'nats of the audited', 'full passes a token', 'positions', 'slim passes a token',
            'modelled speed over sd', 'right')
    return PageTable(head, lines)


TABLES = (      # (records, function of {name: Stored} -> PageTable)
    (('settings', 'runs'), task_table), (('settings', 'runs'), cost_table), (('sampled',), sampled_table),
    (('gammas',), gamma_table), (('settings', 'replays'), threshold_table), (('masks', 'search'), mask_table),
    (('sublayers', 'searches'), sublayer_table), (('drafters',), drafter_table),
    (('unseen',), unseen_table), (('drafting',), drafting_table), (('settings', 'audited'), audit_table))
