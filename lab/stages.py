"""What VIA-SD's claims are computed from: real runs of every rival, and recorded blocks to replay a gate on.

lab/claims.py makes the findings. p target, q draft, s a middle stage (a slim path of the target, or a model
of its own); V vocabulary, n draft tokens of a block, K stages.
"""
import itertools
from collections import namedtuple
from dataclasses import dataclass

import torch
from tqdm import tqdm

import specmini
from lab import tasks
from lab.compare import tokens_of
from lab.rivals import stage_gain
from model import Path, Reader
from verify import Exact, Score, ViaSd, rollout, violation

GAMMA, LAG = ViaSd.gamma, ViaSd.max_lag
FORMS = dict(R=(0.5, 0.5), strict=(0.0, 1.0))       # alpha, beta of R: as published; nothing forgiven
Seen = namedtuple('Seen', 'ratios same apart gains')    # of a stage: see look


# ------------------------------------------------------------------------------------------------ real runs

def contest(engine, rows, prompts, rivals):
    """[{rival: its figures}], a dict for each text; all rivals write a text in turn, each from a fresh cache.

    rivals: {name: (function to a method, masks taken in turn, {role: Reader; None takes the engine's away})}.
    The figures are those of specmini.statistics, with tokens (ids) and right (None where nothing is graded).
    """
    found, own, readers = [], engine.calibration, dict(engine.readers)
    for i, (row, ids) in enumerate(zip(rows, tqdm(prompts, desc='runs', disable=None))):
        found.append({})
        for name, (make, masks, others) in rivals.items():
            engine.readers = {role: x for role, x in (readers | others).items() if x}
            engine.calibration = dict(mask=own['mask'] | dict(skip=masks[i % len(masks)]))
            cycles = list(specmini.decode(engine.start(ids, 'sd')[0], make()))
            tokens = tokens_of(cycles)
            right = tasks.grade(row, engine.tokenizer.decode(tokens))
            found[-1][name] = engine.statistics(cycles) | dict(tokens=tokens, right=right)
    engine.readers, engine.calibration = readers, own
    return found


def memory(*readers):
    """Bytes of the readers' weights and caches."""
    return sum(x.nbytes for r in readers
               for x in itertools.chain(r.model.parameters(), *r.cache.stores))


# --------------------------------------------------------------------------------------- blocks to replay on

@dataclass
class Block:
    """A block of draft tokens behind some place of the target's own text, as every verifier sees it."""
    p: list             # [n] target's p(y) / max p of each token: 1 where it is the target's choice
    room: int           # tokens that the text still has
    stages: dict        # name: Seen


def look(session, draft, stages):
    """({stage: Seen} of a draft, [n] the target's ratios); stages: {name: Path of the target, or a Reader}.

    Seen: [n] s(y) / max s, [n] whether s and p agree on the likeliest token, {TV, R: [n] from s to p},
    {measure: [n] Delta, how much shorter the way from q to p is through s}. Slim reads on top of what the
    full path wrote: its lag is 0 here, and up to max_lag in real runs.
    """
    score = Score(session, draft, session.target.model.full)
    law = lambda logits: logits.log_softmax(-1)
    q, p = law(draft.logits), law(score.logits[:-1])                                    # [n, V]
    others = [Score(session, draft, x) if isinstance(x, Path) else Score(session, draft, x.model.full, x)
              for x in stages.values()]
    s = law(torch.stack([other.logits[:-1] for other in others]))                       # [K, n, V]
    tv = lambda b, a: (a.exp() - b.exp()).abs().sum(-1) / 2
    kl = lambda b, a: (a.exp() * (a - b)).sum(-1)
    gains = {name: stage_gain(q, s, p, *form) for name, form in FORMS.items()}
    gains |= {name: f(p, q) - f(s, q) - f(p, s) for name, f in dict(KL=kl, TV=tv).items()}
    apart = dict(TV=tv(p, s), R=violation(p, s))                                        # [K, n]
    same = s.argmax(-1) == p.argmax(-1)
    part = lambda table, k: {name: x[k].tolist() for name, x in table.items()}
    return {name: Seen(others[k].ratios, same[k].tolist(), part(apart, k), part(gains, k))
            for k, name in enumerate(stages)}, score.ratios


