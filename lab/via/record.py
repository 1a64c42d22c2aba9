"""What VIA-SD is judged by: real runs of it and its rivals, blocks to replay its gate on, searches for masks.

Greedy, on seven tasks. The records share what Material holds; how their rows are judged is in claims.py.
p target, q draft, s a middle stage (a slim path of the target, or a model of its own); V vocabulary,
n draft tokens of a block, K stages.
"""
import copy
import functools
import itertools
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tqdm import tqdm

import train_mask
from lab import tasks
from lab.common import MODELS, embedded, held_out_rows, is_there
from lab.via import rivals                              # its methods enter METHODS
from lab.via.claims import EVENLY, LENIENT, MIDDLES, RANDOM, TUNED, USUAL, Run, choose
from model import Path, Reader
from specmini import Engine
from verify import METHODS, Exact, Score, ViaSd, decode, tokens_of, violation

GAMMA = ViaSd.gamma
MAX_LAG = ViaSd.max_lag
TASKS = dict(math={}, table=dict(high=20, columns=(1, 4)), code={}, story={}, qa={}, translate={}, summary={})
KEEPS = 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0
ESCALATES = 0.0, 0.1, 0.3, 0.5, 0.6, 0.8, 0.9
NEVER_KEPT = 2.0, 2.0           # thresholds at which via writes the target's text
FREE = range(2, 18, 2)          # attention sublayers of the free layers: the first and the last always run
FORMS = dict(R=(0.5, 0.5), strict=(0.0, 1.0))           # alpha, beta of R: as published; nothing forgiven
WINDOW = 32                     # calibration tokens that a mask's cost is of, as train_mask.py has it
PATHS = dict(draft=('draft/',), middle=('slim', 'mid/'), target=('target/full',))      # what their names hold
SEEDS = 5                       # searches with and without Bayes
NEEDED = ['target', 'draft'] + [role for role in MIDDLES if is_there(role)]


# ------------------------------------------------------------------------------------- the core, in one place

def engine_of():
    """The embedded pair with what via needs of calibration.json."""
    engine = Engine(target=MODELS / 'target', draft=MODELS / 'draft')
    engine.calibrate(ViaSd())
    return engine


def session_of(engine, ids):
    """A Session that has read this prompt and trusts nothing of an earlier text."""
    return engine.start(ids, Exact())


def search_masks(cost, units, skipped, **settings):
    """{mask: cost} of the masks of so many units that a search tried; settings: of train_mask.py."""
    tried = {}
    train_mask.search(cost, units, skipped, train_mask.Settings(**settings), tried)
    return tried


# ------------------------------------------------------------------------------------------------------ masks

def skipping(layers):
    """The sublayers of these free layers, as a mask."""
    mask = []
    for layer in sorted(layers):
        mask += [FREE[layer], FREE[layer] + 1]
    return tuple(mask)


def evenly(k):
    """The mask of k free layers, evenly spaced."""
    step = len(FREE) / k
    return skipping(int((i + 0.5) * step) for i in range(k))


def named(mask):
    """A mask as a text."""
    return ' '.join(map(str, mask))


