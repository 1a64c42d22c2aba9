"""What a run shows: coloured text, its trace, a check, tables, what pays."""
import json
import os
import sys
from math import inf

from tqdm import tqdm

from lab.tasks import grade
from verify import METHODS, Autoregressive, CmAsd, Sparse, SpecGuard, ViaSd, knobs_of, whole_passes

PAINT = dict(draft='32', target='31', bonus='36', slim='33', dim='2', strike='9;2')


class Printer:
    """Shows a text as it is committed, each piece in the colour of who wrote it; never half a character."""

    def __init__(self, tokenizer, color, show):
        self.tokenizer, self.color, self.show = tokenizer, color, show
        self.ids, self.shown, self.cycles = [], '', 0

    def paint(self, text, kind):
        return f'\033[{PAINT.get(kind, "0")}m{text}\033[0m' if self.color and text else text

    def add(self, cycle):
        self.cycles += 1
        if self.show:
            return print(picture(self.cycles, cycle, self), flush=True)
        for token, label in zip(cycle.tokens, cycle.labels):
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids)
            if not text.endswith('\ufffd'):             # else a character whose bytes are not all there yet
                print(self.paint(text[len(self.shown):], label), end='', flush=True)
                self.shown = text

    def finish(self, text):
        """Prints what the stream held back: the bytes of a character that never became whole."""
        if not self.show:
            print(text[len(os.path.commonprefix([text, self.shown])):], flush=True)


class Teller:
    """Tells a run: each text or its JSON, its figures, trace and check, and at the end what they come to."""

    def __init__(self, engine, args):
        self.engine, self.args, self.every, self.reports = engine, args, [], []
        self.trace = open(args.trace, 'w', buffering=1, encoding='utf-8') if args.trace else None  # by line
        self.color = args.color == 'always' or args.color == 'auto' and sys.stdout.isatty()
        self.begin()

    def begin(self):
        """Another text."""
        self.printer, self.cycles = Printer(self.engine.tokenizer, self.color, self.args.show), []

    def add(self, cycle):
        self.cycles.append(cycle)
        if not self.args.json:
            self.printer.add(cycle)

    def finish(self, number, row, session, method):
        """The text is written, or interrupted; number: of its row."""
        found = report(self.engine, row, session, method, self.cycles)
        if self.args.json:
            print(json.dumps(found), flush=True)
        else:
            self.printer.finish(found['text'])
            print(figures(found), file=sys.stderr, flush=True)
        if self.trace:
            lines = (trace_line(number, i, c, self.engine.tokenizer) for i, c in enumerate(self.cycles))
            self.trace.writelines(lines)
        self.every, self.reports = self.every + self.cycles, self.reports + [found]
        self.begin()

    def check(self, ids):
        """Says, if it was asked for, where the latest text, behind the prompt ids, leaves plain decoding."""
        if self.args.check:
            print(check(self.engine, ids, self.reports[-1]['tokens']), file=sys.stderr)

    def conclude(self, session, method):
        for sentence in conclude(self.engine, session, method, self.every, self.reports):
            print(sentence, file=sys.stderr)


def report(engine, row, session, method, cycles):
    """The JSON object of one text; `right` only where the row can be graded."""
    tokens, name = tokens_of(cycles), engine.args.method
    right = grade(row, text := engine.tokenizer.decode(tokens))
    finish = 'eos' if session.ended else 'interrupted' if session.room else 'length'
    graded = {} if right is None else dict(right=right)
    knobs = {k: json_value(getattr(method, f.name)) for k, f in knobs_of(METHODS[name]).items()}
    return dict(text=text, tokens=tokens, prompt_tokens=len(session.tokens) - len(tokens), method=name,
                lossless=lossless(engine, method), knobs=knobs, seed=session.generator.initial_seed(),
                device=engine.device, dtype=engine.dtype, finish=finish,
                stats=engine.statistics(cycles, session.prompt_seconds)) | graded


def lossless(engine, method):
    """Whether this run keeps the target's law; --sparse leaves plain decoding alone."""
    plain = isinstance(method, Autoregressive)
    return method.lossless and (plain or engine.sparse is None or engine.sparse.lossless)


def json_value(x):
    """x, or its name where JSON has none: an infinite knob or threshold."""
    return str(x) if x in (inf, -inf) else x


