"""VIA-SD's baselines: their distributions and limits; its records on small networks; its claims by hand."""
import numpy
import pytest

import lab.via.baselines                                # noqa: F401, enters the baselines in METHODS
from lab.judge import Costs, Runs
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


def test_slim_row_by_hand():
    """Drafts of five after the target's text: who has the full pass's favourites, from fresh caches."""
    (prompt,) = EMBEDDED.texts(['table'], 1)
    target, _, eos = embedded('target')
    draft, _, _ = embedded('draft')
    slim = target.full.without(read_calibration(EMBEDDED.target)['mask']['skip'])
    text = plain(target, prompt.ids, 160, eos=eos)
    wanted = dict(positions=len(text), draft_right=0, slim_right=0)
    for i in range(0, len(text), 5):
        line = prompt.ids + text[:i]
        block = plain(draft, line, min(5, len(text) - i))
        full, middle = [favourites(target, line, block, path) for path in (target.full, slim)]
        wanted['draft_right'] += sum(map(int.__eq__, block, full))
        wanted['slim_right'] += sum(map(int.__eq__, middle, full))
    assert wanted.items() <= record.slim_row(EMBEDDED, prompt).items()
    assert wanted['draft_right'] < wanted['slim_right']


def favourites(model, line, block, path):
    """What a path has for likeliest at each token of a block, after what the full path read."""
    reader = Reader(model, len(line) + 5)
    reader.read(line[:-1], model.full, 0)
    return reader.read(line + block, path, len(block) + 1).argmax(-1).tolist()[:-1]


def run(tokens, wrong, steps, **more):
    return dict(tokens=tokens, wrong=wrong, steps=steps) | more


def test_claims_by_hand():
    """Two texts: speeds, rejections, break-even; who errs oftener than via is left out; the best block."""
    judged = dict(sd=dict(judged=10, accepted=6), via=dict(judged=10, accepted=8), plain={})
    usual = {name: run(10, 0, steps, cycles=4, full=full, **judged[name])
             for name, steps, full in (('plain', 10, 10), ('sd', 5, 4), ('via', 4, 1))}
    found = {claim.text: claim.figure(numpy.arange(2)) for claim in claims.speed_claims(texts_of(usual))}
    assert list(found.values()) == pytest.approx([2.5, 1.25, 0.5])
    costs = Costs({'target/full': [0.0] + [2.0] * 6, 'target/slim': [0.0] + [1.0] * 6})
    assert claims.break_even_claim(texts_of(usual), costs).figure(numpy.arange(2)) == pytest.approx(0.25)
    tuned = {claims.USUAL: run(10, 1, 5), 'via 5, 0 0': run(10, 3, 1), 'sd 5': run(10, 0, 8),
             'cascade 5, 0.1': run(10, 1, 4), 'cascade 5, 0.3': run(10, 2, 2)}
    assert claims.equal_claim(texts_of(tuned)).figure(numpy.arange(2)) == pytest.approx(0.8)
    rows = [dict(scored=1, found=2.0, evenly=9.0, blocks=[1.0, 4.0]),
            dict(scored=3, found=2.0, evenly=9.0, blocks=[5.0, 3.0])]
    assert claims.unseen_claim(rows).figure(numpy.arange(2)) == pytest.approx(1 - 8 / 19)


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
