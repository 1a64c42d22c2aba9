"""What VIA-SD is judged by: real runs of it and its rivals, blocks to replay its gate on, searches for masks.

Greedy but for `sampled`. The records share what Material holds; how their rows are judged is in claims.py. On
the embedded pair: seven tasks, every rival. On another one, whose target has a mask in its calibration.json:
its prompts, and fewer rivals. p target, q draft, s a middle stage (a slim path of the target, or a model of
its own); V vocabulary, n draft tokens of a block, K stages.
"""
import bisect
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
from lab.cmasd.rivals import Lenient
from lab.common import embedded, held_out_rows, is_there
from lab.pairs import EMBEDDED, LabRecord, Prompt, Record
from lab.via import rivals                              # its methods enter METHODS
from lab.via.claims import (ASKING, BARE, BLIND, BOUNDS, CASCADES, CONTIGUOUS, DRAFTED, EVENLY, LAMS, LENIENT,
                            MIDDLES, RANDOM, SAMPLED, USUAL, Audited, Drafted, Run, Sampled, at, bounded,
                            choose, like, tuned)
from model import Path, Reader, expect, read_calibration
from verify import (METHODS, Autoregressive, Draft, Exact, Score, ViaSd, decode, lookup, overlap, token_logps,
                    tokens_of, violation)

GAMMA = ViaSd.gamma
MAX_LAG = ViaSd.max_lag
TASKS = dict(math={}, table=dict(high=20, columns=(1, 4)), code={}, story={}, qa={}, translate={}, summary={})
KEEPS = 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0
ESCALATES = 0.0, 0.1, 0.3, 0.5, 0.6, 0.8, 0.9
NEVER_KEPT = 2.0, 2.0           # thresholds at which via writes the target's text
FREE = 8                        # layers of the embedded target that a mask may skip, see train_mask.maskable
ROOM = 256                      # tokens that a text of the embedded pair has at most
REAL = 20                       # texts of each family that are really run on another pair
SOME_LAMS = 0.5, 0.9            # at which lenient sd runs there
FEW_BOUNDS = 1.0, 0.05, 0.01, 0.0   # of most_wrong, there
FORMS = dict(R=(0.5, 0.5), strict=(0.0, 1.0))           # alpha, beta of R: as published; nothing forgiven
WINDOW = 32                     # calibration tokens that a mask's cost is of, as train_mask.py has it
PATHS = dict(draft=('draft/',), middle=('slim', 'mid/'), target=('target/full',))      # what their names hold
SEEDS = 5                       # searches with and without Bayes
GAMMAS = 3, 5, 8, 12, 16, 24, 36    # among which each rule is given its best
FEW_WINDOWS = 2                 # calibration texts that all sublayer masks are scored on
NEEDED = ['target', 'draft'] + [role for role in MIDDLES if is_there(role)]


# ------------------------------------------------------------------------------------- the core, in one place

def prompts_of(pair, n):
    """[Prompt], n of each family."""
    if not pair.is_embedded:
        return pair.texts((), n)
    found = []
    for task, knobs in TASKS.items():
        for place, row in enumerate(held_out_rows(task, n, **knobs)):
            found.append(Prompt(task, place, row, pair.encode(row['prompt'])))
    return found


def engine_of(pair, prompts, draft=None):
    """An Engine of the pair for these Prompts, with what via needs of calibration.json; draft: another."""
    engine = pair.engine(prompts, draft, ROOM if pair.is_embedded else pair.max_new)
    engine.calibrate(ViaSd())
    return engine


def session_of(engine, ids):
    """A Session that has read this prompt and trusts nothing of an earlier text."""
    return engine.start(ids, Exact())


def search_masks(cost, units, skipped, **settings):
    """{mask: cost} of the masks of so many units that a search tried; settings: of train_mask.py."""
    tried = {}
    asked = train_mask.Settings(**settings)
    train_mask.search(cost, train_mask.proposals(units, skipped, asked, tried), asked, tried)
    return tried


# ------------------------------------------------------------------------------------------------------ masks

def skipping(layers):
    """The sublayers of these free layers, as a mask: the first free one is the second of all."""
    mask = []
    for layer in sorted(layers):
        mask += [2 * layer + 2, 2 * layer + 3]
    return tuple(mask)


def plain_masks(m, k):
    """(the mask of k of m free layers, evenly spaced, [every contiguous one])."""
    evenly, *blocks = map(skipping, train_mask.plain_masks(m, k))
    return evenly, blocks


def named(mask):
    """A mask as a text."""
    return ' '.join(map(str, mask))


