"""Train the embedded models and their tokenizer from the generated tasks alone.

`python -m lab.train target --minutes 90`, then `draft`, `mid`, `up`, `moe`. A run resumes from the weights in
lab/models/ (or from its checkpoint, with the optimizer's state, if one is there) and writes Hugging Face
directories in bf16. CPU and CUDA from the same code. After it, `python -m lab.train recalibrate` makes anew
what train_mask.py measures on the pair and the mixture.
"""
import argparse
import itertools
import json
import random
import re
import sys
import time
from pathlib import Path as File

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm

import train_mask
from lab import tasks
from lab.files import save_state, save_weights, write_json, write_text
from model import Transformer, read_config
from specmini import exit_status

HOME = File(__file__).parent / 'models'
EOS = '<|end|>'
LATE = 0.88                             # from that share of its time on a step skips middle layers by chance
DROP = dict(target=0.1)                 # with this chance each; other models skip none
GROW = (0.09, 2), (0.35, 4)             # until this share of its time only so many outer layers of it run
PEAKS = 0.01, 2e-3, 8e-3                # learning rates of Muon, of AdamW, of AdamW on queries and keys; half
                                        # for one that goes on. A fresh llama's queries and keys have no norm:
                                        # at 8e-3 logits of 900 ended all learning, so theirs is the second
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
    target=dict(model_type='llama', hidden_size=128, intermediate_size=336, num_hidden_layers=10,
                num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    draft=dict(model_type='qwen3', hidden_size=80, intermediate_size=208, num_hidden_layers=2,
               num_attention_heads=4, num_key_value_heads=2, head_dim=20))
SHAPES |= dict(
    mid=SHAPES['target'] | dict(num_hidden_layers=5), up=SHAPES['draft'] | dict(num_hidden_layers=8),
    moe=SHAPES['target'] | dict(model_type='qwen3_moe', num_experts=8, num_experts_per_tok=4,
                                moe_intermediate_size=84, norm_topk_prob=True, decoder_sparse_step=1,
                                mlp_only_layers=[]))
HEIRS = dict(   # model: whose weights it starts from, which layer each of its own is; moe: cut into experts
    mid=('target', {0: 0, 1: 2, 2: 4, 3: 7, 4: 9}), up=('draft', {0: 0, 7: 1}), moe=('target', None))
ARCHITECTURES = dict(llama='LlamaForCausalLM', qwen3='Qwen3ForCausalLM', qwen3_moe='Qwen3MoeForCausalLM')
COMMON = dict(max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=10000.0)


def drills(seed, high, columns):
    """Endless rows of practice that can give away no held-out text: bare steps, or cells looked up."""
    rng = random.Random(f'drill {seed}')
    while True:
        prompt = ''
        lines = []
        if rng.random() < 0.15:
            while len(lines) < 8:
                n = tasks.number(rng, 900)
                _, _, steps, _ = tasks.event(rng, n, 2)
                lines += steps
        else:
            prompt, values = tasks.cells(rng, 2, high, columns)
            cells = rng.sample(sorted(values.items()), min(32, len(values)))
            for (item, column), n in cells:
                lines.append(f'| {column} of {item} {n}')
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
    sources = []
    shares = []
    for task, knobs, share in phase:
        if task == 'drill':
            source = drills(seed, **knobs)
        elif task == 'gist':
            source = gists(seed, **knobs)
        else:
            source = tasks.rows(task, seed, 'train', **knobs)
        sources.append(source)
        shares.append(share)
    while True:
        source = rng.choices(sources, shares)[0]
        yield next(source)


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
    rows = itertools.islice(mixture(0), n)
    texts = (row['prompt'] + row['solution'] for row in rows)
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


def length_of(example):
    """The tokens of an example (ids, start)."""
    return len(example[0])


def batches(tokenizer, source, tokens, seed):
    """Endless (ids [B, T], labels [B, T]) of about `tokens` tokens; rows of like length, to pad little."""
    rng = random.Random(seed)
    while True:
        rows = list(itertools.islice(source, 1024))
        pool = sorted(encode(tokenizer, rows), key=length_of)
        groups = grouped(pool, tokens)
        rng.shuffle(groups)
        for group in groups:
            yield padded(group)


