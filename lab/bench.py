"""The README's figures, each made by one command.

`python -m lab.bench quality` grades the embedded models on held-out rows; `python -m lab.bench speed` times
the pair, or a random one of 0.1 B parameters, against transformers (which must be installed) on the same
weights, prompts, threads and dtype. Everything compared is run in turn on every prompt, so that a noisy
machine is noisy for all; whole calls are timed, prompt included. `python -m lab.bench pass` times one
verifying pass, dense and sparse (lab/passes.py); `python -m lab.bench blocks` draws the blocks that it reads.
"""
import argparse
import itertools
import json
import math as maths
import statistics
import sys
import tempfile
import time
from pathlib import Path as File

import torch
from safetensors.torch import save_file
from tqdm import tqdm

import specmini
from lab import passes, tasks
from lab.compare import tokens_of
from model import Transformer, load, read_config

HOME = File(__file__).parent / 'models'


def engine_for(target, draft, **changes):
    """A specmini Engine with the command line's own defaults."""
    flags = ['--prompt', '-', '--target', str(target), '--draft', str(draft)]
    args = specmini.parse(flags + [str(x) for k, v in changes.items()
                                   for x in (f'--{k.replace("_", "-")}', v) if v is not True]
                          + [f'--{k}' for k, v in changes.items() if v is True])
    args.methods = ['ar', 'sd']
    return specmini.Engine(args)


def held_out(tokenizer, task, n):
    """n held-out rows of a task and their prompts as ids."""
    rows = list(itertools.islice(tasks.rows(task, 7), n))
    return rows, [tokenizer.encode(r['prompt']).ids for r in rows]


def quality(n):
    """A table, a row a task: n held-out rows, greedy. What each model gets right; sd with gamma 4."""
    names = [name for name in ('target', 'draft', 'mid', 'moe') if (HOME / name / 'config.json').exists()]
    engines = {name: engine_for(HOME / name, HOME / 'draft' if name == 'target' else 'none', max_new=200)
               for name in names}
    print('| task |', ' | '.join(names), '| acceptance | block efficiency | `sd` = `ar` |')
    print('|---|' + '--:|' * (len(names) + 3), flush=True)
    for task in tasks.TASKS:
        rows, prompts = held_out(engines['target'].tokenizer, task, n)
        texts, cycles, same = {name: [] for name in names}, [], 0
        for engine in engines.values():
            engine.open(prompts)
        for ids in tqdm(prompts, desc=task, file=sys.stderr):
            for name, engine in engines.items():
                texts[name].append(engine.tokenizer.decode(tokens_of(engine.write(ids, 'ar')[1])))
            trace = engines['target'].write(ids, 'sd')[1]
            same += engines['target'].tokenizer.decode(tokens_of(trace)) == texts['target'][-1]
            cycles += trace
        s = engines['target'].statistics(cycles)
        cells = [figure(task, rows, texts[name], engine) for name, engine in engines.items()]
        print('|', ' | '.join([f'`{task}`', *cells, f'{s["acceptance_rate"]:.1%}',
                               f'{s["block_efficiency"]:.2f}', f'{same} of {n}']), '|', flush=True)


def figure(task, rows, texts, engine):
    """How good the texts of one model are, as words: the share right, BLEU, ROUGE-L, facts found; a
    story's perplexity."""
    if task == 'story':
        return perplexity(rows, engine)
    words = f'{sum(map(tasks.grade, rows, texts)) / len(rows):.1%}'
    if task == 'translate':
        words += f', BLEU {tasks.bleu([[r["answer"]] for r in rows], [t.strip() for t in texts]):.2f}'
    if task == 'summary':
        rouge = statistics.fmean(tasks.rouge_l(row['answer'], text) for row, text in zip(rows, texts))
        words += f', ROUGE-L {rouge:.2f}, facts {statistics.fmean(map(tasks.facts_found, rows, texts)):.1%}'
    return words


def perplexity(rows, engine):
    """A model's perplexity per token of the rows' stories over that of the grammar which made them."""
    nats, grammar, count, reader = 0.0, 0.0, 0, engine.readers['target']
    for row in rows:
        prompt, story = (engine.tokenizer.encode(row[key]).ids for key in ('prompt', 'solution'))
        logits = reader.read(prompt + story[:-1], [], reader.model.full, len(story))
        nats += torch.nn.functional.cross_entropy(logits, torch.tensor(story), reduction='sum').item()
        grammar += row['nats']
        count += len(story)
    mine, best = (maths.exp(x / count) for x in (nats, grammar))
    return f'{mine:.2f} (grammar {best:.2f}, +{mine / best - 1:.0%})'