def trace_line(row, index, cycle, tokenizer):
    """One cycle as a JSON line: ids, text, who wrote what, the judged tokens' scalars, passes, time."""
    passes = {path: dict(passes=n, positions=T, ms=round(seconds * 1000, 3))
              for path, (n, T, seconds) in cycle.passes.items()}
    judged = [{k: json_value(v) for k, v in token.items()} for token in cycle.judged]
    line = dict(prompt=row, cycle=index, drafted=cycle.drafted, judged=judged, tokens=cycle.tokens,
                labels=cycle.labels, text=tokenizer.decode(cycle.tokens), passes=passes,
                ms=round(cycle.seconds * 1000, 3))
    return json.dumps(line) + '\n'


def figures(r):
    """One line of a report: what the run was and what it measured."""
    s, show = r['stats'], lambda name, form: '-' if s[name] is None else format(s[name], form)
    wrote = ', '.join(f'{n} {label}' for label, n in s['labels'].items())
    return (f'{r["method"]} ({"lossless" if r["lossless"] else "LOSSY"}): {len(r["tokens"])} tokens '
            f'({wrote}) in {s["seconds"]:.2f} s, {show("tokens_per_second", ".1f")} tokens/s; '
            f'acceptance {show("acceptance_rate", ".0%")}, block efficiency '
            f'{show("block_efficiency", ".2f")}, {whole_passes(s["passes"])} target passes, '
            f'work {s["work"]:.1f}')


def picture(number, cycle, printer):
    """One cycle as a line: kept tokens, [-rejected-], [+its successor+] ([~by slim~]), (not judged)."""
    def word(token, kind, plain='{}'):
        text = printer.tokenizer.decode([token], skip_special_tokens=False).replace('\n', '\u23ce')
        return printer.paint(text, kind) if printer.color else plain.format(text)
    n = cycle.accepted
    parts = [word(t, 'draft') for t in cycle.tokens[:n]]
    parts += [word(j['token'], 'strike', '[-{}-]') for j in cycle.judged if not j['kept']]
    parts += [word(t, label, '[~{}~]' if label == 'slim' else '[+{}+]')
              for t, label in zip(cycle.tokens[n:], cycle.labels[n:])]
    parts += [printer.paint(f'({word(t, "")})', 'dim') for t in cycle.drafted[len(cycle.judged):]]
    return f'{number:4d}  {n}/{len(cycle.drafted)}  ' + ' '.join(parts)


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

    The methods are run in turn on each prompt, so that noise falls on all alike. Ctrl-C ends the runs: the
    tables are of the prompts that all methods have finished, then the interrupt goes on its way.
    """
    methods, tables = {name: engine.write(prompts[0], name)[0] for name in names}, {}       # a warming round
    stopped = None
    try:
        for i, (row, ids) in enumerate(zip(rows, tqdm(prompts, 'compare', file=sys.stderr, disable=None))):
            new = {name: engine.write(ids, name, i)[1] for name in names}
            asked, traces = tables.setdefault(str(row.get('task') or ''), ([], {name: [] for name in names}))
            asked.append((row, len(ids)))
            for name in names:
                traces[name].append(new[name])
    except KeyboardInterrupt as error:
        stopped = error
    for task, (asked, traces) in tables.items():
        yield from [f'{task}, {len(asked)} prompts'] if task else []
        yield from table(engine, asked, methods, traces)
    if stopped:
        raise stopped


def table(engine, rows, methods, traces):
    """Lines: what each method measured, then its break-even and what else there is to say.

    rows: (row, tokens of its prompt); traces: {method: [list of Cycles of a row]}.
    """
    cycles = {name: sum(texts, []) for name, texts in traces.items()}
    stats = {name: engine.statistics(cycles[name]) for name in methods}
    plain, cell = stats['ar'], lambda x, form: '-' if x is None else format(x, form)
    speedup = {name: s['tokens_per_second'] / plain['tokens_per_second'] for name, s in stats.items()}
    width, reports = max(14, *map(len, stats)), {}
    yield (f'{"method":{width}}  tokens/s   x ar    right  accepted block eff.  passes, positions/token  '
           'like ar')
    for name, s in stats.items():
        kind = 'lossless' if lossless(engine, methods[name]) else 'LOSSY'
        reports[name] = [dict(prompt_tokens=n, tokens=(ids := tokens_of(trace)),
                              right=grade(row, engine.tokenizer.decode(ids)))
                         for (row, n), trace in zip(rows, traces[name])]
        right = share_right([r['right'] for r in reports[name]])
        like = agreement(traces[name], traces['ar']) if engine.args.temperature == 0 else None
        passes, positions = (whole_passes(s[x]) / sum(s['labels'].values()) for x in ('passes', 'positions'))
        yield (f'{name:{width}} {s["tokens_per_second"]:9.1f} {speedup[name]:6.2f} {cell(right, ".1%"):>8} '
               f'{cell(s["acceptance_rate"], ".1%"):>9} {cell(s["block_efficiency"], ".2f"):>10} '
               f'{passes:11.3f} {positions:12.2f} {cell(like, ".1%"):>8} {kind}')
    yield from cut_short(engine, reports['ar'])
    one = sum(c.passes['target/full'][2] for c in cycles['ar']) / plain['cycles']
    for name in list(methods)[1:]:
        yield f'{name}: {break_even(cycles[name], one)} Seen: {speedup[name]:.2f}.'
        for said in (*stage_remarks(methods[name], cycles[name], one),
                     *remarks(methods[name], engine.sparse, cycles[name], reports[name])):
            yield f'{name}: {said}'


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


def conclude(engine, session, method, cycles, reports):
    """Sentences for the end of a run: what cut texts short, the break-even, the method's remarks, grades."""
    yield from cut_short(engine, reports)
    if reports[-1]['method'] != 'ar':
        one = decode_seconds(session)
        yield break_even(cycles, one)
        yield from stage_remarks(method, cycles, one)
    yield from remarks(method, session.sparse, cycles, reports)
    grades = [report.get('right') for report in reports]
    if (share := share_right(grades)) is not None:
        yield f'right: {grades.count(True)} of {len(grades) - grades.count(None)} graded texts ({share:.1%})'


