"""What a checkpoint's folder may hold, and what is refused: exit status 2, one line that names the fault."""
import contextlib
import copy
import functools
import json
import math
import shutil
from pathlib import Path as File

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load as tensors_of
from safetensors.torch import save
from tokenizers import Tokenizer, models, processors

import kernels
import specmini
from lab.tests.helpers import (LEARNED_TWO, RANGES, byte_network, bytes_tokenizer, program, put, refused,
                               refuses, reported, tiny)
from lab.toys import SIZES, fresh
from model import (BadInput, chat, check_writable, encode, fingerprint, load, new_file, read_calibration,
                   read_config, read_tokenizer, snapshot, write_calibration)

ORIGINAL = 'original_max_position_embeddings'
CONFIG, INDEX, WEIGHTS = 'tokenizer_config.json', 'model.safetensors.index.json', 'model.safetensors'
MAPPED, HEAD, EMBEDDING = 'special_tokens_map.json', 'lm_head.weight', 'model.embed_tokens.weight'
MOE = dict(model_type='qwen3_moe', num_experts=2, num_experts_per_tok=1, moe_intermediate_size=4)
WINDOW = dict(model_type='qwen2', sliding_window=32, use_sliding_window=True)
LINEAR, YARN = dict(type='linear'), dict(rope_type='yarn', factor=2)
LLAMA3 = dict(factor=8, low_freq_factor=1, high_freq_factor=4)


def stored(change, part=''):
    """Changes of `tiny`: the tensors whose name has this part are stored changed by this function."""
    return dict(weights=lambda tensors: {
        name: change(tensor) if part in name else tensor for name, tensor in tensors.items()})


def template_of(word, i):
    """A tokenizer that puts a special token of this id before every text."""
    tokenizer = bytes_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=f'{word} $A', special_tokens=[(word, i)])
    return tokenizer


# -------------------------------------------------------------------------------------------- what is refused

VALUES = [              # a setting of config.json that is no value, or asks for what is not here
    ('model_type', 'gpt2'), ('hidden_size', None), ('num_attention_heads', 0), ('rms_norm_eps', '1e-6'),
    ('tie_word_embeddings', 'no'), ('vocab_size', 10 ** 18), ('head_dim', 5), ('num_hidden_layers', 10 ** 9),
    ('hidden_act', 'gelu'), ('eos_token_id', '</s>'), ('partial_rotary_factor', 0.5), ('rope_theta', 'x')]
ROTARY = [              # what the line names, the rotary settings of transformers 4
    ("'longrope'", dict(type='longrope')), ("['yarn']", dict(type=['yarn'])),
    ('beta_fast', YARN | dict(beta_fast='x')), ('attention_factor', YARN | dict(attention_factor=0)),
    ('mscale', YARN | dict(mscale=1)), ('mscale_all_dim', YARN | dict(mscale_all_dim=1)),
    ('truncate', YARN | dict(truncate=False)), ('factor', LINEAR | dict(factor=math.inf)),
    ('factor', LINEAR | dict(factor=True)), ('factor', LINEAR | dict(factor=0.5)),
    (ORIGINAL, YARN | {ORIGINAL: 10 ** 400}),
    ('low_freq_factor', LLAMA3 | dict(type='llama3', low_freq_factor=5))]
