"""VIA-SD's claims, judged by stored rows: real runs, replayed gates, masks, distances between laws.

Modelled speed: a pass costs the weight bytes that it reads, in passes of the full path; nothing else costs
anything. Compute-bound: each position of a pass costs them. p is the target's distribution, q the draft's,
s the slim verifier's.
"""
import bisect
import itertools
import operator
import statistics
from typing import NamedTuple

import scipy.stats

from lab.common import Claim, PageTable, mean, roc_area
from lab.via.rivals import blended_law

MORE = 1.005                    # a line for "better": a tie is none
ABOVE_ZERO = 1e-9               # a line for "above 0"
USUAL = 0.5, 0.3                # keep and escalate by default
CONSERVATIVE, AGGRESSIVE = (0.8, 0.6), (0.3, 0.1)
MOST_WRONG = 0.01               # share of wrong tokens that a tuned rule may write
CASCADES = 'cascade', 'cascade-opt', 'cascade-tokenv3'
TUNED, LENIENT = 'via, tuned', 'sd, lenient'
RANDOM, EVENLY = 'via, random masks', 'via, evenly spaced'
SPEEDS = dict(seconds='measured', work='modelled')      # figure of a Run: how its speed is called
MIDDLES = dict(                 # models for the middle
    mid='a model of its own', up='an upscaled drafter')
MEMORY_LINES = dict(mid=1.38 / 1.04, up=MORE)           # by the paper, of a model in the middle over slim
SPEED_LINES = dict(mid=2.32 / 2.08, up=MORE)            # of slim over a model in the middle
MEASURES = dict(KL='KL', R='R, alpha = beta = 1/2', strict='R, alpha 0, beta 1')     # of Delta

# why a claim may fail, where several share the reason
SLIM_IS_PAID = 'Every cycle pays for a slim pass, whether or not it spares the full one'
CALLS = 'in small models a pass costs its calls rather than its weights'
ALSO_FORGIVES = 'The rival forgives too, without a slim pass'
MANY_MASKS = 'The target was trained with layers left out at random: many masks serve it almost as well'
SOME_MASKS = 'The search tries only some of the masks, and may miss a better one'
TASKS_DIFFER = 'Tasks differ in the layers that they need: what is best over all may be poor on one'


# ----------------------------------------------------------------------------------- rows, as they are stored

class Run(NamedTuple):
    """What a rival did with a text. Passes and positions are by reader; middle: slim, or another model."""
    tokens: int
    judged: int                 # draft tokens that were looked at
    accepted: int
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
    """{name: kind} of columns {field of kind: [a value for each of the names]}."""
    fields = [columns[field] for field in kind._fields]
    return {name: kind(*values) for name, values in zip(names, zip(*fields))}


def runs_of(stored):
    """[{rival: Run}], a dict a text."""
    rivals = settings_of(stored)['rivals']
    found = []
    for row in stored['runs'].rows:
        columns = dict(row)
        if row['right'] is None:
            columns['right'] = [None] * len(rivals)
        found.append(by_name(columns, rivals, Run))
    return found


def by_task(stored, runs):
    """{task: its runs}."""
    found = {}
    for row, run in zip(stored['runs'].rows, runs):
        found.setdefault(row['task'], []).append(run)
    return found


def with_cost(tokens, wrong, passes, cycles, cycle_cost):
    """The Sums of a text; cycle_cost: what each cycle costs beside its full pass."""
    return Sums(tokens, wrong, passes, cycles, cycles * cycle_cost + passes)


def replayed(rows, settings):
    """{(keep, escalate): [Sums a text]} of via at all thresholds that were swept."""
    cycle_cost = settings['draft_cost'] + settings['costs']['slim']
    found = {tuple(pair): [] for pair in settings['pairs']}
    for row in rows:
        columns = row['via']
        for i, sums in enumerate(found.values()):
            numbers = columns['tokens'][i], columns['wrong'][i], columns['passes'][i]
            sums.append(with_cost(*numbers, row['cycles'], cycle_cost))
    return found