def random_masks(k, n=20):
    """n different masks of k layers, by lot."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    while len(found) < n:
        found[train_mask.propose(found, len(FREE), k, generator, False)] = 0.0
    return [skipping(layers) for layers in found]


def best_masks(windows):
    """{layers skipped: the mask of least R among 20 tried}, for the sweep of skip ratios."""
    def cost(layers):
        return windows.cost(skipping(layers))
    sweep = {}
    for k in range(1, len(FREE) + 1):
        tried = search_masks(cost, len(FREE), k, evaluations=20)
        sweep[k] = skipping(min(tried, key=tried.get))
    return sweep


# -------------------------------------------------------------------------------------------------- real runs

@dataclass
class Rival:
    """What writes each text of the contest in turn."""
    method: str                                         # of METHODS
    masks: list                                         # taken in turn, a mask a text
    knobs: dict = field(default_factory=lambda: dict(gamma=GAMMA))
    readers: dict = field(default_factory=dict)         # {role: Reader} for the engine; None: without one


def rivals_of(mask, random, middles, choice):
    """{name: Rival}; random: masks by lot; middles: {role: Reader}; choice: see claims.choose."""
    found = dict(ar=Rival('ar', [mask], {}))
    for name in ('sd', 'cascade', 'cascade-opt', 'cascade-tokenv3', 'via', 'via-tiers', 'via-two-level'):
        found[name] = Rival(name, [mask])
    found['via, draft alone'] = Rival('via', [mask], dict(gamma=GAMMA, keep=0.0, escalate=0.0))
    found[RANDOM] = Rival('via', random)
    found[EVENLY] = Rival('via', [evenly(len(mask) // 2)])
    for role, reader in middles.items():
        found[f'via-{role}'] = Rival('via-mid', [mask], readers=dict(mid=reader))
    found['sd, draft self'] = Rival('sd', [mask], readers=dict(draft=None))
    tuned = dict(gamma=GAMMA, keep=choice['keep'], escalate=choice['escalate'])
    found[TUNED] = Rival('via', [mask], tuned)
    forgiven = dict(gamma=GAMMA, lam=1 - choice['lenient'] / 100)
    found[LENIENT] = Rival('cascade-tokenv3', [mask], forgiven)         # greedy, it is lenient sd
    return found


def readers_for(engine, rival):
    """{role: Reader} that a rival works with."""
    both = engine.readers | rival.readers
    return {role: reader for role, reader in both.items() if reader}


def write_text(engine, ids, rival, turn):
    """(ids of the text as a rival writes it, figures of its trace), from fresh caches."""
    own_readers = engine.readers
    own_calibration = engine.calibration
    skip = rival.masks[turn % len(rival.masks)]
    engine.readers = readers_for(engine, rival)
    engine.calibration = dict(mask=own_calibration['mask'] | dict(skip=skip))
    try:
        method = METHODS[rival.method](**rival.knobs)
        cycles = list(decode(session_of(engine, ids), method))
        return tokens_of(cycles), engine.statistics(cycles)
    finally:
        engine.readers = own_readers
        engine.calibration = own_calibration


def likeness(tokens, plain):
    """The share of places at which two texts have the same token."""
    same = sum(a == b for a, b in zip(tokens, plain))
    return same / max(len(tokens), len(plain))


def passes_of(found):
    """{draft_passes, draft_positions, middle_..., target_...} of figures of a trace."""
    counts = {}
    for who, words in PATHS.items():
        for kind in ('passes', 'positions'):
            counts[f'{who}_{kind}'] = 0
            for path, times in found[kind].items():
                if any(word in path for word in words):
                    counts[f'{who}_{kind}'] += times
    return counts


def columns_of(rows, names):
    """{name: [its value in each row]} of dicts."""
    return {name: [row[name] for row in rows] for name in names}


def contest(engine, rows, prompts, contestants):
    """Rows of `runs`: each text is written by all in turn, plain decoding first."""
    for turn, (row, ids) in enumerate(zip(rows, tqdm(prompts, desc='runs', disable=None))):
        found = []
        plain = None
        for rival in contestants.values():
            tokens, figures = write_text(engine, ids, rival, turn)
            plain = tokens if plain is None else plain
            right = tasks.grade(row, engine.tokenizer.decode(tokens))
            found.append(dict(tokens=len(tokens), judged=figures['judged'], accepted=figures['accepted'],
                              right=None if right is None else int(right), alike=likeness(tokens, plain),
                              seconds=figures['seconds'], work=figures['work'], compute=figures['compute'],
                              **passes_of(figures)))
        columns = columns_of(found, Run._fields)
        if found[0]['right'] is None:
            columns['right'] = None
        yield dict(task=row['task']) | columns


def memory(readers):
    """Bytes of the weights and caches of {role: Reader}."""
    size = 0
    for reader in readers.values():
        for tensor in itertools.chain(reader.model.parameters(), *reader.cache.stores):
            size += tensor.nbytes
    return size


# ---------------------------------------------------------------------------------------- blocks to replay on

class Seen(NamedTuple):
    """What a stage makes of a block of n draft tokens."""
    ratios: list        # [n] s(y) / max s of each draft token y
    same: list          # [n] whether s and p agree on the likeliest token
    apart: dict         # {TV, R: [n] from s to p}
    gains: dict         # {measure: [n] Delta, how much shorter the way from q to p is through s}


@dataclass
class Block:
    """A block of draft tokens behind some place of the target's own text, as every verifier sees it."""
    p: list             # [n] target's p(y) / max p of each token: 1 where it is the target's choice
    room: int           # tokens that the text still has
    stages: dict        # {name: Seen}


