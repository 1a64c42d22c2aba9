"""Makes a folder that specmini loads of one that transformers loads: `python -m lab.convert SOURCE NEW`.

SOURCE is a folder, a repository owner/name, a .gguf file or an adapter of peft. transformers reads it,
whatever its form, and writes NEW in its one form of today. Then specmini loads NEW: its ids, ends, chats and
logits have to be those of transformers, or NEW does not stay.
"""
import contextlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path as File

from specmini import Parser, exit_status
import torch
from safetensors.torch import save_file
from torch.nn import functional

from lab import new_folder
from model import (ORIGINAL, BadInput, Linear, Reader, chat, encode, find_folder, find_tensors, load,
                   read_config, read_json, require_that, weight_files)

PACKAGES = '; `pip install transformers peft gguf sentencepiece protobuf` has all that sources may need'
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'
LONGEST = 256           # tokens whose logits are compared
TEXTS = 'One evening, Mia met 12 foxes.\n\n  "día" \U0001f98a', 'def f(x):\n\treturn  x \r\n', ' a  b\u00a0'
USER, SAYS, SYSTEM = [dict(role=role, content='Hello <there>. ') for role in ('user', 'assistant', 'system')]
CHATS = [USER], [SYSTEM, USER], [USER, SAYS, USER], [SYSTEM, USER, SAYS, USER]


# ------------------------------------------------------------------------------- reading, by transformers

def read(source):
    """(model, tokenizer) of transformers; BadInput for fresh weights, or integers without scales."""
    import transformers
    folder, settings, more = str(source), {}, dict(dtype='auto')
    if folder.lower().endswith('.gguf'):
        folder, settings = str(File(source).parent), dict(gguf_file=File(source).name)
        more = dict(dtype=torch.float16, quantization_config=transformers.GgufConfig(dequantize=True))
    else:
        home = find_folder(source)
        adapter = home / 'adapter_config.json'
        if adapter.exists() and not [*home.glob('model*.safetensors')]:
            return with_adapter(home, read_json(adapter)['base_model_name_or_path'])
        refuse_bare_numbers(home)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **settings, **more)
    absent = sorted(map(str, [*info['missing_keys'], *info['mismatched_keys']]))
    require_that(not absent, f'{len(absent)} tensors are missing or of another shape, first {absent[:1]}')
    if getattr(model, 'hf_quantizer', None) and not settings:
        model = model.dequantize()
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **settings)


def with_adapter(home, base):
    """The base model of an adapter of peft with the adapter's weights added, and the adapter's tokenizer."""
    import peft
    import transformers
    model, tokenizer = read(base)
    if (home / 'tokenizer_config.json').exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    model = peft.PeftModel.from_pretrained(model, home)
    absent = model.load_adapter(home, 'default').missing_keys       # from_pretrained only warns
    require_that(not absent, f'{len(absent)} tensors of the adapter are missing, first {absent[:1]}')
    return model.merge_and_unload(), tokenizer


def refuse_bare_numbers(folder):
    """BadInput for weights in 8 bits without scales: transformers reads the numbers as they are."""
    stored = {}
    with contextlib.suppress(BadInput):                 # no safetensors, or a broken file
        stored = find_tensors(folder)
    bare = [name for name, (_, dtype) in stored.items() if not dtype]
    quantised = bare and read_json(folder / 'config.json').get('quantization_config')
    require_that(not bare or quantised, f'{bare[:1]} and others are integers, or in 8 bits, without scales')


# ------------------------------------------------------------------------------- writing the one form

def write(model, tokenizer, source, new):
    """Saves both in the form that specmini reads; another architecture is refused before its weights."""
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(new)
    raw = read_json(new / 'config.json')
    raw.pop(ORIGINAL, None)                             # it is among the rotary settings
    raw.pop('quantization_config', None)
    raw['eos_token_id'] = model.generation_config.eos_token_id      # and not a class's default
    if 'sliding_attention' not in raw.get('layer_types', []):
        raw['use_sliding_window'] = False
    (new / 'config.json').write_text(json.dumps(raw, indent=2), encoding='utf-8')
    read_config(new)
    tensors = {}
    for name, weight in model.state_dict().items():
        parts = {name: weight}
        if weight.ndim == 3:                            # a stack of experts, each with gates and ups in one
            home, kind = name.rsplit('.', 1)
            kinds = ['gate_proj', 'up_proj'] if kind == 'gate_up_proj' else [kind]
            parts = {f'{home}.{e}.{one}.weight': part for e, expert in enumerate(weight)
                     for one, part in zip(kinds, expert.chunk(len(kinds)))}
        tensors |= parts
    if tensors[HEAD].data_ptr() == tensors[EMBEDDING].data_ptr():
        tensors.pop(HEAD)                               # tied
    with contextlib.suppress(BadInput):                 # files that hold just these tensors are copied
        stored = find_tensors(File(source))
        if stored.keys() == tensors.keys() and all(dtype for _, dtype in stored.values()):
            for file in weight_files(File(source)):
                shutil.copy(file, new)
            return
    save_file(tensors, new / 'model.safetensors', dict(format='pt'))


