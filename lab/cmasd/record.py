"""What is measured for CM-ASD: `python -m lab.claims cmasd` stores it, lab/cmasd/claims.py judges it.

`python -m lab.cmasd.record "A prompt"` draws a cycle.

Of another pair less is measured, since passes are all that it costs, and each takes several milliseconds.
Replayed are windows up to 12 tokens and seven relaxed rules, which write six texts of their own; real
runs are of few rules, with one seed, on a twelfth of the prompts. There is no second copy of the models in 4
bits, and right answers are those of the replayed texts, where prompts have answers.
"""
import copy
import functools
import sys
from collections import Counter
from statistics import fmean

import torch
from tqdm import tqdm

import lab.cmasd.rivals                                 # noqa: F401, enters the rivals in METHODS
from lab import tasks
from lab.cmasd.claims import (FAMILIES, GAINS, HUGGING_FACE, LONGEST_WINDOWS, SIGNALS, TAUS, WARM_SUMS,
                              WARM_TAUS, WINDOWS, Evidence)
from lab.common import read_stored
from lab.pairs import EMBEDDED, LabRecord, Record
from lab.replay import Replay, Run, clock, columns, modelled_seconds, pass_costs
from verify import (CONTROLLERS, METHODS, CmAsd, Cycle, Draft, Exact, Score, decode, token_logps,
                    tokens_of)

SEEDS = 3
WINDOW = 7                                              # tokens, where a window is fixed
DIGITS = 4                                              # decimals of a stored signal
ALPHAS = 0.5, 1.0, 2.0                                  # of the strict rules
FEW_TAUS = 0.3, 0.6, 0.8, 0.95                          # what is measured of another pair than the embedded
FEW_GAINS = 0.5, 2.0                                    # the first is the default's
FEW_WARM_TAUS = 0.3, 1.0
FEW_WINDOWS = 12                                        # fixed ones, of 1 token to so many
FEW_LONGEST = 5, 10


def replayed_prompts(pair, n):
    return pair.texts(FAMILIES, n)


def product_prompts(pair, n):
    return pair.texts(FAMILIES, n)


