"""What is measured for CM-ASD: `python -m lab.claims cmasd` stores it, lab/cmasd/claims.py judges it.

Prompts are those of at most 300 tokens of five families. `python -m lab.cmasd.record "A prompt"` draws a
cycle.
"""
import copy
import sys
import time
from collections import Counter
from statistics import fmean

import torch
from tqdm import tqdm

import lab.cmasd.rivals                                 # noqa: F401, enters the rivals in METHODS
from lab import tasks
from lab.cmasd.claims import FAMILIES, SIGNALS, TAUS
from lab.common import embedded
from lab.replay import Replay, columns, modelled_seconds, open_session, pass_costs, short_prompts, written
from verify import CONTROLLERS, METHODS, CmAsd, Draft, Exact, Score, decode, tokens_of

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
    rules = {f'fixed {k}': Exact(k) for k in range(1, 16)}
    for alpha in (0.5, 1.0, 2.0):
        for k_max in (5, 10, 15, 25):
            rules[f'online {alpha} {k_max}'] = CmAsd(alpha=alpha, k_max=k_max, accept_='strict')
    for name in SIGNALS:
        rules[f'{name} alone'] = one_signal(name, accept_='strict')
    return rules


def relaxed_rules():
    """{name: method}: the default knobs, each sweep of one of them, other rules, constant thresholds."""
    rules = {'default': CmAsd(), f'adaptive tau, fixed {WINDOW}': CmAsd(WINDOW, controller='fixed')}
    for gain in (0.1, 0.5, 1.0, 2.0):
        rules[f'gamma_tau {gain}'] = CmAsd(gamma_tau=gain)
    for k_max in (5, 10, 15, 25):
        rules[f'k_max {k_max}'] = CmAsd(k_max=k_max)
    for name in SIGNALS:
        rules[f'{name} alone'] = one_signal(name)
    for name in ('cmasd-prob', 'cmasd-specdec', 'cmasd-typical'):
        rules[name] = METHODS[name]()
    for tau in TAUS:
        rules[f'tau {tau}'] = CmAsd(tau_base=tau, gamma_tau=0)
    for tau in TAUS:
        rules[f'tau {tau}, fixed {WINDOW}'] = CmAsd(WINDOW, tau_base=tau, gamma_tau=0, controller='fixed')
    return rules


STRICT = strict_rules()
TWO_STRICT = {f'strict, fixed {WINDOW}': Exact(WINDOW), 'strict, online': CmAsd(accept_='strict')}
RULES = relaxed_rules() | TWO_STRICT
ROUNDED = 'strict, online', 'default'                   # what is replayed with 4-bit models


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


def sums_of(run, row, plain):
    """What a Run is judged by, in the order of lab.cmasd.claims.SUMS; plain: the ids of the target's text."""
    to_text = embedded('target')[1].decode
    text = to_text(list(run.text))
    rolled_back = sum(kept < drafted for kept, drafted in zip(run.kept, run.drafted))
    return [sum(run.kept), len(run.kept), len(run.text), rolled_back, steps_worth(run.drafted),
            alignment(run.text, plain), chrf(text, to_text(list(plain))), as_number(tasks.grade(row, text))]


def bits(flags):
    """A list of flags as a text of 1 and 0: a character each, where stored JSON would take six."""
    return ''.join(str(int(flag)) for flag in flags)


def replayed_row(family, row, ids):
    """Of one prompt: every rule's sums, and along the target's own text each token's signals and its hit.

    A hit: the draft's favourite is the target's, which is when the strict rule keeps it.
    """
    replay = Replay(ids)
    plain = replay.text
    strict = {name: steps_worth(replay.run(method).drafted) for name, method in STRICT.items()}
    runs = {name: sums_of(replay.run(method), row, plain) for name, method in RULES.items()}
    signals = dict(entropy=[], margin=[], softmax=[])
    hits = []
    for i in range(len(plain)):
        place = replay.place(plain[:i])
        hits.append(place.token == place.pick)
        for name, value in zip(SIGNALS, place.signals):
            signals[name].append(round(value, DIGITS))
    right = tasks.grade(row, embedded('target')[1].decode(list(plain)))
    return dict(family=family, tokens=len(plain), right=as_number(right), strict=strict, runs=runs,
                signals=signals, hits=bits(hits))


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
            for name in ROUNDED:
                run = replay.run(RULES[name])
                found[role][name] = [sum(run.kept), len(run.kept)]
        yield found


# ---------------------------------------------------------------------------------------------- real runs

def sampled_rows(n):
    """Of each prompt, at temperature 1, the draft tokens kept and the cycles, a number a seed."""
    for _, _, ids in tqdm(texts(n), desc='sampled'):
        kept, cycles = [], []
        for seed in range(SEEDS):
            trace = written(open_session(ids), ids, CmAsd(), 1.0, seed)
            kept.append(sum(cycle.accepted for cycle in trace))
            cycles.append(len(trace))
        yield dict(kept=kept, cycles=cycles)


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


def controller_rows(n):
    """Of an eighth of the prompts {controller: sums of its strict run}, 'plain' for plain decoding.

    All take turns on each text, so that what else the machine does falls on all.
    """
    methods = dict(plain=Exact(0))
    for name in CONTROLLERS:
        methods[name] = CmAsd(WINDOW, accept_='strict', controller=name)
    for _, _, ids in tqdm(texts(max(1, n // 8)), desc='controllers'):
        session = open_session(ids)
        found = {}
        for name, method in methods.items():
            trace = written(session, ids, method)
            drafted = [len(cycle.drafted) for cycle in trace]
            found[name] = dict(kept=sum(cycle.accepted for cycle in trace), cycles=len(trace),
                               drafted=sum(drafted), tokens=len(tokens_of(trace)), steps=steps_worth(drafted),
                               seconds=sum(cycle.seconds for cycle in trace))
        yield found


# -------------------------------------------------------------------------------------------------- costs

def own_cost_rows(n, times=50):
    """Times over, the processor's seconds for the confidences of a block of 4, and for a target pass."""
    window = CmAsd().confidence_window
    logits = torch.randn(4, 1, embedded('target')[0].vocab, generator=torch.Generator().manual_seed(0))
    line = [1] * 100
    session = open_session(line)
    draft, target = session.draft, session.target
    for _ in range(times):
        draft.read(line, [], draft.model.full, 1)       # the confidences follow a draft pass, as in a run
        begin = time.process_time()
        for row in logits:
            window.confidence(row)
        middle = time.process_time()
        target.read(line, [], target.model.full, 1)
        end = time.process_time()
        yield dict(confidences=middle - begin, target_pass=end - middle)


def pass_cost_rows(n):
    """One row: the seconds of the passes by which speed is modelled; target: over 0, 1, 2, ... positions."""
    draft, target = pass_costs()
    yield dict(draft=draft, target=target)


PAIR = 'target', 'draft'
RECORDS = dict(
    replayed=(PAIR, replayed_rows),
    rounded=(PAIR, rounded_rows),
    sampled=(PAIR, sampled_rows),
    dropout=(PAIR, dropout_rows),
    controllers=(PAIR, controller_rows),
    own_cost=(PAIR, own_cost_rows),
    pass_costs=(PAIR, pass_cost_rows))


# ------------------------------------------------------------------------------------------------ a drawing

def observed(session, cycle):
    """(cycle, the target's favourites, p / max p of the draft tokens) of the cycle that just ended."""
    before = copy.copy(session)
    before.tokens = session.tokens[:len(session.tokens) - len(cycle.tokens)]
    score = Score(before, Draft(cycle.drafted, None), session.target.model.full)
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
