"""train_mask.py: the search for a mask, anchors and thresholds of sparse passes, SpecGuard's signals."""
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import train_mask
from lab.tests.helpers import EMBEDDED, LINE, interrupt, json_lines, program, refused, refuses, reported, tiny
from lab.toys import byte_network, bytes_tokenizer, network, seeded, session, write
from model import load, read_calibration
from train_mask import Choices, sparsity
from verify import METHODS

MIXED = dict(experts=(6, 0, 6, 0), num_experts_per_tok=3, moe_intermediate_size=8, num_hidden_layers=4)


def measured(capsys, *flags):
    """(exit status, stdout, stderr) of a run of train_mask.py."""
    status = train_mask.main([str(flag) for flag in flags])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def section(folder, name='mask'):
    return json.loads((folder / 'calibration.json').read_text())[name]


def tried_by(cost, units, skipped, end=math.inf, **settings):
    """{mask: cost} of the masks that a search tries; settings: of train_mask.Settings."""
    tried = {}
    settings = train_mask.Settings(**settings)
    masks = train_mask.proposals(units, skipped, settings, tried)
    train_mask.search(cost, masks, settings, tried, end)
    return tried


# ------------------------------------------------------------------------------------ what a search finds

@pytest.mark.slow
@pytest.mark.parametrize('unit, useless, objective', [
    ('layer', {4, 5, 8, 9}, 'argmax'), ('sublayer', {3, 4, 9, 10, 13}, 'violation')])
def test_search_finds_planted_sublayers(unit, useless, objective, tmp_path, capsys):
    """Sublayers that add nothing are found, all and no other, in one search or a resumed one."""
    def planted(weights):
        for j in useless:
            output = 'mlp.down_proj' if j % 2 else 'self_attn.o_proj'
            weights[f'model.layers.{j // 2}.{output}.weight'].zero_()
        return weights
    text = tmp_path / 'text'
    text.write_text('To be, or not to be, that is the question. ' * 9)
    folder = tiny(tmp_path / 'm', 3, dict(num_hidden_layers=8), planted, max_position_embeddings=512)
    flags = ['--target', folder, '--text', text, '--unit', unit, '--objective', objective, '--windows', 2,
             '--patience', 999, '--skip', (len(useless) + 0.1) / 16]

    def found(*more):
        assert measured(capsys, *flags, *more)[0] == 0
        return section(folder)
    everything = found('--evaluations', 90)
    assert set(everything['skip']) == useless
    plain = everything['plain']
    assert everything['cost'] < 1e-9 < min(plain['evenly']['cost'], plain['contiguous']['cost'])
    assert len(found('--evaluations', 30)['tried']) <= 30
    resumed = found('--evaluations', 90, '--resume')
    assert list(resumed['tried'].items()) == list(everything['tried'].items())      # as if uninterrupted
    refused(capsys, '--resume', *flags, '--resume', '--seed', 1, main=train_mask_main)
    refused(capsys, '--skip', *flags, '--skip', 0.9, main=train_mask_main)


def train_mask_main():
    return train_mask.main()


@pytest.mark.slow
def test_search_comes_near_the_best_and_bayes_beats_chance():
    """Within 5 % of the best of all 70 masks of 4 of 8 units; on 16 units a tenth below random proposals.

    A mask costs exp of a random weight for each unit and each pair of units in it; three seeds.
    """
    weights = torch.rand(16, generator=seeded())
    pairs = 0.2 * torch.rand(16, 16, generator=seeded(1))

    def cost(mask):
        rows = list(mask)
        return float((weights[rows].sum() + pairs[rows][:, rows].sum()).exp())

    def best(units, skipped, period, seed):
        return min(tried_by(cost, units, skipped, patience=999, period=period, seed=seed).values())
    optimum = min(map(cost, itertools.combinations(range(8), 4)))
    assert all(best(8, 4, 2, seed) <= 1.05 * optimum for seed in range(3))
    by_chance = sum(best(16, 7, 0, seed) for seed in range(3))
    assert sum(best(16, 7, 2, seed) for seed in range(3)) < 0.9 * by_chance