class Outcome(NamedTuple):
    """What a rule makes of a block."""
    tokens: int         # committed
    passes: int         # full ones: 0 or 1
    wrong: int          # tokens that the target would not have written


def variation(a, b):
    """Total variation distance [...] of log-probabilities [..., V]."""
    return (a.exp() - b.exp()).abs().sum(-1) / 2


def divergence(a, b):
    """KL(a, b) [...] in nats of log-probabilities [..., V]."""
    return (a.exp() * (a - b)).sum(-1)


def look(session, draft, stages):
    """({stage: Seen} of a draft, [n] the target's ratios); stages: {name: Path of the target, or a Reader}.

    Slim reads on top of what the full path wrote: its lag is 0 here, and up to max_lag in real runs.
    """
    score = Score(session, draft, session.target.model.full)
    others = []
    laws = []
    q = draft.logits.log_softmax(-1)                                                    # [n, V]
    p = score.logits[:-1].log_softmax(-1)                                               # [n, V]
    for stage in stages.values():
        if isinstance(stage, Path):
            other = Score(session, draft, stage)
        else:
            other = Score(session, draft, stage.model.full, stage)
        others.append(other)
        laws.append(other.logits[:-1].log_softmax(-1))
    s = torch.stack(laws)                                                               # [K, n, V]
    apart = dict(TV=variation(s, p), R=violation(p, s))                                 # [K, n]
    gains = {name: rivals.stage_gain(q, s, p, *form) for name, form in FORMS.items()}
    gains['KL'] = divergence(q, p) - divergence(q, s) - divergence(s, p)
    gains['TV'] = variation(q, p) - variation(q, s) - variation(s, p)
    same = s.argmax(-1) == p.argmax(-1)
    found = {}
    for k, name in enumerate(stages):
        found[name] = Seen(others[k].ratios, same[k].tolist(), row_of(apart, k), row_of(gains, k))
    return found, score.ratios


def row_of(table, k):
    """{name: row k, as a list} of {name: tensor}."""
    return {name: values[k].tolist() for name, values in table.items()}


def kept_until(ratios, least, begin=0):
    """The first place from `begin` on whose ratio is below `least`; the length where there is none."""
    for i in range(begin, len(ratios)):
        if ratios[i] < least:
            return i
    return len(ratios)


def replay(block, stage, keep, escalate):
    """The Outcome of a block by via's gate, greedy: once escalated, the target judges what is left."""
    seen = block.stages[stage]
    wrong = 0
    for i, ratio in enumerate(seen.ratios):
        if ratio < escalate:
            return Outcome(kept_until(block.p, 1, i) + 1, 1, wrong)
        if ratio < keep:
            return Outcome(i + 1, 0, wrong + int(not seen.same[i]))
        wrong += block.p[i] < 1
    return Outcome(len(block.p), 0, wrong)


def lenient(block, least):
    """The Outcome for one full pass a cycle that keeps y from p(y) / max p >= least on; 1: exact."""
    n = kept_until(block.p, least)
    return Outcome(n + 1, 1, sum(p < 1 for p in block.p[:n]))


def text_sums(blocks, rule):
    """dict(tokens, wrong, passes) of a text by a rule, a function Block -> Outcome.

    A full pass is one that a cycle asked for, or reads a lag of more than MAX_LAG tokens.
    """
    sums = dict(tokens=0, wrong=0, passes=0)
    lag = 0
    for block in blocks:
        outcome = rule(block)
        late = lag > MAX_LAG
        if late:
            lag = 0
        lag = 0 if outcome.passes else lag + outcome.tokens
        sums['tokens'] += min(outcome.tokens, block.room)
        sums['wrong'] += outcome.wrong
        sums['passes'] += outcome.passes + late
    return sums


