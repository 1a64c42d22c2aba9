"""Where the time of a run goes: `python -m lab.times FLAGS` writes the texts that specmini's flags ask for.

Then it prints tables of pass times and of acceptance by position, and the best gamma: see SPEED.md.
"""
import sys
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median

import torch

import kernels
from lab import read_bytes
from lab.measure import moment
from model import require_that
from specmini import cycles_of, exit_status, parse, statistics, table, write_texts
from verify import Autoregressive, Exact, decode, readers_of

BLOCKS = 0, 1, 2, 3, 4, 5, 7, 9, 11, 16     # draft tokens of the blocks whose passes are timed
TIMING = 2.0            # seconds after which no further round of them begins
SURE = 30               # judged draft tokens from which a gamma is advised
STEPS = 8               # of plain decoding, of which the median is taken


def parse_run(argv):
    """specmini's flags; BadInput for those that print something else."""
    args = parse(argv)
    for name in ('json', 'list', 'show'):
        require_that(getattr(args, name) in (None, False), f'--{name}: only specmini.py has it; leave it out')
    return args


def run(argv):
    """Writes the texts and prints the tables of each method."""
    methods, weights = {}, {}
    for text in write_texts(parse_run(argv)):
        weights |= weights_of(text.session)
        methods.setdefault(text.name, []).append(text)
    for texts in methods.values():
        for line in times(texts, weights):
            print(line, flush=True)


def times(texts, weights):
    """Lines on the specmini.Texts of one method; weights: see weights_of."""
    yield from table(texts)
    session = texts[-1].session
    cycles = cycles_of(texts)
    stats = statistics(cycles)
    step = plain_step(session)
    parts = session.drafter.model.modules() if session.drafter else ()
    eight = any(isinstance(part, kernels.Int8) for part in parts)
    yield (f'a step of plain decoding takes {1000 * step:.3g} ms; {texts[0].name} was '
           f'{stats["tokens_per_second"] * step:.2f} times as fast' + ', its draft in 8 bits' * eight)
    if isinstance(texts[0].method, Exact):              # others judge no blocks
        drafted = {len(cycle.drafted) for cycle in cycles}
        verify, busy = time_passes(session.target, session.tokens, session.target_path(), drafted)
        draft = {0: 0.0}
        if session.drafter:
            draft, _ = time_passes(session.drafter, session.tokens, session.drafter.model.full, {0}, ())
        plain_sd = type(texts[0].method) is Exact
        yield from speed_tables(plain_sd, cycles, verify, draft[0], step, busy)
        if busy:
            yield 'the machine is busy: equal passes took times that differ by more than a third'
    wrote = ', '.join(f'{n} {label}' for label, n in stats['labels'].items())
    read = sum(n * weights[path] for path, n in stats['passes'].items())
    yield (f'tokens: {wrote}; {read / 1e9 / stats["seconds"]:.1f} GB of weights read a second; '
           f'peak memory: {peak_memory(texts[0].engine.device):.1f} GB')


def plain_step(session):
    """Seconds of a step of plain decoding: the median of STEPS that end where the text does."""
    n = min(STEPS, len(session.tokens) - 1)
    again = replace(session, tokens=session.tokens[:-n], tokens_left=n, eos=frozenset())
    return median(cycle.seconds for cycle in decode(again, Autoregressive()))


def weights_of(session):
    """{reader/path: weight bytes that one pass reads} of the paths in the logs of a session's readers."""
    weights = {}
    for role, reader in readers_of(session).items():
        paths = dict(full=reader.model.full) | {path.name: path for path, *_ in reader.log}
        weights |= {f'{role}/{name}': read_bytes(reader.model, path) for name, path in paths.items()}
    return weights


def peak_memory(device):
    """GB that this process has held at most, of the GPU or of the machine."""
    if device == 'cuda':
        return torch.cuda.max_memory_allocated() / 1e9
    import resource                                     # not on Windows
    unit = 1 if sys.platform == 'darwin' else 1024      # bytes on macOS, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def acceptance_by_place(cycles):
    """[kept, judged] of the draft tokens at the first position of a block, at the second, ...

    Conditional acceptance: counts only blocks that reached this position. A judged step has one position.
    """
    places = []
    for cycle in cycles:
        place = 0
        for judged in cycle.judged:
            if place == len(places):
                places.append([0, 0])
            places[place][0] += judged.kept
            places[place][1] += 1
            place += judged.kept
    return places