def test_search_begins_with_masks_that_need_none(monkeypatch):
    """Evenly spaced units, every contiguous block, others; an ended search goes on where it stood."""
    model = byte_network(3, num_hidden_layers=8)
    windows = SimpleNamespace(cost=lambda skip, objective: float(sum((j - 5) ** 2 for j in skip)))
    asked = train_mask.Settings(evaluations=7)
    found = train_mask.find_mask(model, windows, asked, {})
    assert list(found['tried'])[:5] == ['1 3 5', '0 1 2', '1 2 3', '2 3 4', '3 4 5']
    assert found['plain']['evenly'] == dict(skip=[4, 5, 8, 9, 12, 13], cost=139.0)
    assert found['plain']['contiguous'] == dict(skip=[2, 3, 4, 5, 6, 7], cost=19.0)
    tried = {(1, 3, 5): 999.0}
    resumed = train_mask.find_mask(model, windows, asked, tried)
    assert list(resumed['tried']) == list(found['tried']) and len(tried) == 7
    assert tried[1, 3, 5] == 999.0                      # what was tried is not tried again
    interrupt(monkeypatch, windows, 'cost', 1)
    refuses('--minutes', train_mask.find_mask, model, windows, train_mask.Settings(), {})


def test_search_ends_without_progress():
    """Patience counts the masks since the best one; by default it is less than the budget."""
    counted = itertools.count()
    assert len(tried_by(lambda mask: next(counted), 8, 4, patience=5)) == 6
    defaults = train_mask.Settings()
    assert defaults.patience < defaults.evaluations


@pytest.mark.slow
@pytest.mark.parametrize('last, minutes, tried, nested', [
    (11, 60, 10, 1), (4, 60, 3, 3), (99, 7, 7, 1), (99, 12, 10, 2)])
def test_search_that_is_ended_keeps_the_best(last, minutes, tried, nested, monkeypatch):
    """Ctrl-C at a `last` evaluation, or the end of the minutes, ends a search; what it has found counts.

    10 masks are tried, then 3 for each of the nested ones. Each takes a minute.
    """
    model, *_ = load(EMBEDDED / 'target')
    windows = SimpleNamespace(cost=lambda skip, objective: float(sum(skip)))
    costs = interrupt(monkeypatch, windows, 'cost', last)
    clock = SimpleNamespace(perf_counter=lambda: 60.0 * len(costs))
    monkeypatch.setattr(train_mask, 'time', clock)
    found = train_mask.find_mask(model, windows, train_mask.Settings(evaluations=10, minutes=minutes), {})
    assert (len(found['tried']), len(found['nested'])) == (tried, nested)
    assert found['nested'][0] == found['skip']
    assert len(costs) <= min(minutes, 10 + 3 + 3)


# -------------------------------------------------------------------------------------- calibration texts

@pytest.fixture
def asked(tmp_path):
    """(a checkpoint with a chat template, flags of a short search on two prompts)."""
    folder = tiny(tmp_path / 'm', 0, dict(num_hidden_layers=4),
                  files={'chat_template.jinja': 'user:{{ messages[0].content }}!'})
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(json_lines([dict(prompt='To be'), dict(question='or not')]))
    return folder, ['--target', str(folder), '--prompts', str(rows), '--windows', '2', '--window', '8',
                    '--evaluations', '2', '--skip', '0.5']


def test_texts_of_prompts(asked, capsys):
    """A text is a prompt, in the template, and what the target itself writes behind it."""
    folder, flags = asked
    settings = train_mask.settings_of(train_mask.parse([*flags, '--chat']))
    model, texts = train_mask.load_with_texts(folder, settings)
    for text, prompt in zip(texts, ('user:To be!', 'user:or not!')):
        ids = bytes_tokenizer().encode(prompt).ids
        written, _ = write(session(model, None, ids, 8), METHODS['ar']())
        assert text == ids + written
    assert measured(capsys, *flags, '--chat')[0] == 0
    assert section(folder)['settings']['chat']
    refused(capsys, '--resume', *flags, '--resume', main=train_mask_main)   # without a template: others


@pytest.mark.parametrize('named, more', [
    ('--windows', ['--windows', '3']), ('--prompts', ['--window', '600']), ('--text', ['--text', 'x']),
    ('--share', ['--signals', '--share', '2']), ('--anchors', ['--signals', '--anchors']),
    ('nowhere', ['--target', 'nowhere'])])
def test_refused_flags(named, more, asked, capsys):
    refused(capsys, named, *asked[1], *more, main=train_mask_main)


# ------------------------------------------------------------------------------------------------ --anchors