def grouped(pool, tokens):
    """Examples, sorted by length, cut into lists of about `tokens` tokens each."""
    groups = []
    i = 0
    while i < len(pool):
        most = tokens // length_of(pool[i])             # if all were as long as the first
        longest = pool[min(i + most, len(pool) - 1)]
        n = max(1, tokens // length_of(longest))
        groups.append(pool[i:i + n])
        i += n
    return groups


def padded(group):
    """Examples (ids, start) -> (ids [B, T], labels [B, T]); -100 is no label."""
    T = max(map(length_of, group))
    ids = torch.zeros(len(group), T, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for b, (line, start) in enumerate(group):
        ids[b, :len(line)] = torch.tensor(line)
        labels[b, start - 1:len(line) - 1] = torch.tensor(line[start:])     # position i predicts token i + 1
    return ids, labels


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for the matrices inside the layers.

    Five Newton-Schulz steps in fp32, all matrices of one shape as one batch (torch.optim.Muon works in bf16,
    one by one). Source: Jordan et al. 2024.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for weight in group['params']:
                if weight.grad is not None:
                    shapes.setdefault(weight.shape, []).append(weight)
            for weights in shapes.values():
                self.step_alike(weights, group)

    def step_alike(self, weights, group):
        """Moves matrices of one shape by the settings of their group."""
        updates = []
        for weight in weights:
            momentum = self.state[weight].setdefault('momentum', torch.zeros_like(weight))
            momentum.lerp_(weight.grad, 1 - group['momentum'])
            updates.append(weight.grad.lerp(momentum, group['momentum']))
        updates = orthogonal(torch.stack(updates))
        rows, columns = weights[0].shape
        rate = group['lr'] * max(1, rows / columns) ** 0.5
        for weight, update in zip(weights, updates):
            weight.mul_(1 - group['lr'] * group['weight_decay'])
            weight.add_(update, alpha=-rate)


def orthogonal(x):
    """x [N, rows, columns] -> nearly the closest matrices with all singular values 1, by Newton-Schulz."""
    tall = x.shape[1] > x.shape[2]
    wide = x.mT if tall else x
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.mT if tall else wide


def build(name, tokenizer):
    """A fresh network of SHAPES[name]; writes the folder's config.json."""
    shape = COMMON | SHAPES[name] | dict(vocab_size=tokenizer.get_vocab_size())
    eos = tokenizer.token_to_id(EOS)
    architecture = ARCHITECTURES[shape['model_type']]
    raw = shape | dict(hidden_act='silu', bos_token_id=None, eos_token_id=eos, pad_token_id=eos,
                       torch_dtype='bfloat16', architectures=[architecture])
    folder = HOME / name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / 'config.json', raw)
    model = Transformer(read_config(folder))
    for key, weight in model.named_parameters():
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
    weights = {}
    for key, weight in model.named_parameters():
        weights[key] = weight.detach().to('cpu', torch.bfloat16).contiguous()
    save_weights(folder / 'model.safetensors', weights)
    write_json(folder / 'generation_config.json', dict(eos_token_id=eos, pad_token_id=eos))
    write_text(folder / 'tokenizer.json', tokenizer.to_str(pretty=True))
    write_json(folder / 'tokenizer_config.json', dict(
        tokenizer_class='PreTrainedTokenizerFast', eos_token=EOS, pad_token=EOS, model_max_length=2048,
        clean_up_tokenization_spaces=False))


@torch.no_grad()
def accuracy(model, tokenizer, n=20):
    """{task: share of n held-out rows whose every answer token is the network's first choice}.

    This is greedy accuracy, read once. For a story, which has no one answer: the mean loss in nats per token.
    """
    scores = {}
    for task in tasks.TASKS:
        rows = list(itertools.islice(tasks.rows(task, 1), n))
        found = 0.0
        for line, start in encode(tokenizer, rows):
            ids = torch.tensor([line], device=model.cos.device)
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
    """[Muon for the matrices inside the layers, AdamW for the rest, AdamW for queries and keys]."""
    inner, rest, looks = [], [], []
    for key, weight in model.named_parameters():
        if key.endswith(('q_proj.weight', 'k_proj.weight')):
            looks.append(weight)
        elif weight.ndim != 2 or 'embed' in key:
            rest.append(weight)
        else:
            inner.append(weight)
    muon = Muon(inner, lr=PEAKS[0])
    return [muon, adam(rest, PEAKS[1]), adam(looks, PEAKS[2])]


def adam(weights, rate):
    return torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0)


