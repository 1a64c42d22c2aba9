"""What is measured for CM-ASD: `python -m lab.claims cmasd` stores it, lab/cmasd/claims.py judges it.

Prompts are those of at most 300 tokens of five families. `python -m lab.cmasd.record "A prompt"` draws a
cycle.
"""
import copy
import sys
import time
from collections import Counter
from statistics import fmean
from types import SimpleNamespace

import torch
from tqdm import tqdm

import lab.cmasd.rivals                                 # noqa: F401, enters the rivals in METHODS
from lab import tasks
from lab.cmasd.claims import (FAMILIES, GAINS, LONGEST_WINDOWS, SIGNALS, TAUS, WARM_SUMS, WARM_TAUS,
                              WINDOWS, Costs, texts_of)
from lab.common import embedded, read_stored
from lab.replay import Replay, columns, modelled_seconds, open_session, pass_costs, short_prompts, written
from verify import CONTROLLERS, METHODS, CmAsd, Draft, Exact, Score, decode, token_logps, tokens_of

SEEDS = 3
WINDOW = 7                                              # tokens, where a window is fixed
DIGITS = 4                                              # decimals of a stored signal


def texts(n):
    """[(family, row, prompt ids)] of n prompts of each family, always in this order."""
    found = []
    for family in FAMILIES:
        for row, ids in short_prompts(family, n):
            found.append((family, row, ids))
    return found


# -------------------------------------------------------------------------------- rules that are replayed

def one_signal(name, **knobs):
    """CM-ASD whose confidence is one of the signals alone."""
    weights = dict(lam_entropy=0.0, lam_margin=0.0, lam_softmax=0.0)
    weights[f'lam_{name}'] = 1.0
    return CmAsd(**weights, **knobs)


def strict_rules():
    """{name: method}: rules with which every text is the target's, so that only the length counts."""
    rules = {f'fixed {k}': Exact(k) for k in range(1, 26)}
    for alpha in (0.5, 1.0, 2.0):
        for k_max in LONGEST_WINDOWS:
            rules[f'online {alpha} {k_max}'] = CmAsd(alpha=alpha, k_max=k_max, accept_='strict')
    for name in SIGNALS:
        rules[f'{name} alone'] = one_signal(name, accept_='strict')
    return rules


def relaxed_rules():
    """{name: method}: the default knobs, the paper's two sweeps crossed, other rules, constant thresholds."""
    rules = dict(default=CmAsd())
    for gain in GAINS:
        for k_max in LONGEST_WINDOWS:
            rules[f'gamma_tau {gain} k_max {k_max}'] = CmAsd(gamma_tau=gain, k_max=k_max)
    for name in SIGNALS:
        rules[f'{name} alone'] = one_signal(name)
    for name in ('cmasd-prob', 'cmasd-specdec', 'cmasd-typical'):
        rules[name] = METHODS[name]()
    for tau in TAUS:
        rules[f'tau {tau}'] = constant(tau)
    return rules


def windowed_rules():
    """{name: method}: relaxed rules with fixed windows, for thresholds to be compared at any window."""
    rules = {f'adaptive tau, fixed {WINDOW}': CmAsd(WINDOW, controller='fixed')}
    for tau in TAUS:
        for window in WINDOWS:
            rules[f'tau {tau}, fixed {window}'] = constant(tau, window)
    return rules


def constant(tau, window=None):
    """CM-ASD with the same tau everywhere; window: tokens, where it is fixed too."""
    if window is None:
        return CmAsd(tau_base=tau, gamma_tau=0)
    return CmAsd(window, tau_base=tau, gamma_tau=0, controller='fixed')


def looks(method):
    """Whether a rule needs the draft's confidence, and so has to pay for it."""
    if not isinstance(method, CmAsd):
        return False
    adapts = method.gamma_tau > 0 and method.accept_ != 'strict'
    return adapts or method.controller == 'online'


STRICT = strict_rules()
RULES = relaxed_rules()
WINDOWED = windowed_rules()
ROUNDED = {'strict, online': CmAsd(accept_='strict'), 'default': CmAsd()}     # replayed with 4-bit models
SAMPLED = dict(plain=Exact(0), default=CmAsd(), typical=METHODS['typical'](WINDOW))     # at temperature 1
for warm_tau in WARM_TAUS:
    SAMPLED[f'tau {warm_tau}'] = constant(warm_tau)


# ------------------------------------------------------------------------------------------ replayed texts

def grams(text, n):
    """Counter of the character n-grams of a text."""
    return Counter(text[i:i + n] for i in range(len(text) - n + 1))