def lenient(rows, settings, hundredths):
    """[Sums a text] of lenient sd, which keeps y from p(y) / max p >= hundredths / 100 on; 100: exact."""
    found = []
    for row in rows:
        steps = row['lenient']                          # stored where they change
        i = bisect.bisect_right(steps['begin'], hundredths) - 1
        cycles = row['cycles']
        found.append(with_cost(steps['tokens'][i], steps['wrong'][i], cycles, cycles, settings['draft_cost']))
    return found


def at_masks(stored):
    """{mask: [Sums a text]} of via at its usual thresholds with every mask that was tried."""
    settings = settings_of(stored)
    found = {}
    for i, (mask, cost) in enumerate(settings['mask_costs'].items()):
        found[mask] = []
        for row in stored['masks'].rows:
            numbers = row['tokens'][i], row['wrong'][i], row['passes'][i]
            found[mask].append(with_cost(*numbers, row['cycles'], settings['draft_cost'] + cost))
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


# ----------------------------------------------------------------------- thresholds, chosen on the even texts

def fair_pairs(rows, settings):
    """[(keep, escalate)] at which at most MOST_WRONG of via's tokens are wrong on these rows."""
    swept = replayed(rows, settings)
    return [pair for pair, sums in swept.items() if wrong_share(sums) <= MOST_WRONG]


def choose(rows, settings):
    """dict(keep, escalate, lenient): what is fastest on the even rows at MOST_WRONG, and lenient sd like it.

    lenient: the lowest ratio, in hundredths, at which lenient sd writes no larger a share of wrong tokens.
    """
    even = rows[::2]
    swept = replayed(even, settings)
    fair = fair_pairs(even, settings)
    best = max(fair, key=lambda pair: pace(swept[pair]))
    allowed = wrong_share(swept[best])
    for hundredths in range(1, 101):
        if wrong_share(lenient(even, settings, hundredths)) <= allowed:
            break
    return dict(keep=best[0], escalate=best[1], lenient=hundredths)


# -------------------------------------------------------------------------------------- claims: the real runs

def claims(stored):
    """All claims of VIA-SD."""
    runs = runs_of(stored)
    found = rejection_claims(runs) + speed_claims(runs) + quality_claims(runs) + stage_claims(runs)
    found += equal_claims(stored, runs[1::2])
    for role in settings_of(stored)['middles']:
        found += middle_claims(stored, runs, role)
    found += mask_claims(stored) + search_claims(stored, runs)
    found += threshold_claims(stored) + ratio_claims(stored) + geometry_claims(stored)
    return found + hand_over_claims(stored) + gap_claims(stored)


def rejection_claims(runs):
    def below_sd(runs):
        return rejected(runs, 'sd') - rejected(runs, 'via')

    def below_cascades(runs):
        return min(rejected(runs, name) for name in CASCADES) - rejected(runs, 'via')
    return [
        Claim('rejection rate of sd minus that of via', 'paper', 0.10, runs, below_sd,
              note='a lenient gate rejects less by definition',
              why='Where the target itself rejects little, a gate finds little to forgive'),
        Claim('rejection rate of the best cascade minus that of via', 'paper', 0.10, runs, below_cascades,
              why='A cascade forgives too, wherever the draft is sure enough')]


def speed_claims(runs):
    found = []
    for by, words in SPEEDS.items():
        extra = f'; {CALLS}' if by == 'seconds' else ''
        found += [
            speed_claim(f'{words} speed of via over plain decoding', runs, ['ar'], by, 2.5,
                        why=f"Every cycle pays for the draft's passes and a slim one{extra}"),
            speed_claim(f'{words} speed of via over sd', runs, ['sd'], by, 1.10, why=SLIM_IS_PAID + extra),
            speed_claim(f'{words} speed of via over the fastest cascade', runs, CASCADES, by, 1.10,
                        why=ALSO_FORGIVES + extra)]
    calls = per_token(runs, 'via', 'target')
    calls_of_sd = per_token(runs, 'sd', 'target')
    found.append(speed_claim(
        'modelled speed of via over sd, compute-bound: a pass costs its positions', runs, ['sd'], 'compute',
        MORE, whose='ours', note=f'target calls, positions a token: {calls}; of sd {calls_of_sd}',
        why='What slim kept the target reads later all the same, as the lag'))
    return found