TOGETHER = [            # what settings ask for together is not here, or the weights are others
    ('config.json', dict(num_key_value_heads=3)),
    ('quantised by MLX', dict(quantization=dict(group_size=64, bits=4))),
    ('quantised by gptq', dict(quantization_config=dict(quant_method='gptq', bits=4))),
    ('num_experts_per_tok', MOE | dict(num_experts_per_tok=3)),
    ('1000000000 experts', MOE | dict(num_experts=10 ** 9)),
    ('config.json', MOE | dict(num_experts='2')), ('config.json', MOE | dict(decoder_sparse_step='x')),
    ('config.json', MOE | dict(mlp_only_layers=1)),
    ('config.json', dict(model_type='mistral', sliding_window='x')),
    ('window of 32', dict(model_type='mistral', sliding_window=32)),
    *(('window of 32', WINDOW | by) for by in (
        dict(max_window_layers=1), dict(model_type='qwen3_moe'), dict(layer_types=['sliding_attention']))),
    ('window of 4096', dict(model_type='mistral', max_position_embeddings=8192)),       # the usual one
    ('window of 100', dict(model_type='mistral', sliding_window=100, max_position_embeddings=64,
                           rope_scaling=YARN)),         # less than the scaled context
    ('k_norm.weight', dict(model_type='qwen3', sliding_window=32, use_sliding_window=False)),   # window off
    ('layers.2.input_layernorm.weight', dict(num_hidden_layers=3)),
    ('layers.1.input_layernorm.weight', dict(num_hidden_layers=1)),
    ('[25, 16]', dict(intermediate_size=25)),
    ('config.json', dict(rope_parameters=dict(full_attention=dict(rope_type='yarn')))),
    ('expected an object', dict(rope_scaling='linear')),
    ('rope_theta', dict(rope_scaling=YARN, rope_theta=1))]
POINTER = 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n'
FILES = [
    *[(f'{name} is a git-LFS pointer', dict(files={name: POINTER})) for name in (WEIGHTS, 'tokenizer.json')],
    ('merge_and_unload', dict(files={'adapter_config.json': {}, WEIGHTS: None})),
    ('AutoTokenizer', dict(files={'tokenizer.json': None, 'tokenizer.model': 'x'})),
    ("all begin with '_orig_mod.", dict(weights=lambda tensors: {
        f'_orig_mod.{name}': x for name, x in tensors.items()})),
    ('1 tensors are missing, first lm_head.weight', dict(weights=lambda tensors: {
        name: x for name, x in tensors.items() if name != HEAD})),
    ('1 are unknown, first extra', dict(weights=lambda tensors: tensors | dict(
        extra=1 * tensors[HEAD]))),
    ('lm_head.weight', stored(lambda x: x * math.nan, 'head')),
    ('NaN', stored(lambda x: x * 1e38, 'down')),                  # beyond fp32
    ('stored in another type', stored(torch.Tensor.char)),
    ('stored in another type', stored(lambda x: x + 0j)),
    ('config.json', dict(files={'config.json': '{"model_type": '})),
    ('tokenizer.json', dict(files={'tokenizer.json': '{}'})),
    *[(WEIGHTS, dict(files={WEIGHTS: content})) for content in (b'', b'\xff' * 99, bytes(99))],
    ('lm_head.weight', dict(files={WEIGHTS: b'\2' + bytes(7) + b'{}'})),        # a header of no tensors
    ('GGUF', dict(files={WEIGHTS: None, 'model.gguf': b'GGUF'})),
    ('convert .bin', dict(files={WEIGHTS: None, 'pytorch_model.bin': 'x'})),
    (INDEX, dict(files={INDEX: '{}', WEIGHTS: None}))]
ENDLESS = dict(type='Split', pattern=dict(Regex='(a|a)*$'), behavior='Isolated', invert=False)
TORN = dict(type='BPE', vocab=dict(a=0, b=1, ab=2), merges=['a b'], continuing_subword_prefix='###')
TOKENIZERS = [          # it raises where it encodes, or where it is read, perhaps by a panic of Rust
    *(('prompt 1', template_of(f'<{i}>', i)) for i in (257, 999)),      # beyond the embedding
    ('tokenizer', Tokenizer(models.WordLevel({f'w{i}': i for i in range(257)}, unk_token='absent'))),
    ('cannot encode', dict(pre_tokenizer=ENDLESS)), ('tokenizer.json', dict(model=TORN)),
    ('tokenizer of 1', Tokenizer(models.WordLevel(dict(a=0), unk_token='a'))),
    ('tokenizer of', Tokenizer(models.BPE({}, [])))]


