"""What a checkpoint's folder may hold, and what is refused: exit status 2, one line that names the fault."""
import copy
import json
import math
import os
import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load as tensors_of
from safetensors.torch import save
from tokenizers import Tokenizer, models, processors

import kernels
import specmini
from lab.tests.helpers import case, program, put, refused, refuses, reported, tiny
from lab.toys import byte_network, bytes_tokenizer, fresh
from model import encode, load, read_calibration, read_config, read_tokenizer, write_calibration


def run_refused(capsys, named, folder, *flags):
    line = refused(capsys, '', '--target', folder, '--prompt', 'x', *flags)
    assert str(named) in line.replace(str(folder), '')      # pytest names the folder after the case


# ------------------------------------------------------------------------------------------------ config.json

def scaled(kind, **settings):
    """The rotary settings of a config.json of transformers 4."""
    return dict(rope_scaling=dict(rope_type=kind, factor=2, **settings))


@pytest.mark.parametrize('name, value', [
    ('model_type', 'gpt2'), ('hidden_size', None), ('num_attention_heads', 0),
    ('max_position_embeddings', '64'), ('rms_norm_eps', '1e-6'), ('tie_word_embeddings', 'no'),
    ('layer_types', 'full'), ('vocab_size', 10 ** 18), ('head_dim', 5), ('num_hidden_layers', 10 ** 9),
    ('hidden_act', 'gelu'), ('eos_token_id', '</s>'), ('quantization_config', dict(bits=4)),
    ('partial_rotary_factor', 0.5), ('rope_theta', 'x'), ('attention_bias', 0), ('use_sliding_window', 'x'),
    ('sliding_window', 'x'), ('num_experts', 0.5), ('decoder_sparse_step', 0), ('mlp_only_layers', 1)])
def test_refused_value(name, value, tmp_path, capsys):
    """The line names a setting that is no value, or asks for what is not here."""
    run_refused(capsys, name, tiny(tmp_path, **{name: value}))


@pytest.mark.parametrize('named, changes', [
    case('heads-that-do-not-divide', 'config.json', dict(num_key_value_heads=3)),
    case('more-experts-than-there-are', 'num_experts_per_tok',
         dict(model_type='qwen3_moe', num_experts=2, num_experts_per_tok=3, moe_intermediate_size=4)),
    case('experts-of-no-size', 'moe_intermediate_size',
         dict(model_type='qwen3_moe', num_experts=2, num_experts_per_tok=1)),
    case('mistral-window', 'window of 32', dict(model_type='mistral', sliding_window=32)),
    case('qwen2-window', 'window of 32',
         dict(model_type='qwen2', sliding_window=32, use_sliding_window=True)),
    case('mistral-usual-window', 'window of 4096', dict(model_type='mistral', max_position_embeddings=8192)),
    case('sliding-layers', 'sliding window', dict(layer_types=['sliding_attention'])),
    case('qwen3-window-is-off', 'k_norm.weight',            # its norms are missing: its window is no reason
         dict(model_type='qwen3', sliding_window=32, use_sliding_window=False)),
    case('weights-missing', 'layers.2.input_layernorm.weight', dict(num_hidden_layers=3)),
    case('weights-unknown', 'layers.1.input_layernorm.weight', dict(num_hidden_layers=1)),
    case('weights-shape', '[16, 25]', dict(intermediate_size=25)),
    case('sizes-absurd', 'config.json', dict(vocab_size=10 ** 10, hidden_size=10 ** 10)),
    case('layers-beyond-the-files', '9999', dict(num_hidden_layers=9999)),
    case('rope-text', "'linear'", dict(rope_scaling='linear')),
    case('rope-type', "'longrope'", scaled('longrope')),
    case('rope-type-list', "['yarn']", scaled(['yarn'])),
    case('rope-by-layer', 'config.json', dict(rope_parameters=dict(full_attention=dict(rope_type='yarn')))),
    case('rope-theta', 'rope_theta', scaled('yarn') | dict(rope_theta=1)),
    case('rope-option', 'beta_fast', scaled('yarn', beta_fast='x')),
    case('rope-option-0', 'attention_factor', scaled('yarn', attention_factor=0)),
    case('rope-mscale', 'mscale', scaled('yarn', mscale=1)),
    case('rope-mscale-all', 'mscale_all_dim', scaled('yarn', mscale_all_dim=1)),
    case('rope-fractions', 'truncate', scaled('yarn', truncate=False)),
    case('rope-endless', 'factor', dict(rope_scaling=dict(type='linear', factor=math.inf))),
    case('rope-boolean', 'factor', dict(rope_scaling=dict(type='linear', factor=True))),
    case('rope-too-big', 'original_max_position_embeddings',
         scaled('yarn', original_max_position_embeddings=10 ** 400)),
    case('rope-shrinks', 'factor', dict(rope_scaling=dict(type='linear', factor=0.5))),
    case('rope-ends-swapped', 'beta_slow', scaled('yarn', beta_slow=40)),
    case('rope-llama3-ends', 'low_freq_factor', scaled('llama3', low_freq_factor=4, high_freq_factor=1))])
