"""A draft model for a target that has none: a few of its layers, taught by what the target itself writes.

`python -m lab.distil --target DIR --prompts FILE --chat --minutes 20 --out OUT` takes the target's first
layers and its last one, its embedding and its head, lets the target answer the prompts, and teaches the
layers to say there what it says. OUT is then a Hugging Face folder for `--draft OUT`.

OUT/held_out.jsonl are prompts that nothing was learned from; OUT/run is what a broken-off run goes on from,
also with more --minutes, and may be deleted.
"""
import argparse
import itertools
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import NamedTuple

import torch
from tqdm import tqdm

from lab.common import for_json
from lab.files import save_state, save_weights, write_json, write_text
from lab.pairs import Pair
from lab.train import adam, inherit
from model import KVCache, Transformer, expect, read_json, send, whole
from specmini import DTYPES, exit_status, pick_device, take_threads
from verify import probs, sample

HELD = 20           # prompts that are only measured on
WRITING = 0.4       # share of the time in which the target writes
TOGETHER = dict(cpu=8192, cuda=32768)       # tokens of the texts that it writes at once
PLACES = 256        # whose logits are held at once: 0.16 GB for 151,936 tokens
GAMMA = 4           # draft tokens a cycle of the held-out figures
WARMING = 20        # steps until the learning rate is at its peak; it falls from 30 % of the time on
STORE = 60          # seconds between checkpoints
WEIGHTS = '.safetensors', '.bin', '.pt', '.pth', '.gguf', '.h5', '.onnx', '.index.json'     # endings
OWN = 'config.json', 'calibration.json'     # of the target alone


# ------------------------------------------------------------------------------------------------ lessons

class Lesson(NamedTuple):
    """A text and what a target says at each place of its solution."""
    prompt: list                # ids
    solution: list              # ids
    said: torch.Tensor          # [n, C], hidden states for its head, or [n, V], log-probabilities

    @property
    def length(self):
        return len(self.prompt) + len(self.solution)