def speed_claim(text, runs, others, by, line, whose='paper', **more):
    """A Claim on via's speed over that of the fastest of the others."""
    def figure(runs):
        return over(runs, 'via', others, by)
    return Claim(text, whose, line, runs, figure, **more)


def quality_claims(runs):
    graded = [run for run in runs if run['ar'].right is not None]

    def gained(other):
        def figure(runs):
            return right_share(runs, 'via') - right_share(runs, other)
        return figure
    right = right_share(graded, 'ar')
    note = f"{right:.3f} of {len(graded)} right; {alike(runs, 'via'):.1%} of tokens as plain decoding's"
    return [
        Claim('share of right texts, via minus plain decoding', 'paper', -0.01, graded, gained('ar'),
              note=note,
              why="A token that slim kept against the target's choice may be what the answer hangs on"),
        Claim('share of right texts, mask found minus random masks', 'paper', 0.32 - 0.29, graded,
              gained(RANDOM),
              why='What a poorer slim doubts goes to the target, so that a poor mask costs speed rather than '
                  'answers')]


def stage_claims(runs):
    """How many stages, and which mask."""
    speeds = []
    for name in ('sd', 'via', 'via-tiers'):
        speeds.append(f'{over(runs, name, ["ar"], "work"):.2f}')
    return [
        speed_claim('modelled speed of 3 stages over the better of 2 and 4', runs, ['sd', 'via-tiers'],
                    'work', 1.0, note='2, 3, 4 stages of nested masks: ' + ', '.join(speeds),
                    why='Each stage costs a pass in every cycle that asks it, and stages are alike in what '
                        'they doubt'),
        speed_claim('modelled speed with the mask found over random masks', runs, [RANDOM], 'work',
                    2.32 / 1.62, why=MANY_MASKS),
        speed_claim('F2 modelled speed with the mask found over evenly spaced layers', runs, [EVENLY], 'work',
                    MORE, whose='ours', why=MANY_MASKS)]


def equal_claims(stored, runs):
    """F1 end to end: via at the thresholds that were chosen on even texts, run on odd ones."""
    choice = settings_of(stored)['choice']
    right = {name: right_share(runs, name) for name in ('sd', TUNED, LENIENT)}
    shares = {name: alike(runs, name) for name in (TUNED, LENIENT)}
    over_sd = over(runs, TUNED, ['sd'], 'work')
    over_lenient = over(runs, TUNED, [LENIENT], 'work')
    notes = dict(seconds=f'{chosen(choice)}; right {listed(right)}',
                 work=f'over each: {over_sd:.3f}, {over_lenient:.3f}')

    def faster(by):
        def figure(runs):
            return over(runs, TUNED, ['sd', LENIENT], by)
        return figure

    def closer(runs):
        return alike(runs, TUNED) - alike(runs, LENIENT)
    found = []
    for by, words in SPEEDS.items():
        text = f'F1 {words} speed of tuned via over the better of sd and lenient sd'
        found.append(Claim(text, 'ours', 1.05, runs, faster(by), note=notes[by], why=ALSO_FORGIVES))
    found.append(Claim("F1 share of tokens as plain decoding's, tuned via minus lenient sd", 'ours', -0.01,
                       runs, closer, note=listed(shares),
                       why="Both were tuned on the target's own text; behind a wrong token each goes its own "
                           'way'))
    return found


def chosen(choice):
    """The thresholds of via and of lenient sd, in words."""
    return f'keep {choice["keep"]}, escalate {choice["escalate"]}, lenient from {choice["lenient"] / 100}'


