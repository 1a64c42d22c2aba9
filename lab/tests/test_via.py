"""VIA-SD's baselines: their distributions and limits; its records on small networks; its claims by hand."""
import numpy
import pytest

import lab.via.baselines                                # noqa: F401, enters the baselines in METHODS
from lab.judge import Runs
from lab.measure import EMBEDDED, embedded
from lab.toys import Table, enumerate_law, network, overlap, plain, seeded, session, slim_session, write
from lab.via import claims, record
from lab.via.baselines import MiddleSession, ViaMid
from model import Reader, read_calibration
from verify import METHODS, draft_model, probs


def by_token(p, q, lam):
    inside = q * (p >= (1 - lam) * p.max())
    return inside + (1 - inside.sum()) * p


@pytest.mark.parametrize('name, blend, lams', [
    ('cascade', lambda p, q, lam: q if q.max() >= 1 - lam else p, (0.3, 0.7)),
    ('cascade-opt', lambda p, q, lam: q if q.max() >= p.max() - lam * (1 - overlap(p, q)) else p, (0.3, 0.6)),
    ('cascade-tokenv3', by_token, (0.3, 0.9))])
def test_law_of_cascades(name, blend, lams):
    """The first of two tokens follows the rule's own blend of p and q, the second the target's p.

    The blend has to differ between two lam, else the rule's condition would not be tested.
    """
    target, draft = Table(2), Table(4)
    p, q = (probs(table.row((0,))) for table in (target, draft))
    blends = set()
    for lam in lams:
        wanted = blend(p, q, lam)
        blends.add(tuple(wanted.tolist()))
        method = METHODS[name](1, lam=lam)
        assert not method.lossless
        for (first, second), chance in enumerate_law(target, draft, method, 2, temperature=1.0).items():
            after = probs(target.row((0, first)))
            assert chance == pytest.approx(float(wanted[first] * after[second]))
    assert len(blends) > 1


def test_middle_model_that_is_the_target():
    """ViaMid writes the middle model's text where it is never escalated: here the target's, or another."""
    target = network(0, num_hidden_layers=4)
    texts = []
    for middle in (target, network(5, num_hidden_layers=2)):
        readers = [Reader(model, 27) for model in (target, network(10), middle)]
        s = MiddleSession(*readers[:2], draft_model, [1, 2, 3], 24, generator=seeded(), mid=readers[2])
        texts.append(write(s, ViaMid(5, keep=1.0, escalate=0.0, max_lag=99))[0])
        assert texts[-1] == plain(middle, [1, 2, 3], 24)
    assert texts[0] == plain(target, [1, 2, 3], 24) != texts[1]


def test_layers_that_slim_skips():
    """Layers named one by one are the calibrated mask's text, others another one, none the mask itself."""
    knobs = dict(keep=1.0, escalate=0.0, max_lag=99)
    texts = {}
    for layers in ('', '1 2', '0 3'):
        s = slim_session(skip=(2, 3, 4, 5))
        texts[layers], _ = write(s, METHODS['via-layers'](5, layers=layers, **knobs))
    assert texts[''] == texts['1 2'] != texts['0 3']


def test_worth_row_by_hand():
    """First choices of the draft and of slim at each token of the target's text, from fresh caches."""
    (prompt,) = EMBEDDED.texts(['table'], 1)
    target, _, eos = embedded('target')
    draft, _, _ = embedded('draft')
    text = plain(target, prompt.ids, record.WINDOW, eos=eos)
    guesses = [plain(draft, prompt.ids + text[:i], 1)[0] for i in range(len(text))]
    reader = Reader(target, 200)
    reader.read(prompt.ids[:-1], target.full, 0)
    slim = target.full.without(read_calibration(EMBEDDED.target)['mask']['skip'])
    choices = reader.read(prompt.ids + text[:-1], slim, len(text)).argmax(-1).tolist()
    row = record.worth_row(EMBEDDED, prompt)
    assert row['hit'] == list(map(int.__eq__, guesses, text)) and sum(row['hit']) == row['draft_right']
    assert [ratio == 1 for ratio in row['ratio']] == list(map(int.__eq__, guesses, choices))
    assert row['slim_right'] == sum(map(int.__eq__, choices, text)) > row['draft_right']


def run(tokens, wrong, steps, **more):
    return dict(tokens=tokens, wrong=wrong, steps=steps) | more


def test_claims_by_hand():
    """Two texts: speeds, rejections; who errs oftener than via is left out; the rule in passes."""
    judged = dict(sd=dict(judged=10, accepted=6), via=dict(judged=10, accepted=8), plain={})
    usual = {name: run(10, 0, steps, cycles=4, full=full, **judged[name])
             for name, steps, full in (('plain', 10, 10), ('sd', 5, 4), ('via', 4, 1))}
    found = {claim.text: claim.figure(numpy.arange(2)) for claim in claims.speed_claims(texts_of(usual))}
    assert list(found.values()) == pytest.approx([2.5, 1.25])
    assert claims.spared_claim(texts_of(usual), 'sd').figure(numpy.arange(2)) == pytest.approx(0.5)
    tuned = {claims.USUAL: run(10, 1, 5), 'via 5, 0 0': run(10, 3, 1), 'sd 5': run(10, 0, 8),
             'cascade 5, 0.1': run(10, 1, 4), 'cascade 5, 0.3': run(10, 2, 2)}
    assert claims.equal_claim(texts_of(tuned)).figure(numpy.arange(2)) == pytest.approx(0.8)
    told = dict(positions=2, slim_right=2, draft_right=1, delta=0.5, hit=[1, 0], ratio=[1, 1], work=0.6)
    for cost, wanted in ((None, 5 / 1.1 / (2 / 1.5)), (0.2, 5 / 1.6 / (2 / 2))):    # one cycle, two of sd
        *_, rule = claims.worth_claims([told | dict(draft_cost=0.1)] * 2, cost)
        assert rule.figure(numpy.arange(2)) == pytest.approx(wanted)


def texts_of(runs):
    """Runs of two texts of a family that went alike."""
    return Runs([dict(family='qa', place=place, runs=runs) for place in range(2)])


def test_slims_first_choice_is_not_in_doubt():
    """At escalate 1 a draft of slim's own first choices, whose ratio is 1, is never handed to the target."""
    target = network(0, num_hidden_layers=4)

    def by_slim(s, plan):
        return draft_model(s, plan, s.target, s.slim_path)
    s = session(target, None, [1, 2, 3], 24, by_slim, calibration=dict(mask=dict(skip=[2, 3, 4])))
    _, cycles = write(s, METHODS['via'](3, keep=1.0, escalate=1.0, max_lag=99))
    verdicts = [verdict for cycle in cycles for verdict in cycle.judged]
    assert verdicts and all(verdict.kept and verdict.by == 'slim' for verdict in verdicts)
