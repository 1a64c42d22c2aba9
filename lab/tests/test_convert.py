"""Folders of other forms: the program refuses them and names lab.convert, which makes one that loads."""
import io
import json
import os
import sys

import gguf
import peft
import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

import lab.convert
from lab.convert import convert
from lab.tests.helpers import byte_network, bytes_tokenizer, program, put, refuses, tiny
from lab.toys import SIZES, fresh
from model import chat, checkpoint_views, encode, load

CONFIG, WEIGHTS = 'tokenizer_config.json', 'model.safetensors'
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'
SAYS = '<{{ messages[0].content }}>'
SEVERAL = [dict(name='other', template='{{ 12 }}'), dict(name='default', template=SAYS)]
YARN = dict(type='yarn', factor=2)
LLAMA3 = dict(type='llama3', factor=8, low_freq_factor=1, high_freq_factor=4)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4)
PLAIN = dict(tokenizer_class='PreTrainedTokenizerFast')


def renamed(change):
    return dict(weights=lambda tensors: {change(name): x for name, x in tensors.items() if change(name)})


FORMS = dict(           # changes of `tiny` that transformers reads
    tied_only_head=dict(tie_word_embeddings=True) | renamed(lambda name: name != EMBEDDING and name),
    names_without_model=dict(tie_word_embeddings=True) | renamed(
        lambda name: name != HEAD and name.removeprefix('model.')),
    no_context=dict(max_position_embeddings=None, eos_token_id=None),
    fewer_layers=dict(num_hidden_layers=1),
    value_head=dict(weights=lambda tensors: tensors | {'v_head.summary.weight': torch.ones(1, 16)}),
    yarn_without_context=dict(rope_scaling=YARN), llama3_without_context=dict(rope_scaling=LLAMA3),
    context_beside=dict(rope_scaling=LLAMA3, original_max_position_embeddings=90),
    added_tokens={'added_tokens.json': {'<b>': 258, '<a>': 257}}, named_token={CONFIG: dict(bos_token='<a>')},
    extra_tokens={CONFIG: dict(additional_special_tokens=['<b>', '<a>'])},
    mapped_token={'special_tokens_map.json': dict(pad_token='<a>')},
    named_extra={CONFIG: dict(extra_special_tokens=dict(boi='<a>', eoi_token='<b>'))})


def old(tmp_path, files=None, **changes):
    """A folder that transformers reads as it is."""
    files = files or {}
    return tiny(tmp_path / 'old', files=files | {CONFIG: PLAIN | files.get(CONFIG, {})}, **changes)


def theirs(folder, text='x<a> <b>y <eos>'):
    """(ids, logits) of transformers."""
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)['input_ids']
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0]


def converted(folder, loads=load):
    """The new folder of one that is refused as it is."""
    refuses('lab.convert', loads, folder)
    new = folder.with_name('new')
    assert convert(str(folder), new) < 1e-3 and {one.name for one in folder.parent.iterdir()} <= {
        'old', 'new', 'base'}
    return new


@pytest.mark.parametrize('form', FORMS)
def test_a_form_that_transformers_reads(form, tmp_path):
    """It has transformers' ids and logits once it is converted."""
    changes = {name: value for name, value in FORMS[form].items() if '.json' not in name}
    files = {name: value for name, value in FORMS[form].items() if '.json' in name}
    folder = old(tmp_path, files, vocab=260, **changes)
    ids, logits = theirs(folder)
    model, tokenizer, _ = load(converted(folder))
    assert encode(tokenizer, 'x<a> <b>y <eos>') == ids
    assert torch.allclose(fresh(model, ids), logits[:, :model.vocab], atol=1e-4)


def test_weights_that_are_right_are_copied(tmp_path):
    folder = old(tmp_path, {CONFIG: dict(bos_token='<a>')}, vocab=260)
    assert (converted(folder) / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_weights_in_bin(tmp_path):
    folder = old(tmp_path)
    whole = fresh(load(folder)[0], [1, 2])
    torch.save(load_file(folder / WEIGHTS), folder / 'pytorch_model.bin')
    (folder / WEIGHTS).unlink()
    assert fresh(load(converted(folder))[0], [1, 2]).equal(whole)


def test_experts_of_transformers_5(tmp_path):
    """Stacked, as it has them in memory."""
    torch.manual_seed(0)
    folder = old(tmp_path)
    config = transformers.Qwen3MoeConfig(vocab_size=257, **MOE, **SIZES)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder, save_original_format=False)
    ids, logits = theirs(folder, 'hello')
    assert torch.allclose(fresh(load(converted(folder))[0], ids), logits, atol=1e-4)


def test_an_adapter(tmp_path):
    """Its base is read, its weights are added; one that lacks some is refused."""
    base = tiny(tmp_path / 'base', files={CONFIG: PLAIN})
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(r=2, target_modules=['q_proj', 'up_proj'], init_lora_weights=False)
    model = peft.get_peft_model(model, settings)
    model.save_pretrained(tmp_path / 'old')
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits[0]
    assert torch.allclose(fresh(load(converted(tmp_path / 'old'))[0], [1, 2, 3]), logits, atol=1e-4)
    file = tmp_path / 'old/adapter_model.safetensors'
    save_file(dict(list(load_file(file).items())[1:]), file)
    refuses('1 tensors of the adapter are missing', convert, str(tmp_path / 'old'), tmp_path / 'half')