def middle_claims(stored, runs, role):
    """F3: the slim path against a model of its own in the middle."""
    settings = settings_of(stored)
    words = MIDDLES[role]
    costs = settings['costs']
    near = min(('slim', 'slim5'), key=lambda name: abs(costs[name] - costs[role]))     # of like cost
    name = f'via-{role}'

    def more_memory(rows):
        return rows[0][name] / rows[0]['sd']

    def faster(runs):
        return over(runs, 'via', [name], 'work')
    right = right_share(runs, 'via')
    right_there = right_share(runs, name)
    return [
        Claim(f'memory with {words} over that with slim', 'paper', MEMORY_LINES[role], [settings['memory']],
              more_memory, note='weights and caches over those of sd; slim shares both with the target: 1.00',
              sampled=False,
              why='A model in the middle is smaller than the target, which both ways keep in memory'),
        distance_claim(stored['replays'].rows, 'TV', role, near, costs),
        distance_claim(stored['replays'].rows, 'R', role, near, costs),
        Claim(f'modelled speed of via over the same with {words}', 'paper', SPEED_LINES[role], runs, faster,
              note=f'right {right:.3f} and {right_there:.3f}',
              why='A model in the middle may be of any size; slim needs most of the layers to be of use')]


def distance_claim(rows, measure, role, near, costs):
    """That slim (`near`, of like cost) is nearer to the target than the model in the middle."""
    def further(rows):
        return per_place(rows, 'apart', measure, role) - per_place(rows, 'apart', measure, near)
    ours = per_place(rows, 'apart', measure, near)
    theirs = per_place(rows, 'apart', measure, role)
    note = f'{theirs:.4f}, {ours:.4f}; a pass reads {costs[role]:.2f}, {costs[near]:.2f} of the target'
    return Claim(f'F3 {measure} to the target, {MIDDLES[role]} minus slim', 'paper', ABOVE_ZERO, rows,
                 further, note=note,
                 why='A model that was trained at its size may be nearer than one with layers taken out')


# -------------------------------------------------------------------------------- claims: masks, their search

def cost_of(row, objective):
    """A mask's cost on all calibration texts."""
    return mean(itertools.chain.from_iterable(row[objective].values()))


def mask_claims(stored):
    """F2: the mask that was found against all masks of its size, even spacing and another objective."""
    settings = settings_of(stored)
    rows = stored['search'].rows
    found = settings['mask']
    costs = {row['mask']: cost_of(row, 'violation') for row in rows}
    differing = {row['mask']: cost_of(row, 'argmax') for row in rows}
    match = min(differing, key=differing.get)
    least = min(costs, key=costs.get)

    def over_found(mask):
        def figure(rows):
            by_mask = {row['mask']: row for row in rows}
            return cost_of(by_mask[mask], 'violation') / cost_of(by_mask[found], 'violation')
        return figure

    def typical(rows):
        """{task: the median mask's cost over that of the mask found}."""
        return {task: typical_cost(rows, task, found) for task in rows[0]['violation']}

    def worst(rows):
        return min(typical(rows).values())
    evenly = settings['evenly']
    of_all = mean(costs.values()) / costs[found]
    agreement = f'{1 - differing[match]:.1%}, {1 - differing[found]:.1%}'
    by_task = ', '.join(f'{task} {cost:.2g}' for task, cost in typical(rows).items())
    return [
        Claim('F2 cost of evenly spaced over the mask found', 'ours', 1.0, rows, over_found(evenly),
              note=f'R a token; random masks on average {of_all:.2f}', sampled=False, why=SOME_MASKS),
        Claim("F2 cost of the mask that SWIFT's objective finds over the mask found", 'ours', 1.0, rows,
              over_found(match), note=f'R a token; likeliest tokens alike: {agreement}', sampled=False,
              why=SOME_MASKS),
        Claim(f'F2 cost of the best of all {len(rows)} masks over the mask found', 'ours', 1 / 1.05, rows,
              over_found(least), note='within 5 % of the optimum', sampled=False, why=SOME_MASKS),
        Claim('one mask for all: cost of the median mask over the one found, worst task', 'paper', 1, rows,
              worst, note=by_task, sampled=False, why=TASKS_DIFFER)]


def typical_cost(rows, task, found):
    """The median mask's cost on a task's calibration texts over that of the mask found."""
    costs = {row['mask']: mean(row['violation'][task]) for row in rows}
    return statistics.median(costs.values()) / max(costs[found], 1e-9)