def test_refused_config(named, changes, tmp_path, capsys):
    """What the settings ask for together is not here, or the weights are others."""
    run_refused(capsys, named, tiny(tmp_path, **changes))


ORIGINAL = 'original_max_position_embeddings'
LOW_HIGH = dict(low_freq_factor=1, high_freq_factor=4)


@pytest.mark.parametrize('kind, settings, around', [
    case('theta-beside-them', 'default', {}, dict(rope_theta=500.0)),
    case('theta-in-both', 'default', dict(rope_theta=100), dict(rope_theta=500.0)),
    case('linear', 'linear', dict(factor=3), {}),
    case('llama3', 'llama3', dict(factor=8, **LOW_HIGH), {}),       # the context is the original one
    case('original-in-both', 'llama3', dict(factor=8, **LOW_HIGH, **{ORIGINAL: 90}), {ORIGINAL: 900}),
    case('yarn', 'yarn', dict(factor=8, mscale=0, mscale_all_dim=None, truncate=True), {}),
    case('zeros-are-absent', 'yarn', dict(factor=8, beta_fast=0, beta_slow=0, **{ORIGINAL: 90}), {}),
    case('yarn-options', 'yarn', dict(factor=8, beta_fast=9.5, beta_slow=2, attention_factor=0.7), {}),
    case('all-are-slow', 'yarn', dict(factor=8, beta_slow=30, **{ORIGINAL: 2}), {}),
    case('all-are-fast', 'yarn', dict(factor=8, beta_fast=0.01, beta_slow=0.01, **{ORIGINAL: 9e9}), {}),
    case('no-band', 'yarn', dict(factor=8, beta_fast=32, beta_slow=32, **{ORIGINAL: 201.0}), {})])
