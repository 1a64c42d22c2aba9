"""train_mask.py: the search for a mask, anchors and thresholds of sparse passes, SpecGuard's signals."""
import shutil
from types import SimpleNamespace

import pytest
import torch

import train_mask
from lab.tests.helpers import (EMBEDDED, LINE, MIXED, byte_network, bytes_tokenizer, interrupt, json_lines,
                               program, refused, refuses, reported, tiny)
from lab.toys import network, session, write
from model import Reader, read_calibration
from specmini import Engine
from train_mask import Settings
from verify import METHODS


@pytest.mark.slow
def test_search_finds_planted_layers(tmp_path, capsys, monkeypatch):
    """Layers that add nothing are found, all and no other: without them slim is the target."""
    useless = {f'model.layers.{i}.{w}.weight' for i in (2, 4) for w in ('self_attn.o_proj', 'mlp.down_proj')}

    def planted(weights):
        return {name: weight * (name not in useless) for name, weight in weights.items()}
    monkeypatch.setattr(train_mask, 'PATIENCE', 999)
    rows = json_lines([dict(prompt='To be, or not to be'), dict(prompt='that is the question')] * 4)
    folder = tiny(tmp_path, 3, dict(num_hidden_layers=8), planted, files=dict(rows=rows))
    flags = '--prompts', folder / 'rows', '--texts', 2, '--evaluations', 90, '--skip', 0.26
    _, out, _ = program(capsys, '--target', folder, *flags, main=train_mask.main)
    found = read_calibration(folder)['mask']
    assert "slim's first choice is the target's at 100.0% of the tokens" in out
    assert found['skip'] == [4, 5, 8, 9] and found['cost'] < 1e-9 and found['masks'] <= 90


@pytest.mark.parametrize('last, tried', [(4, 3), (99, 10)])
def test_search_that_is_ended_keeps_the_best(last, tried, monkeypatch):
    """Ctrl-C at the end of a `last` evaluation, or of all that were asked for; of the first: nothing yet."""
    windows = SimpleNamespace(cost=lambda skip: float(sum(skip)))
    costs = interrupt(monkeypatch, windows, 'cost', last)
    asked = byte_network(3, num_hidden_layers=10), windows, Settings(evaluations=10)
    found = train_mask.find_mask(*asked)
    assert found['masks'] == tried and found['cost'] == min(costs[:tried])
    interrupt(monkeypatch, windows, 'cost', 1)
    with pytest.raises(KeyboardInterrupt):
        train_mask.find_mask(*asked)


@pytest.fixture
def asked(tmp_path):
    """(a checkpoint with a chat template, flags of a short search on two prompts)."""
    rows = [dict(prompt='To be'), dict(question='or not'), dict(prompt='x' * 60), dict(prompt='')]
    files = {'chat_template.jinja': 'user:{{ messages[0].content }}!', 'rows.jsonl': json_lines(rows)}
    folder = tiny(tmp_path / 'm', 0, dict(num_hidden_layers=4), files=files)
    numbers = '--texts 2 --tokens 8 --evaluations 2 --skip 0.25'.split()
    return folder, ['--target', folder, '--prompts', str(folder / 'rows.jsonl'), *numbers]


@pytest.mark.parametrize('named, more', [
    ('2 of 4 prompts', '--texts 3'), ('give other --prompts', '--tokens 600'),
    ('texts is 0; expected a whole number 1 or more', '--texts 0'), ('skip is 1.5; expected', '--skip 1.5'),
    ('0 layers; expected 1 to 2', '--skip 0.1'), ('3 layers; expected 1 to 2', '--skip 0.9'),
    ('--evaluations', '--evaluations x'), ('--anchors', '--signals --anchors'),
    ('give --draft DIR', '--signals --draft lookup'), ('no/such: no such folder', '--target no/such')])
def test_refused_flags(named, more, asked, capsys):
    refused(capsys, named, *asked[1], *more.split(), main=train_mask.main)


def test_two_layers_have_none_to_leave_out(tmp_path, capsys):
    folder = tiny(tmp_path, files={'rows.jsonl': json_lines([dict(prompt='hi')])}, eos_token_id=None)
    flags = '--target', folder, '--prompts', folder / 'rows.jsonl', '--texts', 1, '--tokens', 4, '--skip', 0.5
    refused(capsys, 'none can be left out', *flags, main=train_mask.main)


def test_what_cannot_be_written_is_not_measured(asked, capsys, monkeypatch):
    folder, flags = asked
    (folder / 'calibration.json').symlink_to(folder / 'no' / 'such')
    monkeypatch.setattr(train_mask, 'SECTIONS', {})
    refused(capsys, 'calibration.json cannot be written', *flags, main=train_mask.main)