def chrf(text, reference, order=6):
    """Mean F1 of the character n-grams of two texts, n = 1 to 6.

    Source: Popović 2015 (chrF), with beta 1.
    """
    if text == reference:
        return 1.0
    scores = []
    for n in range(1, order + 1):
        mine = grams(text, n)
        theirs = grams(reference, n)
        shared = (mine & theirs).total()
        scores.append(2 * shared / max(1, mine.total() + theirs.total()))
    return fmean(scores)


def steps_worth(drafted):
    """The modelled time of these cycles, in steps of plain decoding (target passes of one position)."""
    _, target = pass_costs()
    return modelled_seconds(drafted) / target[1]


def alignment(text, reference):
    """The share of places at which two lists of ids agree, of the longer one's."""
    same = sum(a == b for a, b in zip(text, reference))
    return same / max(len(text), len(reference))


def as_number(grade):
    """1 or 0 for a grade; None where nothing could be graded."""
    return None if grade is None else int(grade)


def strict_sums(run):
    """What a strict Run is judged by, in the order of lab.cmasd.claims.STRICT_SUMS."""
    return [sum(run.kept), len(run.kept), sum(run.drafted), steps_worth(run.drafted)]


def sums_of(run, method, row, plain):
    """What a Run is judged by, in the order of lab.cmasd.claims.SUMS; plain: the ids of the target's text."""
    to_text = embedded('target')[1].decode
    text = to_text(list(run.text))
    rolled_back = sum(kept < drafted for kept, drafted in zip(run.kept, run.drafted))
    looked = sum(run.drafted) if looks(method) else 0
    return [*strict_sums(run), looked, len(run.text), rolled_back, alignment(run.text, plain),
            chrf(text, to_text(list(plain))), as_number(tasks.grade(row, text))]


def bits(flags):
    """A list of flags as a text of 1 and 0: a character each, where stored JSON would take six."""
    return ''.join(str(int(flag)) for flag in flags)


def windowed_sums(run, plain):
    """What a Run with a fixed window is judged by, in the order of lab.cmasd.claims.WINDOWED_SUMS."""
    return [sum(run.kept), len(run.kept), sum(run.drafted), len(run.text), alignment(run.text, plain)]


def rule_rows(n):
    """One row: the names of the rules of replayed, in the order of its sums."""
    yield dict(strict=list(STRICT), runs=list(RULES), windowed=list(WINDOWED))


def replayed_row(family, row, ids):
    """Of one prompt: every rule's sums, and along the target's own text each token's signals and its hit.

    A hit: the draft's favourite is the target's, which is when the strict rule keeps it.
    """
    replay = Replay(ids)
    plain = replay.text
    strict = [strict_sums(replay.run(method)) for method in STRICT.values()]
    runs = [sums_of(replay.run(method), method, row, plain) for method in RULES.values()]
    windowed = [windowed_sums(replay.run(method), plain) for method in WINDOWED.values()]
    signals = dict(entropy=[], margin=[], softmax=[])
    hits = []
    for i in range(len(plain)):
        place = replay.place(plain[:i])
        hits.append(place.token == place.pick)
        for name, value in zip(SIGNALS, place.signals):
            signals[name].append(round(value, DIGITS))
    right = tasks.grade(row, embedded('target')[1].decode(list(plain)))
    return dict(family=family, tokens=len(plain), right=as_number(right), strict=strict, runs=runs,
                windowed=windowed, signals=signals, hits=bits(hits))


def replayed_rows(n):
    for text in tqdm(texts(n), desc='replayed'):
        yield replayed_row(*text)


def rounded_rows(n):
    """Of each prompt {model that is rounded to 4 bits: {rule: [kept, cycles]}}."""
    for _, _, ids in tqdm(texts(n), desc='4 bits'):
        found = {}
        for role in ('draft', 'target'):
            replay = Replay(ids, role)
            found[role] = {}
            for name, method in ROUNDED.items():
                run = replay.run(method)
                found[role][name] = [sum(run.kept), len(run.kept)]
        yield found


# ---------------------------------------------------------------------------------------------- real runs

def answer_rows(n):
    """Of ten times as many texts of math, whether plain decoding and the default are right."""
    to_text = embedded('target')[1].decode
    for row, ids in tqdm(short_prompts('math', 10 * n), desc='answers'):
        replay = Replay(ids)
        texts = dict(plain=replay.text, default=replay.run(CmAsd()).text)
        yield {name: as_number(tasks.grade(row, to_text(list(text)))) for name, text in texts.items()}


def word_rows(n):
    """Of texts that are compared with a reference: its counts for BLEU, its ROUGE-L.

    plain, default: those rules' text against the reference; alike: the default's against plain decoding's.
    """
    to_text = embedded('target')[1].decode
    for family in ('translate', 'summary'):
        for row, ids in tqdm(short_prompts(family, n), desc=f'words, {family}'):
            replay = Replay(ids)
            plain = to_text(list(replay.text)).strip()
            default = to_text(list(replay.run(CmAsd()).text)).strip()
            pairs = dict(plain=(row['answer'], plain), default=(row['answer'], default),
                         alike=(plain, default))
            bleu = {name: tasks.bleu_counts([reference], text) for name, (reference, text) in pairs.items()}
            rouge = {name: tasks.rouge_l(reference, text) for name, (reference, text) in pairs.items()}
            yield dict(family=family, bleu=bleu, rouge=rouge)