def test_sparse_calibration():
    """The layers by difference, and quantiles of what is to be left out."""
    found = sparsity(network(**MIXED), [LINE, LINE[::-1]], dense_below=8, block=4)
    assert found['anchors'] == [0, *sorted(range(1, 4), key=lambda layer: found['jaccard'][layer - 1])]
    assert all(0 < likeness < 1 for likeness in found['jaccard'])
    assert list(map(len, found['experts'])) == [2, 0, 2, 0]                 # m = 1, 2; none in a dense layer
    assert list(map(len, found['channels'])) == [1, 21, 1, 21]
    one, two = found['experts'][0]
    assert one == sorted(one) and len(one) == 21
    assert 0 < one[0] and one[-1] <= 1 / 3 and two[-1] <= 2 / 3
    refuses('12 tokens', sparsity, network(), [[1] * 12])


def test_sparse_likeness_by_hand():
    """Jaccard: the blocks that both layers chose over those that either did, mean over key heads."""
    first = dict(blocks=torch.tensor([[[0, 1, 2], [4, 5, 6]]]), channels=torch.ones(1, 5, 24))
    second = dict(blocks=torch.tensor([[[1, 2, 3], [6, 5, 4]]]), channels=torch.ones(1, 5, 24))
    choices = Choices([0, 0])
    choices.add(list(enumerate([first, first, second, second])))
    assert choices.likeness() == [(2 / 4 + 3 / 3) / 2]


def test_anchors_from_the_program(tmp_path, capsys):
    """What --anchors writes is what a run of `sparse` reads: the first half of the layers choose blocks."""
    folder = tiny(tmp_path / 'm', 0, dict(num_hidden_layers=4), max_position_embeddings=512)
    text = tmp_path / 'text'
    text.write_text('To be, or not to be, that is the question. ' * 9)
    status, out, _ = measured(capsys, '--anchors', '--target', folder, '--text', text, '--windows', 2)
    found = read_calibration(folder, sections=['sparse'])['sparse']
    assert status == 0 and str(found['anchors']) in out
    flags = '--target', folder, '--draft', 'none', '--prompt', 'hello', '--max-new', 4, '--method', 'sparse'
    _, _, err = program(capsys, *flags)
    first = ', '.join(map(str, sorted(found['anchors'][:2])))
    assert f' {first} choose' in err


# ------------------------------------------------------------------------------------------------ --signals

@pytest.mark.slow
def test_signals_of_the_embedded_pair(tmp_path, capsys):
    """specguard asks for what --signals writes, a gate with it; at tau inf its text is the target's."""
    for name in ('target', 'draft'):
        shutil.copytree(EMBEDDED / name, tmp_path / name, ignore=lambda *_: ['calibration.json'])
    pair = '--target', tmp_path / 'target', '--draft', tmp_path / 'draft'
    run = *pair, '--method', 'specguard', '--prompt', 'Tom has 9 pens. Tom loses 5. How many pens are left?'
    refused(capsys, '--signals', *run)
    status, out, _ = measured(capsys, '--signals', '--rows', 1, '--share', 0.5, *pair)
    assert status == 0 and out.count('<- chosen') == 1
    found = section(tmp_path / 'target', 'signals')
    for name in ('target_logp', 'target_grounding', 'draft_logp', 'draft_grounding'):
        low, high = found[name]
        assert low < high
    assert reported(capsys, *run)['text']
    plain = reported(capsys, *pair, '--method', 'ar', *run[-2:])
    assert reported(capsys, *run, '--set', 'tau=inf')['text'] == plain['text']


@pytest.mark.slow
def test_signals_of_prompts_without_answers(tmp_path, capsys):
    """Steps that nobody can grade give scales and no gate."""
    pair = []
    for seed, role in enumerate(('target', 'draft')):
        pair += [f'--{role}', tiny(tmp_path / role, seed, max_position_embeddings=512)]
    file = tmp_path / 'rows.jsonl'
    file.write_text(json_lines([dict(prompt='hello')]))
    status, _, err = measured(capsys, '--signals', '--share', 1, '--prompts', file, *pair)
    assert status == 0, err
    found = section(tmp_path / 'target', 'signals')
    assert {'target_logp', 'target_grounding', 'draft_logp', 'draft_grounding'} <= found.keys()
    assert 'tau' not in found