@pytest.mark.parametrize('named, changes', [
    *((name, {name: value}) for name, value in VALUES),
    *((name, dict(rope_scaling=settings)) for name, settings in ROTARY), *TOGETHER, *FILES,
    *((name, dict(tokenizer=tokenizer)) for name, tokenizer in TOKENIZERS)])
def test_refused(named, changes, tmp_path, capsys):
    """A checkpoint that is damaged, or that asks for what is not here; the line names the reason."""
    folder = tiny(tmp_path, **changes)
    line = refused(capsys, '', '--target', folder, '--prompt', 'a' * 30 + 'b')
    assert named in line.replace(str(folder), '')       # pytest names the folder after the case


def test_weights_beyond_fp16(tmp_path, capsys):
    """The line says with which dtype they can be used."""
    flags = *talk(tiny(tmp_path, **stored(lambda x: x * 1e6, 'down'))), '--dtype'
    refused(capsys, 'holds NaN or infinity in torch.float16; the widest range has --dtype fp32', *flags, 'fp16')
    assert reported(capsys, *flags, 'fp32')['tokens']


@pytest.mark.parametrize('defect', [TypeError, NameError, RuntimeError])
def test_a_defect_of_ours_keeps_its_traceback(defect, tmp_path, monkeypatch):
    """No file is to blame for it."""
    def broken(*_):
        raise defect('ours')
    monkeypatch.setattr('model.fill', broken)
    with pytest.raises(defect, match='^ours$'):
        specmini.main(['--target', str(tiny(tmp_path)), '--prompt', 'x'])


# ------------------------------------------------------------------------------- what is read, and as what

@pytest.mark.parametrize('kind, settings, around', [
    ('default', {}, dict(rope_theta=500.0)), ('default', dict(rope_theta=100), dict(rope_theta=500.0)),
    ('linear', dict(factor=3), {}), ('llama3', LLAMA3, {}),             # the context is the original one
    ('llama3', LLAMA3 | {ORIGINAL: 90}, {ORIGINAL: 900}),
    ('yarn', dict(factor=8, mscale=0, mscale_all_dim=None, truncate=True), {}),
    ('yarn', dict(factor=8, beta_fast=0, beta_slow=0, **{ORIGINAL: 90}), {}),           # 0 is absent
    ('yarn', dict(factor=8, beta_fast=9.5, beta_slow=2, attention_factor=0.7), {}),
    ('yarn', dict(factor=8, beta_slow=40, **{ORIGINAL: 2}), {}),                        # all are slow,
    ('yarn', dict(factor=8, beta_fast=0.01, beta_slow=0.01, **{ORIGINAL: 9e9}), {}),    # fast,
    ('yarn', dict(factor=8, beta_fast=32, beta_slow=32, **{ORIGINAL: 201.0}), {})])     # or either
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