def random_masks(k, n=20):
    """n different masks of k layers, by lot."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    while len(found) < n:
        found[train_mask.propose(found, FREE, k, generator, False)] = 0.0
    return [skipping(layers) for layers in found]


def singles(windows, k):
    """The mask of the k layers that cost least when each is left out alone."""
    ranked = sorted(range(FREE), key=lambda layer: windows.cost(skipping([layer])))
    return skipping(ranked[:k])


def best_masks(windows):
    """{layers skipped: the mask of least R among 20 tried}, for the sweep of skip ratios."""
    def cost(layers):
        return windows.cost(skipping(layers))
    sweep = {}
    for k in range(1, FREE + 1):
        tried = search_masks(cost, FREE, k, evaluations=20)
        sweep[k] = skipping(min(tried, key=tried.get))
    return sweep


# -------------------------------------------------------------------------------------------------- real runs

@dataclass
class Rival:
    """What writes texts of the contest."""
    method: type                                        # of Method
    masks: list                                         # taken in turn, a mask a text
    knobs: dict = field(default_factory=lambda: dict(gamma=GAMMA))
    readers: dict = field(default_factory=dict)         # {role: Reader} for the engine; None: without one
    texts: str = 'all'                                  # which it writes: all; odd; few, every fifth


def plain_rivals(shared):
    """{name: Rival} of any pair's Material: a text takes each about as long, so that there are few."""
    mask = [shared.mask]
    found = dict(ar=Rival(Autoregressive, mask, {}), sd=Rival(Exact, mask), via=Rival(ViaSd, mask))
    for lam in SOME_LAMS:
        found[at(LENIENT, lam)] = Rival(METHODS[LENIENT], mask, dict(gamma=GAMMA, lam=lam))
    found[BARE] = Rival(ViaSd, mask, dict(gamma=GAMMA, slim_bonus=False), texts='odd')
    found[EVENLY] = Rival(ViaSd, [shared.plainer['evenly spaced']], texts='odd')
    found[CONTIGUOUS] = Rival(ViaSd, [shared.plainer['contiguous']], texts='odd')
    return found


def rivals_of(shared, choice):
    """{name: Rival} of the LabMaterial; choice: see claims.choose."""
    mask = [shared.mask]
    found = dict(ar=Rival(Autoregressive, mask, {}), sd=Rival(Exact, mask), via=Rival(ViaSd, mask))
    found[BARE] = Rival(ViaSd, mask, dict(gamma=GAMMA, slim_bonus=False))
    found[RANDOM] = Rival(ViaSd, shared.random)
    for name in ('sd', 'via', *CASCADES):
        found[tuned(name)] = Rival(METHODS[name], mask, choice[tuned(name)], texts='odd')
    found[ASKING] = Rival(ViaSd, mask, choice[ASKING], texts='odd')
    found[EVENLY] = Rival(ViaSd, [shared.plainer['evenly spaced']], texts='few')
    for role, reader in shared.middles.items():
        found[f'via-{role}'] = Rival(METHODS['via-mid'], mask, readers=dict(mid=reader), texts='few')
        found[like(role)] = Rival(ViaSd, [shared.near[role]], texts='few')
    keeps_all = dict(gamma=GAMMA, keep=0.0, escalate=0.0, slim_bonus=False)
    found['via, draft alone'] = Rival(ViaSd, mask, keeps_all, texts='few')
    found['sd, draft self'] = Rival(Exact, mask, readers=dict(draft=None), texts='few')
    for name in ('via-tiers', 'via-two-level'):
        found[name] = Rival(METHODS[name], mask, texts='few')
    for rule, lams in LAMS.items():
        for lam in lams:
            found[at(rule, lam)] = Rival(METHODS[rule], mask, dict(gamma=GAMMA, lam=lam), texts='few')
    return found


def writes(rival, turn):
    """Whether a rival writes the text of this number."""
    return rival.texts == 'all' or (turn % 2 == 1 if rival.texts == 'odd' else turn % 5 == 0)


def readers_for(engine, rival):
    """{role: Reader} that a rival works with."""
    both = engine.readers | rival.readers
    return {role: reader for role, reader in both.items() if reader}


def write_text(engine, ids, rival, turn, temperature=0.0):
    """(Cycles of the text as a rival writes it, figures of this trace), from fresh caches."""
    own_readers = engine.readers
    own_calibration = engine.calibration
    skip = rival.masks[turn % len(rival.masks)]
    engine.readers = readers_for(engine, rival)
    engine.calibration = dict(mask=own_calibration['mask'] | dict(skip=skip))
    try:
        session = session_of(engine, ids)
        session.temperature = temperature
        session.generator = torch.Generator().manual_seed(turn)
        method = rival.method(**rival.knobs)
        cycles = list(decode(session, method))
        return cycles, engine.statistics(cycles)
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


