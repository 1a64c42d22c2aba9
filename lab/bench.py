"""The README's figures, each made by one command.

`python -m lab.bench quality` grades the embedded models on held-out rows; `python -m lab.bench speed` times
the pair, or a random one of 0.1 B parameters, against transformers (which must be installed) on the same
weights, prompts, threads and dtype. Everything compared is run in turn on every prompt, so that a noisy
machine is noisy for all; whole calls are timed, prompt included. `python -m lab.bench pass` times one
verifying pass, dense and sparse (lab/sparse/passes.py); `python -m lab.bench blocks` draws what it reads.
"""
import argparse
import json
import math as maths
import statistics
import sys
import tempfile
import time
from pathlib import Path as File

import torch
from safetensors.torch import save_file
from torch.nn import functional
from tqdm import tqdm

from lab import tasks
from lab.common import held_out_rows
from lab.sparse import passes
from model import Transformer, load, read_calibration, read_config
from specmini import Engine
from verify import Autoregressive, Exact, tokens_of

HOME = File(__file__).parent / 'models'
RATIOS = [('specmini ar', 'transformers generate'), ('specmini ar --compile', 'transformers generate'),
          ('specmini sd', 'transformers assisted'), ('specmini sd', 'specmini ar'),
          ('specmini sd --compile', 'specmini ar --compile')]       # what speed prints, where it has both


def prompts_of(rows, tokenizer):
    """The prompts of rows as lists of ids."""
    return [tokenizer.encode(row['prompt']).ids for row in rows]


def written(engine, ids, method):
    """(text, cycles) that an engine writes after a prompt."""
    cycles = engine.write(ids, method)
    return engine.tokenizer.decode(tokens_of(cycles)), cycles


# ------------------------------------------------------------------------------------------------- quality

def quality(n):
    """Prints a table, a row a task: n held-out rows, greedy. What each model gets right; sd with gamma 4."""
    names = [name for name in ('target', 'draft', 'mid', 'moe') if (HOME / name / 'config.json').exists()]
    engines = {}
    for name in names:
        draft = HOME / 'draft' if name == 'target' else 'none'
        engines[name] = Engine(target=HOME / name, draft=draft, max_new=200)
    print('| task |', ' | '.join(names), '| acceptance | block efficiency | `sd` = `ar` |')
    print('|---|' + '--:|' * (len(names) + 3), flush=True)
    for task in tasks.TASKS:
        cells = quality_cells(task, held_out_rows(task, n, seed=7), engines)
        print('|', ' | '.join([f'`{task}`', *cells]), '|', flush=True)


def quality_cells(task, rows, engines):
    """The texts of one row of the table: a figure for each engine, then sd's three."""
    target = engines['target']
    prompts = prompts_of(rows, target.tokenizer)
    for engine in engines.values():
        engine.open(prompts)
    texts = {name: [] for name in engines}
    sd_cycles = []
    same = 0
    for ids in tqdm(prompts, desc=task, file=sys.stderr):
        for name, engine in engines.items():
            text, _ = written(engine, ids, Autoregressive())
            texts[name].append(text)
        text, cycles = written(target, ids, Exact())
        same += text == texts['target'][-1]
        sd_cycles += cycles
    stats = target.statistics(sd_cycles)
    cells = [figure(task, rows, texts[name], engine) for name, engine in engines.items()]
    acceptance = f'{stats["acceptance_rate"]:.1%}'
    return cells + [acceptance, f'{stats["block_efficiency"]:.2f}', f'{same} of {len(rows)}']


def figure(task, rows, texts, engine):
    """How good the texts of one model are, as words: the share right, BLEU, ROUGE-L, facts found; a
    story's perplexity."""
    if task == 'story':
        return perplexity(rows, engine)
    right = [tasks.grade(row, text) for row, text in zip(rows, texts)]
    figures = [f'{sum(right) / len(rows):.1%}']
    if task == 'translate':
        references = [[row['answer']] for row in rows]
        stripped = [text.strip() for text in texts]
        figures.append(f'BLEU {tasks.bleu(references, stripped):.2f}')
    if task == 'summary':
        rouge = statistics.fmean(tasks.rouge_l(row['answer'], text) for row, text in zip(rows, texts))
        facts = statistics.fmean(map(tasks.facts_found, rows, texts))
        figures += [f'ROUGE-L {rouge:.2f}', f'facts {facts:.1%}']
    return ', '.join(figures)