def resume(model, optimizers, folder):
    """(seconds spent, steps done, whether it has grown) as a checkpoint or saved weights leave them."""
    checkpoint = folder / 'checkpoint.pt'
    weights = folder / 'model.safetensors'
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=model.cos.device, weights_only=True)
        model.load_state_dict(saved['model'])
        for optimizer, state in zip(optimizers, saved['optimizers']):
            optimizer.load_state_dict(state)
        return saved['spent'], saved['done'], saved['grown']
    if weights.exists():
        model.load_state_dict(load_file(weights), strict=False)     # the tied head is not in the file twice
        return 0.0, 0, True
    if folder.name not in HEIRS:
        return 0.0, 0, False
    parent, layers = HEIRS[folder.name]
    state = load_file(HOME / parent / 'model.safetensors')
    if layers:
        inherit(model, state, layers)
    else:
        split(model, state)
    return 0.0, 0, True


@torch.no_grad()
def inherit(model, state, layers):
    """Gives a model the weights `state` of another of its width; layers: {own: theirs}, others as built."""
    for name, weight in model.named_parameters():
        own = re.search(r'layers\.(\d+)\.', name)
        if own is None:
            weight.copy_(state[name])
            continue
        layer = int(own[1])
        if layer in layers:
            theirs = name.replace(own[0], f'layers.{layers[layer]}.')
            weight.copy_(state[theirs])


@torch.no_grad()
def split(model, state):
    """Makes a mixture of the target's weights `state`: it computes nearly the same before its first step.

    Each layer's F channels become four experts of F / 4 and four twins of them. A twin's router row is the
    expert's negative, so that a token's top four hold every channel once, each weighted about 1 / 4 (hence
    down times 4). The norms on queries and keys start at the mean size of what they replace.
    Source: Komatsuzaki et al. 2022 (sparse upcycling); the split is ours.
    """
    own = model.state_dict()
    for key, value in state.items():
        if key in own:
            own[key].copy_(value)
    for i, layer in enumerate(model.model.layers):
        for name in ('gate_proj', 'up_proj', 'down_proj'):
            whole = state[f'model.layers.{i}.mlp.{name}.weight'].float()
            split_experts(layer.mlp, name, whole)
        router = layer.mlp.gate.weight
        router[:4] *= 0.1
        router[4:] = -router[:4]
        attention = layer.self_attn
        for norm, proj in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
            products = proj.weight * layer.input_layernorm.weight
            size = products.pow(2).sum(1).mean().sqrt()
            norm.weight.fill_(size)


def split_experts(mixture, name, whole):
    """Gives the eight experts of a mixture their quarters of one matrix of the feed-forward, each twice."""
    quarter = SHAPES['moe']['moe_intermediate_size']
    down = name == 'down_proj'
    parts = whole.split(quarter, dim=1 if down else 0)
    for e, expert in enumerate(mixture.experts):
        part = parts[e % 4] * (4 if down else 1)
        getattr(expert, name).weight.copy_(part)


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
    """Sublayers that rest in this step: the inner layers while a fresh model grows, some more by chance.

    share: how much of its time a fresh model (of more than 4 layers) has had; None for one that has grown.
    """
    running = layers
    if share is not None and layers > 4:
        for until, outer in GROW:
            if share < until:
                running = outer
                break
    resting = set()
    for i in range(1, layers - 1):
        depth = min(i, layers - 1 - i)                  # layers to the nearer end
        if depth >= running / 2 or rng.random() < drop:
            resting |= {2 * i, 2 * i + 1}
    return resting