def test_rotary_settings(kind, settings, around, tmp_path):
    """Frequencies and the factor on cos and sin are transformers', by its version 4's config and by 5's."""
    raw = dict(model_type='llama', hidden_size=64, num_attention_heads=2, vocab_size=64, intermediate_size=24,
               num_hidden_layers=2, max_position_embeddings=640) | around
    old = dict(rope_parameters=dict(rope_type='linear', factor=3), rope_scaling=dict(type=kind, **settings))
    for places in (old, dict(rope_parameters=dict(rope_type=kind, **settings))):
        put(tmp_path, {'config.json': raw | places})
        cos, sin = kernels.rope_table(read_config(tmp_path).rope, 32, 2)
        with pytest.MonkeyPatch.context() as patch:                         # theirs in double precision
            patch.setattr(torch, 'float', torch.float64)
            patch.setattr(torch, 'float32', torch.float64)
            config = transformers.AutoConfig.for_model(**copy.deepcopy(raw | places))
            theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        assert torch.allclose(cos[0], torch.full_like(cos[0], theirs.attention_scaling), rtol=1e-6, atol=0)
        ours = torch.atan2(-sin[1, :16], cos[1, :16])                       # the angles of position 1
        assert torch.allclose(ours, theirs.inv_freq, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------- files

def multiplied(part, factor):
    """A function that multiplies the tensors whose name has this part."""
    def change(tensors):
        return {name: tensor * factor if part in name else tensor for name, tensor in tensors.items()}
    return change


def stored_as(dtype):
    """A function that gives tensors of this dtype."""
    return lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize('named, changes', [
    case('nan', 'lm_head.weight', dict(weights=multiplied('head', math.nan))),
    case('overflow', 'NaN', dict(weights=multiplied('down', 1e38))),
    case('integers', 'I8', dict(weights=stored_as(torch.int8))),
    case('complex', 'C64', dict(weights=stored_as(torch.complex64))),
    case('half-a-config', 'config.json', dict(files={'config.json': '{"model_type": '})),
    case('no-tokenizer', 'tokenizer.json', dict(files={'tokenizer.json': None})),
    case('empty-tokenizer', 'tokenizer.json', dict(files={'tokenizer.json': '{}'})),
    case('tokenizer-beyond-the-embedding', '258', dict(tokenizer=bytes_tokenizer(['x2']))),
    case('empty-weights', 'model.safetensors', dict(files={'model.safetensors': b''})),
    case('endless-header', 'model.safetensors', dict(files={'model.safetensors': b'\xff' * 99})),
    case('header-that-is-no-json', 'model.safetensors', dict(files={'model.safetensors': bytes(99)})),
    case('header-without-tensors', 'lm_head.weight',
         dict(files={'model.safetensors': b'\2' + bytes(7) + b'{}'})),
    case('a-pickle', 'convert .bin', dict(files={'model.safetensors': None, 'pytorch_model.bin': 'x'})),
    case('no-index', 'model.safetensors.index.json',
         dict(files={'model.safetensors.index.json': '{}', 'model.safetensors': None}))])
def test_refused_content(named, changes, tmp_path, capsys):
    run_refused(capsys, named, tiny(tmp_path, **changes))


@pytest.mark.parametrize('name, becomes', [
    ('model.safetensors', 'cut'), ('config.json', 'pipe'),
    ('tokenizer.json', 'pipe'), ('model.safetensors', 'folder'), ('model.safetensors', '/dev/zero'),
    ('model.safetensors', '../outside'), ('model.safetensors', 'model.safetensors'),
    ('generation_config.json', 'nothing')])
def test_refused_file(name, becomes, tmp_path, capsys):
    """A file that is cut off, is no file, or is a link that leads out of the folder or nowhere."""
    file = tiny(tmp_path / 'folder') / name
    shutil.copy(file.parent / 'model.safetensors', tmp_path / 'outside')
    if becomes == 'cut':
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink(missing_ok=True)
        make = dict(pipe=os.mkfifo, folder=os.mkdir).get(becomes, partial(os.symlink, becomes))
        make(file)
    run_refused(capsys, name, file.parent)


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in two shards, beside copies of the first one where no index may lead."""
    folder = tiny(tmp_path / 'sharded')
    tensors = tensors_of((folder / 'model.safetensors').read_bytes())
    first = save({'model.norm.weight': tensors.pop('model.norm.weight')})
    put(folder, {'model.safetensors': None, 'one.safetensors': first, 'two.safetensors': save(tensors)})
    (folder / 'folder').mkdir()
    for home in (folder / 'folder', tmp_path):
        shutil.copy(folder / 'one.safetensors', home)
    (folder / 'linked').symlink_to('../one.safetensors')
    os.mkfifo(folder / 'pipe')
    return folder


def write_index(folder, *shards):
    names = {f'tensor {i}': shard for i, shard in enumerate(shards)}
    put(folder, {'model.safetensors.index.json': dict(weight_map=names)})


@pytest.mark.parametrize('one', [
    '../one.safetensors', 'linked', 'folder/one.safetensors', './one.safetensors', 'one.safetensors/',
    'one.safetensors\0', 'pipe', 'folder', '.', '..', '', '/dev/zero', 'absent', 'config.json', '\udcff', 7,
    None, []])
def test_an_index_names_files_of_its_folder(one, sharded):
    write_index(sharded, one, 'two.safetensors')
    refuses(sharded.name, load, sharded)


@pytest.mark.slow
def test_shards_are_read_once_each(sharded):
    """Both shards load; a tensor that is in two of them is refused, and so is an index without a map."""
    write_index(sharded, 'one.safetensors', 'two.safetensors')
    assert fresh(load(sharded)[0], [1, 2]).equal(fresh(byte_network(0), [1, 2]))
    shutil.copy(sharded / 'one.safetensors', sharded / 'again')
    write_index(sharded, 'one.safetensors', 'two.safetensors', 'again')
    refuses('model.norm.weight', load, sharded)
    put(sharded, {'model.safetensors.index.json': dict(weight_map=[])})
    refuses('index.json', load, sharded)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_are_read(dtype, tmp_path):
    model, _, _ = load(tiny(tmp_path, weights=stored_as(dtype)))
    assert model.lm_head.weight.dtype == torch.float32


# -------------------------------------------------------------------------------------------- tokenizers

def test_rows_beyond_the_tokenizer(tmp_path, capsys):
    """Embeddings are padded by different amounts: the spare rows reach no distribution."""
    target = tiny(tmp_path / 'target', 0, vocab=300)
    draft = tiny(tmp_path / 'draft', 1, vocab=280)
    assert fresh(load(target)[0], [1, 2]).shape == (2, 257)
    flags = '--target', target, '--draft', draft, '--prompt', 'x'
    assert program(capsys, *flags, '--max-new', 8)[0] == 0


def test_a_vocabulary_with_a_gap_goes_up_to_its_highest_id(tmp_path):
    """The ids 256 to 299 are nobody's: the network writes up to 300, not up to the number of words."""
    raw = json.loads(bytes_tokenizer().to_str())
    raw['model']['vocab']['<eos>'] = raw['added_tokens'][0]['id'] = 300
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    folder = tiny(tmp_path / 'gap', vocab=301, tokenizer=tokenizer, eos_token_id=300)
    assert load(folder)[0].vocab == 301


def test_vocabularies_must_agree(tmp_path, capsys):
    """Two tokenizers of one length are compared token by token."""
    target = tiny(tmp_path / 'target', vocab=258, tokenizer=bytes_tokenizer(['here']))
    draft = tiny(tmp_path / 'draft', vocab=258, tokenizer=bytes_tokenizer(['there']))
    refused(capsys, "'there'", '--target', target, '--draft', draft, '--prompt', 'x')


def template_of(word, i):
    """A tokenizer that puts a special token of this id before every text."""
    tokenizer = bytes_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=f'{word} $A', special_tokens=[(word, i)])
    return tokenizer