def speed_tables(plain_sd, cycles, verify, draft, step, busy=False):
    """Lines of two tables, pass times and acceptance by position, and of plain `sd` the gamma that pays.

    verify: {n: seconds of a target pass over n draft tokens and the root}; draft: of a draft pass; busy: as
    time_passes has it.
    """
    places = acceptance_by_place(cycles)

    def line(head, cells):
        return f'{head:27}' + ''.join(f'{cells.get(n, ""):>6}' for n in verify).rstrip()
    yield line('n draft tokens', {n: n for n in verify})
    yield line('pass over n + 1, ms', {n: f'{1000 * t:.3g}' for n, t in verify.items()})
    if not places:
        return
    yield line('kept at position n', {n: f'{a / b:.0%}' for n, (a, b) in enumerate(places, 1)})
    yield line('  of so many judged', {n: b for n, (_, b) in enumerate(places, 1)})
    if plain_sd and draft:
        rest = sum(cycle.seconds - verify[len(cycle.drafted)] for cycle in cycles)
        rest -= draft * sum(cycle.passes.get('draft/full', (0, 0))[0] for cycle in cycles)
        passes = sum(n for cycle in cycles for n, _ in cycle.passes.values())
        rest = max(0.0, rest / passes)                  # of a pass: draws, and Python
        v = {n: (seconds + rest) / step for n, seconds in verify.items()} | {0: 1.0}
        kept, judged = map(sum, zip(*places))
        speeds = {n: speedup(kept / judged, n, (draft + rest) / step, v[n]) for n in v}
        yield line('  times ar at gamma n', {n: f'{x:.2f}' for n, x in speeds.items()})
        best = min(n for n, speed in speeds.items() if speed >= 0.98 * max(speeds.values()))
        advice = f'{best}, {speeds[best]:.2f} times plain decoding' if best else 'none, drafting does not pay'
        if judged < (SURE if kept else SURE // 3):      # 0 of 10: 26 % is the most that can be, by 95 %
            advice = 'too few tokens were judged to tell'
        if busy:
            advice = 'no verdict, because the machine is busy'
        yield f'break-even: a draft pass takes {draft / verify[0]:.2f} of a target pass; best gamma: {advice}'


def speedup(alpha, gamma, c, v):
    """The speed of blocks of gamma over plain decoding, if each guess is kept with chance alpha.

    c: a draft pass, v: the rest of a cycle, both in plain steps.
    Source: Leviathan et al. 2023, equation 1 and theorem 3.8, where v is 1.
    """
    return sum(alpha ** i for i in range(gamma + 1)) / (gamma * c + v)


def time_passes(reader, tokens, path, drafted, blocks=BLOCKS):
    """({n: seconds of a pass over the last n + 1 of these tokens}, whether the machine is busy).

    n of blocks and drafted; of a compiled reader drafted alone, because others would have to be compiled.
    After a round that warms up come ten, or as many as TIMING allows. The fastest one counts, and no pass is
    slower than a longer one. Busy: a median is a third above the fastest.
    """
    blocks = drafted | {0} if reader.compiled else drafted.union(blocks)
    seconds = {n: [] for n in sorted(blocks) if n < len(tokens)}
    begin = moment()
    for turn in range(11):
        if turn > 1 and moment() - begin > TIMING:
            break
        for n in seconds:
            start = moment()
            reader.read(tokens, path, n + 1)
            seconds[n].append(moment() - start)
    fastest = {}
    best = inf
    for n in reversed(seconds):
        best = fastest[n] = min(best, *seconds[n][1:])
    busy = any(median(some[1:]) > 4 / 3 * min(some[1:]) for some in seconds.values())
    return dict(sorted(fastest.items())), busy


main = partial(exit_status, 'lab.times', lambda: run(sys.argv[1:]))         # returns the exit status

if __name__ == '__main__':
    sys.exit(main())