@pytest.mark.parametrize('kind', ['llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe'])
def test_what_config_json_leaves_out(kind, tmp_path):
    """It is what transformers' class of this type has."""
    raw = dict(model_type=kind, vocab_size=64, hidden_size=256, intermediate_size=24, num_hidden_layers=2,
               num_attention_heads=32)
    known = dict(num_key_value_heads=16, head_dim=4, max_position_embeddings=64, rms_norm_eps=1e-5,
                 tie_word_embeddings=True, sliding_window=None)
    known |= MOE | dict(num_experts=16, norm_topk_prob=True) if kind == 'qwen3_moe' else {}
    for name in known:
        left = raw | {key: value for key, value in known.items() if key != name}
        put(tmp_path, {'config.json': left})
        ours, theirs = read_config(tmp_path), transformers.AutoConfig.for_model(**left)
        usual = dict(head_dim=256 // 32) | theirs.to_dict()         # where transformers' network computes it
        assert {key: usual.get(key, value) for key, value in vars(ours).items()} == vars(ours)
        assert max(ours.mixtures) == getattr(theirs, 'num_experts', 0)


@pytest.mark.parametrize('settings, context', [
    (dict(type='linear', factor=4), 256), (dict(rope_type='yarn', factor=2.5), 160),
    (dict(type='yarn', factor=4, **{ORIGINAL: 32}), 128), (dict(type='yarn', factor=2, **{ORIGINAL: 16}), 64),
    (LLAMA3 | dict(type='llama3', **{ORIGINAL: 16}), 64), ({}, 64)])
def test_a_scaled_context(settings, context, tmp_path):
    """The original one times the factor, at least; llama3's number is of the extended one."""
    assert read_config(tiny(tmp_path, rope_scaling=settings)).max_position_embeddings == context


@pytest.mark.parametrize('changes', [
    dict(rope_theta=1e12), dict(num_experts_per_tok=8), MOE | dict(num_experts=0),
    MOE | dict(num_experts_per_tok=8, mlp_only_layers=[0, 1])])
def test_settings_of_real_models_are_not_refused(changes, tmp_path):
    """A large rotary base; experts a token where no layer is a mixture."""
    assert not any(read_config(tiny(tmp_path, **changes)).mixtures)


@pytest.mark.parametrize('dense', [[], [1]])
def test_experts_of_transformers_5(dense, tmp_path):
    """Stacked, as it has them in memory: the same network as from single matrices."""
    moe = MOE | dict(num_experts=4, num_experts_per_tok=2, mlp_only_layers=dense)
    config = transformers.Qwen3MoeConfig(vocab_size=257, **SIZES | moe)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    logits = []
    for original in (True, False):
        folder = tiny(tmp_path / str(original))
        model.save_pretrained(folder, save_original_format=original)
        logits.append(fresh(load(folder)[0], [1, 2, 3]))
    stored_names = tensors_of((folder / WEIGHTS).read_bytes()).keys()
    assert 'model.layers.0.mlp.experts.gate_up_proj' in stored_names and logits[0].equal(logits[1])
    with torch.no_grad():
        assert torch.allclose(logits[0], model(torch.tensor([[1, 2, 3]])).logits[0], atol=1e-5)


@pytest.mark.parametrize('only', [{}, dict(max_window_layers=2), dict(layer_types=['full_attention'] * 2)])
def test_a_window_of_no_layer(only, tmp_path):
    assert load(tiny(tmp_path, sizes=dict(qkv_bias=True), **WINDOW | only))     # the first 28 have none


@pytest.mark.parametrize('stored_names', [[HEAD], [EMBEDDING], [HEAD, EMBEDDING]])
def test_tied_heads(stored_names, tmp_path):
    """The one that is stored is both; a head that is stored beside the embedding counts."""
    folder = tiny(tmp_path, tie_word_embeddings=True, weights=lambda tensors: {
        name: x for name, x in tensors.items() if name in stored_names or name not in (HEAD, EMBEDDING)})
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[1, 2]])).logits[0]
    assert torch.allclose(fresh(load(folder)[0], [1, 2]), theirs.float(), atol=1e-4)


def sharded(folder, *shards):
    """A checkpoint in two shards, one.safetensors and two.safetensors; its index names these files."""
    tensors = tensors_of((tiny(folder) / WEIGHTS).read_bytes())
    first = save({'model.norm.weight': tensors.pop('model.norm.weight')})
    put(folder, {WEIGHTS: None, 'one.safetensors': first, 'two.safetensors': save(tensors),
                 INDEX: dict(weight_map=dict(enumerate(shards)))})
    return folder


def test_shards_are_read_as_one_file(tmp_path):
    """Beside a whole file an index is stale, and is not read."""
    folder = sharded(tmp_path, 'one.safetensors', 'two.safetensors')
    assert fresh(load(folder)[0], [1, 2]).equal(fresh(byte_network(0), [1, 2]))
    put(tiny(folder, seed=1), {'one.safetensors': None})
    assert fresh(load(folder)[0], [1, 2]).equal(fresh(byte_network(1), [1, 2])) and fingerprint(folder)