def sampled_rows(n):
    """Of each prompt {rule: {sum: a number a seed}}, at temperature 1.

    nats: the target's of the text, at temperature 1. The default has SEEDS seeds, the other rules one, on a
    half of the prompts.
    """
    for place, (_, row, ids) in enumerate(tqdm(texts(n), desc='sampled')):
        found = {}
        for name, method in SAMPLED.items():
            if name == 'default':
                runs = [sampled_sums(method, row, ids, seed) for seed in range(SEEDS)]
            elif place % 2 == 0:
                runs = [sampled_sums(method, row, ids, 0)]
            else:
                continue
            found[name] = dict(zip(WARM_SUMS, zip(*runs)))
        yield found


def sampled_sums(method, row, ids, seed):
    """The sums, in the order of WARM_SUMS, of one text at temperature 1."""
    session = open_session(ids)
    cycles = written(session, ids, method, 1.0, seed)
    tokens = tokens_of(cycles)
    drafted = [len(cycle.drafted) for cycle in cycles]
    target = open_session(ids).target
    logits = target.read(ids, tokens[:-1], target.model.full, len(tokens))
    nats = -float(token_logps(logits, tokens).sum())
    looked = sum(drafted) if looks(method) else 0
    right = tasks.grade(row, embedded('target')[1].decode(tokens))
    return [sum(cycle.accepted for cycle in cycles), len(cycles), steps_worth(drafted), looked, len(tokens),
            nats, as_number(right)]


def dropout_row(ids):
    """A strict run of cmasd-dropout, whose text is therefore the replayed one's, token by judged token.

    places: where in the text; confidence and mean: what dropout says there; kept: the verdicts.
    positions: what the draft read as usual, and what it read once more for the confidence.
    """
    method = METHODS['cmasd-dropout'](accept_='strict')
    places, confidence, mean, kept = [], [], [], []
    positions = Counter()
    begin = 0
    for cycle in written(open_session(ids), ids, method):
        for i, judged in enumerate(cycle.judged):
            places.append(begin + i)
            confidence.append(round(judged['confidence'], DIGITS))
            mean.append(round(judged['mean'], DIGITS))
            kept.append(judged['kept'])
        for path, (_, n, _) in cycle.passes.items():
            positions[path] += n
        begin += len(cycle.tokens)
    return dict(tokens=begin, places=places, confidence=confidence, mean=mean, kept=bits(kept),
                positions=[positions['draft/full'], positions['draft/full dropout']])


def dropout_rows(n):
    for _, _, ids in tqdm(texts(n), desc='dropout'):
        yield dropout_row(ids)


def controller_run(session, ids, name):
    """The sums of a strict run."""
    method = Exact(0) if name == 'plain' else Exact(WINDOW, controller=name)
    trace = written(session, ids, method)
    drafted = [len(cycle.drafted) for cycle in trace]
    return dict(kept=sum(cycle.accepted for cycle in trace), cycles=len(trace), drafted=sum(drafted),
                tokens=len(tokens_of(trace)), steps=steps_worth(drafted),
                seconds=sum(cycle.seconds for cycle in trace))


