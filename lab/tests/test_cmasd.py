"""CM-ASD's baselines: ends of blocks, lenient rules; its claims by hand."""
import copy
import random
from types import SimpleNamespace

import pytest

from lab import judge
from lab.baselines import Confident, Payoff, Product, RatioPayoff, draft_cost
from lab.cmasd import claims
from lab.measure import EMBEDDED, write_rows
from lab.tests.helpers import case, law_gap
from lab.toys import Table, enumerate_law, exact_law, fresh, network, session, variation, write
from model import load
from verify import METHODS, Cycle, Judged, confidence_signals, decode

AREA = 'AUROC of C for acceptance, all tokens'


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


# --------------------------------------------------------------------------------------------- its figures

def frame_of(tmp_path, kept=3, **settings):
    """A frame of two texts; settings: {name: [seconds a text]}; each writes 10 tokens in two cycles."""
    rows = [dict(family='ab'[i], place=0, setting=name, tokens=10, wrong=i, seconds=[second], right=1,
                 passes={'target/full': {'5': 2}}, cycles={f'4 4 {kept}': 2})
            for name, seconds in settings.items() for i, second in enumerate(seconds)]
    write_rows(tmp_path / 'rows.jsonl', {}, [rows])
    return judge.framed(tmp_path / 'rows.jsonl')


def pair_of(frame):
    """What `figures` reads of a judge.Pair that has no other record."""
    return SimpleNamespace(name='real', clock=frame, frame=lambda record: None, has=lambda record: False,
                           rows=lambda record: [], ceiling=lambda k_max: min(k_max, 5.0))


DEFAULT_ALONE = {'ar': [4, 4], 'sd gamma=2': [2, 3], 'sd gamma=4': [3, 3], 'sd gamma=4 lookup=true': [1, 1],
                 claims.DEFAULT: [1, 3]}
ONE = 'cmasd lam_margin=0 lam_softmax=0'


def test_a_pair_that_has_the_default_alone(tmp_path):
    """Its speeds are those of the list of all methods; over `sd`, which is tuned, there is no verdict."""
    found = dict(claims.figures(pair_of(frame_of(tmp_path, **DEFAULT_ALONE))))
    plain, sd = (found[f'best setting: speed over {rival}'] for rival in ('plain decoding', '`sd`'))
    assert (plain.figure, plain.ceiling, sd.figure) == pytest.approx((8 / 4, 5, 5 / 4))
    assert not plain.blind and sd.verdict(1.02) == 'NO VERDICT (only `sd` is tuned)'
    assert found["default: its tokens that are the target's choice"].figure == 19 / 20
    assert len(found) == 3


def test_settings_of_each_side(tmp_path):
    """The window is exact; C of one signal is not C of all; a setting without a window is none of them."""
    frame = frame_of(tmp_path, **DEFAULT_ALONE | {
        'sd gamma=10': [4, 4], claims.SAME_CYCLES: [5, 5], 'cmasd gamma=4 tau_base=1': [5, 6], ONE: [1, 1],
        'cmasd gamma=8': [2, 1], claims.CONSTANT[0]: [6, 2], 'product': [2, 2], 'payoff': [1, 2]})
    found = {text: each.figure for text, each in claims.figures(pair_of(frame))}
    assert found['best setting: speed over `sd`'] == pytest.approx(5 / 2)
    assert found['the window, exact: speed over `sd`'] == pytest.approx(5 / 11)
    assert found['adaptive threshold: speed over a constant one'] == pytest.approx(8 / 4)
    assert found['mean of three signals: speed over one alone'] == pytest.approx(2 / 3)
    assert found['blocks ended by `product` or `payoff`, exact: speed over `sd`'] == pytest.approx(5 / 3)
    assert found['default: accepted tokens a cycle'] == 1
    ceilings = {text: each.ceiling for text, each in claims.figures(pair_of(frame))}
    assert ceilings['default: accepted tokens a cycle'] == pytest.approx(10 / 3)


def test_confidence_by_hand():
    """Six tokens of one text: C orders hits before misses but for one pair below 0.9."""
    rows = [dict(signals=[[c] * 3 for c in (0.95, 1.0, 0.5, 0.6, 0.7, 0.2)], hit=[1, 1, 0, 1, 0, 0])]
    areas = [claims.confidence_area(rows, *limit).figure for limit in ((), (0.9,))]
    assert areas == pytest.approx([8 / 9, 2 / 3])


def test_confidence_that_tells_nothing_fails():
    """A negative control, on the stored rows: confidences in another order."""
    rows = copy.deepcopy(judge.Pair('cmasd', 'embedded').rows('tokens'))
    for row in rows:
        random.Random(0).shuffle(row['signals'])
    assert claims.confidence_area(rows).verdict(claims.CLAIMS[AREA][2]) == 'FAILS'


def test_token_row():
    """Against full passes without a cache."""
    prompt = EMBEDDED.texts(['math'], 1)[0]
    row = claims.token_row(EMBEDDED, prompt)
    ids = list(prompt.ids)
    models = [load(folder)[0] for folder in EMBEDDED.folders]
    for hit, signals in zip(row['hit'], row['signals']):
        first, guess = (int(fresh(model, ids, 1)[0].argmax()) for model in models)
        assert hit == (guess == first)
        assert signals == pytest.approx(confidence_signals(fresh(models[1], ids, 1)), abs=1e-4)
        ids.append(first)
    assert len(row['hit']) == len(row['signals']) == row['tokens'] > 4
