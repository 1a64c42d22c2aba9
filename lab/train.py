"""Train the embedded models and their tokenizer from the generated tasks alone.

`python -m lab.train target --minutes 90`, then `draft`, `mid`, `up`, `moe`. A run resumes from the weights in
lab/models/ (or from its checkpoint, with the optimizer's state, if one is there) and writes Hugging Face
directories in bf16. CPU and CUDA from the same code. After it, `python -m lab.train recalibrate` makes anew
what train_mask.py measures on the pair and the mixture.
"""
import argparse
import json
import random
import re
import sys
import time
from pathlib import Path as File

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import train_mask
from lab import tasks
from model import Transformer, read_config

HOME = File(__file__).parent / 'models'
EOS = '<|end|>'
LATE, DROP = 0.88, dict(target=0.1)     # from that share of its time on a step skips a middle layer by chance
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
COMMON = dict(max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=10000.0)


def drills(seed, high, columns):
    """Endless rows of practice that can give away no held-out text: bare steps, or cells looked up."""
    rng = random.Random(f'drill {seed}')
    while True:
        if rng.random() < 0.15:
            prompt, lines = '', []
            while len(lines) < 8:
                lines += tasks.event(rng, tasks.number(rng, 900), 2)[2]
        else:
            prompt, values = tasks.cells(rng, 2, high, columns)
            lines = [f'| {column} of {item} {n}'
                     for (item, column), n in rng.sample(sorted(values.items()), min(32, len(values)))]
        yield dict(task='drill', prompt=prompt, answer=None, solution='\n' + '\n'.join(lines))


def gists(seed, high):
    """Endless rows of practice: statements, and what matters about each of the people, without a question."""
    rng = random.Random(f'gist {seed}')
    while True:
        prompt, answers = tasks.statements(rng, 1, high)
        lines = rng.sample([*answers.values()], len(answers))
        yield dict(task='gist', prompt=prompt, answer=None, solution='\nSummary: ' + ' '.join(lines))


def mixture(seed, shares=LONG):
    """Endless training rows of all tasks in their shares."""
    rng = random.Random(f'mixture {seed}')
    practice = dict(drill=drills, gist=gists)
    sources = [practice[task](seed, **knobs) if task in practice else tasks.rows(task, seed, 'train', **knobs)
               for task, knobs, _ in shares]
    while True:
        yield next(rng.choices(sources, [share for *_, share in shares])[0])


def train_tokenizer(n=20_000):
    """Byte-level BPE of at most 1,024 entries; every digit stands alone (with any space before it)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r' ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s'), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[EOS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    source = mixture(0)
    tokenizer.train_from_iterator((r['prompt'] + r['solution'] for r, _ in zip(source, range(n))), trainer)
    return tokenizer


def encode(tokenizer, rows):
    """Rows -> [(ids, where the loss begins)]: on the answer part, and on all of a story."""
    prompts = tokenizer.encode_batch([r['prompt'] for r in rows])
    answers = tokenizer.encode_batch([r['solution'] for r in rows])
    eos = tokenizer.token_to_id(EOS)
    return [(p.ids + a.ids + [eos], 1 if r['task'] == 'story' else max(1, len(p.ids)))
            for r, p, a in zip(rows, prompts, answers)]


def batches(tokenizer, source, tokens, seed):
    """Endless (ids [B, T], labels [B, T]) of about `tokens` tokens; rows of like length, to pad little."""
    rng = random.Random(seed)
    while True:
        pool = sorted(encode(tokenizer, [next(source) for _ in range(1024)]), key=lambda e: len(e[0]))
        groups, i = [], 0
        while i < len(pool):
            n = max(1, tokens // len(pool[min(i + tokens // len(pool[i][0]), len(pool) - 1)][0]))
            groups.append(pool[i:i + n])
            i += n
        rng.shuffle(groups)
        for group in groups:
            ids = torch.zeros(len(group), max(len(e) for e, _ in group), dtype=torch.long)
            labels = torch.full_like(ids, -100)
            for b, (e, start) in enumerate(group):
                ids[b, :len(e)] = torch.tensor(e)
                labels[b, start - 1:len(e) - 1] = torch.tensor(e[start:])    # position i predicts token i + 1
            yield ids, labels


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
            for p in group['params']:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    m = self.state[p].setdefault('momentum', torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group['momentum'])
                    updates.append(p.grad.lerp(m, group['momentum']))
                scale = max(1, shape[0] / shape[1]) ** 0.5
                for p, u in zip(params, orthogonal(torch.stack(updates))):
                    p.mul_(1 - group['lr'] * group['weight_decay']).add_(u, alpha=-group['lr'] * scale)


def orthogonal(x):
    """x [N, rows, columns] -> nearly the closest matrices with all singular values 1, by Newton-Schulz."""
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    return wide if x.shape[1] <= x.shape[2] else wide.mT


def build(name, tokenizer):
    """The network of SHAPES[name], and its config.json."""
    shape = COMMON | SHAPES[name] | dict(vocab_size=tokenizer.get_vocab_size())
    eos = tokenizer.token_to_id(EOS)
    architecture = dict(llama='LlamaForCausalLM', qwen3='Qwen3ForCausalLM',
                        qwen3_moe='Qwen3MoeForCausalLM')[shape['model_type']]
    raw = shape | dict(hidden_act='silu', bos_token_id=None, eos_token_id=eos, pad_token_id=eos,
                       torch_dtype='bfloat16', architectures=[architecture])
    HOME.joinpath(name).mkdir(parents=True, exist_ok=True)
    (HOME / name / 'config.json').write_text(json.dumps(raw, indent=2) + '\n')
    model = Transformer(read_config(HOME / name))
    for key, p in model.named_parameters():
        if key.endswith(('o_proj.weight', 'down_proj.weight')):
            torch.nn.init.zeros_(p)                     # every layer starts as the identity
        elif p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02 if 'embed' in key else p.shape[1] ** -0.5)
    return model


def save(model, tokenizer, name):
    """Writes the folder lab/models/<name>: bf16 weights, generation_config.json and the tokenizer's files."""
    folder, eos = HOME / name, tokenizer.token_to_id(EOS)
    state = {key: p.detach().to('cpu', torch.bfloat16).contiguous() for key, p in model.named_parameters()}
    save_file(state, folder / 'model.safetensors', metadata=dict(format='pt'))
    (folder / 'generation_config.json').write_text(json.dumps(dict(
        eos_token_id=eos, pad_token_id=eos), indent=2) + '\n')
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(
        tokenizer_class='PreTrainedTokenizerFast', eos_token=EOS, pad_token=EOS, model_max_length=2048,
        clean_up_tokenization_spaces=False), indent=2) + '\n')