@pytest.mark.parametrize('one', [
    '../one.safetensors', 'folder/one.safetensors', '/dev/zero', '', 'absent', 'config.json', 7, None, []])
def test_an_index_names_files_of_its_folder(one, tmp_path):
    folder = sharded(tmp_path / 'home', one, 'two.safetensors')
    (folder / 'folder').mkdir()
    for there in (folder / 'folder', tmp_path):
        shutil.copy(folder / 'one.safetensors', there)
    refuses('home', load, folder)
    put(folder, {INDEX: dict(weight_map=one)})
    refuses('index.json', load, folder)


def test_a_fingerprint_samples_all_of_the_weights(tmp_path):
    """Retrained models often keep their embeddings, and their files their size."""
    folder = tiny(tmp_path)
    prints = set()
    for sampled, byte in ((0, 0), (0, 1), (100, 1), (255, 1)):
        weights = bytearray(3_000_000)
        weights[sampled * len(weights) // 256] = byte
        put(folder, {WEIGHTS: bytes(weights)})
        prints.add(fingerprint(folder))
    put(folder, {'config.json': {}})
    assert len(prints | {fingerprint(folder)}) == 5


def test_rows_beyond_the_tokenizer(tmp_path, capsys):
    """Embeddings are padded by different amounts; spare rows, or entries, reach no distribution.

    Ids that are nobody's do: the network writes up to the highest id, not up to the number of words.
    """
    target = tiny(tmp_path / 'target', 0, vocab=300)
    draft = tiny(tmp_path / 'draft', 1, vocab=280)
    assert fresh(load(target)[0], [1, 2]).shape == (2, 257)
    assert reported(capsys, '--target', target, '--draft', draft, '--prompt', 'x', '--max-new', 8)['tokens']
    padded = tiny(tmp_path / 'padded', tokenizer=bytes_tokenizer(['[PAD]']))
    assert fresh(load(padded)[0], [1, 2]).shape == (2, 257) and reported(capsys, *talk(padded))['tokens']
    raw = json.loads(bytes_tokenizer().to_str())
    raw['model']['vocab']['<eos>'] = raw['added_tokens'][0]['id'] = 300
    gap = tiny(tmp_path / 'gap', vocab=301, tokenizer=Tokenizer.from_str(json.dumps(raw)), eos_token_id=300)
    assert load(gap)[0].vocab == 301


def test_vocabularies_must_agree(tmp_path, capsys):
    """Two tokenizers of one length are compared token by token."""
    target = tiny(tmp_path / 'target', vocab=258, tokenizer=bytes_tokenizer(['here']))
    draft = tiny(tmp_path / 'draft', vocab=258, tokenizer=bytes_tokenizer(['there']))
    refused(capsys, "'there'", '--target', target, '--draft', draft, '--prompt', 'x')


def test_a_tokenizer_draws_nothing(tmp_path):
    """Merges left out by chance are for training: a text has one list of ids."""
    merging = dict(type='BPE', dropout=0.5, vocab=dict(a=0, b=1, ab=2), merges=['a b'])
    folder = tiny(tmp_path, tokenizer=dict(model=merging, added_tokens=[]))
    assert encode(read_tokenizer(folder), ['ab'] * 20) == [[2]] * 20


WORD = dict(content='<a>', special=False, lstrip=False, rstrip=True, normalized=False, single_word=False)


@pytest.mark.parametrize('files', [
    {CONFIG: dict(added_tokens_decoder={'258': WORD | dict(content='<b>'), '257': WORD})},
    {CONFIG: dict(added_tokens_decoder={'257': WORD}, eos_token='<b>', pad_token='<eos>'),
     MAPPED: dict(unk_token='<c>')},                    # not read then
    {CONFIG: {}, 'added_tokens.json': {'<b>': 258, '<a>': 257}, MAPPED: dict(eos_token='<a>')},
    {CONFIG: dict(image_token='<b>', bos_token='<a>', add_bos_token=True, eos_token=None)},
    {CONFIG: dict(additional_special_tokens=['<b>', '<c>'], mask_token=WORD | dict(__type='AddedToken'))},
    {MAPPED: dict(pad_token=WORD, additional_special_tokens=['<b>', '<a>'])},
    {CONFIG: dict(extra_special_tokens=dict(boi='<a>', eoi_token='<b>'))}])
def test_tokens_beside_tokenizer_json(files, tmp_path):
    """They have transformers' ids and flags, and the network can write them."""
    folder = tiny(tmp_path, vocab=262, files=files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model, ours, _ = load(folder)
    text = 'x<a> <b>y <c><eos> <a>'
    assert ours.get_vocab() == theirs.get_vocab() and model.vocab == len(theirs) > 257
    ids = ours.encode(text).ids
    assert ids == theirs.encode(text) and '<' not in ours.decode(theirs.all_special_ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_end_that_no_token_has(tmp_path, capsys):
    """Such a text goes on; a note says why."""
    told = 'no token of the tokenizer has the end-of-sequence id 300'
    folder = tiny(tmp_path, vocab=301, eos_token_id=300)
    assert told in program(capsys, *talk(folder))[2]
    assert told not in program(capsys, *talk(folder, '--ignore-eos'))[2]


# --------------------------------------------------------------------------------- end tokens, chat templates

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}!{% endif %}")
SEVERAL = [dict(name='other', template='{{ 12 }}'), dict(name='default', template='{{ 1 }}')]


def talk(folder, *flags):
    """The flags of a run of two tokens on this checkpoint, with `hi` for a prompt."""
    return '--target', folder, '--draft', 'none', '--prompt', 'hi', '--max-new', 2, *flags


def test_generation_config_ends_a_text(tmp_path, capsys):
    """Its end tokens replace those of config.json, if it names any."""
    folder = tiny(tmp_path)
    first, _ = reported(capsys, *talk(folder))['tokens']
    put(folder, {'generation_config.json': dict(eos_token_id=[1, first])})
    ended = reported(capsys, *talk(folder))
    assert (ended['tokens'], ended['finish']) == ([first], 'eos')
    assert load(folder)[2] == {1, first}
    put(folder, {'generation_config.json': dict(temperature=0.6)})
    assert load(folder)[2] == {256}


def test_a_template_writes_its_special_tokens_itself(tmp_path, capsys):
    """The tokenizer's <eos> goes before a bare prompt alone."""
    files = {CONFIG: dict(chat_template=TEMPLATE, bos_token=dict(content='^'))}
    folder = tiny(tmp_path, tokenizer=template_of('<eos>', 256), files=files)
    assert reported(capsys, *talk(folder, '--chat'))['prompt_tokens'] == len('^user:hi!')
    assert reported(capsys, *talk(folder))['prompt_tokens'] == len('^hi')


WORDS = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ pad_token }}|{{ add_bos_token }}"
MAP = dict(bos_token='<s>', eos_token=dict(content='</s>'), extra_special_tokens=dict(image_token='<i>'))
MESSAGES = [dict(role='user', content='a <é>', name=None), dict(role='assistant', content='b')]