def replay(block, stage, keep, escalate):
    """(tokens committed, full passes, how many the target would not have written) by via's gate, greedy."""
    wrong, seen = 0, block.stages[stage]
    for i, (p, r) in enumerate(zip(block.p, seen.ratios)):
        if r < escalate:
            left = next((j for j in range(i, len(block.p)) if block.p[j] < 1), len(block.p))
            return left + 1, 1, wrong
        if r < keep:
            return i + 1, 0, wrong + (not seen.same[i])
        wrong += p < 1
    return len(block.p), 0, wrong


def lenient(block, least):
    """The same for one full pass a cycle that keeps y from p(y) / max p >= least on; 1: exact."""
    n = next((i for i, p in enumerate(block.p) if p < least), len(block.p))
    return n + 1, 1, sum(p < 1 for p in block.p[:n])


class Record:
    """Blocks of many texts, and what a rule would have made of them: modelled speed, wrong tokens.

    The model: a pass costs the weight bytes that it reads, in passes of the full path; nothing else does.
    """

    def __init__(self, engine, texts, stages, drafter=None):
        """texts: [(prompt ids, the target's greedy ids)]; stages: {name: mask or Reader}; drafter: a network
        in the draft's place.
        """
        full = engine.models['target'].full
        drafter, whole = drafter or engine.models['draft'], engine.models['target'].read_bytes(full)
        self.stages = {k: full.slim(set(x)) if isinstance(x, tuple) else x for k, x in stages.items()}
        size = lambda x: (engine.models['target'].read_bytes(x) if isinstance(x, Path)
                          else x.model.read_bytes(x.model.full))
        self.cost = {None: 0.0} | {k: size(x) / whole for k, x in self.stages.items()}
        self.draft = GAMMA * drafter.read_bytes(drafter.full) / whole
        reader = Reader(drafter, engine.readers['draft'].capacity)
        self.rows = [self.blocks(engine, reader, *text) for text in tqdm(texts, desc='blocks', disable=None)]

    def blocks(self, engine, reader, ids, text):
        """[Block], one behind every GAMMA tokens of the text."""
        session, found = engine.start(ids, 'sd')[0], []
        session.draft = reader
        for i in range(0, len(text), GAMMA):
            session.tokens = ids + text[:i]
            draft = rollout(session, Exact(), min(GAMMA, len(text) - i))
            stages, p = look(session, draft, self.stages)
            found.append(Block(p, len(text) - i, stages))
        return found

    def sums(self, stage, *knobs):
        """For each text (tokens, cost, wrong tokens, full passes, cycles); stage None: lenient sd, else via.

        A full pass is one that a cycle asked for, or reads a lag of more than max_lag tokens.
        """
        found = []
        for blocks in self.rows:
            tokens, passes, bad, lag = 0, 0, 0, 0
            for b in blocks:
                n, asked, w = replay(b, stage, *knobs) if stage else lenient(b, *knobs)
                late = lag > LAG
                tokens, passes, bad = tokens + min(n, b.room), passes + asked + late, bad + w
                lag = 0 if asked else n if late else lag + n
            cost = len(blocks) * (self.draft + self.cost[stage]) + passes
            found.append((tokens, cost, bad, passes, len(blocks)))
        return found


def ratio(rows, a, b):
    """Column a of the rows over column b, sums of both."""
    return sum(row[a] for row in rows) / sum(row[b] for row in rows)


def pace(rows):
    """Tokens for each full pass's cost, of rows of Record.sums."""
    return ratio(rows, 0, 1)


def wrong(rows):
    """The share of tokens that the target would not have written."""
    return ratio(rows, 2, 0)
