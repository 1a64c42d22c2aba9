"""lab/sparse: other choices of blocks, contexts, keys. Sparse passes are in test_specmini.py."""
import statistics

import pytest
import torch

import kernels
from lab import tasks
from lab.measure import EMBEDDED
from lab.sparse import records
from lab.sparse.records import keys_read
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
    row, ids = records.look_up(EMBEDDED, 1984, 0)
    *lines, _ = row['prompt'].split('\n')
    cells = [step[2:].replace(' of ', ' ').split() for step in row['solution'].split('\n') if step[:1] == '|']
    for column, item, value in cells:
        assert any(line.startswith(f'| {item}: {column} {value}') for line in lines[:len(lines) // 2])
    assert cells and len(ids) <= 1984 and tasks.grade(row, row['solution'])


def test_channels_of_experts_are_left_out_as_calibrated(monkeypatch):
    """In a network of mixtures the quantile is the share of the chosen experts' channels that is left out."""
    model = network(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=3)
    calibration = dict(sparse=sparsity(model, [LINE], dense_below=8, block=4))
    kept, shares, dense = kernels.kept_channels, [], None

    def counted(gate, threshold):
        h = kept(gate, threshold)
        if threshold:
            shares.append(float((h == 0).double().mean()))
        return h
    monkeypatch.setattr(kernels, 'kept_channels', counted)
    for quantile in (0.0, 0.2, 0.5, 0.8):
        sparse = Sparse(rho=1.0, moe_skip=0, ffn_quantile=quantile)
        s = session(model, None, LINE, 30, no_draft, sparse=sparse, calibration=calibration)
        read_prompt(s)
        logits = s.target.read(LINE + LINE[:9], s.target_path(), 10)
        dense = logits if dense is None else dense
        assert not quantile or statistics.mean(shares) == pytest.approx(quantile, abs=0.1)
        assert bool(quantile) == bool(shares) == (apart(logits, dense) > 1e-3)
        shares.clear()


def test_random_blocks_are_repeated_and_depend_on_no_likeness():
    """The same pass draws the same; another query draws others, and sinks and locals stay."""
    rule = thin(network(), 'sparse-random', rho=0.1).attends[0].keywords['rule']
    torch.manual_seed(0)
    means, query = torch.randn(1, 2, 15, 6), torch.randn(1, 4, 6)
    scores, again = rule.scores(query, None, means), rule.scores(query, None, means)
    assert scores.shape == (1, 2, 15) and torch.equal(scores, again)
    assert not torch.equal(scores.argsort(), rule.scores(query + 0.1, None, means).argsort())
    blocks = kernels.choose(scores, torch.tensor(61), 6, rule)
    assert {0, 14} <= {*blocks[0, 0].tolist()}


def test_every_setting_of_a_record_runs():
    """A name in a record is a setting, and the lists of this folder can be read."""
    for setting in (*records.LONG, *records.READ, *records.EXPERTS):
        assert 0 < keys_read(setting, 1000) <= 1000
    assert {'mixture', 'look-ups'} <= records.RECORDS.keys()