def search_claims(stored, runs):
    """What the search took, and whether its Bayesian half is worth it."""
    settings = settings_of(stored)
    rows = stored['searches'].rows
    spent = settings['search_seconds']
    saved = (total(of(runs, 'sd'), 'seconds') - total(of(runs, 'via'), 'seconds')) / len(runs)
    pays = f'after {spent / saved:,.0f} texts' if saved > 0 else 'never'

    def cheaper(rows):
        return 18 * 60 / rows[0]['search_seconds']

    def better(rows):
        return mean(row['random'] for row in rows) / mean(row['bayesian'] for row in rows)
    tried = settings['search_masks']
    return [
        Claim("the search's cost: the paper's 18 minutes over its own", 'paper', 1, [settings], cheaper,
              note=f'{spent} s for {tried} masks, earned back {pays} ({saved:.4f} s a text)', sampled=False,
              why='Each mask that is tried costs a pass over all calibration texts'),
        Claim('F2 cost by random search over Bayesian, 60 evaluations', 'ours', 1.0, rows, better,
              note=f'{rows[0]["skipped"]} of {rows[0]["sublayers"]} sublayers, {len(rows)} seeds',
              why='Half of the Bayesian masks are random too, and the costs of a few say little of how '
                  'sublayers work together')]


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
    """F1, F5: what was chosen on even texts, replayed on odd ones; the paper's thresholds among others."""
    settings = settings_of(stored)
    rows = stored['replays'].rows
    choice = settings['choice']
    swept = replayed(rows, settings)
    exact = lenient(rows, settings, 100)
    paces = []
    for pair in (USUAL, CONSERVATIVE, AGGRESSIVE):
        paces.append(f'{pace(swept[pair]) / pace(exact):.3f} ({wrong_share(swept[pair]):.2%})')
    published = side_by_side(usual=swept[USUAL], conservative=swept[CONSERVATIVE],
                             aggressive=swept[AGGRESSIVE])
    texts = side_by_side(via=swept[choice['keep'], choice['escalate']], sd=exact,
                         lenient=lenient(rows, settings, choice['lenient']))
    odd = texts[1::2]
    wrong = f'{wrong_share(of(odd, "via")):.2%}, {wrong_share(of(odd, "lenient")):.2%}'
    return [
        Claim('modelled speed at 0.5, 0.3 over 0.8, 0.6 (conservative) and 0.3, 0.1 (aggressive)', 'paper',
              1.0, published, leads, note='over sd (wrong tokens): ' + ', '.join(paces),
              why='A laxer gate asks the target less: by speed alone the laxest wins'),
        Claim('F1 replayed speed over the better of sd and lenient sd at equal wrong tokens', 'ours', 1.05,
              odd, leads, note=f'{chosen(choice)}; wrong: {wrong}', why=ALSO_FORGIVES),
        break_even_claim(settings, rows)]


def break_even_claim(settings, rows):
    """F5, at the fair thresholds that ask the target least often on even texts."""
    slim_cost = settings['costs']['slim']
    even = replayed(rows[::2], settings)
    pair = min(fair_pairs(rows[::2], settings), key=lambda pair: ratio(even[pair], 'passes', 'cycles'))

    def margin(sums):
        return 1 - slim_cost - ratio(sums, 'passes', 'cycles')
    return Claim('F5 break-even minus full passes a cycle', 'ours', ABOVE_ZERO,
                 replayed(rows[1::2], settings)[pair], margin,
                 note=f'keep {pair[0]}, escalate {pair[1]}; a slim pass costs {slim_cost:.2f}',
                 why='A slim pass is a large part of a full one, and one doubtful token in a block asks for '
                     'both')


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
        foretold_claim(stored, done, 'R', '(0.5, 0.5)'),
        foretold_claim(stored, done, 'strict', '(0, 1)'),
        one_mask_claim(stored, done)]


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
    exact = lenient(rows, settings, 100)
    texts = []
    for row, ours, theirs in zip(rows, via, exact):
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
    draft_cost = settings['drafters'][name]
    texts = []
    for row in stored['drafters'].rows:
        found, cycles = row[name], row['cycles']
        sd = with_cost(found['sd_tokens'], 0, cycles, cycles, draft_cost)
        via = with_cost(found['tokens'], found['wrong'], found['passes'], cycles,
                        draft_cost + settings['costs']['slim'])
        texts.append(dict(via=via, sd=sd))
    return texts