WITHOUT_UNKNOWN = Tokenizer(models.WordLevel({f'w{i}': i for i in range(257)}, unk_token='absent'))
ENDLESS = dict(type='Split', pattern=dict(Regex='(a|a)*$'), behavior='Isolated', invert=False)
TORN = dict(type='BPE', vocab=dict(a=0, b=1, ab=2), merges=['a b'], continuing_subword_prefix='###')


@pytest.mark.parametrize('tokenizer, named', [
    case('an-id-beyond-the-embedding', template_of('<s>', 999), '999'),
    case('raises-at-run-time', WITHOUT_UNKNOWN, 'tokenizer'),
    case('panics-at-run-time', dict(pre_tokenizer=ENDLESS), 'cannot encode'),
    case('panics-at-once', dict(model=TORN), 'tokenizer.json'),
    case('one-word', Tokenizer(models.WordLevel(dict(a=0), unk_token='a')), 'tokenizer of 1'),
    case('no-words', Tokenizer(models.BPE({}, [])), 'tokenizer of')])
def test_refused_tokenizer(tokenizer, named, tmp_path, capsys):
    """It raises where it encodes, or where it is read, perhaps by a panic of Rust; ours is one line."""
    run_refused(capsys, named, tiny(tmp_path, tokenizer=tokenizer), '--prompt', 'a' * 30 + 'b')


def test_a_tokenizer_draws_nothing(tmp_path):
    """Merges left out by chance are for training: a text has one list of ids."""
    merging = dict(type='BPE', dropout=0.5, vocab=dict(a=0, b=1, ab=2), merges=['a b'])
    folder = tiny(tmp_path, tokenizer=dict(model=merging, added_tokens=[]))
    assert encode(read_tokenizer(folder), ['ab'] * 20) == [[2]] * 20


# --------------------------------------------------------------------------------- end tokens, chat templates

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}!{% endif %}")
CONFIG = 'tokenizer_config.json'
SEVERAL = [dict(name='other', template='{{ 12 }}'), dict(name='default', template='{{ 1 }}')]


def talk(folder, *flags):
    """The flags of a run of two tokens on this checkpoint, with `hi` for a prompt."""
    return '--target', folder, '--draft', 'none', '--prompt', 'hi', '--max-new', 2, *flags


def test_generation_config_ends_a_text(tmp_path, capsys):
    """Its end tokens are added to those of config.json."""
    folder = tiny(tmp_path)
    first, _ = reported(capsys, *talk(folder))['tokens']
    put(folder, {'generation_config.json': dict(eos_token_id=[1, first])})
    ended = reported(capsys, *talk(folder))
    assert (ended['tokens'], ended['finish']) == ([first], 'eos')
    assert load(folder)[2] == {1, first, 256}


