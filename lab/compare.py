"""A run beside plain decoding: the first difference, a table of methods, whether drafting pays."""
import sys

from tqdm import tqdm

from lab.tasks import grade
from verify import whole_passes


def check(engine, ids, tokens):
    """A sentence that names the first of these tokens that plain decoding would not have written, if any."""
    wanted = tokens_of(engine.write(ids, 'ar')[1])
    i = next((i for i, (a, b) in enumerate(zip(tokens, wanted)) if a != b), None)
    if i is None:
        same = f'check: equal to plain decoding for all {min(len(tokens), len(wanted))} tokens'
        return same + ('.' if len(tokens) == len(wanted)
                       else f', but {len(tokens)} tokens long instead of {len(wanted)}.')
    reader = engine.readers['target']
    logits = reader.read(ids + wanted[:i], [], reader.model.full, 1)[0]
    word = lambda t: repr(engine.tokenizer.decode([t], skip_special_tokens=False))
    return (f'check: differs from plain decoding at token {i}: {word(tokens[i])} ({tokens[i]}) instead of '
            f'{word(wanted[i])} ({wanted[i]}); logit gap {float(logits[wanted[i]] - logits[tokens[i]]):.2g}.')


def compare(engine, rows, prompts, names):
    """Lines of a table of the methods for each task, and one for the rows that name none.

    The methods are run in turn on each prompt, so that noise falls on all alike.
    """
    methods, tables = {name: engine.write(prompts[0], name)[0] for name in names}, {}       # a warming round
    for row, ids in zip(rows, tqdm(prompts, desc='compare', file=sys.stderr, disable=None)):
        asked, traces = tables.setdefault(str(row.get('task') or ''), ([], {name: [] for name in names}))
        asked.append(row)
        for name in names:
            traces[name].append(engine.write(ids, name)[1])
    for task, (asked, traces) in tables.items():
        yield from [f'{task}, {len(asked)} prompts'] if task else []
        yield from table(engine, asked, methods, traces)


def table(engine, rows, methods, traces):
    """Lines: what each method measured, then its break-even. traces: {method: [list of Cycles of a row]}."""
    cycles = {name: sum(texts, []) for name, texts in traces.items()}
    stats = {name: engine.statistics(cycles[name]) for name in methods}
    plain, cell = stats['ar'], lambda x, form: '-' if x is None else format(x, form)
    speedup = {name: s['tokens_per_second'] / plain['tokens_per_second'] for name, s in stats.items()}
    yield 'method          tokens/s   x ar    right  accepted block eff.  passes/token  like ar'
    for name, s in stats.items():
        kind = 'lossless' if engine.lossless(methods[name]) else 'LOSSY'
        texts = [engine.tokenizer.decode(tokens_of(trace)) for trace in traces[name]]
        right = share_right([grade(row, text) for row, text in zip(rows, texts)])
        like = agreement(traces[name], traces['ar']) if engine.args.temperature == 0 else None
        passes = whole_passes(s['passes']) / sum(s['labels'].values())
        yield (f'{name:14} {s["tokens_per_second"]:9.1f} {speedup[name]:6.2f} {cell(right, ".1%"):>8} '
               f'{cell(s["acceptance_rate"], ".1%"):>9} {cell(s["block_efficiency"], ".2f"):>10} '
               f'{passes:13.3f} {cell(like, ".1%"):>8} {kind}')
    one = sum(c.passes['target/full'][2] for c in cycles['ar']) / plain['cycles']
    for name in list(methods)[1:]:
        yield f'{name}: {break_even(cycles[name], one)} Seen: {speedup[name]:.2f}.'


def agreement(texts, others):
    """The mean share of places at which two lists of texts hold the same token; samples differ by chance."""
    shares = []
    for pair in zip(texts, others):
        a, b = map(tokens_of, pair)
        shares.append(sum(x == y for x, y in zip(a, b)) / max(len(a), len(b)))
    return sum(shares) / len(shares)


def tokens_of(cycles):
    """The ids that the Cycles of one text committed."""
    return [token for cycle in cycles for token in cycle.tokens]


def share_right(grades):
    """The share of True among the grades that are not None; None if nothing was graded."""
    graded = [g for g in grades if g is not None]
    return sum(graded) / len(graded) if graded else None


def conclude(session, method, cycles, reports):
    """Sentences for the end of a run: the break-even, the method's own remarks, the share of right texts."""
    if reports[-1]['method'] != 'ar':
        yield break_even(cycles, decode_seconds(session))
    yield from method.remarks(cycles, reports)
    if session.sparse:
        yield from session.sparse.remarks(cycles, reports)
    grades = [report.get('right') for report in reports]
    if (share := share_right(grades)) is not None:
        yield f'right: {grades.count(True)} of {len(grades) - grades.count(None)} graded texts ({share:.1%})'


def break_even(cycles, decode_seconds):
    """In plain words, whether drafting pays here: measured costs, and the speed that they and alpha predict.

    decode_seconds: one target pass over one position.
    Source: Leviathan et al. 2023, theorem 3.8, with measured costs.
    """
    spent = dict(target=[0, 0.0], draft=[0, 0.0])       # role -> passes, seconds
    for cycle in cycles:
        for path, (n, _, seconds) in cycle.passes.items():
            role = spent.setdefault(path.split('/')[0], [0, 0.0])
            role[0], role[1] = role[0] + n, role[1] + seconds
    verdicts = [j['kept'] for c in cycles for j in c.judged]
    if not verdicts:
        return 'break-even: nothing was drafted, so there is nothing to compare.'
    c, v = (seconds / max(n, 1) / decode_seconds for n, seconds in (spent['draft'], spent['target']))
    a, lengths = sum(verdicts) / len(verdicts), [len(c.drafted) for c in cycles]
    gamma = sum(lengths) / len(lengths)
    tokens = sum(a ** k for n in lengths for k in range(n + 1)) / len(lengths)
    if any(len(c.tokens) != c.accepted + 1 for c in cycles):    # else each cycle adds one: the formula's case
        tokens = sum(len(c.tokens) for c in cycles) / len(cycles)
    cost = sum(seconds for _, seconds in spent.values()) / len(cycles) / decode_seconds
    drafting = f'a draft pass costs {c:.2f} and ' if spent['draft'][0] else ''
    return (f'break-even: {drafting}a verifying pass {v:.2f} of a decoding pass; '
            f'{a:.0%} acceptance of {gamma:.1f} drafted tokens gives {tokens:.2f} a cycle for the time of '
            f'{cost:.2f} decoding passes: {tokens / cost:.2f} times plain decoding predicted'
            + (', not worth it here.' if tokens <= cost else '.'))


def decode_seconds(session):
    """Seconds of one target pass over one position, here and now: the median of five."""
    reader, times = session.target, []
    for _ in range(5):
        reader.read(session.tokens[:-1], [], reader.model.full, 1)
        times.append(reader.take()['full'][2])
    return sorted(times)[2]
