"""CM-ASD's baselines: ends of blocks; the rows of its confidence."""
import pytest

from lab.baselines import Payoff, Product, RatioPayoff, draft_cost
from lab.cmasd import claims
from lab.judge import Pair
from lab.measure import EMBEDDED
from lab.toys import Table, network, session
from verify import Cycle, Judged, decode


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


def test_a_row_of_tokens():
    """What is stored is measured again, to the digits that are stored."""
    stored = next(row for row in Pair('cmasd', 'embedded').rows('tokens') if row['family'] == 'math')
    found = claims.token_row(EMBEDDED, EMBEDDED.texts(['math'], 1)[0])
    assert found | dict(signals=stored['signals']) == stored
    assert found['signals'] == [pytest.approx(one, abs=1e-4) for one in stored['signals']]