@torch.no_grad()
def accuracy(model, tokenizer, n=20):
    """{task: share of n held-out rows whose every answer token is the network's first choice}.

    This is greedy accuracy, read once. For a story, which has no one answer: the mean loss in nats per token.
    """
    scores = {}
    for task in tasks.TASKS:
        found = 0.0
        for ids, start in encode(tokenizer, [r for r, _ in zip(tasks.rows(task, 1), range(n))]):
            ids = torch.tensor([ids], device=model.cos.device)
            logits = model.logits(model(ids, torch.arange(ids.shape[1], device=ids.device), model.full))
            logits, wanted = logits[0, start - 1:-1], ids[0, start:]
            found += (F.cross_entropy(logits, wanted).item() if task == 'story'
                      else (logits.argmax(-1) == wanted).all().item())
        scores[task] = round(found / n, 3)
    return scores


def optimizers_for(model):
    """[Muon for the matrices inside the layers, AdamW for the rest, AdamW for queries and keys]."""
    kinds = [[], [], []]
    for key, p in model.named_parameters():
        looks = key.endswith(('q_proj.weight', 'k_proj.weight'))
        kinds[2 if looks else int(p.ndim != 2 or 'embed' in key)].append(p)
    adam = lambda params, lr: torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0)
    return [Muon(kinds[0], lr=PEAKS[0]), adam(kinds[1], PEAKS[1]), adam(kinds[2], PEAKS[2])]


def resume(model, optimizers, folder):
    """(seconds spent, steps done, whether it has grown) as a checkpoint or saved weights leave them."""
    checkpoint, weights = folder / 'checkpoint.pt', folder / 'model.safetensors'
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=model.cos.device, weights_only=True)
        model.load_state_dict(saved['model'])
        for optimizer, state in zip(optimizers, saved['optimizers']):
            optimizer.load_state_dict(state)
        return saved['spent'], saved['done'], saved['grown']
    if weights.exists():
        model.load_state_dict(load_file(weights), strict=False)     # the tied head is not in the file twice
    elif folder.name in HEIRS:
        parent, layers = HEIRS[folder.name]
        state = load_file(HOME / parent / 'model.safetensors')
        inherit(model, state, layers) if layers else split(model, state)
        return 0.0, 0, True
    return 0.0, 0, weights.exists()


@torch.no_grad()
def inherit(model, state, layers):
    """Gives a model the weights `state` of another of its width; layers: {own: theirs}, others as built."""
    for name, p in model.named_parameters():
        own = re.search(r'layers\.(\d+)\.', name)
        if own is None:
            p.copy_(state[name])
        elif int(own[1]) in layers:
            p.copy_(state[name.replace(own[0], f'layers.{layers[int(own[1])]}.')])