def cut_short(engine, reports):
    """A sentence if texts ended because a context was full."""
    limit, most, lengths = engine.context, engine.args.max_new, [len(r['tokens']) for r in reports]
    n = sum(r['prompt_tokens'] + k == limit and k < most and r['tokens'][-1] not in engine.eos
            for r, k in zip(reports, lengths))
    said = f'{n} of {len(reports)} texts ended before --max-new {most}: the context of {limit} tokens'
    return [f'{said} (of the {engine.shortest}) was full'] if n else []


def break_even(cycles, decode_seconds):
    """In plain words, whether drafting pays here: measured costs, and the speed that they and alpha predict.

    decode_seconds: one target pass over one position.
    Source: Leviathan et al. 2023, theorem 3.8, with measured costs.
    """
    spent = dict(draft=[0, 0.0], slim=[0, 0.0], target=[0, 0.0], mid=[0, 0.0])      # passes, seconds
    for cycle in cycles:
        for path, (n, _, seconds) in cycle.passes.items():
            role = spent['slim' if 'slim' in path else path.split('/')[0]]
            role[0], role[1] = role[0] + n, role[1] + seconds
    verdicts = [j['kept'] for c in cycles for j in c.judged]
    if not verdicts:
        return 'break-even: nothing was drafted, so there is nothing to compare.'
    a, lengths = sum(verdicts) / len(verdicts), [len(c.drafted) for c in cycles]
    gamma = sum(lengths) / len(lengths)
    tokens = sum(a ** k for n in lengths for k in range(n + 1)) / len(lengths)
    if any(len(c.tokens) != c.accepted + 1 for c in cycles):    # else each cycle adds one: the formula's case
        tokens = sum(len(c.tokens) for c in cycles) / len(cycles)
    cost = sum(seconds for _, seconds in spent.values()) / len(cycles) / decode_seconds
    names = dict(draft='draft', slim='slim', target='verifying', mid='middle')
    costs = [f'a {names[role]} pass {seconds / n / decode_seconds:.2f}'
             for role, (n, seconds) in spent.items() if n]
    return (f'break-even: {" and ".join(costs)} of a decoding pass; '
            f'{a:.0%} acceptance of {gamma:.1f} drafted tokens gives {tokens:.2f} a cycle for the time of '
            f'{cost:.2f} decoding passes: {tokens / cost:.2f} times plain decoding predicted'
            + (', not worth it here.' if tokens <= cost else '.'))