class BlockRecord:
    """Reads texts block by block with every stage, and knows what a pass of each costs.

    Costs are weight bytes that a pass reads, in passes of the full path; nothing else costs anything.
    """

    def __init__(self, engine, stages, drafter=None):
        """stages: {name: mask or Reader}; drafter: a network in the draft's place."""
        self.engine = engine
        self.drafter = drafter or engine.models['draft']
        self.reader = Reader(self.drafter, engine.readers['draft'].capacity)
        self.target = engine.models['target']
        self.stages = {}
        for name, stage in stages.items():
            self.stages[name] = self.target.full.without(stage) if isinstance(stage, tuple) else stage

    def size(self, model, path):
        return model.read_bytes(path) / self.target.read_bytes(self.target.full)

    def costs(self):
        """{stage: cost of a pass}."""
        found = {}
        for name, stage in self.stages.items():
            if isinstance(stage, Path):
                found[name] = self.size(self.target, stage)
            else:
                found[name] = self.size(stage.model, stage.model.full)
        return found

    def draft_cost(self):
        """The cost of a block's draft."""
        return GAMMA * self.size(self.drafter, self.drafter.full)

    def blocks(self, ids, text):
        """[Block], one behind every GAMMA tokens of a text (ids) behind its prompt (ids)."""
        session = session_of(self.engine, ids)
        session.draft = self.reader
        exact = Exact()
        found = []
        for i in range(0, len(text), GAMMA):
            session.tokens = ids + text[:i]
            draft = exact.guess(session, min(GAMMA, len(text) - i))
            stages, p = look(session, draft, self.stages)
            found.append(Block(p, len(text) - i, stages))
        return found


# ------------------------------------------------------------------------------------- what all records share

@dataclass
class Material:
    """What the records of one measurement are made from."""
    engine: object
    rows: list          # held-out rows, task by task
    prompts: list       # their ids
    texts: list         # (prompt ids, the target's greedy ids) of each
    windows: object     # train_mask.Windows of the calibration texts
    mask: tuple         # that train_mask.py found
    sweep: dict         # {layers skipped: mask}
    random: list        # masks of as many layers as the one found
    middles: dict       # {role: Reader} of the models for the middle
    few: list           # indices of the texts for what is read with many stages

    def all_masks(self):
        """Every mask of the sweep and of the lot, the one found first, each once."""
        return list(dict.fromkeys([self.mask, *self.sweep.values(), *self.random]))

    def stages(self):
        """The stages of the main replay; slim5 is of like cost as `mid`."""
        return dict(slim=self.mask, slim5=self.sweep[5]) | self.middles