def controller_rows(n):
    """Of half of the prompts {controller: its controller_run}, 'plain' for plain decoding.

    All take turns on each text, so that what else the machine does falls on all. What one has learned ends
    with the text; Hugging Face's two that learn go on from it in the next.
    """
    for family, _, ids in tqdm(texts(max(1, n // 2)), desc='controllers'):
        session = open_session(ids)
        found = {name: controller_run(session, ids, name) for name in ('plain', *CONTROLLERS)}
        yield dict(family=family) | found


def paired_rows(n, turns=3):
    """Of half of the prompts the processor's seconds of the task's best fixed window and of its best online.

    Which are best says what was replayed. They take turns; of each text the least time counts.
    """
    stored = {name: read_stored('cmasd', name) for name in ('rules', 'replayed', 'own_cost')}
    replayed = texts_of(stored, Costs(stored['own_cost'].rows))
    for family, _, ids in tqdm(texts(max(1, n // 2)), desc='paired'):
        session = open_session(ids)
        row = dict(family=family, fixed=[], online=[])
        for _ in range(turns):
            for kind in ('fixed', 'online'):
                method = STRICT[replayed.of(family).best(kind)]
                row[kind].append(cpu_seconds(written, session, ids, method))
        yield dict(family=family, fixed=min(row['fixed']), online=min(row['online']))


# -------------------------------------------------------------------------------------------------- costs

def cpu_seconds(function, *args):
    """The processor's seconds that a call takes."""
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


def end_of_cycle(control, block, cycle):
    """What a controller does once in a cycle."""
    control.trim(block)
    control.learn(block, cycle)


def own_cost_rows(n, rounds=100):
    """Round by round the processor's seconds of what controllers themselves take, and of a target pass.

    token: {controller: for one token}, a mean over a block of 4, each token's behind its draft pass and the
    block behind a target pass: as in a run, where passes drive what a controller needs out of the cache.
    cycle: {controller: for one cycle}, behind five others.
    """
    line = [1] * 100
    session = open_session(line)
    draft, target = session.draft, session.target
    logits = torch.randn(4, 1, embedded('target')[0].vocab, generator=torch.Generator().manual_seed(0))
    tokens = logits.argmax(-1)                                                          # [4, 1]
    block = Draft(tokens[:, 0].tolist(), logits[:, 0].softmax(-1), logits[:, 0])
    cycle = SimpleNamespace(accepted=3)
    names = [name for name in CONTROLLERS if name != 'oracle']
    for _ in range(rounds):
        token_costs = {}
        cycle_costs = {}
        passes = []
        for name in names:
            control = Exact(WINDOW, controller=name).control
            passes.append(cpu_seconds(target.read, line, [], target.model.full, 1))
            spent = 0.0
            for i in range(1, 5):
                draft.read(line, [], draft.model.full, 1)
                notes = [dict(confidence=0.5) for _ in range(i)]        # the last one's is set anew
                spent += cpu_seconds(control.more, session, tokens[:i], logits[:i], notes)
            token_costs[name] = spent / 4
            for _ in range(5):
                control.learn(block, cycle)
            cycle_costs[name] = cpu_seconds(end_of_cycle, control, block, cycle)
        yield dict(token=token_costs, cycle=cycle_costs, target_pass=min(passes))


def pass_cost_rows(n):
    """One row: the seconds of the passes by which speed is modelled; target: over 0, 1, 2, ... positions."""
    draft, target = pass_costs()
    yield dict(draft=draft, target=target)


PAIR = 'target', 'draft'
RECORDS = dict(
    rules=(PAIR, rule_rows),
    replayed=(PAIR, replayed_rows),
    rounded=(PAIR, rounded_rows),
    answers=(PAIR, answer_rows),
    words=(PAIR, word_rows),
    sampled=(PAIR, sampled_rows),
    dropout=(PAIR, dropout_rows),
    controllers=(PAIR, controller_rows),
    own_cost=(PAIR, own_cost_rows),
    paired=(PAIR, paired_rows),
    pass_costs=(PAIR, pass_cost_rows))


# ------------------------------------------------------------------------------------------------ a drawing

def observed(session, cycle):
    """(cycle, the target's favourites, p / max p of the draft tokens) of the cycle that just ended."""
    before = copy.copy(session)
    before.tokens = session.tokens[:len(session.tokens) - len(cycle.tokens)]
    score = Score(before, Draft.points(cycle.drafted, session.target.model), session.target.model.full)
    return cycle, score.logits.argmax(-1).tolist(), score.ratios


def interest(seen):
    """How much a cycle shows: above all whether it keeps what the target would not write, then its doubt."""
    cycle, best, _ = seen
    bent = False
    for judged, favourite in zip(cycle.judged, best):
        if judged['kept'] and judged['token'] != favourite:
            bent = True
    lowest = min((judged['confidence'] for judged in cycle.judged), default=1.0)
    return bent, -lowest


def two_decimals(numbers):
    return [f'{number:.2f}' for number in numbers]


def confident_cycle(session, word):
    """Lines of a cycle of cmasd: one that keeps what the target would not write, else the least confident.

    word: function from a token id to its text.
    """
    seen = [observed(session, cycle) for cycle in decode(session, CmAsd())]
    cycle, best, ratios = max(seen, key=interest)
    return columns([
        ('drafted', [word(token) for token in cycle.drafted]),
        ('C', two_decimals(judged['confidence'] for judged in cycle.judged)),
        ('tau', two_decimals(judged['threshold'] for judged in cycle.judged)),
        ('p / max p', two_decimals(ratios)),
        ('the best', [word(token) for token in best]),
        ('', ['kept' if judged['kept'] else 'out' for judged in cycle.judged]),
        ('committed', [word(token) for token in cycle.tokens])])


def main(text='One evening Mia the fox went to the market with a map.'):
    tokenizer = embedded('target')[1]

    def word(token):
        return tokenizer.decode([token], skip_special_tokens=False).strip() or '_'
    session = open_session(tokenizer.encode(text).ids)
    print(*confident_cycle(session, word), sep='\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
