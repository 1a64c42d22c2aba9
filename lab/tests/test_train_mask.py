"""train_mask.py: the search for a mask, anchors and thresholds of sparse passes, SpecGuard's signals."""
import itertools
import json
import math
import re
import shutil
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import train_mask
from lab.tests.helpers import EMBEDDED, LINE, interrupt, json_lines, program, refused, refuses, reported, tiny
from lab.toys import byte_network, bytes_tokenizer, network, seeded, session, write
from model import Reader, read_calibration
from specmini import Engine
from train_mask import sparsity
from verify import METHODS, ViaSd

MIXED = dict(experts=(6, 0, 6, 0), num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=4)


def section(folder, name='mask'):
    return json.loads((folder / 'calibration.json').read_text())[name]


def tried_by(cost, units, skipped, **settings):
    """{mask: cost} of the masks that a search tries after the plain ones; settings: of Settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_mask, 'plain_masks', lambda m, k: iter(()))
        return train_mask.search(cost, units, skipped, train_mask.Settings(**settings))


# ------------------------------------------------------------------------------------ what a search finds

@pytest.mark.slow
def test_search_finds_planted_layers(tmp_path, capsys, monkeypatch):
    """Layers that add nothing are found, all and no other; without them slim pays, if the draft is right.

    A cycle is five guesses and slim's own token; in eleven the target once reads, when slim has a lag of 36.
    """
    useless = {4, 5, 8, 9}                              # the sublayers of two layers

    def planted(weights):
        for j in useless:
            output = 'mlp.down_proj' if j % 2 else 'self_attn.o_proj'
            weights[f'model.layers.{j // 2}.{output}.weight'].zero_()
        return weights
    monkeypatch.setattr(train_mask, 'PATIENCE', 999)
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(json_lines([dict(prompt='To be, or not to be'), dict(prompt='that is the question')] * 4))
    folder = tiny(tmp_path / 'm', 3, dict(num_hidden_layers=8), planted, max_position_embeddings=512)
    flags = ['--target', folder, '--draft', folder, '--prompts', rows, '--texts', 2,
             '--skip', (len(useless) + 0.1) / 16, '--evaluations', 90]
    _, out, _ = program(capsys, *flags, main=train_mask.main)
    found = section(folder)
    assert f'\nslim pays: {6 / (5 + found["work"] + 1 / 11):.2f} times sd' in out
    assert set(found['skip']) == useless
    assert found['cost'] < 1e-9 < found['plain']
    assert found['masks'] <= 90
    refused(capsys, '--skip', *flags, '--skip', 0.9, main=train_mask.main)


@pytest.mark.slow
def test_search_comes_near_the_best_and_bayes_beats_chance(monkeypatch):
    """Within 5 % of the best of all 70 masks of 4 of 8 units; on 16 units a tenth below random proposals.

    A mask costs exp of a random weight for each unit and each pair of units in it; three seeds.
    """
    weights = torch.rand(16, generator=seeded())
    pairs = 0.2 * torch.rand(16, 16, generator=seeded(1))

    def cost(mask):
        rows = list(mask)
        return float((weights[rows].sum() + pairs[rows][:, rows].sum()).exp())

    monkeypatch.setattr(train_mask, 'PATIENCE', 999)

    def best(units, skipped, period, seed):
        monkeypatch.setattr(train_mask, 'PERIOD', period)
        return min(tried_by(cost, units, skipped, seed=seed).values())
    optimum = min(map(cost, itertools.combinations(range(8), 4)))
    assert all(best(8, 4, 2, seed) <= 1.05 * optimum for seed in range(3))
    by_chance = sum(best(16, 7, 999, seed) for seed in range(3))
    assert sum(best(16, 7, 2, seed) for seed in range(3)) < 0.9 * by_chance


def test_search_begins_with_masks_that_need_none(monkeypatch):
    """Evenly spaced units, every contiguous block, then others; without time for one mask it says so."""
    asked = train_mask.Settings(evaluations=7)
    tried = train_mask.search(sum, 6, 3, asked)
    assert list(tried)[:5] == [(1, 3, 5), (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)] and len(tried) == 7
    model = byte_network(3, num_hidden_layers=8)
    windows = SimpleNamespace(cost=lambda skip: float(sum((j - 5) ** 2 for j in skip)))
    found = train_mask.find_mask(model, windows, asked)
    assert found['plain'] == 19.0                           # of [2, 3, 4, 5, 6, 7]; evenly spaced 139


def test_search_ends_without_progress(monkeypatch):
    """Patience counts the masks since the best one; it is less than the usual budget."""
    monkeypatch.setattr(train_mask, 'PATIENCE', 5)
    counted = itertools.count()
    assert len(tried_by(lambda mask: next(counted), 8, 4)) == 6
    assert train_mask.Settings().evaluations > 30


@pytest.mark.parametrize('last, tried', [(4, 3), (99, 10)])
def test_search_that_is_ended_keeps_the_best(last, tried, monkeypatch):
    """Ctrl-C at the end of a `last` evaluation, or of all that were asked for."""
    windows = SimpleNamespace(cost=lambda skip: float(sum(skip)))
    costs = interrupt(monkeypatch, windows, 'cost', last)
    asked = train_mask.Settings(evaluations=10)
    found = train_mask.find_mask(byte_network(3, num_hidden_layers=10), windows, asked)
    assert found['masks'] == tried and found['cost'] == min(costs[:tried])


def test_search_that_is_ended_at_once_finds_nothing(monkeypatch):
    windows = SimpleNamespace(cost=lambda skip: 1.0)
    interrupt(monkeypatch, windows, 'cost', 1)
    with pytest.raises(KeyboardInterrupt):
        train_mask.find_mask(byte_network(3, num_hidden_layers=10), windows, train_mask.Settings())


# -------------------------------------------------------------------------------------- calibration texts

@pytest.fixture
def asked(tmp_path):
    """(a checkpoint with a chat template, flags of a short search on two prompts)."""
    folder = tiny(tmp_path / 'm', 0, dict(num_hidden_layers=4),
                  files={'chat_template.jinja': 'user:{{ messages[0].content }}!'})
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(json_lines([dict(prompt='To be'), dict(question='or not'), dict(prompt='x' * 60)]))
    return folder, ['--target', str(folder), '--prompts', str(rows), '--texts', '2', '--tokens', '8',
                    '--evaluations', '2', '--skip', '0.5']


def test_texts_of_prompts(asked, capsys):
    """A text is a prompt, in the template, and what the target itself writes after it."""
    folder, flags = asked
    settings = train_mask.Settings(prompts=flags[3], chat=True, texts=2, tokens=8)
    engine = Engine(str(folder), 'none')
    texts = train_mask.calibration_texts(engine, settings)
    for text, prompt in zip(texts, ('user:To be!', 'user:or not!')):
        ids = bytes_tokenizer().encode(prompt).ids
        written, _ = write(session(engine.models['target'], None, ids, 8), METHODS['ar']())
        assert text == ids + written
    assert program(capsys, *flags, '--chat', main=train_mask.main)[0] == 0
    assert section(folder)['settings']['chat']


@pytest.mark.parametrize('named, more', [
    ('--texts', ['--texts', '3']), ('--prompts', ['--tokens', '600']),
    ('give --draft DIR', ['--signals', '--draft', 'lookup']), ('config.json', ['--target', '']),
    ('--anchors', ['--signals', '--anchors']), ('nowhere', ['--target', 'nowhere'])])
def test_refused_flags(named, more, asked, capsys):
    refused(capsys, named, *asked[1], *more, main=train_mask.main)


def test_cycles_are_replayed_by_the_gates():
    """Blocks of two: slim rewrites a token, the target one, both stay; after a doubt the target judges."""
    assert train_mask.replayed([1, 0, 1, 0, 1, 1], [1, 0.4, 1, 0.1, 0.5, 0.6], ViaSd(2)) == (1 / 3, 7 / 3)
    assert train_mask.replayed([1, 1, 0], [0.1, 0.4, 1], ViaSd(2)) == (1, 3)
    assert train_mask.replayed([1, 1, 1], [0.4, 1, 1], ViaSd(2)) == (0, 2)          # a rewrite ends a block


def test_a_stage_midway_shortens_the_way():
    """Delta is above 0 there, 0 where slim is the draft, and below 0 where it is like neither."""
    p, q, s = torch.randn(3, 99, 11, generator=seeded()).mul(3).log_softmax(-1)
    for forgiven in ((0.5, 0.5), (0.0, 1.0)):
        astray, same, midway = [float(train_mask.shortcut(p, q, slim, *forgiven).mean())
                                for slim in (s, q, torch.logaddexp(p, q) - math.log(2))]
        assert astray < same == 0 < midway


def test_agreement_of_slim_is_printed(asked, capsys):
    """All of it where nothing is random but the weights; without half of these slim does not pay."""
    refused(capsys, '2 of 3 prompts', *asked[1], '--texts', 3, main=train_mask.main)
    _, out, _ = program(capsys, *asked[1], '--draft', asked[0], main=train_mask.main)
    assert 'slim does not pay: 0.' in out
    _, out, _ = program(capsys, *asked[1], main=train_mask.main)
    shown = re.search(r"slim's first choice is the target's at (.+)%\ngive --draft DIR", out)
    settings = train_mask.Settings(prompts=asked[1][3], texts=2, tokens=8)
    engine = Engine(str(asked[0]), 'none')
    texts = train_mask.calibration_texts(engine, settings)
    model = engine.models['target']
    windows = train_mask.Windows(model, texts, 8)

    def agreement(skip):
        return fmean(windows.agreed(windows.logps(model.full.without(skip))))
    assert f'{agreement(section(asked[0])["skip"]):.1%}' == f'{shown[1]}%'
    same = []
    for ids in texts:
        reader = Reader(model, len(ids))
        p = reader.read(ids, model.full, 8)
        same += (p.argmax(-1) == reader.read(ids, model.full.without(range(8)), 8).argmax(-1)).tolist()
    assert agreement(range(8)) == sum(same) / 16 < 1 == agreement([])


# ------------------------------------------------------------------------------------------------ --anchors

def test_sparse_calibration():
    """The layers by difference, and quantiles of what is to be left out."""
    found = sparsity(network(**MIXED), [LINE, LINE[::-1]], dense_below=8, block=4)
    assert found['anchors'] == [0, *sorted(range(1, 4), key=lambda layer: found['jaccard'][layer - 1])]
    assert all(0 < likeness < 1 for likeness in found['jaccard'])
    assert list(map(len, found['experts'])) == [2, 0, 2, 0]                 # m = 1, 2; none in a dense layer
    assert list(map(len, found['channels'])) == [21] * 4
    one, two = found['experts'][0]
    assert one == sorted(one) and len(one) == 21
    assert 0 < one[0] and one[-1] <= 1 / 3 and two[-1] <= 2 / 3
    refuses('12 tokens', sparsity, network(), [[1] * 12])
    columns = torch.stack([torch.arange(40, -1, -1), torch.ones(41)], 1)
    assert train_mask.quantiles(columns) == [list(range(0, 41, 2)), [1.0] * 21]


def test_anchors_from_the_program(asked, capsys):
    """What --anchors writes is what a run of `sparse` reads: the first half of the layers choose blocks."""
    folder, flags = asked
    tiny(folder, 0, dict(num_hidden_layers=4), eos_token_id=None, max_position_embeddings=512)
    status, out, err = program(capsys, '--anchors', *flags, '--tokens', 120, main=train_mask.main)
    assert status == 0, err
    found = read_calibration(folder)['sparse']
    assert str(found['anchors']) in out
    assert METHODS['sparse']().anchor_layers(dict(sparse=found), 4) == sorted(found['anchors'][:2])
    run = '--target', folder, '--draft', 'none', '--prompt', 'hello', '--max-new', 4, '--method', 'sparse'
    status, _, said = program(capsys, *run, '--set', 'ffn_quantile=0.5', 'dense_below=2', 'block=2')
    assert status == 0 and 'nothing was drafted (--draft none)' in said


# ------------------------------------------------------------------------------------------------ --signals

@pytest.mark.slow
def test_signals_of_the_embedded_pair(tmp_path, capsys):
    """specguard asks for what --signals writes; at tau inf its text is the target's."""
    for name in ('target', 'draft'):
        shutil.copytree(EMBEDDED / name, tmp_path / name, ignore=lambda *_: ['calibration.json'])
    pair = '--target', tmp_path / 'target', '--draft', tmp_path / 'draft'
    run = *pair, '--method', 'specguard', '--prompt', 'Tom has 9 pens. Tom loses 5. How many pens are left?'
    refused(capsys, '--signals', *run)
    status, out, _ = program(capsys, '--signals', '--texts', 3, *pair, main=train_mask.main)
    assert status == 0 and 'percentile' in out
    found = section(tmp_path / 'target', 'signals')
    assert found['draft_logp'][0] < found['draft_logp'][1] <= 0 < found['draft_grounding'][1] <= 1
    assert reported(capsys, *run)['text']
    text = reported(capsys, *pair, '--method', 'ar', *run[-2:])
    assert reported(capsys, *run, '--set', 'tau=inf')['text'] == text['text']