def contest(pair, shared, contestants, turn):
    """A row of `runs`: a text is written by its rivals in turn, plain decoding first; who: their places."""
    prompt = shared.prompts[turn]
    found = []
    who = []
    plain = None
    for number, rival in enumerate(contestants.values()):
        if not writes(rival, turn):
            continue
        who.append(number)
        cycles, figures = write_text(shared.engine, prompt.ids, rival, turn)
        tokens = tokens_of(cycles)
        plain = tokens if plain is None else plain
        bare = sum(cycle.accepted == len(cycle.tokens) for cycle in cycles[:-1])
        found.append(dict(tokens=len(tokens), judged=figures['judged'], accepted=figures['accepted'],
                          cycles=len(cycles), bare=bare, right=grade(pair, prompt, tokens),
                          alike=likeness(tokens, plain), seconds=figures['seconds'],
                          work=figures['work'], compute=figures['compute'], **passes_of(figures)))
    columns = columns_of(found, Run._fields)
    if found[0]['right'] is None:
        columns['right'] = None
    return dict(task=prompt.family, who=who) | columns


def grade(pair, prompt, tokens):
    """1 if a text is right, 0 if it is wrong, None where nothing is graded."""
    return pair.grade(prompt.row, pair.text(tokens))


def nats_of(engine, ids, tokens):
    """-log p of a text behind its prompt by the target, at temperature 1."""
    session = session_of(engine, ids)
    draft = Draft.points(tokens, session.target.model)
    score = Score(session, draft, session.target.model.full)
    return -float(token_logps(score.logits[:-1], tokens).sum())


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
    same: list          # [n + 1] whether s and p agree on the likeliest token, the last behind the block
    apart: dict         # {TV, R: [n] from s to p}
    gains: dict         # {measure: [n] Delta, how much shorter the way from q to p is through s}


@dataclass
class Block:
    """A block of draft tokens behind some place of the target's own text, as every verifier sees it."""
    p: list             # [n] target's p(y) / max p of each token: 1 where it is the target's choice
    trust: dict         # {cascade: [n] 1 - lam up to which it keeps the token against the target's choice}
    room: int           # tokens that the text still has
    over: bool          # whether the last token ends a text
    stages: dict        # {name: Seen}

    def shortened(self, gamma):
        """The Block of the first gamma tokens, where there are more."""
        if gamma >= len(self.p):
            return self
        stages = {}
        for name, seen in self.stages.items():
            stages[name] = Seen(seen.ratios[:gamma], seen.same[:gamma + 1], first(seen.apart, gamma),
                                first(seen.gains, gamma))
        return Block(self.p[:gamma], first(self.trust, gamma), self.room, False, stages)


def first(table, n):
    """{name: its first n values}."""
    return {name: values[:n] for name, values in table.items()}


class Outcome(NamedTuple):
    """What a rule makes of a block."""
    tokens: int         # committed
    passes: int         # full ones: 0 or 1
    wrong: int          # tokens that the target would not have written
    kept: int           # draft tokens


def variation(a, b):
    """Total variation distance [...] of log-probabilities [..., V]."""
    return (a.exp() - b.exp()).abs().sum(-1) / 2


def divergence(a, b):
    """KL(a, b) [...] in nats of log-probabilities [..., V]."""
    return (a.exp() * (a - b)).sum(-1)


def look(session, draft, stages):
    """({stage: Seen} of a draft, the target's Score); stages: {name: Path of the target, or a Reader}.

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
        laws.append(other.logits.log_softmax(-1))
    every = torch.stack(laws)                                                           # [K, n + 1, V]
    s = every[:, :-1]
    apart = dict(TV=variation(s, p), R=violation(p, s))                                 # [K, n]
    gains = {name: rivals.stage_gain(q, s, p, *form) for name, form in FORMS.items()}
    gains['KL'] = divergence(q, p) - divergence(q, s) - divergence(s, p)
    gains['TV'] = variation(q, p) - variation(q, s) - variation(s, p)
    same = every.argmax(-1) == score.logits.argmax(-1)                                  # [K, n + 1]
    found = {}
    for k, name in enumerate(stages):
        found[name] = Seen(others[k].ratios, same[k].tolist(), row_of(apart, k), row_of(gains, k))
    return found, score


def trust_of(score):
    """{cascade: [n]}: each keeps draft token i, not the target's choice, where 1 - lam is at most this."""
    q = score.draft.logits.softmax(-1)                                                  # [n, V]
    p = score.logits[:-1].softmax(-1)                                                   # [n, V]
    sure = q.amax(-1)
    apart = (1 - overlap(p, q)).clamp(min=1e-9)
    found = {'cascade': sure.tolist(), 'cascade-opt': (1 - (p.amax(-1) - sure) / apart).tolist()}
    found['cascade-tokenv3'] = score.ratios
    return found


def row_of(table, k):
    """{name: row k, as a list} of {name: tensor}."""
    return {name: values[k].tolist() for name, values in table.items()}


def kept_until(ratios, least, begin=0):
    """The first place from `begin` on whose ratio is below `least`; the length where there is none."""
    for i in range(begin, len(ratios)):
        if ratios[i] < least:
            return i
    return len(ratios)