def test_a_mask_is_measured_on_what_the_target_writes(asked, capsys, tmp_path):
    """After prompts, in the template; printed: its cost, and how often slim and the draft agree with it."""
    folder, flags = asked
    other = tiny(tmp_path / 'draft', 0, dict(num_hidden_layers=4), lambda weights: {
        name: weight * (0.9 if 'o_proj' in name else 1) for name, weight in weights.items()})
    model, draft = (engine := Engine(folder, other)).models.values()
    texts = train_mask.calibration_texts(engine, Settings(prompts=flags[3], texts=2, tokens=8, chat=True))
    for text, prompt in zip(texts, ('user:To be!', 'user:or not!'), strict=True):
        ids = bytes_tokenizer().encode(prompt).ids
        assert text == ids + write(session(model, None, ids, 8), METHODS['ar']())[0]

    def agreement(path, twin):
        same = []
        for ids in texts:
            p = (reader := Reader(model, 64)).read(ids, model.full, 8)      # slim builds on these keys
            s = (reader if twin is model else Reader(twin, 64)).read(ids, path, 8)
            same += (p.argmax(-1) == s.argmax(-1)).tolist()
        assert 2 < sum(same) < 14
        return f'{sum(same) / 16:.1%}'
    _, out, _ = program(capsys, *flags, '--chat', '--draft', other, main=train_mask.main)
    found = read_calibration(folder)['mask']
    slims, drafts = agreement(model.full.without(found['skip']), model), agreement(draft.full, draft)
    cost, shares, advice, *_ = out.splitlines()
    assert cost.startswith(f'skips {found["skip"]} of 8 sublayers: R {found["cost"]:.2g} nats a token')
    assert shares == f"slim's first choice is the target's at {slims} of the tokens, the draft's at {drafts}"
    assert advice.startswith('slim can pay only where it agrees more often than the draft; python spec')


def test_sparse_calibration():
    """The layers by difference, and quantiles of what is to be left out."""
    found = train_mask.sparsity(network(2, **MIXED), [LINE, LINE[::-1]], dense_below=8, block=4)
    assert found['anchors'] == [0, *sorted(range(1, 4), key=lambda layer: found['jaccard'][layer - 1])]
    assert 0 < min(found['jaccard']) <= max(found['jaccard']) < 1
    assert [*map(len, found['experts'])] == [2] * 4                         # m = 1, 2
    assert [*map(len, found['channels'])] == [21] * 4
    one, two = found['experts'][0]
    assert one == sorted(one) and len(one) == 21 and 0 < one[0] and one[-1] <= 1 / 3 and two[-1] <= 2 / 3
    refuses('12 tokens', train_mask.sparsity, network(), [[1] * 12])
    columns = torch.stack([torch.arange(40, -1, -1), torch.ones(41)], 1)
    assert train_mask.quantiles(columns) == [list(range(0, 41, 2)), [1.0] * 21]


def test_anchors_from_the_program(asked, capsys):
    """What --anchors writes is what a run of `sparse` reads: the first half of the layers choose blocks."""
    folder = tiny(asked[0], 0, dict(num_hidden_layers=4), eos_token_id=None, max_position_embeddings=512)
    _, out, _ = program(capsys, '--anchors', *asked[1], '--tokens', 120, main=train_mask.main)
    found = read_calibration(folder)['sparse']
    layers = METHODS['sparse']().anchor_layers(dict(sparse=found), 4)
    assert "'sparse'" in out and layers == sorted(found['anchors'][:2])
    run = '--target', folder, '--draft', 'none', '--prompt', 'hello', '--max-new', 4, '--method'
    assert program(capsys, *run, 'sparse ffn_quantile=0.5 dense_below=2 block=2')[0] == 0


@pytest.mark.slow
def test_signals_of_the_embedded_pair(tmp_path, capsys):
    home = shutil.copytree(EMBEDDED, tmp_path / 'models', ignore=lambda *_: ['calibration.json', 'moe'])
    pair = '--target', home / 'target', '--draft', home / 'draft'
    run = *pair, '--method', 'specguard', '--prompt', 'Tom has 9 pens.'
    refused(capsys, '--signals', *run)
    for draft in 'self', pair[3]:
        _, out, _ = program(capsys, '--signals', '--texts', 3, *pair[:3], draft, main=train_mask.main)
        found = read_calibration(pair[1], pair[1] if draft == 'self' else draft)['signals']
    assert "'signals'" in out and found['draft_logp'][0] < found['draft_logp'][1] <= 0
    assert 0 < found['draft_grounding'][1] <= 1 and reported(capsys, *run)['text']
