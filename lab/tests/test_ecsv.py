"""ECSV: the laws of its baselines, their votes, and its claims computed by hand."""
import numpy
import pytest

from lab.baselines import OracleTop1
from lab import prove
from lab.ecsv import claims
from lab.judge import Costs, Records
from lab.measure import EMBEDDED, Stored

TWO = dict(gamma=2, branches=2, draft_temperature=1.0, draft_top_p=0.8)


def test_law_of_the_best_branch():
    method = OracleTop1(**TWO)
    assert method.lossless and prove.Proof('best', method, range(4)).gap < prove.SAME


def test_claims_by_hand():
    """n positions take 1 + n s, a draft pass 1 s, of four rows 2 s.

    Greedy sd takes 20 x 3 + 20 s or 10 x 6 + 40 s, the vote 15 x 3 + 15 x 2 s at its first depth.
    SD-1 reads 2 positions a token where it is faster, the vote 1.5 or 3: a third of its texts are the latter.
    """
    votes = {claims.GREEDY: dict(kept=[20, 30], cycles=[20, 10], positions=[40, 50]),
             claims.SD: dict(kept=[10, 20], cycles=[20, 15], positions=[40, 45], drafted=[1, 1], nats=[3, 1]),
             'vote': dict(kept=[25, 30], cycles=[15, 10], positions=[30, 60], drafted=[1, 1], nats=[1, 1])}
    for counts in votes.values():
        drafts = [read - cycles for read, cycles in zip(counts['positions'], counts['cycles'])]
        counts |= dict(passes=counts['cycles'], drafts=drafts)
    stored = Records('ecsv', 'another pair')
    row = dict(family='story', place=0, tokens=20, depths=[2, 4], votes=votes)
    stored['blocks'] = Stored({}, [row, row | dict(place=1)])
    stored.costs = Costs({'target/full': [0, 2, 3, 4, 5, 6], 'draft/full': [0, 1, 1, 1, 2]})
    compared = claims.Votes(stored, 'blocks')
    assert compared.counts[claims.GREEDY]['steps'].tolist() == [[40, 50]] * 2      # in steps of 2 s
    assert compared.over('vote', claims.GREEDY)(compared.texts) == pytest.approx(40 / 37.5)
    kept, perplexity = (compared.matched(figure, 'vote', claims.SD)(compared.texts)
                        for figure in (claims.kept, claims.perplexity))
    assert (kept, perplexity) == pytest.approx(((80 / 3) / (40 / 3) / (10 / 20), numpy.exp(1 - 3)))
    assert numpy.isnan(compared.at_budget('vote', compared.texts, 1.4)['kept'])
    assert not list(claims.figures(stored))             # none of the claims is about these votes


@pytest.mark.slow
def test_measured_rows():
    """The best of four keeps more than one sample, the winner's passes alone counted."""
    prompt = EMBEDDED.texts(('translate',), 1)[0]
    one, best = (claims.BLOCKS[name] for name in (claims.SD, 'best of four'))
    row = claims.block_row(dict(one=one, best=best), (2, 4), EMBEDDED, prompt)
    one, best = row['votes'].values()
    assert best['passes'] == best['cycles'] < one['cycles']
    assert 0 < best['nats'][1] < one['nats'][1] and best['drafted'] > best['kept']