@pytest.mark.parametrize('files, rendered', [
    case('of-the-settings', {CONFIG: dict(chat_template=TEMPLATE, bos_token=dict(content='^'))}, '^user:hi!'),
    case('of-its-own-file-first', {CONFIG: dict(chat_template=TEMPLATE),
                                   'chat_template.jinja': "<{{ messages[0]['content'] }}>"}, '<hi>'),
    case('the-default-of-several', {CONFIG: dict(chat_template=SEVERAL)}, '1')])
def test_chat_template(files, rendered, tmp_path, capsys):
    """A template writes its special tokens itself: the tokenizer's <eos> goes before a bare prompt alone."""
    folder = tiny(tmp_path, tokenizer=template_of('<eos>', 256), files=files)
    assert reported(capsys, *talk(folder, '--chat'))['prompt_tokens'] == len(rendered)
    assert reported(capsys, *talk(folder))['prompt_tokens'] == len('^hi')
    assert specmini.chat(folder, 'hi') == rendered


@pytest.mark.parametrize('template', [
    case('none', None), case('a-list', ['x']), case('raises', "{{ raise_exception('no' * 50_000) }}"),
    case('a-name-that-is-a-list', [dict(name=[], template='x')]),
    case('leaves-the-sandbox', "{{ ''.__class__.__mro__ }}"), case('does-not-parse', '{% for %}'),
    case('divides-by-zero', '{{ 1 / 0 }}')])
def test_refused_template(template, tmp_path, capsys):
    folder = tiny(tmp_path, files={CONFIG: dict(chat_template=template)})
    assert len(refused(capsys, '--chat', *talk(folder, '--chat'))) < 1100


# --------------------------------------------------------------------------------------- calibration.json

SIGNALS = dict(draft_logp=[-2.5, 0.5], draft_grounding=[0.1, 0.5])
SPARSE = dict(anchors=[1, 0], channels=[[0.1], [0.2, 0.3]], experts=[[], [[0.5]]])
MASK = dict(skip=[1, 2])


@pytest.fixture
def folders(tmp_path):
    """Folders of two random checkpoints of two layers."""
    return tiny(tmp_path / 'target', 0), tiny(tmp_path / 'draft', 1)


def test_calibration_of_others(folders):
    """What was measured on another draft or target counts as absent; a line says how to measure it."""
    target, draft = folders
    write_calibration(target, 'signals', SIGNALS, draft=draft)
    write_calibration(target, 'mask', MASK)
    for pair in (target, None):
        found = read_calibration(target, pair)
        assert list(found) == ['mask']
        refuses(f'train_mask.py --signals --target {target}', found.__getitem__, 'signals')
    shutil.copy(target / 'calibration.json', draft)
    assert read_calibration(draft) == {}
    refuses(f'train_mask.py --target {draft}', read_calibration(draft).__getitem__, 'mask')
    write_calibration(draft, 'mask', MASK)
    assert read_calibration(draft, target) == dict(mask=MASK)


@pytest.mark.parametrize('name, section, method', [
    ('mask', None, 'via'), ('mask', [], 'via'), ('mask', {}, 'via'), ('mask', dict(skip=7), 'via'),
    ('signals', dict(SIGNALS, draft_logp='ab'), 'specguard'), ('sparse', 'x', 'sparse'),
    ('sparse', dict(SPARSE, channels=0.2), 'sparse')])
def test_a_damaged_section_is_told_where_it_is_read(name, section, method, folders, capsys):
    """With the command that makes it; methods that do not read it run."""
    target, draft = folders
    write_calibration(target, 'mask', MASK)
    found = json.loads((target / 'calibration.json').read_text())
    put(target, {'calibration.json': found | {name: section}})
    flags = '--target', target, '--draft', draft, '--prompt', 'ab', '--max-new', 3
    refused(capsys, f'a damaged section {name!r}', *flags, '--method', method)
    assert program(capsys, *flags)[0] == 0


@pytest.mark.parametrize('content', ['', '[]', '[' * 9999])
def test_calibration_that_is_none(content, folders):
    target, _ = folders
    put(target, {'calibration.json': content})
    refuses('calibration.json', read_calibration, target)