def run_prompts(pair, n, share=2):
    """The prompts of real runs: one of `share` of the embedded pair's, a twelfth of any other's."""
    if not pair.is_embedded:
        share = 12
    return pair.texts(FAMILIES, max(1, n // share))


# -------------------------------------------------------------------------------- rules that are replayed

def one_signal(name, **knobs):
    """CM-ASD whose confidence is one of the signals alone."""
    weights = dict(lam_entropy=0.0, lam_margin=0.0, lam_softmax=0.0)
    weights[f'lam_{name}'] = 1.0
    return CmAsd(**weights, **knobs)


def strict_rules(windows, longest):
    """{name: method}: rules with which every text is the target's, so that only the length counts."""
    rules = {f'fixed {k}': Exact(k) for k in range(1, windows + 1)}
    for alpha in ALPHAS:
        for k_max in longest:
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


def few_relaxed_rules():
    """{name: method}: the default knobs, adaptive and constant thresholds: 6 texts a prompt."""
    rules = dict(default=CmAsd())
    for gain in FEW_GAINS:
        rules[f'gamma_tau {gain} k_max 10'] = CmAsd(gamma_tau=gain)
    for tau in FEW_TAUS:
        rules[f'tau {tau}'] = constant(tau)
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


@functools.cache
def rules_of(pair):
    """{part of a replayed row: {name: method}} of a pair.

    Of any but the embedded one no thresholds with fixed windows: each is one more text, which takes a second.
    """
    if pair.is_embedded:
        return dict(strict=strict_rules(25, LONGEST_WINDOWS), runs=relaxed_rules(), windowed=windowed_rules())
    return dict(strict=strict_rules(FEW_WINDOWS, FEW_LONGEST), runs=few_relaxed_rules(), windowed={})


def warm_rules(pair):
    """{name: method} of real runs at temperature 1."""
    rules = dict(plain=Exact(0), default=CmAsd())
    if pair.is_embedded:
        rules['typical'] = METHODS['typical'](WINDOW)
    for tau in WARM_TAUS if pair.is_embedded else FEW_WARM_TAUS:
        rules[f'tau {tau}'] = constant(tau)
    return rules


def controller_names(pair):
    """The controllers whose real runs are measured."""
    return tuple(CONTROLLERS) if pair.is_embedded else ('fixed', 'online', *HUGGING_FACE)


ROUNDED = {'strict, online': CmAsd(accept_='strict'), 'default': CmAsd()}     # replayed with 4-bit models


# ----------------------------------------------------------------------------- length controllers, replayed

LIMITS = 0.3, 0.4, 0.5, 0.6, 0.7                        # h of product
COSTS = 0.1, 0.2, 0.3, 0.4, 0.5                         # of a draft pass, in target passes, as payoff is told


def controlled(name, **settings):
    """Exact decoding with a length controller whose class says otherwise."""
    method = Exact(WINDOW, controller=name)
    for key, value in settings.items():
        setattr(method.control, key, value)
    return method


def length_rules(pair):
    """{name: method}: strict rules that differ in their blocks' lengths; made anew for a text, some learn."""
    rules = strict_rules(FEW_WINDOWS, FEW_LONGEST)
    if pair.is_embedded:
        rules = strict_rules(25, LONGEST_WINDOWS)
    rules = {name: method for name, method in rules.items() if not name.endswith('alone')}
    for name in HUGGING_FACE[:2]:
        rules[name] = controlled(name)
    for limit in LIMITS:
        rules[f'product {limit}'] = controlled('product', limit=limit)
    rules['payoff'] = controlled('payoff')
    for cost in COSTS:
        rules[f'payoff, cost {cost}'] = controlled('payoff', cost=cost)
    return rules


def foreseeing(replay, text):
    """The Run of a rule that knows the text and drafts to its first wrong token, as `oracle` does."""
    kept, drafted = [], []
    begin = 0
    while begin < len(text):
        most = min(replay.room, len(text)) - begin
        count = 0
        while count < most and replay.guess(text[:begin + count]).token == text[begin + count]:
            count += 1
        room = replay.room - begin - 1
        kept.append(min(count, room))
        drafted.append(min(count + (count < most), room))
        begin += kept[-1] + 1
    return Run(text, kept, drafted)


def product_row(pair, prompt):
    """{rule: [draft tokens kept, {draft tokens of a block: cycles}]} of one prompt.

    bytes: of a draft pass, in the target's. It takes a draft pass for each token drafted behind a wrong one.
    All rules write one text: plain decoding's, or where 16 bits round otherwise in a pass over many, nearly.
    """
    replay = Replay(pair, prompt.ids)
    runs = {name: replay.run(method) for name, method in length_rules(pair).items()}
    text = runs['fixed 1'].text
    runs['oracle'] = foreseeing(replay, text)
    found = {}
    for name, run in runs.items():
        assert run.text == text, f'{name} is not strict'
        found[name] = [sum(run.kept), dict(sorted(Counter(run.drafted).items()))]
    target, draft = (pair.network(role)[0] for role in ('target', 'draft'))
    share = draft.read_bytes(draft.full) / target.read_bytes(target.full)
    return prompt.name | dict(tokens=len(text), bytes=share, rules=found)


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


def steps_worth(pair, drafted):
    """The modelled time of these cycles, in steps of plain decoding (target passes of one position)."""
    _, target = pass_costs(pair)
    return modelled_seconds(pair, drafted) / target[1]


def alignment(text, reference):
    """The share of places at which two lists of ids agree, of the longer one's."""
    same = sum(a == b for a, b in zip(text, reference))
    return same / max(len(text), len(reference))


def strict_sums(pair, run):
    """What a strict Run is judged by, in the order of lab.cmasd.claims.STRICT_SUMS."""
    return [sum(run.kept), len(run.kept), sum(run.drafted), steps_worth(pair, run.drafted)]


def sums_of(pair, prompt, plain, method, run):
    """What a Run is judged by, in the order of lab.cmasd.claims.SUMS; plain: the ids of the target's text."""
    text = pair.text(run.text)
    rolled_back = sum(kept < drafted for kept, drafted in zip(run.kept, run.drafted))
    looked = sum(run.drafted) if looks(method) else 0
    return [*strict_sums(pair, run), looked, len(run.text), rolled_back, alignment(run.text, plain),
            chrf(text, pair.text(plain)), pair.grade(prompt.row, text)]


def bits(flags):
    """A list of flags as a text of 1 and 0: a character each, where stored JSON would take six."""
    return ''.join(str(int(flag)) for flag in flags)


def windowed_sums(run, plain):
    """What a Run with a fixed window is judged by, in the order of lab.cmasd.claims.WINDOWED_SUMS."""
    return [sum(run.kept), len(run.kept), sum(run.drafted), len(run.text), alignment(run.text, plain)]


def rule_row(pair, _):
    """The names of the rules of replayed, in the order of its sums."""
    return {part: list(rules) for part, rules in rules_of(pair).items()}


def replayed_row(pair, prompt):
    """Of one prompt: every rule's sums, and along the target's own text each token's signals and its hit.

    A hit: the draft's favourite is the target's, which is when the strict rule keeps it.
    """
    replay = Replay(pair, prompt.ids)
    plain = replay.text
    rules = rules_of(pair)
    strict = [strict_sums(pair, replay.run(method)) for method in rules['strict'].values()]
    runs = [sums_of(pair, prompt, plain, method, replay.run(method)) for method in rules['runs'].values()]
    windowed = [windowed_sums(replay.run(method), plain) for method in rules['windowed'].values()]
    signals = dict(entropy=[], margin=[], softmax=[])
    hits = []
    for i in range(len(plain)):
        place = replay.place(plain[:i])
        hits.append(place.token == place.pick)
        for name, value in zip(SIGNALS, place.signals):
            signals[name].append(round(value, DIGITS))
    right = pair.grade(prompt.row, pair.text(plain))
    return dict(family=prompt.family, tokens=len(plain), right=right, strict=strict, runs=runs,
                windowed=windowed, signals=signals, hits=bits(hits))


# --------------------------------------------------------------------------------- on the embedded pair alone

def rounded_rows(n):
    """Of each prompt {model that is rounded to 4 bits: {rule: [kept, cycles]}}."""
    for prompt in tqdm(replayed_prompts(EMBEDDED, n), desc='4 bits'):
        found = {}
        for role in ('draft', 'target'):
            replay = Replay(EMBEDDED, prompt.ids, role)
            found[role] = {}
            for name, method in ROUNDED.items():
                run = replay.run(method)
                found[role][name] = [sum(run.kept), len(run.kept)]
        yield found


def plain_and_default(prompt):
    """{rule: its text} of plain decoding and of the default knobs, by the embedded pair."""
    replay = Replay(EMBEDDED, prompt.ids)
    return dict(plain=EMBEDDED.text(replay.text), default=EMBEDDED.text(replay.run(CmAsd()).text))


def answer_rows(n):
    """Of ten times as many texts of math, whether plain decoding and the default are right."""
    for prompt in tqdm(EMBEDDED.texts(['math'], 10 * n), desc='answers'):
        texts = plain_and_default(prompt)
        yield {name: EMBEDDED.grade(prompt.row, text) for name, text in texts.items()}


def word_rows(n):
    """Of texts that are compared with a reference: its counts for BLEU, its ROUGE-L.

    plain, default: those rules' text against the reference; alike: the default's against plain decoding's.
    """
    for prompt in tqdm(EMBEDDED.texts(['translate', 'summary'], n), desc='words'):
        texts = plain_and_default(prompt)
        plain = texts['plain'].strip()
        default = texts['default'].strip()
        answer = prompt.row['answer']
        pairs = dict(plain=(answer, plain), default=(answer, default), alike=(plain, default))
        bleu = {name: tasks.bleu_counts([reference], text) for name, (reference, text) in pairs.items()}
        rouge = {name: tasks.rouge_l(reference, text) for name, (reference, text) in pairs.items()}
        yield dict(family=prompt.family, bleu=bleu, rouge=rouge)


# ---------------------------------------------------------------------------------------------- real runs

def sampled_prompts(pair, n):
    return run_prompts(pair, n, 1)


def sampled_row(pair, prompt):
    """{rule: {sum: a number a seed}} of one prompt, at temperature 1.

    nats: the target's of the text, at temperature 1. On the embedded pair the default has SEEDS seeds, the
    other rules one, on a half of the prompts.
    """
    found = {}
    for name, method in warm_rules(pair).items():
        seeds = 1
        if pair.is_embedded and name == 'default':
            seeds = SEEDS
        elif pair.is_embedded and prompt.place % 2:
            continue
        runs = [sampled_sums(pair, prompt, method, seed) for seed in range(seeds)]
        found[name] = dict(zip(WARM_SUMS, zip(*runs)))
    return found


def sampled_sums(pair, prompt, method, seed):
    """The sums, in the order of WARM_SUMS, of one text at temperature 1."""
    ids = prompt.ids
    session = pair.session(ids)
    cycles = pair.written(session, ids, method, 1.0, seed)
    tokens = tokens_of(cycles)
    drafted = [len(cycle.drafted) for cycle in cycles]
    target = session.target
    logits = target.read(ids, tokens[:-1], target.model.full, len(tokens))
    nats = -float(token_logps(logits, tokens).sum())
    looked = sum(drafted) if looks(method) else 0
    return [sum(cycle.accepted for cycle in cycles), len(cycles), steps_worth(pair, drafted), looked,
            len(tokens), nats, pair.grade(prompt.row, pair.text(tokens))]


def dropout_row(pair, prompt):
    """A strict run of cmasd-dropout, whose text is therefore the replayed one's, token by judged token.

    places: where in the text; confidence and mean: what dropout says there; kept: the verdicts.
    positions: what the draft read as usual, and what it read once more for the confidence.
    """
    method = METHODS['cmasd-dropout'](accept_='strict')
    places, confidence, mean, kept = [], [], [], []
    positions = Counter()
    begin = 0
    for cycle in pair.written(pair.session(prompt.ids), prompt.ids, method):
        for i, judged in enumerate(cycle.judged):
            places.append(begin + i)
            confidence.append(round(judged['confidence'], DIGITS))
            mean.append(round(judged['mean'], DIGITS))
            kept.append(judged['kept'])
        for path, (_, n, _) in cycle.passes.items():
            positions[path] += n
        begin += len(cycle.tokens)
    name = {} if pair.is_embedded else prompt.name      # there it is known by its place in the record
    return name | dict(tokens=begin, places=places, confidence=confidence, mean=mean, kept=bits(kept),
                       positions=[positions['draft/full'], positions['draft/full dropout']])


def controller_run(pair, session, ids, name):
    """The sums of a strict run."""
    method = Exact(0) if name == 'plain' else Exact(WINDOW, controller=name)
    trace = pair.written(session, ids, method)
    drafted = [len(cycle.drafted) for cycle in trace]
    return dict(kept=sum(cycle.accepted for cycle in trace), cycles=len(trace), drafted=sum(drafted),
                tokens=len(tokens_of(trace)), steps=steps_worth(pair, drafted),
                seconds=sum(cycle.seconds for cycle in trace))


def controller_row(pair, prompt):
    """{controller: its controller_run} of one prompt, 'plain' for plain decoding.

    All take turns on each text, so that what else the machine does falls on all. What one has learned ends
    with the text; Hugging Face's two that learn go on from it in the next.
    """
    session = pair.session(prompt.ids)
    found = dict(family=prompt.family)
    for name in ('plain', *controller_names(pair)):
        found[name] = controller_run(pair, session, prompt.ids, name)
    return found


def paired_items(pair, n):
    """[(prompt, its family's best fixed window, its best online one)]: what was replayed says which."""
    stored = {name: read_stored('cmasd', name, pair.name) for name in ('rules', 'replayed', 'own_cost')}
    replayed = Evidence(stored).texts
    items = []
    for prompt in run_prompts(pair, n):
        theirs = replayed.of(prompt.family)
        items.append((prompt, theirs.best('fixed'), theirs.best('online')))
    return items


def paired_row(pair, item, turns=3):
    """The seconds of a family's best fixed window and of its best online one on a prompt.

    They take turns; the least of each counts. On one thread it is the processor's time, see lab.replay.clock.
    """
    prompt, *names = item
    session = pair.session(prompt.ids)
    strict = rules_of(pair)['strict']
    found = dict(fixed=[], online=[])
    for _ in range(turns):
        for kind, name in zip(found, names):
            spent = seconds(session.target, pair.written, session, prompt.ids, strict[name])
            found[kind].append(spent)
    return dict(family=prompt.family, fixed=min(found['fixed']), online=min(found['online']))


# -------------------------------------------------------------------------------------------------- costs

def seconds(reader, function, *args):
    """The seconds that a call takes; the reader says on which device, see lab.replay.clock."""
    begin = clock(reader)
    function(*args)
    return clock(reader) - begin


def end_of_cycle(control, block, cycle):
    """What a controller does once in a cycle."""
    control.trim(block)
    control.learn(block, cycle)


@functools.cache
def timing_session(pair):
    """A Session that has read a line of 100 tokens, for passes whose time is taken."""
    return pair.session([1] * 100)


def rounds_of(pair, n):
    """Rounds in which own costs are taken, however many prompts there are."""
    return list(range(100 if pair.is_embedded else 10))


def own_cost_row(pair, _):
    """The seconds of what controllers themselves take, and of a target pass, in one round.

    token: {controller: for one token}, a mean over a block of 4, each token's behind its draft pass and the
    block behind a target pass: as in a run, where passes drive what a controller needs out of the cache.
    cycle: {controller: for one cycle}, behind five others.
    """
    session = timing_session(pair)
    draft, target = session.draft, session.target
    line = session.tokens
    logits = torch.randn(4, 1, draft.model.vocab, generator=torch.Generator().manual_seed(0))
    logits = logits.to(draft.model.cos.device)
    tokens = logits.argmax(-1)                                                          # [4, 1]
    block = Draft(tokens[:, 0].tolist(), logits[:, 0].softmax(-1), logits[:, 0])
    cycle = Cycle(block.tokens, [], block.tokens, ['draft'] * 3 + ['target'], {}, 0.0)
    token_costs = {}
    cycle_costs = {}
    passes = []
    for name in controller_names(pair):
        if name == 'oracle':                            # a bound: it knows
            continue
        control = Exact(WINDOW, controller=name).control
        control.length(session)
        notes = []
        passes.append(seconds(target, target.read, line, [], target.model.full, 1))
        spent = 0.0
        for i in range(1, 5):
            draft.read(line, [], draft.model.full, 1)
            notes.append({})
            spent += seconds(draft, control.more, session, tokens[:i], logits[:i], notes)
        token_costs[name] = spent / 4
        for _ in range(5):
            control.learn(block, cycle)
        cycle_costs[name] = seconds(draft, end_of_cycle, control, block, cycle)
    return dict(token=token_costs, cycle=cycle_costs, target_pass=min(passes))


def pass_cost_row(pair, _):
    """The seconds of the passes by which speed is modelled; target: over 0, 1, 2, ... positions."""
    draft, target = pass_costs(pair)
    return dict(draft=draft, target=target)


def one_row(pair, n):
    return [0]


PAIR = 'target', 'draft'
RECORDS = dict(
    rules=Record(one_row, rule_row),
    replayed=Record(replayed_prompts, replayed_row),
    rounded=LabRecord(PAIR, rounded_rows, 'models that nobody has rounded, and memory for a second copy'),
    answers=LabRecord(PAIR, answer_rows, 'a thousand problems of math; replayed has grades'),
    words=LabRecord(PAIR, word_rows, 'reference translations and summaries'),
    own_cost=Record(rounds_of, own_cost_row),
    pass_costs=Record(one_row, pass_cost_row),
    paired=Record(paired_items, paired_row),
    controllers=Record(run_prompts, controller_row),
    dropout=Record(sampled_prompts, dropout_row),
    sampled=Record(sampled_prompts, sampled_row),
    product=Record(product_prompts, product_row))


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
    tokenizer = EMBEDDED.tokenizer

    def word(token):
        return tokenizer.decode([token], skip_special_tokens=False).strip() or '_'
    session = EMBEDDED.session(EMBEDDED.encode(text))
    print(*confident_cycle(session, word), sep='\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