@functools.cache
def material(n):
    """The Material for n prompts of each task."""
    engine = engine_of()
    rows = []
    for task, knobs in TASKS.items():
        rows += held_out_rows(task, n, **knobs)
    prompts = [engine.tokenizer.encode(row['prompt']).ids for row in rows]
    engine.open(prompts)
    mask = tuple(engine.calibration['mask']['skip'])
    middles = {}
    for role in MIDDLES:
        if is_there(role):
            middles[role] = Reader(embedded(role)[0], engine.readers['target'].capacity)
        else:
            print(f'no lab/models/{role}: what is compared with {MIDDLES[role]} in the middle is left out '
                  f'(python -m lab.train {role})', file=sys.stderr)
    texts = []
    for ids in tqdm(prompts, desc='texts', disable=None):
        cycles = decode(session_of(engine, ids), METHODS['sd'](GAMMA))      # greedy: as plain decoding's
        texts.append((ids, tokens_of(list(cycles))))
    calibration = train_mask.calibration_texts(engine.tokenizer, train_mask.Settings())
    windows = train_mask.Windows(engine.models['target'], calibration, WINDOW)
    fifth = max(1, n // 5)                              # of each task
    few = [i for i in range(len(rows)) if i % n < fifth]
    return Material(engine, rows, prompts, texts, windows, mask, best_masks(windows),
                    random_masks(len(mask) // 2), middles, few)


def threshold_pairs():
    """[(keep, escalate)] of the sweep."""
    pairs = [(keep, escalate) for keep in KEEPS for escalate in ESCALATES if escalate <= keep]
    return pairs + [NEVER_KEPT]


@functools.cache
def modelled(n):
    """What the replays' sums are turned into costs with."""
    record = BlockRecord(material(n).engine, material(n).stages())
    return dict(pairs=threshold_pairs(), costs=record.costs(), draft_cost=record.draft_cost())


@functools.cache
def contestants(n):
    """({name: Rival}, the choice of thresholds that two of them run at)."""
    shared = material(n)
    choice = choose(list(replays(n)), modelled(n))
    return rivals_of(shared.mask, shared.random, shared.middles, choice), choice


# ------------------------------------------------------------------------------------------------ the records

def settings(n):
    """A single row: what the rows of the other records are of, and what holds for all texts."""
    shared = material(n)
    rivals_by_name, choice = contestants(n)
    section = shared.engine.calibration['mask']
    paths = {named(mask): mask for mask in shared.all_masks()}
    draft_costs = {}
    for name, drafter in drafters_of(shared).items():
        draft_costs[name] = BlockRecord(shared.engine, {}, drafter).draft_cost()
    yield modelled(n) | dict(
        gamma=GAMMA,
        rivals=list(rivals_by_name),                    # the order of the columns of `runs`
        memory={name: memory(readers_for(shared.engine, rival)) for name, rival in rivals_by_name.items()},
        choice=choice,
        middles=list(shared.middles),
        mask=named(shared.mask),
        evenly=named(evenly(len(shared.mask) // 2)),
        random=[named(mask) for mask in shared.random],
        sweep={k: named(mask) for k, mask in shared.sweep.items()},
        mask_costs=BlockRecord(shared.engine, paths).costs(),       # the order of the columns of `masks`
        drafters=draft_costs,
        search_seconds=section['seconds'],
        search_masks=len(section['tried']),
        longest=max(map(len, shared.prompts)))          # tokens of a prompt


def runs(n):
    """A row a text: {figure of a Run: [its value for each of the rivals]}."""
    shared = material(n)
    yield from contest(shared.engine, shared.rows, shared.prompts, contestants(n)[0])


@functools.cache
def replays(n):
    """A list of rows, a row a text: via at all thresholds, lenient sd at all ratios, distances, the gates."""
    shared = material(n)
    record = BlockRecord(shared.engine, shared.stages())
    found = []
    for row, text in zip(shared.rows, tqdm(shared.texts, desc='blocks', disable=None)):
        blocks = record.blocks(*text)
        found.append(dict(task=row['task'], cycles=len(blocks), via=via_columns(blocks),
                          lenient=lenient_steps(blocks), **distances(blocks), gates=gates(blocks)))
    return found


def via_columns(blocks):
    """{sum: [its value at each of threshold_pairs]} of a text."""
    rows = []
    for keep, escalate in threshold_pairs():
        rows.append(text_sums(blocks, functools.partial(replay, stage='slim', keep=keep, escalate=escalate)))
    return columns_of(rows, ('tokens', 'wrong', 'passes'))


def lenient_steps(blocks):
    """{begin, tokens, wrong: lists}: from which ratio on, in hundredths, a text has these sums; 1 to 100."""
    steps = []
    last = None
    for hundredths in range(1, 101):
        sums = text_sums(blocks, functools.partial(lenient, least=hundredths / 100))
        if sums != last:
            steps.append(dict(begin=hundredths) | sums)
        last = sums
    return columns_of(steps, ('begin', 'tokens', 'wrong'))


def distances(blocks):
    """Sums over the places of a text: each stage's distance, slim's Delta, where that is above 0."""
    found = dict(places=sum(len(block.p) for block in blocks), apart=dict(TV={}, R={}), gains={}, above={})
    for name in blocks[0].stages:
        for measure, sums in found['apart'].items():
            sums[name] = 0.0
            for block in blocks:
                sums[name] += sum(block.stages[name].apart[measure])
    for measure in ('KL', 'R', 'strict', 'TV'):
        gains = []
        for block in blocks:
            gains += block.stages['slim'].gains[measure]
        found['gains'][measure] = sum(gains)
        found['above'][measure] = sum(gain > 1e-6 for gain in gains)
    return found


def gates(blocks):
    """Counts over the places of a text, at via's usual thresholds.

    early, late: handed to slim, to the target; draft_right, slim_right: its token is the target's own;
    chosen_right: that of whom the gate chose is.
    """
    keep, escalate = USUAL
    counts = dict(early=0, late=0, draft_right=0, slim_right=0, chosen_right=0)
    for block in blocks:
        seen = block.stages['slim']
        for p, ratio, slim_right in zip(block.p, seen.ratios, seen.same):
            draft_right = p == 1
            late = ratio < escalate
            early = not late and ratio < keep
            chosen_right = late or (slim_right if early else draft_right)
            counts['early'] += early
            counts['late'] += late
            counts['draft_right'] += draft_right
            counts['slim_right'] += slim_right
            counts['chosen_right'] += chosen_right
    return counts


def masks(n):
    """A row for each of a few texts: {sum, Delta by R and strict R: [its value with each mask]}."""
    shared = material(n)
    stages = {named(mask): mask for mask in shared.all_masks()}
    record = BlockRecord(shared.engine, stages)
    for i in tqdm(shared.few, desc='masks', disable=None):
        blocks = record.blocks(*shared.texts[i])
        rows = []
        for name in stages:
            row = usual_sums(blocks, name)
            for form in FORMS:
                row[form] = 0.0
                for block in blocks:
                    row[form] += sum(block.stages[name].gains[form])
            rows.append(row)
        columns = columns_of(rows, ('tokens', 'wrong', 'passes', *FORMS))
        places = sum(len(block.p) for block in blocks)
        yield dict(task=shared.rows[i]['task'], cycles=len(blocks), places=places) | columns


def usual_sums(blocks, stage):
    """The sums of a text by via at its usual thresholds."""
    keep, escalate = USUAL
    return text_sums(blocks, functools.partial(replay, stage=stage, keep=keep, escalate=escalate))


def search(n):
    """A row for every mask of as many layers as the one found: its cost on each calibration text, by task."""
    shared = material(n)
    windows = {}                                        # the texts go through the tasks in turn
    for i, task in enumerate(tasks.TASKS):
        windows[task] = []
        for text in shared.windows.texts[i::len(tasks.TASKS)]:
            windows[task].append(train_mask.Windows(shared.windows.model, [text], WINDOW))
    every = list(itertools.combinations(range(len(FREE)), len(shared.mask) // 2))
    for layers in tqdm(every, desc='all masks', disable=None):
        mask = skipping(layers)
        row = dict(mask=named(mask))
        for objective in ('violation', 'argmax'):
            row[objective] = {}
            for task, texts in windows.items():
                row[objective][task] = [text.cost(mask, objective) for text in texts]
        yield row


def searches(n):
    """A row a seed: the least cost that 60 masks of half of the sublayers reach, with and without Bayes."""
    shared = material(n)
    few = train_mask.Windows(shared.windows.model, shared.windows.texts[:7], WINDOW)

    @functools.cache
    def cost(units):
        return few.cost([unit + FREE[0] for unit in units])
    for seed in range(SEEDS):
        row = dict(sublayers=2 * len(FREE), skipped=len(FREE))
        for name, period in (('bayesian', 2), ('random', 0)):
            tried = search_masks(cost, 2 * len(FREE), len(FREE), period=period, seed=seed, patience=999)
            row[name] = min(tried.values())
        yield row


def drafters_of(shared):
    """{name: network} of drafters, the smallest first; the first is the draft cut, not trained as it is."""
    draft = shared.engine.models['draft']
    found = {'the draft without its last feed-forward': cut(draft), 'the draft': draft}
    for role in ('up', 'mid'):
        if role in shared.middles:
            found[f'lab/models/{role}'] = embedded(role)[0]
    return found


def cut(model):
    """A network without its last feed-forward; it shares the weights."""
    twin = copy.copy(model)
    twin.full = twin.full.without({2 * len(twin.full.ffns) - 1})
    return twin


def drafters(n):
    """A row for each of a few texts: {drafter: its sums with sd and with via}."""
    shared = material(n)
    records = {}
    for name, drafter in drafters_of(shared).items():
        records[name] = BlockRecord(shared.engine, dict(slim=shared.mask), drafter)
    for i in tqdm(shared.few, desc='drafters', disable=None):
        row = dict(task=shared.rows[i]['task'])
        for name, record in records.items():
            blocks = record.blocks(*shared.texts[i])
            exact = text_sums(blocks, functools.partial(lenient, least=1))
            row['cycles'] = len(blocks)                 # blocks begin every GAMMA tokens, whoever drafts
            row[name] = usual_sums(blocks, 'slim') | dict(sd_tokens=exact['tokens'])
        yield row


RECORDS = dict(settings=(NEEDED, settings), runs=(NEEDED, runs), replays=(NEEDED, replays),
               masks=(['target', 'draft'], masks), search=(['target'], search),
               searches=(['target'], searches), drafters=(NEEDED, drafters))