def stage_remarks(method, cycles, decode_seconds):
    """In plain words whether the middle stages of a method that has any paid, for as many tokens a cycle.

    With them a cycle costs middle + escalated * full, without them one full pass: the cost-aware criterion.
    decode_seconds: of a target pass over one position, which stands for a full one where none was needed.
    """
    drafted = any(path.startswith('draft/') for c in cycles for path in c.passes)
    if not isinstance(method, ViaSd) or not drafted:    # a target that drafts for itself does so as slim, too
        return []
    spent = [(path, n, seconds) for c in cycles for path, (n, _, seconds) in c.passes.items()]
    middle = sum(seconds for path, _, seconds in spent if 'slim' in path or path.startswith('mid/'))
    full = [(n, seconds) for path, n, seconds in spent if path in ('target/full', 'target/sparse')]
    if not middle:
        return ['middle stage: never needed, so there are no costs to compare.']
    needed = sum(n for n, _ in full)
    one = sum(seconds for _, seconds in full) / needed if needed else decode_seconds
    cost, escalated = middle / len(cycles) / one, needed / len(cycles)
    verdict = 'paid' if escalated < 1 - cost else 'did not pay'
    return [f'middle stage: a cycle spends {cost:.2f} of a full pass on it, and {escalated:.2f} full passes '
            f'besides; it pays where these are fewer than {max(0, 1 - cost):.2f}, so here it {verdict}.']


def decode_seconds(session):
    """Seconds of one target pass over one position, here and now: the median of five."""
    reader, times = session.target, []
    for _ in range(5):
        reader.read(session.tokens[:-1], [], reader.model.full, 1)
        times.append(reader.take()['full'][2])
    return sorted(times)[2]


# ------------------------------------------------------------------------- what a method's trace gives away

def remarks(method, sparse, cycles, reports):
    """Plain sentences on a method, and on the Sparse (or None) that thins it out, from a run's trace.

    reports: the JSON objects of its texts; of these, prompt_tokens, tokens and right are looked at.
    """
    every = [method] if isinstance(method, Sparse) else [method, sparse]
    return [text for one in every for kind, say in REMARKS.items() if isinstance(one, kind)
            for text in say(one, cycles, reports)]


def window_remarks(method, cycles, reports):
    """The paper's failure signatures, as far as one run shows them: a sentence each."""
    verdicts = [j for c in cycles for j in c.judged]
    if not verdicts:
        return []
    a, n = sum(j['kept'] for j in verdicts) / len(verdicts), len(cycles)
    k, seen = sum(len(c.drafted) for c in cycles) / n, sum(len(c.tokens) for c in cycles) / n
    fixed = (1 - a ** (k + 1)) / (1 - a) if a < 1 else 0.0      # Leviathan et al. 2023, equation 1
    rolled = sum(not j['kept'] for j in verdicts) / n
    extra = sum(j['chance'] - min(1, j['p'] / j['q']) for j in verdicts) / len(verdicts)
    signs = [
        (rolled > 0.5, f'{rolled:.0%} of the cycles were rolled back: does C predict acceptance here?'),
        (extra > 0.05, f'{extra:.1%} of the judged tokens were kept although exactness forbids it: if '
                       'quality suffers, raise tau_base or gamma_tau'),
        (seen < fixed, f'no gain over a fixed window: {fixed:.2f} tokens a cycle would be expected from '
                       f'gamma={k:.1f} at this acceptance rate, {seen:.2f} were seen')]
    return [text for said, text in signs if said]


def step_remarks(method, cycles, reports):
    """How many steps were kept, and whether the calibration is stale."""
    first = [c.judged[0] for c in cycles]
    kept, clipped = (sum(j[x] for j in first) / max(1, len(first)) for x in ('kept', 'clipped'))
    stale = ', above 20 %: run train_mask.py --signals on such texts' if clipped > 0.2 else ''
    return [f'{len(first)} steps, {kept:.0%} kept; {clipped:.0%} had a signal clipped{stale}.']


def sparse_remarks(method, cycles, reports):
    """The failure signatures that the paper's readers name, where they are seen."""
    tau = sum(len(c.tokens) for c in cycles) / max(len(cycles), 1)
    short = sum(r['prompt_tokens'] + len(r['tokens']) <= method.dense_below for r in reports)
    wrong, right = ([r.get('right') for r in reports].count(x) for x in (False, True))
    return [text for seen, text in (
        (tau < 2, f'sparse: only {tau:.2f} tokens a cycle; the draft and the sparse target have parted'),
        (short and method.rho < 1, f'sparse: {short} texts stayed below dense_below {method.dense_below}'),
        (wrong > right, f'sparse: {wrong} graded texts are wrong; compare with sd')) if seen]


REMARKS = {CmAsd: window_remarks, SpecGuard: step_remarks, Sparse: sparse_remarks}
