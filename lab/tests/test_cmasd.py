"""CM-ASD's baselines and ablations: controllers, relaxed rules; its claims by hand."""
import math

import numpy
import pytest
import torch

import lab.cmasd.baselines                              # noqa: F401, enters the baselines in METHODS
import verify
from lab.cmasd import claims
from lab.tests.helpers import case, law_gap
from lab.toys import Table, enumerate_law, exact_law, network, session, variation, write
from verify import CONTROLLERS, METHODS, CmAsd, Cycle, Draft, Exact


@pytest.mark.parametrize('name, learns, constant, value', [
    ('hf-confidence', False, 'limit', 0.5), ('product', False, 'limit', 0.7), ('payoff', True, 'cost', 0.5)])
def test_law_of_controllers(name, learns, constant, value, monkeypatch):
    """Every draw enumerated: the target's law, though blocks differ in length.

    A controller that never changes its mind would fail: its law is that of a fixed length. One that learns
    has to decide differently after the same tokens.
    """
    monkeypatch.setattr(CONTROLLERS[name], constant, value)                 # so that toys move it
    horizon = 5
    method = Exact(2, controller=name)
    decisions = {}                                      # (text, block so far): whether it went on

    def run(s, method):
        tokens, cycles = write(s, method)
        place = 0
        for cycle in cycles:
            tokens_left = len(tokens) - place - 1
            for i in range(1, min(len(cycle.drafted) + 1, tokens_left)):
                known = tuple(tokens[:place]), tuple(cycle.drafted[:i])
                decisions.setdefault(known, set()).add(i < len(cycle.drafted))
            place += len(cycle.tokens)
        return tokens, cycles
    target = Table(1, 2)
    law = enumerate_law(target, Table(2, 2), method, horizon, run=run, temperature=1.0)
    gap = variation(law, exact_law(target, horizon, temperature=1.0))
    assert method.lossless and gap < 1e-9
    assert set().union(*decisions.values()) == {True, False}
    if learns:
        assert any(len(both) > 1 for both in decisions.values())


def learner(name):
    return CONTROLLERS[name](CmAsd())


def noted(*largest):
    """The signals of a block of tokens with these largest probabilities."""
    return [dict(largest=q) for q in largest]


def test_product_by_hand():
    """One doubt stops a block that a mean would let run on; several small ones do, too."""
    controller = learner('product')
    asked = [noted(0.9, 0.9), noted(*[0.9] * 6), noted(*[0.9] * 7), noted(*[1.0] * 9, 0.45)]
    assert [controller.keep_drafting(None, signals) for signals in asked] == [True, True, False, False]


def test_payoff_by_hand():
    """A token is drafted if the chance that it is kept exceeds its cost at the rate so far."""
    controller = learner('payoff')
    controller.cost = 0.5
    signals = noted(0.9, 0.6)
    assert controller.keep_drafting(None, signals[:1])        # 0.9 > 0.5 (1 + 0.9) / 1.5
    assert not controller.keep_drafting(None, signals)        # 0.54 < 0.5 (1 + 0.9 + 0.54) / 2
    judged = [verify.Judged(5, 1.0, 1.0, kept=kept, signals=dict(largest=largest))
              for kept, largest in ((True, 0.95), (False, 0.75))]       # after a miss none is judged
    cycle = Cycle([5, 5, 5], judged, [5, 6], ['draft', 'target'], {}, 0.0)
    controller.learn(cycle)
    assert (controller.tokens, controller.time) == (2, 2.5)
    assert controller.chance(0.75) == pytest.approx((0 + 2 * 0.75) / 3)
    assert controller.chance(0.95) == pytest.approx((1 + 2 * 0.95) / 3)


@pytest.mark.parametrize('name, knobs, wanted', [
    ('cmasd-prob', dict(tau_base=0.37), [1, 0, 1, 0]), ('cmasd-specdec', dict(tolerance=0.6), [1, 1, 1, 0]),
    ('cmasd-specdec', dict(tolerance=9.0, top_beta=2), [1, 0, 1, 0])])
def test_rules_by_hand(name, knobs, wanted):
    """Four draft tokens with p of 0.38, 0.23, 0.38 and 0.02, where max p is 0.38."""
    draft = Draft([0, 1, 2, 3], torch.ones(4, 4), signals=[dict(confidence=1.0)] * 4)
    score = verify.Score(session(network(), None, [1], 2), draft, None)
    score.logits = torch.tensor([[3.0, 3.0 + math.log(0.6), 3.0, 0.0]] * 5, dtype=torch.float64)
    assert [METHODS[name](**knobs).chance(score, i) for i in range(4)] == wanted


@pytest.mark.parametrize('method, lossless', [
    case('lenient-off', METHODS['lenient'](1, lenience=1.0), True),
    case('lenient', METHODS['lenient'](1, lenience=0.5), False)])
def test_law_of_lenient(method, lossless):
    """Lenience 1 is exact, below it q and p are mixed."""
    found = law_gap(method, 3, 2)
    assert method.lossless == lossless and (found < 1e-9 if lossless else found > 0.1)


def test_claims_by_hand():
    """Six tokens of one text: C orders hits before misses but for one pair below 0.9."""
    signals = [[c] * 3 for c in (0.95, 0.99, 0.5, 0.6, 0.7, 0.2)]
    rows = [dict(signals=signals, hit=[1, 1, 0, 1, 0, 0])]
    areas = [claims.confidence_area(rows, *limit)(numpy.array([0])) for limit in ((), (0.9,))]
    assert areas == pytest.approx([8 / 9, 2 / 3])
    assert claims.drafted(dict(passes={'target/full': {'5': 6, '3': 1}})) == 26