def gap_claims(stored):
    """The gap between draft and target: what slim adds to sd with drafters of several sizes."""
    names = list(settings_of(stored)['drafters'])
    if len(names) > 2:
        names = names[1:]                               # the first was not trained as it is
    small, large = names[0], names[-1]
    texts = side_by_side(small=drafter_texts(stored, small), large=drafter_texts(stored, large))

    def wider(texts):
        return leads(of(texts, 'small')) / leads(of(texts, 'large'))
    return [Claim(f'gain of via over sd with {small} over that with {large}', 'paper', MORE, texts, wider,
                  note='modelled; by the paper wide gaps gain most',
                  why='Where the draft is often wrong slim asks the target, and the cycle pays both')]


# ------------------------------------------------------------------------------------------------- the tables

def tables(stored):
    """The numbers behind the claims."""
    runs = runs_of(stored)
    of_runs = [task_table(stored, runs), cost_table(stored, runs)]
    return of_runs + [threshold_table(stored), drafter_table(stored)]


def task_table(stored, runs):
    """The paper's first table: methods by task."""
    parts = by_task(stored, runs)
    controls = [RANDOM, EVENLY, 'via-mid', 'via-up']    # they are in the second table
    lines = []
    for name in runs[0]:
        if name == 'ar' or name in controls:
            continue
        cells = []
        for part in parts.values():
            cell = f'{rejected(part, name):.2f}, {over(part, name, ["ar"], "work"):.2f}'
            if part[0][name].right is not None:
                cell += f', {right_share(part, name):.2f}'
            cells.append(cell)
        lines.append((name, *cells, over(runs, name, ['ar'], 'seconds')))
    return PageTable(('rejection rate, modelled speed over ar, right', *parts, 'measured speed'), lines)


def cost_table(stored, runs):
    """The paper's second table: what each method costs, wherever its middle stage is from."""
    memory = settings_of(stored)['memory']
    lines = []
    for name in runs[0]:
        if name == 'ar':
            continue
        speeds = [over(runs, name, ['ar'], by) for by in ('work', 'compute', 'seconds')]
        passes = [per_token(runs, name, who) for who in ('draft', 'middle', 'target')]
        quality = [rejected(runs, name), right_share(runs, name), alike(runs, name)]
        lines.append((name, memory[name] / memory['sd'], *speeds, *quality, *passes))
    head = ('method', 'peak memory: weights and caches, over those of sd', 'modelled speed over ar',
            'the same, compute-bound', 'measured', 'rejection rate', 'right', 'tokens as ar',
            'draft calls, positions a token', 'slim or middle', 'target')
    return PageTable(head, lines)


def threshold_table(stored):
    """Replayed speed over sd, and the share of wrong tokens, at all thresholds."""
    settings = settings_of(stored)
    rows = stored['replays'].rows
    swept = replayed(rows, settings)
    exact = pace(lenient(rows, settings, 100))
    shown = [pair for pair in swept if pair[0] <= 1]    # the last is the target's text
    late = sorted({escalate for _, escalate in shown})
    lines = []
    for keep in sorted({keep for keep, _ in shown}):
        line = [keep]
        for escalate in late:
            sums = swept.get((keep, escalate))
            line.append(f'{pace(sums) / exact:.2f} ({wrong_share(sums):.1%})' if sums else '')
        lines.append(line)
    return PageTable(('keep', *(f'escalate {escalate}' for escalate in late)), lines)


def drafter_table(stored):
    """Drafters of several sizes, replayed."""
    drafters = settings_of(stored)['drafters']
    gamma = settings_of(stored)['gamma']
    lines = []
    for name, cost in drafters.items():
        texts = drafter_texts(stored, name)
        sd = of(texts, 'sd')
        via = of(texts, 'via')
        lines.append((name, cost / gamma, ratio(sd, 'tokens', 'cycles'), pace(sd), pace(via), leads(texts),
                      wrong_share(via)))
    head = ('drafter', 'size of the target', 'sd: tokens a cycle', 'tokens a pass', 'via: the same',
            'over sd', 'wrong')
    return PageTable(head, lines)