@pytest.mark.parametrize('kind', [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0])
def test_a_gguf_file(kind, tmp_path):
    """It is stored in fp16."""
    sizes = dict(hidden_size=32, intermediate_size=64, head_dim=8)
    file = gguf.GGUFWriter(tmp_path / 'old.gguf', 'llama')
    settings = dict(embedding_length=32, feed_forward_length=64, block_count=2, head_count=4, head_count_kv=2,
                    context_length=64, layer_norm_rms_eps=1e-6, vocab_size=258, rope_dimension_count=8,
                    tokenizer_model='gpt2', token_merges=['a b'], eos_token_id=256)
    vocabulary = bytes_tokenizer(['ab']).get_vocab()
    for name, value in (settings | dict(token_list=sorted(vocabulary, key=vocabulary.get))).items():
        getattr(file, f'add_{name}')(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in checkpoint_views(byte_network(vocab=258, **sizes)).items():
        data, name = tensor.contiguous().numpy(), names.get_name(name, ('.weight',))
        file.add_tensor(name, data) if data.ndim == 1 else file.add_tensor(
            name, gguf.quantize(data, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    refuses('lab.convert', load, tmp_path / 'old.gguf')
    assert convert(str(tmp_path / 'old.gguf'), tmp_path / 'new') < 1e-3
    assert load_file(tmp_path / 'new' / WEIGHTS)[HEAD].dtype == torch.float16


def test_a_sentencepiece_tokenizer(tmp_path):
    model, texts = io.BytesIO(), iter(['a fox and a hen', 'the fox met them'] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=model, model_type='bpe', vocab_size=280, byte_fallback=True,
        bos_id=1, eos_id=2, unk_id=0, minloglevel=2)
    folder = old(tmp_path, {'tokenizer.json': None, 'tokenizer.model': model.getvalue(), CONFIG: dict(
        tokenizer_class='LlamaTokenizer')}, vocab=280, eos_token_id=2)
    ids = transformers.AutoTokenizer.from_pretrained(folder)('the</s> fox  é').input_ids
    assert encode(load(converted(folder))[1], 'the</s> fox  é') == ids


def test_a_template_of_several(tmp_path):
    folder = old(tmp_path, {CONFIG: dict(chat_template=SEVERAL)})
    assert chat(converted(folder, lambda folder: chat(folder, 'Hi')), 'Hi') == '<Hi>'


@pytest.mark.parametrize('changes, named', [
    (dict(hidden_act='gelu'), "hidden_act 'gelu'"), (dict(is_causal=False), 'is_causal'),
    *((renamed(lambda name, prefix=prefix: prefix + name), 'tensors are missing')
      for prefix in ('_orig_mod.', 'module.', 'base_model.model.')),
    *((dict(weights=lambda tensors, kind=kind: {
        name: x.to(kind) if x.ndim > 1 else x for name, x in tensors.items()}), 'without scales')
      for kind in (torch.int8, torch.float8_e4m3fn)),
    (dict(files={'config.json': '{'}), 'old')])
def test_what_cannot_be_converted(changes, named, tmp_path, capsys):
    """Another architecture, weights that would be fresh or are no numbers: a line, no new folder."""
    folder = old(tmp_path, **changes)
    status, out, err = program(capsys, folder, tmp_path / 'new', main=lab.convert.main)
    assert status == 2 and named in err.splitlines()[-1] and os.listdir(tmp_path) == ['old'], err
    assert 'old exists' in program(capsys, folder, folder, main=lab.convert.main)[2]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    base = str(tiny(tmp_path / 'base'))
    put(tmp_path, {'adapter_config.json': dict(base_model_name_or_path=base)})
    monkeypatch.setitem(sys.modules, 'peft', None)
    refuses('`pip install transformers peft', convert, str(tmp_path), tmp_path / 'new')


@pytest.mark.parametrize('file, named', [
    (WEIGHTS, 'logits'), ('chat_template.jinja', 'a chat of user'), ('tokenizer.json', 'the ids of'),
    ('generation_config.json', 'the ends')])
def test_a_difference_is_found(file, named, tmp_path, monkeypatch):
    """Weights, a template, a tokenizer or an end that are not those of transformers; nothing stays."""
    folder = old(tmp_path, {CONFIG: dict(chat_template=SAYS)})
    write = lab.convert.write

    def spoiled(model, tokenizer, source, new):
        write(model, tokenizer, source, new)
        if file == WEIGHTS:
            tensors = load_file(new / file)
            save_file(tensors | {HEAD: tensors[HEAD].flip(0)}, new / file)
        elif file == 'tokenizer.json':
            raw = json.loads((new / file).read_text())
            put(new, {file: raw | dict(pre_tokenizer=raw['pre_tokenizer'] | dict(add_prefix_space=True))})
        else:
            put(new, {file: 'x' if 'chat' in file else dict(eos_token_id=7)})
    monkeypatch.setattr(lab.convert, 'write', spoiled)
    (tmp_path / '.new.begun').mkdir()                   # of a run that was killed
    refuses(named, convert, str(folder), tmp_path / 'new')
    assert os.listdir(tmp_path) == ['old']