# ------------------------------------------------------------------------------- comparing
# Both networks compute in fp32, one matrix at a time, because all of them would be twice as large.

def in_fp32(model):
    """transformers' model, whose parts are in fp32 while they compute."""
    def widen(part, _):
        part.stored = [weight.data for weight in part.parameters()]
        part.float()

    def narrow(part, *_):
        for weight, stored in zip(part.parameters(), part.stored):
            weight.data = stored
    for part in model.modules():
        if [*part.parameters(recurse=False)]:
            part.register_forward_pre_hook(widen)
            part.register_forward_hook(narrow)
    return model


class Widened(Linear):
    """A matrix product in fp32 with a weight in 16 bits."""

    def __call__(self, x):
        return functional.linear(x, self.weight.float(), self.bias)


def rendered(render, messages):
    """The text of a chat; None where the template refuses it."""
    with contextlib.suppress(Exception):
        return render(messages)


def compare(new, tokenizer, texts, ends, logits):
    """How far specmini's logits are from these, in deviations; BadInput for any other difference.

    logits: [T, V], of the last text's first tokens.
    """
    network, ours, our_ends = load(new, dtype=None)
    pairs = {'the ends of a text': (our_ends, ends)}
    pairs |= {f'the ids of {text!r}': (encode(ours, text), tokenizer(text)['input_ids']) for text in texts}
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    for messages in CHATS:
        roles = ', '.join(one['role'] for one in messages)
        pairs[f'a chat of {roles}'] = rendered(partial(chat, new), messages), rendered(render, messages)
    for what, (mine, theirs) in pairs.items():
        require_that(mine == theirs, f'{what}: {mine}, by transformers {theirs}')
    for part in network.modules():
        part.__class__ = Widened if isinstance(part, Linear) else part.__class__
    ids = encode(ours, texts[-1])[:min(len(logits), network.config.max_position_embeddings)]
    logits = logits[:len(ids), :network.vocab]
    found = Reader(network, len(ids)).read(ids, network.full, len(ids))
    apart = float((found - logits).abs().max() / logits.std())
    require_that(apart < 1e-3, f'logits differ, by {apart:.2g} of their deviation')
    return apart


# ------------------------------------------------------------------------------- the program

def convert(source, new):
    """Makes the folder `new`, whole or not at all; returns what `compare` does."""
    with new_folder(new) as begun:
        try:
            model, tokenizer = read(source)
        except Exception as error:
            lacking = isinstance(error, ImportError) or 'pip install' in str(error)
            raise BadInput(f'{source}: {error}' + lacking * PACKAGES) from None
        write(model, tokenizer, source, begun)
        ends = model.generation_config.eos_token_id
        ends = {*ends} if isinstance(ends, list) else {ends} - {None}
        rows = model.config.vocab_size
        added = [token.content for i, token in tokenizer.added_tokens_decoder.items() if i < rows]
        texts = [*TEXTS, f'a{" x".join(added)} b\n{"".join(added)} c']
        with torch.no_grad():
            logits = in_fp32(model)(torch.tensor([tokenizer(texts[-1])['input_ids'][:LONGEST]])).logits[0]
        del model                                       # before ours is in memory
        return compare(begun, tokenizer, texts, ends, logits)


def run():
    p = Parser(prog='python -m lab.convert', description=__doc__)
    p.add_argument('source')
    p.add_argument('new', type=File)
    args = p.parse_args()
    apart = convert(args.source, args.new)
    print(f'{args.new}: ids, ends and chats are those of transformers, logits within {apart:.1g} deviations')


main = partial(exit_status, 'lab.convert', run)         # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