def grouped(lessons, tokens):
    """Lessons of like length together, in lists of about `tokens` ids each, padding included."""
    pool = sorted(lessons, key=lambda lesson: lesson.length)
    groups = []
    while pool:
        count = max(1, tokens // pool[-1].length)
        groups.append(pool[-count:])
        pool = pool[:-count]
    return groups


def batch(group):
    """(ids [B, T], at [B, T] bool, said [n, ...]) of some lessons.

    at: the n places from which the target guesses; what stands behind a row's end is never looked at.
    """
    longest = max(lesson.length for lesson in group)
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    at = torch.zeros(len(group), longest, dtype=torch.bool)
    for row, lesson in enumerate(group):
        ids[row, :lesson.length] = torch.tensor(lesson.prompt + lesson.solution)
        at[row, len(lesson.prompt) - 1:lesson.length - 1] = True
    return ids, at, torch.cat([lesson.said for lesson in group])


def packed(lessons, tokens, rng):
    """Endless batches (see batch) of about `tokens` ids, all lessons once before any comes again."""
    groups = grouped(lessons, tokens)
    while True:
        for group in rng.sample(groups, len(groups)):
            yield batch(group)


# ------------------------------------------------------------------------------------ the target's texts

class Blank(NamedTuple):
    """A text that is still to be written."""
    prompt: list                # ids
    length: int                 # tokens, at most


@torch.no_grad()
def write(target, blanks, eos, temperature, seed):
    """The Lessons that the target writes into some Blanks, all rows at once.

    Rows stand at the same position: where a longer prompt still goes on, its own token is taken, not a guess.
    """
    device = target.cos.device
    longest = max(blank.length for blank in blanks)
    known = send([len(blank.prompt) for blank in blanks], device)                       # [B]
    ends = send([blank.length for blank in blanks], device)
    ids = torch.zeros(len(blanks), longest, dtype=torch.long, device=device)            # [B, S]
    for row, blank in enumerate(blanks):
        ids[row, :len(blank.prompt)] = send(blank.prompt, device)
    stops = send(sorted(eos), device)
    stores = KVCache(target.config, longest, target.lm_head.weight, len(blanks)).stores
    generator = torch.Generator().manual_seed(seed)
    begin = 0
    end = min(len(blank.prompt) for blank in blanks)
    first = end
    states = []
    while end < longest and (ends > end).any():
        positions = torch.arange(begin, end, device=device)
        hidden = target(ids[:, begin:end], positions, target.full, stores, end)[:, -1]  # [B, C]
        guesses = sample(probs(target.logits(hidden), temperature), generator)
        ids[:, end] = torch.where(known > end, ids[:, end], guesses)
        stopped = torch.isin(ids[:, end], stops) & (known <= end)
        ends = torch.where(stopped, ends.clamp(max=end + 1), ends)
        states.append(hidden)
        begin, end = end, end + 1
    states = torch.stack(states, 1).cpu()               # [B, places, C]; place 0 guesses token `first`
    lessons = []
    for blank, row, said, stop in zip(blanks, ids.tolist(), states, ends.tolist()):
        start = len(blank.prompt)
        lessons.append(Lesson(blank.prompt, row[start:stop], said[start - first:stop - first].clone()))
    return lessons


class Texts:
    """What a target writes, batch by batch, each kept in a file: a run that goes on has them already."""

    def __init__(self, folder, target, eos):
        self.folder = folder
        self.target = target
        self.eos = eos
        self.together = TOGETHER[target.cos.device.type]

    def batch(self, name, blanks, temperature, seed):
        """(Lessons, the seconds that they took) of these Blanks, from the file if it is there."""
        where = self.folder / f'{name}.pt'
        if not where.exists():
            begin = time.monotonic()
            lessons = write(self.target, blanks, self.eos, temperature, seed)
            rows = [tuple(lesson) for lesson in lessons]
            save_state(where, dict(lessons=rows, seconds=time.monotonic() - begin))
        saved = torch.load(where, weights_only=True)
        return [Lesson(*row) for row in saved['lessons']], saved['seconds']

    def held_out(self, blanks):
        """The Lessons to measure on: one greedy text a prompt."""
        found = []
        for number, group in enumerate(grouped(blanks, self.together)):
            lessons, _ = self.batch(f'held_out-{number:04d}', group, 0, 0)
            found += lessons
        return found

    def for_training(self, blanks, seconds):
        """The Lessons of about so many seconds: first a greedy text a prompt, then sampled ones."""
        groups = grouped(blanks, self.together)
        random.Random(0).shuffle(groups)
        found = []
        spent = 0.0
        bar = clock('writing', seconds)
        for number in itertools.count():
            again, place = divmod(number, len(groups))
            lessons, took = self.batch(f'{number:04d}', groups[place], float(again > 0), number)
            found += lessons
            spent += took
            tick(bar, spent, texts=len(found))
            if spent + took / 2 >= seconds:             # the next would end further from it
                bar.close()
                return found


def clock(words, seconds):
    """A bar of so many seconds on a terminal."""
    return tqdm(total=round(seconds), unit='s', desc=words, file=sys.stderr, disable=None)


def tick(bar, seconds, **figures):
    """Moves a bar to so many seconds."""
    bar.set_postfix(figures, refresh=False)
    bar.update(min(bar.total, round(seconds)) - bar.n)


# ------------------------------------------------------------------------------------------ the student

def kept_layers(L, n):
    """The layers that a draft of n layers takes from a target of L: the first ones, and the last."""
    return [*range(n - 1), L - 1]


def student_of(target, kept):
    """A Transformer in fp32 of the layers `kept` of a target; its embedding and its head do not learn."""
    experts = tuple(target.config.mixtures[layer] for layer in kept)
    config = replace(target.config, num_hidden_layers=len(kept), experts=experts if any(experts) else ())
    student = Transformer(config).to(target.cos.device)
    state = {}
    for name, weight in target.named_parameters():
        state[name] = weight.to_dense() if weight.is_mkldnn else weight     # see Transformer.pack
    inherit(student, state, dict(enumerate(kept)))
    student.model.embed_tokens.requires_grad_(False)
    student.lm_head.requires_grad_(False)
    student.vocab = target.vocab
    student.set_context(len(target.cos))
    return student


@torch.no_grad()
def divergence(student, target, guesses, said):
    """(KL from target to student in nats, summed over n places, and what it grows by for guesses [n, C]).

    guesses, said: hidden states of both. Not by autograd: through a softmax the slope is q - p, and so never
    more than a few places' logits are held. Source: Hinton et al. 2015; Zhou et al. 2024 (DistillSpec).
    """
    head = student.lm_head.weight[:student.vocab]
    nats = 0.0
    slopes = []
    for mine, theirs in zip(guesses.split(PLACES), said.split(PLACES)):
        log_q = student.logits(mine).log_softmax(-1)                        # [places, V]
        log_p = target.logits(theirs).float().log_softmax(-1)
        p = log_p.exp()
        nats = nats + (p * (log_p - log_q)).sum()       # on the device: nobody waits
        slopes.append((log_q.exp() - p) @ head)
    return float(nats), torch.cat(slopes)


def step(student, target, optimizer, lessons):
    """One update on a batch of lessons (see batch); returns the KL in nats per place."""
    ids, at, said = (x.to(target.cos.device) for x in lessons)
    hidden = student(ids, torch.arange(ids.shape[1], device=ids.device), student.full)[at]  # [n, C]
    nats, slope = divergence(student, target, hidden.detach(), said)
    hidden.backward(slope / len(hidden))
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return nats / len(hidden)


def train(student, target, lessons, run):
    """Teaches a student until the run's time is spent, from its checkpoint if there is one."""
    peak = min(2e-3, 0.6 / target.config.hidden_size)
    optimizer = adam(learned(student).values(), peak)
    spent, done = resume(student, optimizer, run.checkpoint)
    stored = time.monotonic()
    begin = stored - spent
    batches = packed(lessons, run.tokens, random.Random(done))
    bar = clock('training', run.training)
    mean = None
    while spent < run.training:
        left = 1 - spent / run.training
        optimizer.param_groups[0]['lr'] = peak * min(1, (done + 1) / WARMING, left / 0.7)
        nats = step(student, target, optimizer, next(batches))
        mean = nats if mean is None else 0.95 * mean + 0.05 * nats
        done += 1
        now = time.monotonic()
        spent = now - begin
        tick(bar, spent, steps=done, nats=f'{mean:.3f}')
        if now - stored > STORE or spent >= run.training:
            stored = now
            save_state(run.checkpoint, dict(learned=learned(student), optimizer=optimizer.state_dict(),
                                            spent=spent, done=done))
    bar.close()


def learned(student):
    """{name: weight} of those that learn."""
    return {name: weight for name, weight in student.named_parameters() if weight.requires_grad}


def resume(student, optimizer, checkpoint):
    """(seconds spent, steps done), as the checkpoint has them; the student and its optimizer become its."""
    if not checkpoint.exists():
        return 0.0, 0
    saved = torch.load(checkpoint, map_location=student.cos.device, weights_only=True)
    student.load_state_dict(saved['learned'], strict=False)
    optimizer.load_state_dict(saved['optimizer'])
    return saved['spent'], saved['done']


# ------------------------------------------------------------------------------------- how good it is

@torch.no_grad()
def agreed(student, target, lesson):
    """[n] whether the student's favourite is the target's, for each token of a text, all before it given."""
    ids, at, said = batch([lesson])
    ids = ids.to(target.cos.device)
    hidden = student(ids, torch.arange(ids.shape[1], device=ids.device), student.full)[0, at[0]]
    found = []
    for mine, theirs in zip(hidden.split(PLACES), said.to(hidden.device).split(PLACES)):
        found.append(student.logits(mine).argmax(-1) == target.logits(theirs).argmax(-1))
    return torch.cat(found).tolist()


def cycles_over(places, gamma=GAMMA):
    """The cycles in which greedy decoding writes a text; places: see agreed."""
    cycles = 0
    begin = 0
    while begin < len(places):
        run = 0
        for good in places[begin:begin + gamma]:
            if not good:
                break
            run += 1
        begin += run + 1
        cycles += 1
    return cycles


def held_out_figures(student, target, lessons):
    """{acceptance: share of places where both have one favourite, tokens_a_cycle: greedily, at GAMMA}."""
    same = 0
    tokens = 0
    cycles = 0
    for lesson in lessons:
        places = agreed(student, target, lesson)
        same += sum(places)
        tokens += len(places)
        cycles += cycles_over(places)
    return dict(acceptance=same / tokens, tokens_a_cycle=tokens / cycles)


# ------------------------------------------------------------------------------------------ the folder

def save(student, kept, pair, out):
    """Writes the Hugging Face folder: config.json, weights in the pair's dtype, the tokenizer's files."""
    source = File(pair.target)
    raw = read_json(source / 'config.json')
    raw.pop('dtype', None)                              # transformers 5's name of the next one
    dtype = DTYPES[pair.dtype]
    raw.update(num_hidden_layers=len(kept), torch_dtype=str(dtype).removeprefix('torch.'))
    if raw.get('layer_types'):
        raw['layer_types'] = [raw['layer_types'][layer] for layer in kept]
    mixtures = student.config.mixtures
    if any(mixtures):
        dense = [layer for layer, experts in enumerate(mixtures) if not experts]
        raw.update(mlp_only_layers=dense, decoder_sparse_step=1)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name not in OWN:
            with whole(out / file.name) as copy:
                shutil.copyfile(file, copy)
    weights = {}
    for name, weight in student.named_parameters():     # a tied head is not among them
        weights[name] = weight.detach().to('cpu', dtype).contiguous()
    save_weights(out / 'model.safetensors', weights)
    write_json(out / 'config.json', raw)


@dataclass
class Run:
    """Where a run writes, and for how long."""
    out: File
    minutes: float
    layers: int
    tokens: int         # of a training step

    @property
    def folder(self):
        return self.out / 'run'

    @property
    def checkpoint(self):
        return self.folder / 'checkpoint.pt'

    @property
    def writing(self):
        return 60 * self.minutes * WRITING

    @property
    def training(self):
        return 60 * self.minutes * (1 - WRITING)

    def open(self, pair):
        """Makes the folders; ValueError where they are of other models, prompts or layers."""
        head = for_json(pair.head('distil', HELD) | dict(layers=self.layers))
        where = self.folder / 'settings.json'
        found = read_json(where) if where.exists() else head
        other = [name for name in head if found.get(name) != head[name]]
        expect(not other, f'--out {self.out}: a run with other {", ".join(other)}; give another folder')
        empty = where.exists() or not (self.out / 'config.json').exists()
        expect(empty, f'--out {self.out}: a model is there already; give another folder')
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(where, head)


def shuffled(pair):
    """The pair's Prompts in an order of their own; the first HELD are held out."""
    prompts = pair.texts((), sys.maxsize)
    random.Random(0).shuffle(prompts)
    expect(len(prompts) > HELD, f'{len(prompts)} prompts of {pair.longest} tokens or fewer; expected more '
           f'than {HELD}, which are held out')
    return prompts


def distil(pair, run):
    """Makes the draft of a pair's target; prints its held-out figures before and after."""
    target, _, eos = pair.network('target')
    take_threads(target)
    L = target.config.num_hidden_layers
    if run.layers is None:
        run.layers = max(2, round(L / 6))
    expect(2 <= run.layers < L, f'--layers {run.layers}: expected 2 to {L - 1}, fewer than the target has')
    context = pair.longest + pair.max_new
    most = target.config.max_position_embeddings
    expect(context <= most, f'--longest and --max-new: {context} tokens; the context has {most}')
    target.set_context(context)
    prompts = shuffled(pair)
    run.open(pair)
    lines = [json.dumps(prompt.row) + '\n' for prompt in prompts[:HELD]]
    write_text(run.out / 'held_out.jsonl', ''.join(lines))
    blanks = [Blank(prompt.ids, len(prompt.ids) + pair.max_new) for prompt in prompts]
    held, others = blanks[:HELD], blanks[HELD:]
    texts = Texts(run.folder, target, eos)
    exam = texts.held_out(held)
    lessons = texts.for_training(others, run.writing)
    kept = kept_layers(L, run.layers)
    student = student_of(target, kept)
    print('untrained:', in_words(held_out_figures(student, target, exam)), flush=True)
    train(student, target, lessons, run)
    save(student, kept, pair, run.out)
    tokens = sum(len(lesson.solution) for lesson in lessons)
    print(f'{run.out}: layers {kept} of {L}, {student.read_bytes(student.full) / 1e6:.0f} MB of fp32 a pass; '
          f'{len(lessons)} texts, {tokens:,} tokens')
    print('held out:', in_words(held_out_figures(student, target, exam)), flush=True)


def in_words(figures):
    return (f'its favourite is the target\'s at {figures["acceptance"]:.1%} of the places; '
            f'{figures["tokens_a_cycle"]:.2f} tokens a cycle at gamma {GAMMA}')


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--target', metavar='DIR', required=True, help='a Hugging Face folder')
    add('--prompts', metavar='FILE', nargs='+', required=True,
        help='JSON lines with a prompt, question or turns')
    add('--chat', action='store_true', help="put prompts into the target's chat template")
    add('--minutes', type=float, default=20, help=f'{WRITING:.0%} to write texts, the rest to train')
    add('--out', metavar='DIR', required=True, help='the folder to write')
    add('--layers', type=int, help="of the draft (default: a sixth of the target's)")
    add('--max-new', type=int, default=200, help='tokens that a text has at most (default: 200)')
    add('--longest', type=int, default=512, help='tokens of a prompt; longer ones are passed over')
    add('--tokens', type=int, default=2048, help='of a training step, prompts included')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    add('--dtype', choices=DTYPES, default='fp32', help='of the target and of what is saved')
    return parser.parse_args()


def main():
    """Runs the program; returns its exit status: 0, 2 for bad input, 130 for Ctrl-C."""
    args = parse()
    return exit_status('lab.distil', lambda: run(args))


def run(args):
    try:
        for name in ('minutes', 'tokens', 'max_new', 'longest'):
            value = getattr(args, name)
            expect(value > 0, f'--{name.replace("_", "-")} {value}: expected above 0')
        device = pick_device(args.device)
        pair = Pair(args.target, '', tuple(args.prompts), args.chat, args.max_new, args.longest, device,
                    args.dtype)
        distil(pair, Run(File(args.out), args.minutes, args.layers, args.tokens))
    except KeyboardInterrupt:
        print('interrupted: the same command goes on', file=sys.stderr)
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
