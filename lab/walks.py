"""Where the walks of lab/prove.py begin: settings from the ranges of real runs, and models that fit them.

A fault may show only with many words, late in a text, at a low temperature, after a long prompt. So each walk
draws all of this, and fifty walks meet all parts of each range.
"""
import random
from dataclasses import replace
from functools import partial

import torch

from lab.baselines import slim_draft
from lab.toys import Near, Table, session
from model import QUANTILES, Calibration
from verify import Sparse, draft_model, lookup_then_draft, prompt_lookup, read_prompt

STRATA = 8          # walks of a kind in a row, of which each has its own eighth of every range
LEFT = 300          # tokens that a walk may write
NEVER = -1e4        # logit of a word that cannot come
CALIBRATION = Calibration(              # of a table, which has one layer
    mask=dict(skip=[1]), signals=dict(draft_logp=[-4, 0], draft_grounding=[0, 1]))
SPARSE = dict(anchors=[0], channels=[[0.0] * QUANTILES], experts=[])
SAMPLING = 'temperature', 'top_k', 'top_p'
DTYPES = dict(fp64=torch.float64, fp32=torch.float32, bf16=torch.bfloat16)
FEW = 'top-k 2 or 3', 'a draft of 1 word', 'a draft of 2 words', 'cold'     # why few words can come next


class Spread:
    """Draws for one walk, spread: of STRATA walks of a kind in a row each has another stratum of a range."""

    def __init__(self, seed, number):
        self.random = random.Random(f'{seed} {number}')
        self.turn, self.kind = divmod(number, 3)
        self.seed = f'{seed} {self.kind}'

    def uniform(self, name):
        """A number in [0, 1)."""
        block, place = divmod(self.turn, STRATA)
        order = random.Random(f'{self.seed} {name} {block}').sample(range(STRATA), STRATA)
        return (order[place] + self.random.random()) / STRATA

    def between(self, name, low, high):
        """A whole number, both ends included, uniform in its logarithm."""
        return min(high, int(low * ((high + 1) / low) ** self.uniform(name)))

    def pick(self, name, *options):
        return options[int(self.uniform(name) * len(options))]


def setting_of(draw, gamma, temperature=None):
    """{name: value} of a walk by a Spread; gamma: the knob; temperature: of all walks, None: its own.

    A third of the walks samples from few words. A third is greedy: that has one way, so texts of any length
    over any vocabulary can be followed. A third samples from many words of which few can come next.
    """
    greedy = draw.kind == 1
    few = draw.pick('few', *FEW) if draw.kind == 2 else ''
    V = draw.pick('words', 2, 2, 2, 3, 4, 7, 11, 16)
    if draw.kind:
        V = draw.between('words', *{FEW[2]: (30, 70), FEW[3]: (5, 60)}.get(few, (5, 400)))
    dtype = draw.pick('dtype', *['fp64'] * 5, 'fp32', 'fp32', 'bf16')
    V = min(V, 60) if dtype == 'bf16' else V            # the cache keeps ids, which bf16 would round
    heat = 0.05 * 60 ** draw.uniform('temperature')     # 0.05 to 3
    phrase = [draw.random.randrange(V) for _ in range(draw.between('phrase', 1, 40))]
    made = dict(
        vocabulary=V, dtype=dtype, few=few,
        temperature=draw.pick('heat', 0.0, 1.0, 1.0, *[heat] * 5) * (not greedy),
        top_k=draw.pick('top-k', *[0] * 5, *[draw.between('k', 1, V)] * 3),
        top_p=draw.pick('top-p', *[1.0] * 5, *[0.05 + 0.95 * draw.uniform('p')] * 3),
        prompt=(phrase * 40)[:max(len(phrase), draw.between('prompt', 1, 40))],
        drafts=draw.pick('drafts', *['by draft'] * 3, 'by short draft', 'by target', 'by look-up',
                         *['by look-up, else draft'] * 2),
        repeating=draw.pick('repeating', *[False] * 5, *[True] * 3),    # so look-ups find something
        noise=draw.pick('noise', 0, *[0.3] * 4, 1.0, 1.0, 1.0),     # of a draft near the target; 0: not near
        gamma=gamma and draw.pick('gamma', *[gamma] * 5, 3, 5, 10 if greedy else 1),
        ends=draw.pick('ends', *[[]] * 5, [V - 1], [0, V - 1], [V // 2, V - 1]),
        logits=draw.pick('logits', *[''] * 5, 'ties', 'impossible words', 'rare words'),
        sparse=draw.pick('sparse', *[''] * 6, 'sparse', 'calibrated sparse'),
        cycles=draw.between('cycles', *((20, 60) if greedy else (1, 24))) - 1,
        full_blocks=draw.pick('full blocks', True, False),      # with all tokens left, not as few as need be
        after_other_knobs=draw.pick('other knobs', *[False] * 5, *[True] * 3),
        second_text=draw.pick('second text', *[False] * 6, True, True))
    if few:
        made['temperature'] = min(heat, 0.2) if few == 'cold' else heat
    if few in FEW[:2]:
        made['top_k'] = draw.random.choice([2, 3])
    if few in FEW[1:3]:
        made['drafts'] = 'by draft'
    if few == FEW[2]:
        made |= dict(top_k=0, top_p=1.0, noise=1.0)
    if temperature is not None:
        made['temperature'] = temperature
    return made


def shaped(how, logits):
    """Random logits [V], changed as a setting says."""
    third = torch.arange(len(logits)) % 3 == 1
    if how == 'ties':
        return logits.round()
    if how == 'impossible words':
        return logits.masked_fill(third, NEVER)
    if how == 'rare words':
        return logits - 12.0 * third                    # one in 10^5
    if how in FEW[1:3]:
        return logits.masked_fill(logits < logits.topk(FEW.index(how)).values[-1], NEVER)
    return logits


def begun(made, method, number):
    """(a Session in this setting, the method as it is walked)."""
    target = Table(2 * number + 1, made['vocabulary'], 2.0, DTYPES[made['dtype']], context=1000)
    target.shape = partial(shaped, made['logits'])
    target.seen = slice(-1, None) if made['repeating'] else slice(None)
    context = len(made['prompt']) + 12 if made['drafts'] == 'by short draft' else 1000
    draft = Table(2 * number + 2, target.vocab, 1.0, target.dtype, context)
    if made['noise']:                                   # or sure: branches rarely part, and can be followed
        draft = Near(2 * number + 2, target, made['noise'], 1 if made['noise'] < 1 else 5, context)
    draft.shape = partial(shaped, made['few'])
    draft = draft if 'draft' in made['drafts'] else None
    proposers = {'by target': slim_draft, 'by look-up': prompt_lookup,
                 'by look-up, else draft': lookup_then_draft}
    calibration = CALIBRATION | ({'sparse': SPARSE} if made['sparse'] == 'calibrated sparse' else {})
    s = session(target, draft, made['prompt'], LEFT, proposers.get(made['drafts'], draft_model), seed=number,
                calibration=calibration, eos=frozenset(made['ends']),
                text=lambda ids: ''.join('a\nbc'[i % 4] for i in ids),      # every fourth id ends a step
                sparse=Sparse(rho=1.0, moe_skip=0) if made['sparse'] else None,
                **{name: made[name] for name in SAMPLING})
    read_prompt(s)
    return s, replace(method, gamma=made['gamma']) if made['gamma'] else replace(method)
