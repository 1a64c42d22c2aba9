"""CM-ASD's baselines: ends of blocks, lenient rules; its claims by hand."""
import numpy
import pytest

from lab.baselines import Confident, Payoff, Product, draft_cost
from lab.best.claims import RatioPayoff
from lab.cmasd import claims
from lab.tests.helpers import case, law_gap
from lab.toys import Table, enumerate_law, exact_law, network, session, variation, write
from verify import METHODS, Cycle, Judged, decode


@pytest.mark.parametrize('method, learns', [    # with limits that toys move
    case('hf-confidence', type('Half', (Confident,), dict(limit=0.5))(), False),
    case('product', type('Strict', (Product,), dict(limit=0.7))(), False),
    case('payoff', Payoff(cost=0.5), True)])
def test_law_of_block_lengths(method, learns):
    """Every draw enumerated: the target's law, though blocks differ in length.

    Not by blocks of a fixed length: each must go on or end, one that learns differently after equal tokens.
    """
    decisions = {}                                      # (text, block so far): whether it went on

    def run(s, method):
        tokens, cycles = write(s, method)
        place = 0
        for cycle in cycles:
            for i in range(1, min(len(cycle.signals) + 1, len(tokens) - place - 1)):
                known = tuple(tokens[:place]), tuple(cycle.drafted[:i])
                decisions.setdefault(known, set()).add(i < len(cycle.signals))
            place += len(cycle.tokens)
        return tokens, cycles
    law = enumerate_law(Table(1, 2), Table(2, 2), method, 5, run=run, temperature=1.0)
    assert method.lossless and variation(law, exact_law(Table(1, 2), 5, temperature=1.0)) < 1e-9
    assert set().union(*decisions.values()) == {True, False}
    assert not learns or any(len(both) > 1 for both in decisions.values())


def noted(*largest):
    """The signals of a block of tokens with these largest probabilities."""
    return [dict(largest=q) for q in largest]


def test_product_by_hand():
    """One doubt stops a block that a mean would let run on; several small ones do, too."""
    asked = [noted(0.9, 0.9), noted(*[0.9] * 6), noted(*[0.9] * 7), noted(*[1.0] * 9, 0.45)]
    assert [Product().keep_drafting(None, signals) for signals in asked] == [True, True, False, False]


def test_payoff_by_hand():
    """A token is drafted if the chance that it is kept exceeds its cost at the rate so far."""
    method = Payoff(cost=0.5)
    assert method.keep_drafting(None, noted(0.9))             # 0.9 > 0.5 (1 + 0.9) / 1.5
    assert not method.keep_drafting(None, noted(0.9, 0.6))    # 0.54 < 0.5 (1 + 0.9 + 0.54) / 2
    judged = [Judged([5], kept=kept, signals=dict(largest=largest))
              for kept, largest in ((True, 0.95), (False, 0.75))]       # after a miss none is judged
    method.learn(Cycle([5, 5, 5], judged, [5, 6], ['draft', 'target'], {}, 0.0))
    assert [method.chance_kept(q) for q in (0.75, 0.95)] == pytest.approx([1.5 / 3, (1 + 1.9) / 3])
    method, s = RatioPayoff(), session(Table(1, weight=8.0), Table(2, weight=2.0), [0], 20)
    cycles = list(decode(s, method))
    assert (method.cost, method.tokens, method.cycles) == (0.25, 20, len(cycles)) and not method.lossless
    assert method.drafted == sum(len(cycle.drafted) for cycle in cycles)
    alone = session(network(), None, [0], 1, calibration=dict(mask=dict(skip=[2])))
    assert 0.5 < draft_cost(alone) < 1                  # slim has three of the target's four sublayers


@pytest.mark.parametrize('lenience', [0.5, 1.0])
def test_law_of_lenient(lenience):
    """Lenience 1 is exact, below it q and p are mixed."""
    method = METHODS['lenient'](1, lenience=lenience)
    gap = law_gap(method, 3, 2)
    assert method.lossless == (lenience == 1) and (gap < 1e-9 if method.lossless else gap > 0.1)


def test_claims_by_hand():
    """Six tokens of one text: C orders hits before misses but for one pair below 0.9."""
    rows = [dict(signals=[[c] * 3 for c in (0.95, 0.99, 0.5, 0.6, 0.7, 0.2)], hit=[1, 1, 0, 1, 0, 0])]
    areas = [claims.confidence_area(rows, *limit)(numpy.array([0])) for limit in ((), (0.9,))]
    assert areas == pytest.approx([8 / 9, 2 / 3])
