"""One step, as SpecGuard's claims need it recorded: candidates, signals under many rollouts, right or wrong.

Who asks for which steps: record.py (the lab's tasks) and answers.py (any pair's own answers).
"""
import math
import os
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch

import kernels
from lab.specguard.rivals import sureness
from model import Reader
from verify import SpecGuard, most_central, token_logps, write_steps

CANDIDATES = {'1': 1, '2': 2, '4': 4, '8': 8, 'common': 4}      # selectors, and how many they choose from


# --------------------------------------------------------------------------------- the signals of a step

class Rollout(NamedTuple):
    """What grounding is measured by."""
    who: str                    # whose attention, draft or target
    layers: str                 # which of its layers: first, middle, last, all
    n: int                      # how many
    sparsify: float = 0.01      # attention weights below it are dropped
    residual: float = 0.0       # the identity's share of a layer
    row: str = 'own'            # a token's own row, or `predicting`: the one before, which predicts it
    first: bool = True          # False: without the prompt's first token


ROLLOUTS = {        # the first is what SpecGuard's defaults look at
    'draft last 3': Rollout('draft', 'last', 3),
    'draft last 1': Rollout('draft', 'last', 1),
    'sparsify 0': Rollout('draft', 'last', 3, sparsify=0.0),
    'sparsify 0.05': Rollout('draft', 'last', 3, sparsify=0.05),
    'residual 0.5': Rollout('draft', 'last', 3, residual=0.5),
    'predicting row': Rollout('draft', 'last', 3, row='predicting'),
    'without the first': Rollout('draft', 'last', 3, first=False),
    'target last 1': Rollout('target', 'last', 1),
    'target last 2': Rollout('target', 'last', 2),
    'target last 3': Rollout('target', 'last', 3),
    'target last 6': Rollout('target', 'last', 6),
    'target first 3': Rollout('target', 'first', 3),
    'target middle 3': Rollout('target', 'middle', 3),
    'target all': Rollout('target', 'all', 3),
    'target without the first': Rollout('target', 'last', 3, first=False)}

FEW_ROLLOUTS = ('draft last 3', 'draft last 1', 'without the first', 'target last 1', 'target last 3',
                'target without the first')     # those recorded with `mid`


def observe(session, who, step, rollouts):
    """(lowest log-probability of a step's ids, {rollout: lowest grounding}) by one model, in one pass.

    who: draft or target. Log-probabilities in nats at temperature 1, grounding 0..1.
    """
    reader = getattr(session, who)
    full = reader.model.full
    mine = {name: ROLLOUTS[name] for name in rollouts if ROLLOUTS[name].who == who}
    cuts = {rollout.sparsify for rollout in mine.values()}
    T = len(step)
    layers = []                             # of each layer: {sparsify: attention weights [1, T, S]}

    def watch(q, k, v, mask, carry):
        rows = kernels.full_mask(mask, q, k)[-T:]
        layers.append({cut: kernels.attention_rows(q[:, :, -T:], k, rows, cut) for cut in cuts})
        return kernels.attend(q, k, v, mask, carry)
    path = replace(full, name='observed', attends=(watch,) * len(full.attends))
    logits = reader.read(session.tokens, step, path, T + 1)[:-1]
    lowest = float(token_logps(logits, step).min())
    return lowest, {name: lowest_grounding(full, layers, rollout) for name, rollout in mine.items()}


def lowest_grounding(full, layers, rollout):
    """The least share of a step's tokens on the text before it, 0..1; layers: see observe."""
    attends = full.grounded(rollout.layers, rollout.n).attends
    shades = None
    for weights, attend in zip(layers, attends):
        if attend is kernels.grounded:
            rows = weights[rollout.sparsify]
            if not rollout.first:
                rows = without_first(rows)
            shades = kernels.shade(rows, shades, rollout.residual)
    shares = shades[0].sum(-1).tolist()
    if rollout.row == 'predicting':
        shares = [1.0] + shares[:-1]        # the row that predicts the first token is of the text before
    return min(shares)


def without_first(weights):
    """Attention rows [B, T, S] without the first token, the rest scaled up to sum to 1.

    Much attention goes to the first token for want of anything better (a sink): that is no grounding.
    Source: Xiao et al. 2023 (attention sinks).
    """
    rest = weights.clone()
    rest[..., 0] = 0
    return rest / rest.sum(-1, keepdim=True).clamp(min=1e-9)