def with_extra(block, n):
    """Tokens of a cycle that kept n: another one, unless the text is over."""
    return n if block.over and n == len(block.p) else n + 1


def replay(block, stage, keep, escalate):
    """The Outcome of a block by via's gate, greedy: once escalated, the target judges what is left."""
    seen = block.stages[stage]
    n = len(block.p)
    wrong = 0
    for i, ratio in enumerate(seen.ratios):
        if ratio < escalate:
            kept = kept_until(block.p, 1, i)
            return Outcome(with_extra(block, kept), 1, wrong, kept)
        if ratio < keep:
            return Outcome(i + 1, 0, wrong + int(not seen.same[i]), i)
        wrong += block.p[i] < 1
    tokens = with_extra(block, n)
    if n < tokens <= block.room:                        # slim's own token, unless the text has no room for it
        wrong += int(not seen.same[n])
    return Outcome(tokens, 0, wrong, n)


def cascade(block, rule, least):
    """The Outcome for one full pass a cycle by a speculative cascade, greedy; least: 1 - lam; above 1: sd."""
    trust = block.trust[rule]
    n = 0
    wrong = 0
    for p, trusted in zip(block.p, trust):
        if p < 1 and trusted < least:
            break
        n += 1
        wrong += p < 1
    return Outcome(with_extra(block, n), 1, wrong, n)


def exact(block):
    """The Outcome of sd."""
    return cascade(block, 'cascade', 2.0)


def text_sums(blocks, rule):
    """dict(tokens, wrong, passes, kept, judged) of a text by a rule, a function Block -> Outcome.

    A full pass is one that a cycle asked for, or reads a lag of more than MAX_LAG tokens.
    """
    sums = dict(tokens=0, wrong=0, passes=0, kept=0, judged=0)
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
        sums['kept'] += outcome.kept
        sums['judged'] += min(outcome.kept + 1, len(block.p))
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
        """The cost of a draft token."""
        return self.size(self.drafter, self.drafter.full)

    def blocks(self, ids, text, longest=GAMMA):
        """[Block], one behind every GAMMA tokens of a text (ids) behind its prompt (ids)."""
        session = session_of(self.engine, ids)
        session.draft = self.reader
        method = Exact()
        found = []
        for i in range(0, len(text), GAMMA):
            session.tokens = ids + text[:i]
            draft = method.guess(session, min(longest, len(text) - i))
            stages, score = look(session, draft, self.stages)
            over = draft.tokens[-1] in session.eos
            found.append(Block(score.ratios, trust_of(score), len(text) - i, over, stages))
        return found


# ------------------------------------------------------------------------------------- what all records share

@dataclass
class Material:
    """What the records of one measurement are made from, on any pair."""
    engine: object
    prompts: list       # Prompts, family by family
    mask: tuple         # that train_mask.py found
    plainer: dict       # {how it was found: mask} of as many layers, without a search

    def stages(self):
        """The stages of the main replay."""
        return dict(slim=self.mask)


@dataclass
class LabMaterial(Material):
    """What they are made from on the embedded pair."""
    texts: list         # (prompt ids, the target's greedy ids) of each
    windows: object     # train_mask.Windows of the calibration texts
    sweep: dict         # {layers skipped: mask}
    random: list        # masks of as many layers as the one found
    middles: dict       # {role: Reader} of the models for the middle
    few: list           # indices of the texts for what is read with many stages
    near: dict          # {role of a model for the middle: the mask of the sweep whose pass is about as dear}

    def all_masks(self):
        """Every mask of the sweep, of the lot and without a search, the one found first, each once."""
        return list(dict.fromkeys([self.mask, *self.sweep.values(), *self.random, *self.plainer.values()]))

    def stages(self):
        found = dict(slim=self.mask)
        for role, mask in self.near.items():
            found[f'slim like {role}'] = mask
        return found | self.middles


@functools.cache
def material(pair, n):
    """The Material for n prompts of each family."""
    if pair.is_embedded:
        return lab_material(n)
    prompts = prompts_of(pair, n)
    engine = engine_of(pair, prompts)
    found = engine.calibration['mask']
    plain = found.get('plain', {})
    expect(len(plain) == 2, f'{pair.target}: its mask is of an older or interrupted search; make it anew '
           f'with python train_mask.py --target {pair.target}')
    plainer = {'evenly spaced': tuple(plain['evenly']['skip']),
               'contiguous': tuple(plain['contiguous']['skip'])}
    return Material(engine, prompts, tuple(found['skip']), plainer)


