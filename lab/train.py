"""Train the embedded models and their tokenizer from the generated tasks alone.

`python -m lab.train target --minutes 90`, then `draft`, `mid`, `moe`. A run goes on from the weights
in lab/models/, where there are some, and writes Hugging Face folders in bf16. After it, train_mask.py
measures them anew (lab/models/README.md, which also says how the stored models were trained otherwise).
"""
import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path as File

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lab import at_least, tasks
from lab.toys import checkpoint_tensors
from model import Transformer, checkpoint_views, load, read_config
from specmini import exit_status

HOME = File(__file__).parent / 'models'
EOS = '<|end|>'
LATE = 0.88                             # from that share of its time on a step skips middle layers by chance
DROP = dict(target=0.1)                 # with this chance each; other models skip none
GROW = (0.09, 2), (0.35, 4)             # until this share of its time only so many outer layers of it run
PEAKS = 0.01, 2e-3, 8e-3                # learning rates of Muon, of AdamW, of AdamW on qkv_proj; half for one
                                        # that goes on. A fresh llama's queries and keys have no norm: at 8e-3
                                        # logits of 900 ended all learning, so theirs is the second
# task, its knobs, its share of rows; looking up is learned on short tables first or not at all
BASE = [('math', dict(low=1, high=3), 4), ('math', dict(high=6), 5), ('math-hard', {}, 4), ('code', {}, 3),
        ('translate', {}, 2), ('qa', {}, 2.5), ('story', {}, 1)]
SHORT = BASE + [('drill', dict(high=6, columns=(1, 4)), 6), ('table', dict(high=6, columns=(1, 4)), 8),
                ('gist', dict(high=3), 3), ('summary', dict(high=3), 3)]
MEDIUM = BASE + [('drill', dict(high=20, columns=(1, 6)), 4), ('table', dict(high=20, columns=(1, 6)), 7),
                 ('gist', dict(high=6), 3), ('summary', dict(high=5), 3)]
LONG = BASE + [('drill', dict(high=60, columns=(1, 6)), 2.5), ('table', {}, 5), ('table-long', {}, 0.7),
               ('gist', dict(high=8), 2), ('summary', {}, 3)]