def perplexity(rows, engine):
    """A model's perplexity per token of the rows' stories over that of the grammar which made them."""
    reader = engine.readers['target']
    nats = 0.0
    grammar = 0.0
    count = 0
    for row in rows:
        prompt = engine.tokenizer.encode(row['prompt']).ids
        story = engine.tokenizer.encode(row['solution']).ids
        logits = reader.read(prompt + story[:-1], [], reader.model.full, len(story))
        loss = functional.cross_entropy(logits, torch.tensor(story), reduction='sum')
        nats += loss.item()
        grammar += row['nats']
        count += len(story)
    mine = maths.exp(nats / count)
    best = maths.exp(grammar / count)
    return f'{mine:.2f} (grammar {best:.2f}, +{mine / best - 1:.0%})'


# --------------------------------------------------------------------------------------------------- speed

def random_pair(folder):
    """Saves a random llama of 0.1 B parameters and, as its draft, its first 2 layers; returns both folders.

    What the layers add is small beside the embedding, so that the draft is often right although nothing was
    learned.
    """
    torch.manual_seed(0)
    tokenizer = (HOME / 'target' / 'tokenizer.json').read_text()
    vocabulary = json.loads(tokenizer)['model']['vocab']
    shape = dict(model_type='llama', architectures=['LlamaForCausalLM'], hidden_act='silu', hidden_size=768,
                 rms_norm_eps=1e-6, intermediate_size=2304, num_attention_heads=12, num_key_value_heads=4,
                 head_dim=64, rope_theta=10000.0, vocab_size=len(vocabulary), max_position_embeddings=2048,
                 tie_word_embeddings=False)
    weights = None
    homes = []
    for name, layers in (('target', 15), ('draft', 2)):
        home = folder / name
        home.mkdir()
        (home / 'config.json').write_text(json.dumps(shape | dict(num_hidden_layers=layers)))
        (home / 'tokenizer.json').write_text(tokenizer)
        model = Transformer(read_config(home))
        if weights is None:
            randomise(model)
            weights = model.state_dict()
        own = {key: weights[key] for key in model.state_dict()}
        save_file(own, home / 'model.safetensors', metadata=dict(format='pt'))
        homes.append(home)
    return homes


def randomise(model):
    """Random matrices, smaller in what the layers add; norms stay as they are."""
    for key, weight in model.named_parameters():
        if weight.ndim == 2:
            small = key.endswith(('o_proj.weight', 'down_proj.weight'))
            torch.nn.init.normal_(weight, std=0.02 if small else 0.05)


def contestants(engine, compiled, theirs, assistant, gamma, length):
    """{name: function from prompt ids to number of tokens written}, greedy, to the end token or `length`."""
    import transformers

    def ours(engine, method):
        def run(ids):
            return len(tokens_of(engine.write(ids, method)))
        return run

    def generate(**how):
        settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=length, pad_token_id=0,
                                                 eos_token_id=theirs.generation_config.eos_token_id)

        def run(ids):
            with torch.inference_mode():
                whole = theirs.generate(torch.tensor([ids]), generation_config=settings, **how)
                return whole.shape[1] - len(ids)
        return run
    # fixed length: no schedule, no confidence stop
    assistant.generation_config.num_assistant_tokens = gamma
    assistant.generation_config.num_assistant_tokens_schedule = 'constant'
    assistant.generation_config.assistant_confidence_threshold = 0.0
    runs = {'transformers generate': generate(),
            'transformers assisted': generate(assistant_model=assistant),
            'specmini ar': ours(engine, Autoregressive()),
            'specmini sd': ours(engine, Exact(gamma))}
    if compiled:
        runs['specmini ar --compile'] = ours(compiled, Autoregressive())
        runs['specmini sd --compile'] = ours(compiled, Exact(gamma))
    return runs


