"""CM-ASD: its claims, and what `python -m lab.measure cmasd` stores beside the lists of this folder."""
import numpy
import pandas

from lab import judge
from lab.best.claims import answered, less_ar
from lab.judge import BEST_SD, PLAIN, area, estimate, knob, number, over, over_best_sd, plain_sd, settings
from lab.measure import Record, started
from verify import Exact, confidence_signals, decode, tokens_of

SOURCE = 'notes on the paper, which themselves quote its tables'
FAMILIES = 'math', 'table', 'story', 'translate', 'summary'
DEFAULT = 'cmasd gamma=10'
ADAPTIVE = [DEFAULT, 'cmasd gamma_tau=0.1', 'cmasd gamma_tau=1']
CONSTANT = [f'cmasd gamma_tau=0 tau_base={tau}' for tau in (0.3, 0.5, 0.7, 0.9)]
MEAN = [DEFAULT, 'cmasd gamma=8']
SAME_CYCLES = 'cmasd alpha=100 tau_base=1'      # those of `sd gamma=10`, which computes no confidences
LONGEST = range(3, 26)  # k_max of which the highest ceiling is taken
SURE = 0.9              # C from which a token is trivially right
BETTER = 1.02           # a line for "faster": smaller differences are not seen by the clock
SHOWN = [               # settings of the table by the clock
    'sd gamma=10', SAME_CYCLES, 'product', 'payoff', 'hf-confidence',
    *(f'cmasd gamma={k_max}' for k_max in (3, 4, 5, 8, 10, 15)), 'cmasd alpha=100', CONSTANT[0],
    'cmasd gamma=10 tau_base=1', 'cmasd gamma=10 lam_margin=0 lam_softmax=0',
    'cmasd gamma=10 lam_entropy=0 lam_softmax=0', 'cmasd gamma=10 lam_entropy=0 lam_margin=0']
OUR_LINE = '; the number is ours'
CLAIMS = {              # text: whose, rival, line
    'best setting: speed over plain decoding': (
        'notes: "4-5× decoding speedup on translation/summarization"', PLAIN, 4),
    'best setting: speed over `sd`': ('ours', BEST_SD, BETTER),
    'blocks ended by `product` or `payoff`, exact: speed over `sd`': ('ours', BEST_SD, BETTER),
    'default: accepted tokens a cycle': (
        'notes: "4.27 accepted tokens per iteration vs. 2.91 for baseline SpecDec"',
        '`sd gamma=10`, whose longest block is as long', 1.47),
    'the window, exact: speed over `sd`': (
        'notes: "reduces rollback frequency and improves throughput"' + OUR_LINE, BEST_SD, BETTER),
    'adaptive threshold: speed over a constant one': (
        'notes: "maintains output fidelity while improving acceptance rates"' + OUR_LINE,
        'the best constant tau, at the same k_max', BETTER),
    'mean of three signals: speed over one alone': (
        'notes: "more robust uncertainty signals than any single measure alone"' + OUR_LINE,
        'the best of three, at the same k_max', BETTER),
    "default: its tokens that are the target's choice": (
        'notes: "Over 87% output alignment with original model behavior maintained"', '', 0.87),
    'AUROC of C for acceptance': (
        'notes: "confidence measures correlate with actual verification success rates"' + OUR_LINE, '', 0.75),
    'default: right answers won or lost in 100 texts': (
        'notes: "maintaining or improving BLEU/ROUGE scores"' + OUR_LINE, PLAIN, -1)}


# --------------------------------------------------------------------------------------------- what is no run

def token_row(pair, prompt):
    """A row of columns, one value for each token of the target's own greedy text.

    hit: whether the draft's first choice is that token; signals: CM-ASD's three confidences [T, 3].
    """
    session = started(pair, 'sd', prompt)
    written = tokens_of(decode(session, Exact()))
    draft = session.drafter
    q = draft.read(session.tokens[:-1], draft.model.full, len(written)).float()                  # [T, V] raw
    hits = [int(guess == token) for guess, token in zip(q.argmax(-1).tolist(), written)]
    return prompt.name | dict(tokens=len(written), hit=hits,
                              signals=[list(confidence_signals(row[None])) for row in q])


RECORDS = dict(tokens=Record(lambda pair, n: pair.texts(FAMILIES, n),
                             lambda pair, prompt: [token_row(pair, prompt)], n=60))


# --------------------------------------------------------------------------------------------------- figures