def random_pair(folder):
    """Saves a random llama of 0.1 B parameters and, as its draft, its first 2 layers; returns both folders.

    What the layers add is small beside the embedding, so that the draft is often right although nothing was
    learned.
    """
    torch.manual_seed(0)
    tokenizer = HOME / 'target' / 'tokenizer.json'
    shape = dict(model_type='llama', architectures=['LlamaForCausalLM'], hidden_act='silu', hidden_size=768,
                 rms_norm_eps=1e-6, intermediate_size=2304, num_attention_heads=12, num_key_value_heads=4,
                 head_dim=64, rope_theta=10000.0,
                 vocab_size=len(json.loads(tokenizer.read_text())['model']['vocab']),
                 max_position_embeddings=2048, tie_word_embeddings=False)
    weights, homes = None, []
    for name, layers in (('target', 15), ('draft', 2)):
        home = folder / name
        home.mkdir()
        (home / 'config.json').write_text(json.dumps(shape | dict(num_hidden_layers=layers)))
        (home / 'tokenizer.json').write_text(tokenizer.read_text())
        model = Transformer(read_config(home))
        if weights is None:
            for key, p in model.named_parameters():
                if p.ndim == 2:
                    small = key.endswith(('o_proj.weight', 'down_proj.weight'))
                    torch.nn.init.normal_(p, std=0.02 if small else 0.05)
            weights = model.state_dict()
        save_file({key: weights[key] for key in model.state_dict()}, home / 'model.safetensors',
                  metadata=dict(format='pt'))
        homes.append(home)
    return homes


def contestants(engine, compiled, theirs, assistant, gamma, length):
    """{name: function from prompt ids to number of tokens written}, greedy, to the end token or `length`."""
    import transformers

    def ours(e, name):
        return lambda ids: len(tokens_of(e.write(ids, name)[1]))

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
    table = {'transformers generate': generate(),
             'transformers assisted': generate(assistant_model=assistant),
             'specmini ar': ours(engine, 'ar'), 'specmini sd': ours(engine, 'sd')}
    if compiled:
        table |= {'specmini ar --compile': ours(compiled, 'ar'),
                  'specmini sd --compile': ours(compiled, 'sd')}
    return table


def speed(pair, n, gamma, threads, length, compiled):
    """Tokens per second over n held-out prompts of each task, and the ratios that the README quotes."""
    import transformers
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = random_pair(File(folder)) if pair == 'random' else (HOME / 'target', HOME / 'draft')
        settings = dict(gamma=gamma, max_new=length, threads=threads, device='cpu', dtype='fp32')
        engine = engine_for(target, draft, **settings)
        fast = engine_for(target, draft, **settings, compile=True) if compiled else None
        load = transformers.AutoModelForCausalLM.from_pretrained
        theirs, assistant = (load(f, dtype=torch.float32).eval() for f in (target, draft))
    runs = contestants(engine, fast, theirs, assistant, gamma, length)
    seconds, tokens = {name: [] for name in runs}, {name: [] for name in runs}
    for task in ('math', 'table'):
        prompts = held_out(engine.tokenizer, task, n)[1]
        for e in filter(None, (engine, fast)):
            e.open(prompts)                             # a compiled pass reads all of a cache: one a task
        for i, ids in enumerate(tqdm([max(prompts, key=len)] + prompts, file=sys.stderr, desc=task)):
            for name, run in runs.items():
                begin = time.perf_counter()
                count = run(ids)
                if i:                                   # the first round warms up and compiles
                    seconds[name].append(time.perf_counter() - begin)
                    tokens[name].append(count)
    print(f'{pair} pair, {torch.get_num_threads()} threads, {2 * n} prompts, gamma {gamma}, fp32, '
          f'torch {torch.__version__}')
    speed_of = lambda name, rows: sum(tokens[name][rows]) / sum(seconds[name][rows])
    rate = {name: speed_of(name, slice(None)) for name in runs}
    for name in runs:
        each = [n / s for n, s in zip(tokens[name], seconds[name])]
        print(f'{name:24} {rate[name]:8.1f} tokens/s '
              f'(per prompt: deviation {statistics.stdev(each) / rate[name]:.0%}), '
              f'{sum(tokens[name])} tokens, '
              f'equal length in {sum(a == b for a, b in zip(tokens[name], tokens["specmini ar"]))}')
    for a, b in (('specmini ar', 'transformers generate'), ('specmini ar --compile', 'transformers generate'),
                 ('specmini sd', 'transformers assisted'), ('specmini sd', 'specmini ar'),
                 ('specmini sd --compile', 'specmini ar --compile')):
        if a in rate and b in rate:
            math, table = (speed_of(a, rows) / speed_of(b, rows) for rows in (slice(n), slice(n, None)))
            print(f'{a} / {b}: {rate[a] / rate[b]:.2f} times as fast (math {math:.2f}, table {table:.2f})')


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
        target, tokenizer, _ = load(HOME / 'target')
        row = next(r for r in tasks.rows('table', 7) if 400 < len(tokenizer.encode(r['prompt']).ids) < 450)
        print(*passes.picture(target, tokenizer, row, block=8, ffn_threshold=0.0), sep='\n')
    elif args.what == 'pass':
        torch.set_num_threads(args.threads)
        passes.table(args.shape, args.layers, args.contexts, args.positions, args.compile, args.device)
    else:
        speed(args.pair, args.n or 10, args.gamma, args.threads, args.length, args.compile)


if __name__ == '__main__':
    main()