def speed(pair, n, gamma, threads, length, compiled):
    """Prints tokens a second over n held-out prompts of each task, and the ratios that the README quotes."""
    import transformers
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        homes = random_pair(File(folder)) if pair == 'random' else [HOME / 'target', HOME / 'draft']
        settings = dict(max_new=length, threads=threads, device='cpu', dtype='fp32')
        engine = Engine(*homes, **settings)
        fast = Engine(*homes, compile=True, **settings) if compiled else None
        theirs = []
        for home in homes:
            network = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
            theirs.append(network.eval())
    runs = contestants(engine, fast, *theirs, gamma, length)
    timings = {name: [] for name in runs}
    for task in ('math', 'table'):
        prompts = prompts_of(held_out_rows(task, n, seed=7), engine.tokenizer)
        engine.open(prompts)
        if fast:
            fast.open(prompts)                          # a compiled pass reads all of a cache: one a task
        time_prompts(runs, prompts, timings, task)
    print(f'{pair} pair, {torch.get_num_threads()} threads, {2 * n} prompts, gamma {gamma}, fp32, '
          f'torch {torch.__version__}')
    print_speeds(timings, n)


def time_prompts(runs, prompts, timings, task):
    """Adds to timings[name] a pair (tokens, seconds) for each prompt; a first round warms up and compiles."""
    longest = max(prompts, key=len)
    for i, ids in enumerate(tqdm([longest, *prompts], file=sys.stderr, desc=task)):
        for name, run in runs.items():
            begin = time.perf_counter()
            count = run(ids)
            seconds = time.perf_counter() - begin
            if i > 0:
                timings[name].append((count, seconds))


def print_speeds(timings, n):
    """Prints a line for each contestant, then the RATIOS; n timings are of math, then n of table."""
    plain = [count for count, _ in timings['specmini ar']]
    for name, pairs in timings.items():
        counts = [count for count, _ in pairs]
        rate = speed_of(pairs)
        spread = statistics.stdev(count / seconds for count, seconds in pairs) / rate
        equal = sum(mine == other for mine, other in zip(counts, plain))
        print(f'{name:24} {rate:8.1f} tokens/s (per prompt: deviation {spread:.0%}), {sum(counts)} tokens, '
              f'equal length in {equal}')
    for name, other in RATIOS:
        if name in timings and other in timings:
            mine = timings[name]
            theirs = timings[other]
            whole = speed_of(mine) / speed_of(theirs)
            math = speed_of(mine[:n]) / speed_of(theirs[:n])
            table = speed_of(mine[n:]) / speed_of(theirs[n:])
            print(f'{name} / {other}: {whole:.2f} times as fast (math {math:.2f}, table {table:.2f})')


def speed_of(pairs):
    """Tokens a second of pairs (tokens, seconds)."""
    tokens = sum(count for count, _ in pairs)
    return tokens / sum(seconds for _, seconds in pairs)


# ----------------------------------------------------------------------------------------- command line

def blocks():
    """Prints which blocks one verifying pass reads of a table of 400 to 450 tokens."""
    target, tokenizer, _ = load(HOME / 'target')
    for row in tasks.rows('table', 7):
        if 400 < len(tokenizer.encode(row['prompt']).ids) < 450:
            break
    calibration = read_calibration(HOME / 'target', sections=['sparse'])
    for line in passes.draw_blocks(target, tokenizer, row, calibration, block=8):
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('quality', 'speed', 'pass', 'blocks'))
    parser.add_argument('--n', type=int, help='held-out rows of each task (300 for quality, 10 for speed)')
    parser.add_argument('--pair', choices=('embedded', 'random'), default='embedded')
    parser.add_argument('--gamma', type=int, default=4)
    parser.add_argument('--length', type=int, default=120, help='tokens to write at most')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--shape', choices=passes.SHAPES, default='small', help='of pass: the random model')
    parser.add_argument('--layers', type=int, help='of pass: fewer than the shape has')
    parser.add_argument('--contexts', type=int, nargs='+', default=[512, 2048, 8192], help='of pass')
    parser.add_argument('--positions', type=int, nargs='+', default=[6], help='of pass: 1 to 16 new ones')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu', help='of pass')
    args = parser.parse_args()
    if args.what == 'quality':
        quality(args.n or 300)
    elif args.what == 'blocks':
        blocks()
    elif args.what == 'pass':
        torch.set_num_threads(args.threads)
        passes.print_forms(args.shape, args.layers, args.contexts, args.positions, args.compile, args.device)
    else:
        speed(args.pair, args.n or 10, args.gamma, args.threads, args.length, args.compile)


if __name__ == '__main__':
    main()