@pytest.mark.parametrize('template, files', [
    (None, {CONFIG: dict(chat_template=TEMPLATE, bos_token='^')}),
    (None, {CONFIG: dict(chat_template=SEVERAL)}), ('a file', {CONFIG: dict(chat_template='is first')}),
    ('{{ tools is none and documents is none }}{{ messages[0].name is defined }}', {}),
    ("{% for m in messages %}{% generation %}{% set x = 1 %}<{{ m.content }}{{ loop.index }}>"
     "{%- endgeneration %} {{ x }}{% if loop.first %}{% continue %}{% endif %}!{% endfor %}", {}),
    ("{{ messages | tojson(indent=1, sort_keys=True) }}{{ messages | tojson(separators=(',', ':')) }}"
     "{{ messages | tojson(ensure_ascii=True) }}{{ messages | tojson }}{{ strftime_now('%Y %Z') }}", {}),
    (WORDS, {CONFIG: MAP | dict(eos_token='<>', add_bos_token=True)}),
    (WORDS, {MAPPED: MAP, CONFIG: dict(bos_token='')}),
    (WORDS, {MAPPED: MAP, CONFIG: dict(bos_token='', added_tokens_decoder={})})])
def test_a_template_sees_what_transformers_gives(template, files, tmp_path):
    template = {'chat_template.jinja': template} if template else {}
    folder = tiny(tmp_path, files={CONFIG: {}} | template | files)
    render = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template
    assert chat(folder, MESSAGES) == render(MESSAGES, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize('template', [
    None, ['x'], [dict(name=[], template='x')], "{{ raise_exception('no' * 50_000) }}", '{% for %}',
    '{{ 1 / 0 }}', "{{ ''.__class__.__mro__ }}"])
def test_refused_template(template, tmp_path, capsys):
    folder = tiny(tmp_path, files={CONFIG: dict(chat_template=template)})
    assert len(refused(capsys, '--chat', *talk(folder, '--chat'))) < 1100


# ------------------------------------------------------------------------ names of repositories, calibration

NAMES = ['config.json', 'tokenizer.json', 'chat_template.jinja', WEIGHTS, 'model-00001-of-00002.safetensors',
         'original/params.json', 'pytorch_model.bin', 'consolidated.safetensors', 'README.md']


@pytest.mark.parametrize('weights, said', [
    (WEIGHTS, ''), ('pytorch_model.bin', 'convert .bin'),
    (None, 'us/tiny: no such folder, and as a repository of the hub: Access to it is restricted')])
def test_a_repository_of_the_hub(weights, said, tmp_path, monkeypatch, capsys):
    """Once the files that are read are fetched, none of subfolders; a line for what cannot be had."""
    folder, asked = tiny(tmp_path), []

    def snapshot_download(name, **patterns):
        if not weights:
            raise OSError('Access to it is restricted.\nVisit its page')
        asked.append((name, list(filter_repo_objects(NAMES, **patterns))))
        (folder / WEIGHTS).rename(folder / weights)
        return str(folder)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    monkeypatch.setattr('model.snapshot', functools.cache(snapshot.__wrapped__))
    flags = '--target', 'us/tiny', '--draft', 'lookup', '--prompt', 'hello', '--max-new', 4
    assert refused(capsys, said, *flags) if said else reported(capsys, *flags)
    assert asked == ([('us/tiny', NAMES[:5])] if weights else [])


@pytest.mark.parametrize('held, said', [
    (['config.json', 'tokenizer.json', WEIGHTS], ''),
    (['config.json', 'tokenizer.json'], 'no model.safetensors'),
    (['tokenizer.json'], 'us/tiny: no such folder, and as a repository of the hub: offline')])
def test_an_offline_cache_that_has_what_is_read_is_complete(held, said, tmp_path, monkeypatch, capsys):
    """Whatever else the repository has."""
    folder = tiny(tmp_path)
    put(folder, {name: None for name in ('config.json', 'tokenizer.json', WEIGHTS) if name not in held})

    def snapshot_download(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError('offline')
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache', lambda _, name: (
        str(folder / name) if name in held else None))
    monkeypatch.setattr('model.snapshot', functools.cache(snapshot.__wrapped__))
    flags = '--target', 'us/tiny', '--draft', 'lookup', '--prompt', 'hello', '--max-new', 4
    assert refused(capsys, said, *flags) if said else reported(capsys, *flags)