def whole_rollout(model, line, layers, sparsify, residual):
    """[N, N], the rollout of a text (ids) as the paper has it: whole matrices of these layers, multiplied.

    Made head by head and row by row: the oracle of kernels.shade, and the only way to the grounding in a part
    of the earlier tokens.
    """
    seen = []                               # of each layer: attention [N, N], the mean over its heads

    def watch(q, k, v, mask, carry):
        share = q.shape[1] // k.shape[1]    # query heads to a key head
        total = torch.zeros(len(line), len(line), dtype=q.dtype)
        for head, queries in enumerate(q[0]):
            keys = k[0, head // share]
            scores = queries @ keys.T / queries.shape[-1] ** 0.5
            weights = (scores + kernels.causal_mask(*scores.shape, scores)).softmax(-1)
            for row in weights:
                drop_small(row, sparsify)
            total += weights
        seen.append(total.double() / q.shape[1])
        return kernels.attend(q, k, v, mask, carry)
    path = replace(model.full, attends=(watch,) * len(model.full.attends))
    Reader(model, len(line)).read(line, [], path, 1)
    product = torch.eye(len(line), dtype=torch.float64)
    for i in layers:
        product = (1 - residual) * seen[i] @ product + residual * product
    return product


def drop_small(row, least):
    """Zeroes a row's weights below `least` and scales the rest to sum 1, in place; one of only such stays."""
    large = row >= least
    if large.any():
        row *= large / row[large].sum()

# ------------------------------------------------------------------------------------------- a recorded step

def record_step(session, rollouts=tuple(ROLLOUTS), k=8, selectors=tuple(CANDIDATES), delimiter=r'\n'):
    """One step, written by the draft k times side by side and by the target once, as a dict.

    selectors: of CANDIDATES; delimiter: what ends the step.
    candidates: those that a selector chooses, each once, with what candidate_of says. picks: the index of the
    chosen one by selector. passes: of the draft, by how many are written side by side, until the longest is
    over. own: tokens and right of the target's step. same: with how many of its tokens a candidate begins,
    which the draft then need not read again.
    """
    method = SpecGuard(k=k, tau=math.inf, delimiter=delimiter)
    drafts = write_steps(session, method, session.draft, k)
    picks = {}
    passes = {}
    chosen = []                             # ids of each candidate
    for selector, i in chosen_candidates(drafts, selectors).items():
        if drafts[i].tokens not in chosen:
            chosen.append(drafts[i].tokens)
        picks[selector] = chosen.index(drafts[i].tokens)
        count = CANDIDATES[selector]
        passes[str(count)] = max(len(draft.tokens) for draft in drafts[:count])
    candidates = [candidate_of(session, ids, rollouts) for ids in chosen]
    own = write_steps(session, method, session.target, 1)[0].tokens
    for ids, candidate in zip(chosen, candidates):
        candidate['same'] = len(os.path.commonprefix([ids, own]))
    right = session.checker(session.tokens + own)
    return dict(candidates=candidates, picks=picks, passes=passes, own=dict(tokens=len(own), right=right))


def chosen_candidates(drafts, selectors=tuple(CANDIDATES)):
    """{selector: index of the Draft that it chooses}: the most central of the first n, or the commonest."""
    steps = [draft.tokens for draft in drafts]
    logps = [sureness(draft) for draft in drafts]
    found = {}
    for selector in selectors:
        count = CANDIDATES[selector]
        if selector == 'common':
            (commonest, _), = Counter(map(tuple, steps[:count])).most_common(1)
            found[selector] = steps.index(list(commonest))
        else:
            found[selector] = most_central(steps[:count], logps[:count])
    return found


def candidate_of(session, ids, rollouts):
    """What is recorded of a candidate: its text, length, whether it is right, and its weakest signals.

    logp: by model, nats. ungrounded: by rollout, 1 - G, since G is often so near 1 that the digits of a
    stored number would not tell two of them apart.
    """
    draft_logp, by_draft = observe(session, 'draft', ids, rollouts)
    target_logp, by_target = observe(session, 'target', ids, rollouts)
    ungrounded = {name: 1 - grounding for name, grounding in (by_draft | by_target).items()}
    return dict(text=session.text(ids), tokens=len(ids), right=session.checker(session.tokens + ids),
                logp=dict(draft=draft_logp, target=target_logp), ungrounded=ungrounded)


def problem_row(task, steps):
    """The stored row of a problem: column by column, for names that are not repeated at each step.

    candidates, logp and ungrounded have a value a candidate, of all steps in turn; picks (an index into
    those), passes and own have a value a step.
    """
    row = dict(task=task, picks={}, passes={}, own={}, candidates={}, logp={}, ungrounded={})

    def add(part, values):
        for name, value in values.items():
            row[part].setdefault(name, []).append(value)
    count = 0
    for step in steps:
        add('picks', {selector: count + i for selector, i in step['picks'].items()})
        add('passes', step['passes'])
        add('own', step['own'])
        for candidate in step['candidates']:
            add('candidates', {name: candidate[name] for name in ('text', 'tokens', 'right', 'same')})
            add('logp', candidate['logp'])
            add('ungrounded', candidate['ungrounded'])
        count += len(step['candidates'])
    return row