CURRICULUM = (0.4, SHORT), (0.65, MEDIUM), (1, LONG)    # until this share of its time, such rows
AGAIN = (0.1, SHORT), (0.3, MEDIUM), (1, LONG)          # the same for a model that has grown and goes on
SHAPES = dict(
    target=dict(model_type='llama', architectures=['LlamaForCausalLM'], hidden_size=128, head_dim=32,
                intermediate_size=336, num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=2),
    draft=dict(model_type='qwen3', architectures=['Qwen3ForCausalLM'], hidden_size=80, head_dim=20,
               intermediate_size=208, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
SHAPES['mid'] = SHAPES['target'] | dict(num_hidden_layers=5)
SHAPES['moe'] = SHAPES['target'] | dict(
    model_type='qwen3_moe', architectures=['Qwen3MoeForCausalLM'], num_experts=8, num_experts_per_tok=4,
    moe_intermediate_size=84, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
COMMON = dict(max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=10000.0,
              hidden_act='silu', bos_token_id=None, torch_dtype='bfloat16')


def drills(seed, high, columns):
    """Endless rows of practice that can give away no held-out text: bare steps, or cells looked up."""
    rng = random.Random(f'drill {seed}')
    while True:
        prompt, lines = '', []
        if rng.random() < 0.15:
            while len(lines) < 8:
                n = tasks.number(rng, 900)
                _, _, steps, _ = tasks.event(rng, n, 2)
                lines += steps
        else:
            prompt, column, values = tasks.cells(rng, 2, high, columns)
            cells = rng.sample(sorted(values.items()), min(32, len(values)))
            lines = [f'| {column} of {item} {n}' for item, n in cells]
        yield dict(task='drill', prompt=prompt, answer=None, solution='\n' + '\n'.join(lines))


def gists(seed, high):
    """Endless rows of practice: statements, and what matters about each of the people, without a question."""
    rng = random.Random(f'gist {seed}')
    while True:
        prompt, answers = tasks.statements(rng, 1, high)
        lines = rng.sample(list(answers.values()), len(answers))
        yield dict(task='gist', prompt=prompt, answer=None, solution='\nSummary: ' + ' '.join(lines))


def mixture(seed, phase=LONG):
    """Endless training rows of all tasks of a phase, in their shares."""
    rng = random.Random(f'mixture {seed}')
    practice = dict(drill=drills, gist=gists)
    sources = [practice[task](seed, **knobs) if task in practice else tasks.rows(task, seed, 'train', **knobs)
               for task, knobs, _ in phase]
    shares = [share for _, _, share in phase]
    while True:
        yield next(rng.choices(sources, shares)[0])


def train_tokenizer(n=20_000):
    """Byte-level BPE of at most 1,024 entries; every digit stands alone (with any space before it)."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r' ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s')
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[EOS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = (row['prompt'] + row['solution'] for row in itertools.islice(mixture(0), n))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer, rows):
    """Rows -> [(ids, where the loss begins)]: on the answer part, and on all of a story."""
    prompts = tokenizer.encode_batch([row['prompt'] for row in rows])
    answers = tokenizer.encode_batch([row['solution'] for row in rows])
    eos = tokenizer.token_to_id(EOS)
    encoded = []
    for row, prompt, answer in zip(rows, prompts, answers):
        start = 1 if row['task'] == 'story' else max(1, len(prompt.ids))
        encoded.append((prompt.ids + answer.ids + [eos], start))
    return encoded


def batches(tokenizer, source, tokens, seed):
    """Endless (ids, labels) [B, T] of about `tokens` tokens, rows of like length; -100 is no label."""
    rng = random.Random(seed)
    while True:
        examples = encode(tokenizer, list(itertools.islice(source, 1024)))
        examples.sort(key=lambda example: -len(example[0]))
        groups = []
        while examples:
            n = max(1, tokens // len(examples[0][0]))   # the longest of what is left
            groups.append(examples[:n])
            del examples[:n]
        rng.shuffle(groups)
        for group in groups:
            ids = [torch.tensor(line) for line, _ in group]
            labels = [torch.tensor([-100] * (start - 1) + line[start:] + [-100])    # i predicts token i + 1
                      for line, start in group]
            yield (pad_sequence(ids, batch_first=True),
                   pad_sequence(labels, batch_first=True, padding_value=-100))


def build(name, tokenizer):
    """A fresh network of SHAPES[name]; writes the folder's config.json."""
    eos = tokenizer.token_to_id(EOS)
    raw = COMMON | SHAPES[name] | dict(vocab_size=tokenizer.get_vocab_size(), eos_token_id=eos,
                                       pad_token_id=eos)
    folder = HOME / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(raw, indent=2) + '\n')
    model = Transformer(read_config(folder))
    for key, weight in checkpoint_views(model).items():
        if key.endswith(('o_proj.weight', 'down_proj.weight')):
            torch.nn.init.zeros_(weight)                # every layer starts as the identity
        elif weight.ndim == 2:
            deviation = 0.02 if 'embed' in key else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, std=deviation)
    return model


def save(model, tokenizer, name):
    """Writes the folder lab/models/<name>: bf16 weights, generation_config.json and the tokenizer's files."""
    folder = HOME / name
    eos = tokenizer.token_to_id(EOS)
    weights = {key: tensor.to('cpu', torch.bfloat16) for key, tensor in checkpoint_tensors(model).items()}
    save_file(weights, folder / 'model.safetensors', metadata=dict(format='pt'))
    tokenizer.save(str(folder / 'tokenizer.json'))
    raw = dict(generation_config=dict(eos_token_id=eos, pad_token_id=eos),
               tokenizer_config=dict(tokenizer_class='PreTrainedTokenizerFast', eos_token=EOS, pad_token=EOS,
                                     model_max_length=2048, clean_up_tokenization_spaces=False))
    for file, settings in raw.items():
        (folder / f'{file}.json').write_text(json.dumps(settings, indent=2) + '\n')


@torch.no_grad()
def accuracy(model, tokenizer, n=20):
    """{task: share of n held-out rows whose answer is the greedy one; of stories their loss in nats}."""
    scores = {}
    for task in tasks.TASKS:
        rows = list(itertools.islice(tasks.rows(task, 1), n))
        found = 0.0
        for line, start in encode(tokenizer, rows):
            ids = torch.tensor([line], device=model.device)
            hidden = model(ids, torch.arange(len(line), device=ids.device), model.full)
            logits = model.logits(hidden)[0, start - 1:-1]
            wanted = ids[0, start:]
            if task == 'story':
                found += functional.cross_entropy(logits, wanted).item()
            else:
                found += torch.equal(logits.argmax(-1), wanted)
        scores[task] = round(found / n, 3)
    return scores


def optimizers_for(model):
    """[Muon for the matrices inside the layers, AdamW for the rest, AdamW for queries, keys and values].

    The matrices are the network's fused ones. Experts are with the rest, because Muon takes no stack of them.
    """
    inner, rest, looks = [], [], []
    for key, weight in model.named_parameters():
        if key.endswith('qkv_proj.weight'):
            looks.append(weight)
        elif weight.ndim != 2 or 'embed' in key:
            rest.append(weight)
        else:
            inner.append(weight)
    adams = [torch.optim.AdamW(some, betas=(0.9, 0.95), weight_decay=0) for some in (rest, looks)]
    return [torch.optim.Muon(inner, weight_decay=0.01), *adams]


def step(model, optimizers, path, ids, labels):
    """One update on ids, labels [B, T]; returns the loss in nats per judged token."""
    keep = labels != -100
    positions = torch.arange(ids.shape[1], device=ids.device)
    hidden = model(ids, positions, path)
    logits = model.logits(hidden[keep])
    loss = functional.cross_entropy(logits, labels[keep])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def idle(layers, share, drop, rng):
    """Sublayers that rest in this step: inner ones while a fresh model grows, and others with chance drop.

    share: how much of its time a fresh model has had; 1 for one that has grown.
    """
    running = next((outer for until, outer in GROW if share < until), layers)
    resting = set()
    for i in range(1, layers - 1):
        depth = min(i, layers - 1 - i)                  # layers to the nearer end
        if depth >= running / 2 or rng.random() < drop:
            resting |= {2 * i, 2 * i + 1}
    return resting


def train(name, minutes, tokens, seed, device):
    """Trains until `minutes` of wall clock are spent; writes lab/models/<name>."""
    torch.manual_seed(seed)
    folder = HOME / name
    words = HOME / 'target' / 'tokenizer.json'
    tokenizer = Tokenizer.from_file(str(words)) if words.exists() else train_tokenizer()
    grown = (folder / 'model.safetensors').exists()
    model = load(folder, device)[0].requires_grad_() if grown else build(name, tokenizer).to(device)
    optimizers = optimizers_for(model)
    peaks = [peak / 2 if grown else peak for peak in PEAKS]
    if not grown and not model.config.qk_norm:
        peaks[2] = peaks[1]                             # see PEAKS
    rng = random.Random(seed)
    sources = [(until, batches(tokenizer, mixture(seed, rows), tokens, seed))
               for until, rows in (AGAIN if grown else CURRICULUM)]
    bar = tqdm(total=round(minutes * 60), unit='s')
    begin = time.time()
    for done in itertools.count():
        share = (time.time() - begin) / (minutes * 60)
        if share >= 1:
            break
        factor = min(1, (done + 1) / 50, (1 - share) / 0.7)     # warm up, hold, decay over the last 70 %
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]['lr'] = peak * factor
        drop = DROP.get(name, 0) if share >= LATE else 0
        skip = idle(len(model.model.layers), 1 if grown else share, drop, rng)
        ids, labels = next(next(source) for until, source in sources if share < until)
        loss = step(model, optimizers, model.full.without(skip), ids.to(device), labels.to(device))
        bar.update(round(time.time() - begin) - bar.n)
        bar.set_postfix(step=done, loss=f'{loss:.3f}')
    save(model, tokenizer, name)
    print(json.dumps(dict(model=name, steps=done, held_out=accuracy(model, tokenizer, 300))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('model', choices=SHAPES)
    parser.add_argument('--minutes', type=at_least(0.001, float), default=60)
    parser.add_argument('--tokens', type=at_least(1), default=2048, help='tokens a step')
    parser.add_argument('--seed', type=at_least(0), default=0)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    train(args.model, args.minutes, args.tokens, args.seed, args.device)


if __name__ == '__main__':
    sys.exit(exit_status('lab.train', main))