def test_calibration_of_others(tmp_path):
    """What was measured on another draft or target counts as absent; a line says how to measure it."""
    target, draft = tiny(tmp_path / 'target', 0), tiny(tmp_path / 'draft', 1)
    mask, signals = dict(skip=[1, 2]), RANGES | dict(draft=fingerprint(draft))
    write_calibration(target, 'signals', signals)
    write_calibration(target, 'mask', mask)
    assert read_calibration(target, draft) == dict(signals=signals, mask=mask)
    for pair in (target, None):
        assert read_calibration(target, pair) == dict(mask=mask)
        refuses(f'mask.py --signals --target {target}', read_calibration(target, pair).__getitem__, 'signals')
    shutil.copy(target / 'calibration.json', draft)
    assert read_calibration(draft) == {}
    refuses(f'train_mask.py --target {draft}', read_calibration(draft).__getitem__, 'mask')
    write_calibration(draft, 'mask', mask)
    assert read_calibration(draft, target) == dict(mask=mask)


@pytest.mark.parametrize('content', ['', '[]', '[' * 9999, dict(mask=None), dict(mask=[7])])
def test_calibration_that_is_none(content, tmp_path):
    folder = tiny(tmp_path)
    if isinstance(content, dict):
        content = dict(target=fingerprint(folder)) | content
    put(folder, {'calibration.json': content})
    refuses('calibration.json', read_calibration, folder)
    refuses(folder, read_calibration, folder)