def figures(pair):
    """Yields (text of a claim, its Estimate) of what the records of a pair allow."""
    frame, answers, rows = pair.clock, pair.frame('answers'), pair.rows('tokens')
    if frame is not None:
        mine, sd = settings(frame, 'cmasd'), plain_sd(frame)
        exact = [name for name in mine if knob(name, 'tau_base') == 1]
        yield ('best setting: speed over plain decoding',
               over(frame, mine, 'ar', ceiling=max(map(pair.ceiling, LONGEST))))
        yield 'best setting: speed over `sd`', over_best_sd(frame, mine)
        sides = {                                       # text: settings, their rivals
            'blocks ended by `product` or `payoff`, exact: speed over `sd`': (['product', 'payoff'], sd),
            'the window, exact: speed over `sd`': ([name for name in exact if name != SAME_CYCLES], sd),
            'adaptive threshold: speed over a constant one': (ADAPTIVE, CONSTANT),
            'mean of three signals: speed over one alone':
                (MEAN, [name for name in mine if name.count('lam_') == 2])}
        for text, (ours, rivals) in sides.items():
            ours, rivals = ([name for name in names if name in frame.setting.values]
                            for names in (ours, rivals))
            if ours and rivals:
                yield text, over(frame, ours, rivals)
        rival = frame[frame.setting == 'sd gamma=10']
        if len(rival):
            ceiling = 10 / (rival.kept.sum() / rival.cycles.sum())      # with all of ten tokens kept
            yield ('default: accepted tokens a cycle',
                   over(frame, DEFAULT, 'sd gamma=10', 'cycles', 'kept', ceiling=ceiling))
        default = frame[frame.setting == DEFAULT]
        if len(default):
            yield ("default: its tokens that are the target's choice",
                   judge.share(default.agreed, default.tokens))
    if rows:
        for by, below in ('all tokens: ', 2), (f'where C < {SURE}: ', SURE):
            yield 'AUROC of C for acceptance', confidence_area(rows, below, by=by)
    if answers is not None:
        right = judge.array(answers, 'right', [DEFAULT, 'ar'])
        yield 'default: right answers won or lost in 100 texts', judge.mean(100 * (right[:, 0] - right[:, 1]))
    on_gsm8k = answered(pair)
    if DEFAULT in on_gsm8k:
        yield 'default: right answers won or lost in 100 texts', less_ar(100 * on_gsm8k, DEFAULT)
        default = [row for row in pair.rows('answers', 'best') if row['setting'] == DEFAULT]
        yield ("default: its tokens that are the target's choice",
               judge.share([row['tokens'] - row['wrong'] for row in default],
                           [row['tokens'] for row in default], of='questions'))


def confidence_area(rows, below=2, **more):
    """The Estimate of C's AUROC for acceptance, of the tokens whose C is below a limit."""
    sure = [numpy.mean(row['signals'], 1) for row in rows]
    hits = [numpy.array(row['hit'], bool) for row in rows]
    figure = area([c[c < below] for c in sure], [hit[c < below] for c, hit in zip(sure, hits)])
    return estimate(figure, len(rows), **more)


# ---------------------------------------------------------------------------------------------------- tables

def tables(pairs):
    """Yields (title, frame), without verdicts."""
    found = [by_confidence(pair) for pair in pairs if pair.has('tokens')]
    yield 'Accepted draft tokens by C', pandas.DataFrame(found)
    for pair in pairs:
        if pair.has('clock'):
            frame = pair.frame('clock')
            shown = frame[frame.setting.isin(('ar', *SHOWN))]
            yield (f'{pair.name}, by the clock; over `sd` at its best gamma, of all families and of each',
                   judge.overview(shown, **in_families(frame)).iloc[1:])


def by_confidence(pair):
    """A row of a pair: how many tokens have a C below SURE; of each fifth of C, how many are accepted."""
    rows = pair.rows('tokens')
    sure = numpy.concatenate([numpy.mean(row['signals'], 1) for row in rows])
    hits = pandas.Series(numpy.concatenate([row['hit'] for row in rows]))
    fifths = hits.groupby(numpy.minimum(4, (5 * sure).astype(int))).agg(['mean', 'size'])
    cells = {f'C from {fifth / 5:g}': f'{number(mean)} of {n:.0f}' for fifth, (mean, n) in fifths.iterrows()}
    return {'pair': pair.name, f'tokens with C < {SURE}': f'{(sure < SURE).mean():.1%}'} | cells


def in_families(frame):
    """{family or `over sd`: a function of a setting: its speed over the best `sd` there}."""
    def over_there(theirs):
        return lambda name: over_best_sd(theirs, [name]).figure
    return {'over `sd`': lambda name: over_best_sd(frame, [name]).spread} | {
        family: over_there(theirs) for family, theirs in frame.groupby('family', sort=False)}