class Phases:
    """Training batches of the phase that a share of the time (0 to 1) belongs to."""

    def __init__(self, phases, tokenizer, tokens, rows_seed, seed):
        """phases: (until this share of the time, rows of such tasks), as CURRICULUM."""
        self.sources = []
        for until, shares in phases:
            source = batches(tokenizer, mixture(rows_seed, shares), tokens, seed)
            self.sources.append((until, source))

    def next_batch(self, share):
        """(ids, labels), both [B, T]."""
        for until, source in self.sources:
            if share < until:
                return next(source)


def rate_factor(done, share):
    """What multiplies the peak learning rates: warm up, hold, then decay to zero over the last 70 %."""
    return min(1, (done + 1) / 50, (1 - share) / 0.7)


def peaks_for(model, grown):
    """The peak learning rates of the three optimizers: see PEAKS."""
    peaks = [peak / 2 if grown else peak for peak in PEAKS]
    if not grown and not model.config.qk_norm:
        peaks[2] = peaks[1]
    return peaks


def train(name, minutes, tokens, seed, device):
    """Trains until `minutes` of wall clock are spent, checkpoints included; writes lab/models/<name>."""
    torch.manual_seed(seed)
    folder = HOME / name
    shared = HOME / 'target' / 'tokenizer.json'
    tokenizer = Tokenizer.from_file(str(shared)) if shared.exists() else train_tokenizer()
    model = build(name, tokenizer).to(device)
    layers = len(model.model.layers)
    optimizers = optimizers_for(model)
    spent, done, grown = resume(model, optimizers, folder)
    peaks = peaks_for(model, grown)
    rng = random.Random(seed + done)
    phases = Phases(AGAIN if grown else CURRICULUM, tokenizer, tokens, seed + done, seed)
    scores = {}
    losses = []                                         # of the last 50 steps
    bar = tqdm(total=round(minutes * 60), unit='s', initial=round(spent))
    begin = time.time() - spent
    saved_at = time.time()
    while True:
        now = time.time() - begin
        if now >= minutes * 60:
            break
        share = now / (minutes * 60)
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]['lr'] = peak * rate_factor(done, share)
        drop = DROP.get(name, 0) if share >= LATE else 0
        skip = idle(layers, None if grown else share, drop, rng)
        ids, labels = phases.next_batch(share)
        loss = step(model, optimizers, model.full.without(skip), ids.to(device), labels.to(device))
        losses = losses[-49:] + [loss]
        done += 1
        if done % 25 == 0:
            bar.n = round(now)
            bar.set_postfix(step=done, loss=f'{sum(losses) / len(losses):.3f}', **scores)
        if time.time() - saved_at > 400:
            saved_at = time.time()
            scores = accuracy(model, tokenizer)
            mean = round(sum(losses) / len(losses), 3)
            tqdm.write(json.dumps(dict(minute=round(now / 60, 1), step=done, loss=mean, **scores)))
            save(model, tokenizer, name)
            state = dict(model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers])
            save_state(folder / 'checkpoint.pt', state | dict(spent=now, done=done, grown=grown))
    bar.close()
    save(model, tokenizer, name)
    (folder / 'checkpoint.pt').unlink(missing_ok=True)
    print(json.dumps(dict(model=name, steps=done, held_out=accuracy(model, tokenizer, 300))))


def recalibrate():
    """Writes the three calibrations of the pair, then the one of the mixture, if there is one."""
    settings = train_mask.Settings()
    train_mask.measure_mask(HOME / 'target', settings)
    pair = '--target', str(HOME / 'target'), '--draft', str(HOME / 'draft')
    train_mask.measure_signals(train_mask.parse(pair))
    train_mask.measure_anchors(HOME / 'target', settings)
    if (HOME / 'moe' / 'model.safetensors').exists():
        train_mask.measure_anchors(HOME / 'moe', settings)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', choices=[*SHAPES, 'recalibrate'])
    parser.add_argument('--minutes', type=float, default=60)
    parser.add_argument('--tokens', type=int, default=2048, help='tokens a step')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    return exit_status('lab.train', lambda: run(args))


def run(args):
    if args.model == 'recalibrate':
        recalibrate()
    else:
        train(args.model, args.minutes, args.tokens, args.seed, args.device)
    return 0


if __name__ == '__main__':
    sys.exit(main())