SECTIONS = dict(mask=dict(skip=[1, 2]), signals=RANGES, sparse=LEARNED_TWO)
ODD = [None, 5, 'x', True, {}, [], [1], [1, 2, 3], [[1]], [None, 1], [True, 1], [math.nan, 0], [1e400, 0],
       [0, 10 ** 400], [[], []], [[[]], []], [[0.5] * 21], [[0.5] * 21] * 3, ['a', 'b'], [99, 0]]


@pytest.mark.parametrize('name, key', [(name, key) for name in SECTIONS for key in SECTIONS[name]])
def test_calibration_of_another_form(name, key, tmp_path):
    """A line names section and knob, how to mend it, and never a traceback; what is taken can be used."""
    folder = tiny(tmp_path)
    write_calibration(folder, name, SECTIONS[name])
    right = json.loads((folder / 'calibration.json').read_text())
    assert read_calibration(folder)[name] == SECTIONS[name]
    taken = []
    for odd in ODD:
        put(folder, {'calibration.json': right | {name: SECTIONS[name] | {key: odd}}})
        try:
            taken += [read_calibration(folder)[name][key]]
        except BadInput as error:
            assert all(word in str(error) for word in (f'{name}: {key} is', 'train_mask.py', str(folder)))
    forms = dict(skip=[[], [1], [1, 2, 3]], experts=[[[], []]])
    assert taken == forms.get(key, [[99, 0]] if name == 'signals' else [])
    put(folder, {'calibration.json': right | {name: {}}})
    refuses(f'{name}: ', read_calibration, folder)


# ------------------------------------------------------------------------------- files that are written

def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    """Until then, and if that never comes, what it held stays; a link stays one, a pipe is written to."""
    file, link = tmp_path / 'file', tmp_path / 'link'
    file.write_text('old')
    link.symlink_to(file)
    with contextlib.suppress(KeyboardInterrupt), new_file(link) as half:
        half.write('half')
        half.flush()
        assert file.read_text() == 'old'
        raise KeyboardInterrupt
    check_writable(link)
    assert file.read_text() == 'old' and {*tmp_path.iterdir()} == {file, link}
    with new_file(link) as new:
        new.write('new')
    assert file.read_text() == 'new' and link.is_symlink() and {*tmp_path.iterdir()} == {file, link}
    for where in ('/dev/null', tmp_path / 'later'):
        check_writable(where)
        with new_file(where) as new:
            new.write('x')
    assert not File('/dev/null').is_file() and (tmp_path / 'later').read_text() == 'x'
    file.chmod(0o640)
    with new_file(file):
        pass
    assert file.stat().st_mode & 0o777 == 0o640
    for where in (tmp_path, tmp_path / 'no' / 'file', file / 'file'):
        refuses(f'{where} cannot be written', check_writable, where)
