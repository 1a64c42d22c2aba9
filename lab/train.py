"""Train the embedded models from the generated tasks alone.

`python -m lab.train target --minutes 90`, then `draft`, `mid`, `moe`: each run begins anew with the shape and
the tokenizer in lab/models/<name>, and writes over the weights there. After it, train_mask.py measures the
models anew (lab/README.md, which also says how the stored models were trained otherwise).
"""
import argparse
import itertools
import random
import sys
import time
from functools import partial
from pathlib import Path as File

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lab import at_least, tasks
from model import Transformer, check_writable, checkpoint_views, read_config
from specmini import exit_status

HOME = File(__file__).parent / 'models'
EOS = '<|end|>'
LATE = 0.88                             # from that share of its time on a step skips middle layers by chance
DROP = dict(target=0.1)                 # with this chance each; other models skip none
GROW = (0.09, 2), (0.35, 4)             # until this share of its time only so many outer layers of it run
PEAKS = 0.01, 2e-3, 8e-3                # learning rates of Muon, of AdamW, of AdamW on qkv_proj. Where
                                        # queries and keys have no norm, theirs is the second: at 8e-3
                                        # logits of 900 ended all learning
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


def drills(high, columns):
    """Endless rows of practice that can give away no held-out text: bare steps, or cells looked up."""
    rng = random.Random('drill 0')
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


def gists(high):
    """Endless rows of practice: statements, and what matters about each of the people, without a question."""
    rng = random.Random('gist 0')
    while True:
        prompt, answers = tasks.statements(rng, 1, high)
        lines = rng.sample(list(answers.values()), len(answers))
        yield dict(task='gist', prompt=prompt, answer=None, solution='\nSummary: ' + ' '.join(lines))


def mixture(phase):
    """Endless training rows of all tasks of a phase, in their shares."""
    rng = random.Random('mixture 0')
    practice = dict(drill=drills, gist=gists)
    sources = [practice[task](**knobs) if task in practice else tasks.rows(task, 0, 'train', **knobs)
               for task, knobs, _ in phase]
    shares = [share for _, _, share in phase]
    while True:
        yield next(rng.choices(sources, shares)[0])


def example(tokenizer, row):
    """(ids, labels) of a row, two lists: the loss is on its answer, on all of a story. -100 is no label."""
    prompt, answer = (tokenizer.encode(row[part]).ids for part in ('prompt', 'solution'))
    ids = [*prompt, *answer, tokenizer.token_to_id(EOS)]
    start = 1 if row['task'] == 'story' else max(1, len(prompt))
    return ids, [-100] * (start - 1) + ids[start:] + [-100]         # i predicts token i + 1


def batches(tokenizer, source, tokens):
    """Endless (ids, labels) [B, T] of about `tokens` tokens, rows of like length."""
    rng = random.Random(0)
    while True:
        examples = [example(tokenizer, row) for row in itertools.islice(source, 1024)]
        examples.sort(key=lambda example: -len(example[0]))
        groups = []
        while examples:
            n = max(1, tokens // len(examples[0][0]))   # the longest of what is left
            groups.append(examples[:n])
            del examples[:n]
        rng.shuffle(groups)
        for group in groups:
            ids, labels = (list(map(torch.tensor, lines)) for lines in zip(*group))
            yield (pad_sequence(ids, batch_first=True),
                   pad_sequence(labels, batch_first=True, padding_value=-100))


def build(folder):
    """A fresh network of the shape in the folder's config.json."""
    model = Transformer(read_config(folder))
    for key, weight in checkpoint_views(model).items():
        if key.endswith(('o_proj.weight', 'down_proj.weight')):
            torch.nn.init.zeros_(weight)                # every layer starts as the identity
        elif weight.ndim == 2:
            deviation = 0.02 if 'embed' in key else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, std=deviation)
    return model


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
    positions = torch.arange(ids.shape[1])
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
    """Sublayers that rest in this step: inner ones while the model grows, and others with chance drop."""
    running = next((outer for until, outer in GROW if share < until), layers)
    resting = set()
    for i in range(1, layers - 1):
        depth = min(i, layers - 1 - i)                  # layers to the nearer end
        if depth >= running / 2 or rng.random() < drop:
            resting |= {2 * i, 2 * i + 1}
    return resting


def train(name, minutes, tokens):
    """Trains until `minutes` of wall clock are spent; writes lab/models/<name>."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(HOME / name / 'tokenizer.json'))
    model = build(HOME / name)
    optimizers = optimizers_for(model)
    peaks = PEAKS if model.config.qk_norm else (*PEAKS[:2], PEAKS[1])
    rng = random.Random(0)
    sources = [(until, batches(tokenizer, mixture(rows), tokens)) for until, rows in CURRICULUM]
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
        skip = idle(len(model.model.layers), share, drop, rng)
        ids, labels = next(next(source) for until, source in sources if share < until)
        loss = step(model, optimizers, model.full.without(skip), ids, labels)
        bar.update(round(time.time() - begin) - bar.n)
        bar.set_postfix(step=done, loss=f'{loss:.3f}')
    weights = {key: view.detach().bfloat16().contiguous() for key, view in checkpoint_views(model).items()}
    save_file(weights, HOME / name / 'model.safetensors', dict(format='pt'))
    print(f'{name}: {done} steps, loss {loss:.3f}')


def run():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('model', choices=['target', 'draft', 'mid', 'moe'])
    parser.add_argument('--minutes', type=at_least(0.001, float), default=60)
    parser.add_argument('--tokens', type=at_least(1), default=2048, help='tokens a step')
    args = parser.parse_args()
    check_writable(HOME / args.model / 'model.safetensors')
    train(args.model, args.minutes, args.tokens)


main = partial(exit_status, 'lab.train', run)          # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
