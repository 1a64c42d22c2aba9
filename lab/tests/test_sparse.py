"""lab/sparse: other choices of blocks, contexts, claims. Sparse passes are in test_specmini.py."""
import statistics

import pytest
import torch

import kernels
from lab import tasks
from lab.judge import Records
from lab.measure import EMBEDDED, Stored
from lab.sparse import claims
from lab.sparse.claims import DENSE
from lab.tests.helpers import LINE, thin
from lab.toys import apart, network, session
from train_mask import sparsity
from verify import Sparse, no_draft, read_prompt


def test_recent_reads_the_sink_and_the_latest_blocks():
    """Four blocks of the budget, floor(8 + 53 / 10) tokens, a sink and a local."""
    model = network()
    path = thin(model, 'sparse-recent', rho=0.1)
    assert path == thin(model, 'sparse-recent', rho=0.1)    # a compiled pass finds its graph again
    rule = path.attends[0].keywords['rule']
    scores = rule.scores(None, None, torch.zeros(1, 2, 15, 6))
    blocks = kernels.choose(scores, torch.tensor(61), int(kernels.kept_blocks(61, rule)), rule)
    assert sorted(blocks[0, 0].tolist()) == [0, 10, 11, 12, 13, 14]


def test_a_look_up_asks_for_cells_of_the_first_half():
    row, ids = claims.look_up(EMBEDDED, 1984, 0)
    *lines, _ = row['prompt'].split('\n')
    cells = [step[2:].replace(' of ', ' ').split() for step in row['solution'].split('\n') if step[:1] == '|']
    for column, item, value in cells:
        assert any(line.startswith(f'| {item}: {column} {value}') for line in lines[:len(lines) // 2])
    assert cells and len(ids) <= 1984 and tasks.grade(row, row['solution'])


def test_channels_of_experts_are_left_out_as_calibrated(monkeypatch):
    """In a network of mixtures the quantile is the share of the chosen experts' channels that is left out."""
    model = network(experts=(6,) * 3, num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=3)
    calibration = dict(sparse=sparsity(model, [LINE], dense_below=8, block=4))
    kept, shares, dense = kernels.kept_channels, [], None

    def counted(gate, threshold):
        h = kept(gate, threshold)
        if threshold:
            shares.append(float((h == 0).double().mean()))
        return h
    monkeypatch.setattr(kernels, 'kept_channels', counted)
    for quantile in (0.0, 0.2, 0.5, 0.8):
        sparse = Sparse(**DENSE, ffn_quantile=quantile)
        s = session(model, None, LINE, 30, no_draft, sparse=sparse, calibration=calibration)
        read_prompt(s)
        logits = s.target.read(LINE + LINE[:9], s.target_path(), 10)
        dense = logits if dense is None else dense
        assert not quantile or statistics.mean(shares) == pytest.approx(quantile, abs=0.1)
        assert bool(quantile) == bool(shares) == (apart(logits, dense) > 1e-3)
        shares.clear()


def test_claims_of_long_contexts_by_hand():
    """Two texts: chosen keys are right on one of them, the latest on none."""
    rows = []
    for place in (0, 1):
        runs = {'dense': (1, 1, 4), claims.KEYS: (0.9, place, 2), claims.LATEST: (0.6, 0, 2)}
        runs = {name: dict(alike=alike, right=right, seconds=seconds, tokens=8, cycles=4) | {'pass': seconds}
                for name, (alike, right, seconds) in runs.items()}
        rows.append(dict(family='look-up 8192', place=place, runs=runs))
    records = Records('sparse', 'of no pair')
    records['long'] = Stored({}, rows)
    found = [figure(texts) for _, texts, figure, _ in claims.figures(records)]
    assert found == pytest.approx([2, 0.9, 0.3, -0.5, 0.5, 1, 2])


def test_claims_of_cycles_and_of_passes_by_hand():
    """All three have 4 tokens a cycle for 6; a sparse pass takes 2 of 3 seconds after 8k tokens."""
    records = Records('sparse', 'of no pair')
    counts = {'dense': (30, 5), claims.ALL: (40, 10), '3 experts': (30, 5)}
    runs = {name: dict(tokens=tokens, cycles=cycles, nll=1) for name, (tokens, cycles) in counts.items()}
    records['mixture'] = Stored({}, [dict(family='math', place=0, runs=runs)])
    timed = {'dense': {'pass': 3}, 'sparse': {'pass': 2}}
    rows = [dict(family=f'{length} tokens', place=0, runs=timed) for length in (2048, 8192)]
    records['passes'] = Stored({}, rows)
    found = [figure(texts) for _, texts, figure, _ in claims.figures(records)]
    assert found == pytest.approx([4 / 6, 1, 1.5])