@functools.cache
def lab_material(n):
    """The LabMaterial for n prompts of each task."""
    prompts = prompts_of(EMBEDDED, n)
    engine = engine_of(EMBEDDED, prompts)
    mask = tuple(engine.calibration['mask']['skip'])
    middles = {}
    for role in MIDDLES:
        if is_there(role):
            middles[role] = Reader(embedded(role)[0], engine.readers['target'].capacity)
        else:
            print(f'no lab/models/{role}: what is compared with {MIDDLES[role]} in the middle is left out '
                  f'(python -m lab.train {role})', file=sys.stderr)
    texts = []
    for prompt in tqdm(prompts, desc='texts', disable=None):
        texts.append((prompt.ids, greedy_text(engine, prompt.ids)))
    calibration = train_mask.calibration_texts(engine.tokenizer, train_mask.Settings())
    windows = train_mask.Windows(engine.models['target'], calibration, WINDOW)
    fifth = max(1, n // 5)                              # of each task
    few = [i for i in range(len(prompts)) if i % n < fifth]
    k = len(mask) // 2
    evenly, blocks = plain_masks(FREE, k)
    plainer = {'evenly spaced': evenly, 'contiguous': min(blocks, key=windows.cost),
               'single layers': singles(windows, k)}
    sweep = best_masks(windows)
    near = {role: like_cost(engine, sweep, reader.model) for role, reader in middles.items()}
    return LabMaterial(engine, prompts, mask, plainer, texts, windows, sweep, random_masks(k), middles, few,
                       near)


def greedy_text(engine, ids):
    """The target's greedy text behind a prompt (ids), exactly as plain decoding's."""
    return tokens_of(decode(session_of(engine, ids), Exact(GAMMA)))


def like_cost(engine, sweep, model):
    """The mask of the sweep whose pass costs most like a pass of this model."""
    record = BlockRecord(engine, sweep)
    costs = record.costs()
    wanted = record.size(model, model.full)
    return sweep[min(sweep, key=lambda k: abs(costs[k] - wanted))]


def threshold_pairs():
    """[(keep, escalate)] of the sweep."""
    pairs = [(keep, escalate) for keep in KEEPS for escalate in ESCALATES if escalate <= keep]
    return pairs + [NEVER_KEPT]


@functools.cache
def modelled(pair, n):
    """What the replays' sums are turned into costs with."""
    record = BlockRecord(material(pair, n).engine, material(pair, n).stages())
    return dict(pairs=threshold_pairs(), costs=record.costs(), draft_cost=record.draft_cost())


@functools.cache
def contestants(pair, n):
    """({name: Rival}, the choice of knobs that some of them run at)."""
    shared = material(pair, n)
    if not pair.is_embedded:
        return plain_rivals(shared), {}
    choice = choose(list(gammas(n)), modelled(pair, n))
    return rivals_of(shared, choice), choice


@functools.cache
def long_blocks(n):
    """[[Block] of a text], of max(GAMMAS) draft tokens in even texts, of GAMMA in odd ones."""
    shared = lab_material(n)
    record = BlockRecord(shared.engine, shared.stages())
    found = []
    for i, text in enumerate(tqdm(shared.texts, desc='blocks', disable=None)):
        found.append(record.blocks(*text, GAMMA if i % 2 else max(GAMMAS)))
    return found


@functools.cache
def block_record(pair, n):
    """The BlockRecord of the stages of the main replay."""
    shared = material(pair, n)
    return BlockRecord(shared.engine, shared.stages())


def blocks_of(pair, n, turn):
    """[Block] of GAMMA draft tokens of the text of this number."""
    if pair.is_embedded:
        return with_gamma(long_blocks(n)[turn], GAMMA)
    shared = material(pair, n)
    ids = shared.prompts[turn].ids
    return block_record(pair, n).blocks(ids, pair.own_text(ids))


def with_gamma(blocks, gamma):
    """The Blocks of a text as this gamma drafts them."""
    return [block.shortened(gamma) for block in blocks]


# ------------------------------------------------------------------------------------------------ the records

def settings(pair, n):
    """What the rows of the other records are of, and what holds for all texts: the single row of this one."""
    shared = material(pair, n)
    rivals_by_name, choice = contestants(pair, n)
    section = shared.engine.calibration['mask']
    found = modelled(pair, n) | dict(
        gamma=GAMMA,
        rivals=list(rivals_by_name),                    # the order of the columns of `runs`
        memory={name: memory(readers_for(shared.engine, rival)) for name, rival in rivals_by_name.items()},
        choice=choice,
        middles=[],
        mask=named(shared.mask),
        plainer={how: named(mask) for how, mask in shared.plainer.items()},
        search_seconds=section['seconds'],
        search_masks=len(section['tried']),
        longest=max(len(prompt.ids) for prompt in shared.prompts))
    return found | lab_settings(shared) if pair.is_embedded else found


def lab_settings(shared):
    """What more there is of LabMaterial."""
    paths = {named(mask): mask for mask in shared.all_masks()}
    draft_costs = {}
    for name, drafter in drafters_of(shared).items():
        draft_costs[name] = BlockRecord(shared.engine, {}, drafter).draft_cost()
    return dict(
        middles=list(shared.middles),
        random=[named(mask) for mask in shared.random],
        sweep={k: named(mask) for k, mask in shared.sweep.items()},
        mask_costs=BlockRecord(shared.engine, paths).costs(),       # the order of the columns of `masks`
        drafters=draft_costs)


def counted(pair, n):
    """[n]: the single item of `settings`."""
    return [n]


def places(pair, n):
    """[(n, number of a text)], what the items of a record with a row a text are."""
    return [(n, turn) for turn in range(len(material(pair, n).prompts))]


def real_places(pair, n):
    """Likewise; of another pair REAL texts of each family at most."""
    prompts = material(pair, n).prompts
    return [(n, turn) for turn in range(len(prompts)) if pair.is_embedded or prompts[turn].place < REAL]


def runs(pair, item):
    """The row of a text: {figure of a Run: [its value for each of the rivals]}."""
    n, turn = item
    return contest(pair, material(pair, n), contestants(pair, n)[0], turn)


@functools.cache
def gammas(n):
    """A list of rows, a row for each gamma: sums over the even texts of sd, of via and of the cascades."""
    found = []
    for gamma in GAMMAS:
        texts = [with_gamma(blocks, gamma) for blocks in long_blocks(n)[::2]]
        row = dict(gamma=gamma, cycles=0, drafted=0, sd=0)
        for blocks in texts:
            row['cycles'] += len(blocks)
            row['drafted'] += sum(len(block.p) for block in blocks)
            row['sd'] += text_sums(blocks, exact)['tokens']
        row['via'] = added([via_columns(blocks) for blocks in texts])
        row['cascades'] = {}
        for rule in CASCADES:
            row['cascades'][rule] = added([cascade_columns(blocks, rule) for blocks in texts])
        found.append(row)
    return found


def added(rows):
    """{name: [its values, added up place by place]} of such dicts."""
    totals = {}
    for name in rows[0]:
        columns = zip(*(row[name] for row in rows))
        totals[name] = [sum(column) for column in columns]
    return totals


def cascade_columns(blocks, rule):
    """{tokens, wrong: [at 1 - lam of 0.01, 0.02, ... 1]} of a text."""
    rows = []
    for hundredths in range(1, 101):
        rows.append(text_sums(blocks, functools.partial(cascade, rule=rule, least=hundredths / 100)))
    return columns_of(rows, ('tokens', 'wrong'))


def replays(pair, item):
    """The row of a text: via at all thresholds, sd, distances, the gates; of another pair lenient sd, too."""
    n, turn = item
    blocks = blocks_of(pair, n, turn)
    row = dict(task=material(pair, n).prompts[turn].family, cycles=len(blocks),
               sd=text_sums(blocks, exact)['tokens'], via=via_columns(blocks), **distances(blocks),
               gates=gates(blocks))
    return row if pair.is_embedded else row | dict(lenient=cascade_columns(blocks, LENIENT))


def via_columns(blocks):
    """{sum: [its value at each of threshold_pairs]} of a text."""
    rows = []
    for keep, escalate in threshold_pairs():
        rows.append(text_sums(blocks, functools.partial(replay, stage='slim', keep=keep, escalate=escalate)))
    return columns_of(rows, ('tokens', 'wrong', 'passes'))


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
    """A row for half of the few texts: {sum, Delta by R and strict R: [its value with each mask]}."""
    shared = lab_material(n)
    stages = {named(mask): mask for mask in shared.all_masks()}
    record = BlockRecord(shared.engine, stages)
    for i in tqdm(shared.few[::2], desc='masks', disable=None):
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
        yield dict(task=shared.prompts[i].family, cycles=len(blocks), places=places) | columns


def usual_sums(blocks, stage):
    """The sums of a text by via at its usual thresholds."""
    keep, escalate = USUAL
    return text_sums(blocks, functools.partial(replay, stage=stage, keep=keep, escalate=escalate))


def search(n):
    """A row for every mask of as many layers as the one found: its cost on each calibration text, by task."""
    shared = lab_material(n)
    windows = {}                                        # the texts go through the tasks in turn
    for i, task in enumerate(tasks.TASKS):
        windows[task] = []
        for text in shared.windows.texts[i::len(tasks.TASKS)]:
            windows[task].append(train_mask.Windows(shared.windows.model, [text], WINDOW))
    every = list(itertools.combinations(range(FREE), len(shared.mask) // 2))
    for layers in tqdm(every, desc='all masks', disable=None):
        mask = skipping(layers)
        row = dict(mask=named(mask))
        for objective in ('violation', 'argmax'):
            row[objective] = {}
            for task, texts in windows.items():
                row[objective][task] = [text.cost(mask, objective) for text in texts]
        yield row


@functools.cache
def sublayer_costs(n):
    """{mask of half of the free sublayers: its cost on a few windows}, every one of them."""
    shared = lab_material(n)
    few = train_mask.Windows(shared.windows.model, shared.windows.texts[:FEW_WINDOWS], WINDOW)
    every = list(itertools.combinations(range(2 * FREE), FREE))
    costs = {}
    for units in tqdm(every, desc='sublayers', disable=None):
        costs[units] = few.cost([unit + 2 for unit in units])
    return costs


def sublayers(n):
    """A single row: what all masks of half of the free sublayers cost, and where masks of layers rank."""
    shared = lab_material(n)
    costs = sublayer_costs(n)
    ranked = sorted(costs, key=costs.get)
    ordered = [costs[units] for units in ranked]
    places = [round(share * (len(ordered) - 1) / 20) for share in range(21)]
    of_layers = {}
    for how, mask in (dict(found=shared.mask) | shared.plainer).items():
        units = tuple(unit - 2 for unit in mask)
        if units in costs:                              # it skips half of the free layers
            of_layers[how] = dict(cost=costs[units], rank=1 + ranked.index(units))
    yield dict(masks=len(costs), windows=FEW_WINDOWS, window=WINDOW, least=named(ranked[0]),
               quantiles=[ordered[place] for place in places], layers=of_layers)


def searches(n):
    """A row a seed: the best of 60 masks of half of the sublayers, with Bayes and without: cost and rank."""
    costs = sublayer_costs(n)
    ordered = sorted(costs.values())
    for seed in range(SEEDS):
        row = dict(sublayers=2 * FREE, skipped=FREE, least=ordered[0])
        for name, period in (('bayesian', 2), ('random', 0)):
            tried = search_masks(costs.get, 2 * FREE, FREE, period=period, seed=seed, patience=999)
            row[name] = min(tried.values())
            row[f'{name}_rank'] = 1 + bisect.bisect_left(ordered, row[name])
        yield row


def drafters_of(shared):
    """{name: network} of drafters, the smallest first; the first two are the draft cut or rounded."""
    draft = shared.engine.models['draft']
    found = {'the draft without its last feed-forward': cut(draft),
             'the draft at 4 bits': embedded('draft', True)[0], 'the draft': draft}
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
    shared = lab_material(n)
    records = {}
    for name, drafter in drafters_of(shared).items():
        records[name] = BlockRecord(shared.engine, dict(slim=shared.mask), drafter)
    for i in tqdm(shared.few, desc='drafters', disable=None):
        row = dict(task=shared.prompts[i].family)
        for name, record in records.items():
            blocks = record.blocks(*shared.texts[i])
            drafted = sum(len(block.p) for block in blocks)
            row['cycles'] = len(blocks)                 # blocks begin every GAMMA tokens, whoever drafts
            row[name] = dict(drafted=drafted, via=usual_sums(blocks, 'slim'), sd=text_sums(blocks, exact))
        yield row


def sampled(n):
    """A row for every fifth text: {figure of a Sampled: [for each of SAMPLED]}, at temperature 1."""
    shared = lab_material(n)
    found, _ = contestants(EMBEDDED, n)
    forgiving = Rival(Lenient, [shared.mask], dict(gamma=GAMMA, lenience=0.5))
    found = found | {'sd, lenient': forgiving}
    engine = shared.engine
    for turn in tqdm(range(0, len(shared.prompts), 5), desc='sampled', disable=None):
        prompt = shared.prompts[turn]
        rows = []
        for name in SAMPLED:
            cycles, figures = write_text(engine, prompt.ids, found[name], turn, temperature=1.0)
            tokens = tokens_of(cycles)
            rows.append(dict(tokens=len(tokens), judged=figures['judged'], accepted=figures['accepted'],
                             work=figures['work'], nats=nats_of(engine, prompt.ids, tokens),
                             right=grade(EMBEDDED, prompt, tokens)))
        yield dict(task=prompt.family) | columns_of(rows, Sampled._fields)


def some_places(pair, n):
    """Prompts for `drafting`: all where there is no draft model, else every fifth."""
    return prompts_of(pair, n)[::5 if pair.draft else 1]


@functools.cache
def self_engine(pair):
    """An Engine of the pair's target, which drafts for itself."""
    return engine_of(pair, prompts_of(pair, 1), draft='self')


def drafting(pair, prompt):
    """The row of a text: {figure of a Drafted: [for each of DRAFTED]}, without a draft model."""
    engine = self_engine(pair)
    engine.open([prompt.ids])
    found = []
    for name, gamma in DRAFTED.items():
        session = session_of(engine, prompt.ids)
        if 'lookup' in name:
            session.source = lookup
        cycles = list(decode(session, Exact(gamma)))
        figures = engine.statistics(cycles)
        tokens = tokens_of(cycles)
        counts = passes_of(figures)
        found.append(dict(tokens=len(tokens), cycles=len(cycles), judged=figures['judged'],
                          accepted=figures['accepted'], slim=counts['middle_passes'],
                          full=counts['target_passes'], work=figures['work'], seconds=figures['seconds'],
                          right=grade(pair, prompt, tokens)))
    return dict(task=prompt.family) | columns_of(found, Drafted._fields)


def unseen_prompts(pair, n):
    """[Prompt], n of each family, or fewer, that the search for the target's mask did not have."""
    asked = read_calibration(pair.target, None, ['mask'])['mask'].get('settings', {})
    expect(asked.get('unit', 'layer') == 'layer', f'{pair.target}: a mask of sublayers, and blocks of layers '
           'cannot be compared with it; search one of layers')
    searched = []
    if asked.get('prompts'):
        searched = [row['prompt'] for row in train_mask.calibration_rows(train_mask.Settings(**asked))]
    return [prompt for prompt in prompts_of(pair, n) if prompt.row['prompt'] not in searched]


def unseen(pair, prompt):
    """The row of a text that no search saw: R of the mask found, of the evenly spaced, of all blocks.

    Of the first WINDOW tokens that the target writes behind the prompt.
    """
    section = read_calibration(pair.target, None, ['mask'])['mask']
    session = pair.session(prompt.ids)
    text = []
    for cycle in decode(session, Exact()):
        text += cycle.tokens
        if len(text) >= WINDOW:
            break
    text = text[:WINDOW]
    model = session.target.model
    windows = train_mask.Windows(model, [prompt.ids + text], len(text))
    layers = model.config.num_hidden_layers
    evenly, blocks = plain_masks(layers - 2, len(section['skip']) // 2)
    return dict(task=prompt.family, scored=len(text), found=windows.cost(section['skip']),
                evenly=windows.cost(evenly), blocks=[windows.cost(block) for block in blocks])


def audited_methods(pair):
    """{name: ViaSd} at bounds from 1, none, to 0, sd; on the embedded pair also where all drafts are kept."""
    found = {}
    for bound in BOUNDS if pair.is_embedded else FEW_BOUNDS:
        found[bounded('via', bound)] = ViaSd(most_wrong=bound)
    if pair.is_embedded:
        for max_lag, name in BLIND.items():
            for bound in BOUNDS[:-1]:
                found[bounded(name, bound)] = ViaSd(keep=0.0, escalate=0.0, slim_bonus=False, max_lag=max_lag,
                                                    most_wrong=bound)
    return found


def audited(pair, prompt):
    """The row of a text: {figure of an Audited: [for each of audited_methods]}; who: their names."""
    engine = audited_engine(pair)
    engine.open([prompt.ids])
    found = []
    methods = audited_methods(pair)
    for method in methods.values():
        session = session_of(engine, prompt.ids)
        cycles = list(decode(session, method))
        tokens = tokens_of(cycles)
        said = session.heard
        target = session.target
        rows = target.read(prompt.ids + tokens[:-1], [], target.model.full, len(tokens))
        own = rows.argmax(-1).tolist()
        found.append(dict(tokens=len(tokens), cycles=len(cycles), others=judged_by_another(cycles),
                          heard=len(said), heard_wrong=sum(1 - p for p, _ in said),
                          heard_nats=-sum(logp for _, logp in said),
                          wrong=sum(a != b for a, b in zip(tokens, own)), right=grade(pair, prompt, tokens),
                          **passes_of(engine.statistics(cycles))))
    return dict(task=prompt.family, who=list(methods)) | columns_of(found, Audited._fields)


def judged_by_another(cycles):
    """How many committed tokens are not the target's, nor judged by it when they were committed."""
    count = 0
    for cycle in cycles:
        for i, label in enumerate(cycle.labels):
            asked = i < len(cycle.judged) and cycle.judged[i]['p'] is not None
            count += label not in ('target', 'bonus') and not asked
    return count


@functools.cache
def audited_engine(pair):
    """An Engine of the pair with its mask."""
    return engine_of(pair, prompts_of(pair, 1))


LAB_ONLY = 'models of several sizes, and tasks of their own'
RECORDS = dict(
    settings=Record(counted, settings, lab_models=tuple(NEEDED), calibrated=True),
    runs=Record(real_places, runs, lab_models=tuple(NEEDED), calibrated=True),
    replays=Record(places, replays, lab_models=tuple(NEEDED), calibrated=True),
    unseen=Record(unseen_prompts, unseen, drafts=False, calibrated=True),
    drafting=Record(some_places, drafting, drafts=False, calibrated=True),
    audited=Record(prompts_of, audited, calibrated=True),
    sampled=LabRecord(NEEDED, sampled, LAB_ONLY), gammas=LabRecord(NEEDED, gammas, LAB_ONLY),
    masks=LabRecord(['target', 'draft'], masks, LAB_ONLY), search=LabRecord(['target'], search, LAB_ONLY),
    sublayers=LabRecord(['target'], sublayers, LAB_ONLY), searches=LabRecord(['target'], searches, LAB_ONLY),
    drafters=LabRecord(NEEDED, drafters, LAB_ONLY))