@torch.no_grad()
def split(model, state):
    """Makes a mixture of the target's weights `state`: it computes nearly the same before its first step.

    Each layer's F channels become four experts of F / 4 and four twins of them. A twin's router row is the
    expert's negative, so that a token's top four hold every channel once, each weighted about 1 / 4 (hence
    down times 4). The norms on queries and keys start at the mean size of what they replace.
    Source: Komatsuzaki et al. 2022 (sparse upcycling); the split is ours.
    """
    own, quarter = model.state_dict(), SHAPES['moe']['moe_intermediate_size']
    for key, value in state.items():
        if key in own:
            own[key].copy_(value)
    for i, layer in enumerate(model.model.layers):
        for name in ('gate_proj', 'up_proj', 'down_proj'):
            whole = state[f'model.layers.{i}.mlp.{name}.weight'].float()
            parts = whole.split(quarter, dim=1 if name == 'down_proj' else 0)
            for e, expert in enumerate(layer.mlp.experts):
                getattr(expert, name).weight.copy_(parts[e % 4] * (4 if name == 'down_proj' else 1))
        layer.mlp.gate.weight[:4] *= 0.1
        layer.mlp.gate.weight[4:] = -layer.mlp.gate.weight[:4]
        for norm, proj in ((layer.self_attn.q_norm, layer.self_attn.q_proj),
                           (layer.self_attn.k_norm, layer.self_attn.k_proj)):
            norm.weight.fill_((proj.weight * layer.input_layernorm.weight).pow(2).sum(1).mean().sqrt())


def step(model, optimizers, path, ids, labels):
    """One update on ids, labels [B, T]; returns the loss in nats per judged token."""
    keep = labels != -100
    hidden = model(ids, torch.arange(ids.shape[1], device=ids.device), path)
    loss = F.cross_entropy(model.logits(hidden[keep]), labels[keep])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def idle(layers, share, drop, rng):
    """Sublayers that rest in this step: the inner layers while a fresh model grows, some more by chance.

    share: how much of its time a fresh model (of more than 4 layers) has had; False for one that has grown.
    """
    running = next((n for until, n in GROW if share is not False and layers > 4 and share < until), layers)
    inner = range(1, layers - 1)
    resting = [i for i in inner if min(i, layers - 1 - i) >= running / 2 or rng.random() < drop]
    return {s for i in resting for s in (2 * i, 2 * i + 1)}


def train(name, minutes, tokens, seed, device):
    """Trains until `minutes` of wall clock are spent, checkpoints included; writes lab/models/<name>."""
    torch.manual_seed(seed)
    folder, saved = HOME / name, HOME / 'target' / 'tokenizer.json'
    tokenizer = Tokenizer.from_file(str(saved)) if saved.exists() else train_tokenizer()
    model = build(name, tokenizer).to(device)
    optimizers = optimizers_for(model)
    spent, done, grown = resume(model, optimizers, folder)
    layers, peaks = model.model.layers, [peak / 2 for peak in PEAKS] if grown else list(PEAKS)
    if not (grown or model.config.qk_norm):
        peaks[2] = peaks[1]
    rng, scores, losses = random.Random(seed + done), {}, []
    phases = [(until, batches(tokenizer, mixture(seed + done, shares), tokens, seed))
              for until, shares in (AGAIN if grown else CURRICULUM)]
    bar = tqdm(total=round(minutes * 60), unit='s', initial=round(spent))
    begin, saved_at = time.time() - spent, time.time()
    while (now := time.time() - begin) < minutes * 60:
        for optimizer, peak in zip(optimizers, peaks):  # warm up, hold, then decay to zero over the last 70 %
            rate = min(1, (done + 1) / 50, (1 - now / (minutes * 60)) / 0.7)
            optimizer.param_groups[0]['lr'] = peak * rate
        share = now / (minutes * 60)
        skip = idle(len(layers), not grown and share, DROP.get(name, 0) if share >= LATE else 0, rng)
        batch = (x.to(device) for x in next(next(source for until, source in phases if share < until)))
        losses = losses[-49:] + [step(model, optimizers, model.full.slim(skip), *batch)]
        done += 1
        if done % 25 == 0:
            bar.n = round(now)
            bar.set_postfix(step=done, loss=f'{sum(losses) / len(losses):.3f}', **scores)
        if time.time() - saved_at > 400:
            saved_at, scores = time.time(), accuracy(model, tokenizer)
            tqdm.write(json.dumps(dict(minute=round(now / 60, 1), step=done,
                                       loss=round(sum(losses) / len(losses), 3), **scores)))
            save(model, tokenizer, name)
            torch.save(dict(model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers],
                            spent=now, done=done, grown=grown), folder / 'checkpoint.pt')
    bar.close()
    save(model, tokenizer, name)
    (folder / 'checkpoint.pt').unlink(missing_ok=True)
    print(json.dumps(dict(model=name, steps=done, held_out=accuracy(model, tokenizer, 300))))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', choices=[*SHAPES, 'recalibrate'])
    parser.add_argument('--minutes', type=float, default=60)
    parser.add_argument('--tokens', type=int, default=2048, help='tokens a step')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    if args.model == 'recalibrate':
        moe = [['--anchors', '--target', str(HOME / 'moe')]] * (HOME / 'moe' / 'model.safetensors').exists()
        return max(train_mask.main(flags) for flags in ([], ['--signals'], ['--anchors'], *moe))
    train(args.model, args.minutes, args.tokens, args.seed, args.device)


if __name__ == '__main__':
    sys.exit(main())
