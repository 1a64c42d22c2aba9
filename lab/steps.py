"""Steps for SpecGuard's claims: candidates, their signals and whether they are right, recorded once.

A wrong step is never mended on the tasks with steps, so a text is right if all of its steps are. From the
record follow accuracy and share of target steps for any gate, selector or threshold, without another run.
"""
import itertools
import sys
from dataclasses import replace
from functools import partial
from math import inf, nan

from tqdm import tqdm

import kernels
import lab.rivals                                       # noqa: F401, enters the baselines in METHODS
import specmini
from lab import bench, tasks
from verify import METHODS, SpecGuard, central, ensemble, loglikes, probs, write_steps

GROUPS = [('draft', 'last', 1), ('draft', 'last', 3), ('target', 'last', 1), ('target', 'last', 2),
          ('target', 'last', 3), ('target', 'last', 6), ('target', 'first', 3), ('target', 'middle', 3),
          ('target', 'all', 1)]                             # whose signals, and which layers of the rollout
USUAL = dict(k=4, group=GROUPS[1], beta=0.5, tau=0.5, combine='weighted')


def roc_area(scores, labels):
    """The chance that a true one scores above a false one, ties half; nan where either kind is absent."""
    below, wins, ranked = 0, 0.0, sorted(zip(scores, labels))
    for _, tied in itertools.groupby(ranked, key=lambda pair: pair[0]):
        true = [bool(label) for _, label in tied]
        false = true.count(False)
        wins += (len(true) - false) * (below + false / 2)
        below += false
    return wins / (below * (len(ranked) - below)) if 0 < below < len(ranked) else nan


def average_precision(scores, labels):
    """Mean precision: of those scored as high as a true one, the share that is true, on average."""
    seen, hits, total, ranked = 0, 0, 0.0, sorted(zip(scores, labels), reverse=True)
    for _, tied in itertools.groupby(ranked, key=lambda pair: pair[0]):
        true = [bool(label) for _, label in tied]
        seen, hits = seen + len(true), hits + sum(true)
        total += sum(true) * hits / seen
    return total / hits if hits else nan


def step_checker(row, tokenizer, begin):
    """A Session.checker: function from ids to whether their last step is right, by the task's own graders."""
    def right(ids):
        text = tokenizer.decode(ids[begin:])
        last = text.strip().split('\n')[-1]
        if 'Answer:' not in row['solution'] or last.startswith('Answer:'):
            return bool(tasks.grade(row, text))
        return text.endswith('\n') and tasks.steps_right(row, text)[-1:] == [True]
    return right


def start(engine, row, ids, name='sd', seed=0):
    """A Session on a row of a task, with its step checker."""
    session, _ = engine.start(ids, name, seed)
    session.text, session.checker = engine.tokenizer.decode, step_checker(row, engine.tokenizer, len(ids))
    return session


def oracle_steps(engine, row, who):
    """[(lowest log-probability, lowest grounding, right)] of the draft's steps, each behind right ones."""
    session, found = start(engine, row, engine.tokenizer.encode(row['prompt']).ids), []
    for cycle in specmini.decode(session, METHODS['oracle-gate'](signals=who)):
        columns = zip(*((j['logp'], j['grounding'], j['kept']) for j in cycle.judged))
        found.append(tuple(min(column) for column in columns))
    return found


def observe(session, who, draft):
    """{group: (lowest log-probability, lowest grounding)} of a step for a model's GROUPS, from one pass."""
    rows, reader, T = [], getattr(session, who), len(draft.tokens)
    full = reader.model.full

    def watch(q, k, v, mask, carry):
        rows.append(kernels.attention_rows(q[:, :, -T:], k, mask[-T:], 0.01))
        return kernels.attend(q, k, v, mask, carry)
    path = replace(full, name='observed', attends=(watch,) * len(full.attends))
    low = float(loglikes(reader.read(session.tokens, draft.tokens, path, T + 1)[:-1], draft.tokens).min())
    found = {}
    for group in (g for g in GROUPS if g[0] == who):
        shades = None
        for weights, attend in zip(rows, full.grounded(*group[1:]).attends):
            shades = kernels.shade(weights, shades, 0.0) if attend is kernels.grounded else shades
        found[group] = low, float(shades.sum(-1).min())
    return found


def record_step(session, k=8):
    """({n: choice among the first n candidates}, whether the target's own step is right) behind the text.

    A candidate has its tokens, right, sure (mean log-probability), and signals: those of `observe`.
    """
    method, known = SpecGuard(k=k, tau=inf), {}
    over, law = partial(method.over, session), lambda z: probs(z, method.draft_temperature)
    drafts = write_steps(session, session.draft, k, law, over)
    for d in {tuple(d.tokens): d for d in drafts}.values():
        known[tuple(d.tokens)] = dict(
            tokens=d.tokens, right=session.checker(session.tokens + d.tokens),
            sure=float(loglikes(d.logits, d.tokens).mean()),
            signals=observe(session, 'draft', d) | observe(session, 'target', d))
    target = write_steps(session, session.target, 1, session.probs, over)[0]
    found = [known[tuple(d.tokens)] for d in drafts]
    pick = lambda n: found[central([c['tokens'] for c in found[:n]], [c['sure'] for c in found[:n]])]
    return {n: pick(n) for n in (1, 2, 4, 8)}, session.checker(session.tokens + target.tokens)


def record(engine, rows):
    """[[record_step of each step]] of each row, each step behind the reference's own earlier ones."""
    problems, encode = [], lambda text: engine.tokenizer.encode(text, add_special_tokens=False).ids
    for row in tqdm(rows, desc=f'record {rows[0]["task"]}', file=sys.stderr, disable=None):
        ids, lines = encode(row['prompt']), row['solution'].lstrip('\n').split('\n')
        session = start(engine, row, ids)
        problems.append([])
        for i in range(len(lines)):
            session.tokens = ids + encode(''.join(f'\n{line}' for line in lines[:i]) + '\n' * (i > 0))
            problems[-1].append(record_step(session))
    return problems


def judged(problems, ranges, s=USUAL):
    """[(score, L, G, right, tokens)] of the chosen candidate of each recorded step, at settings s."""
    rows = [found[s['k']] for steps in problems for found, _ in steps]
    score = lambda seen: ensemble([seen], ranges[s['group']], s['beta'], s['combine'])[0]
    return [(score(seen := c['signals'][s['group']]), *seen, c['right'], len(c['tokens'])) for c in rows]


def outcomes(problems, ranges, s=USUAL, rate=None):
    """[(chance that the text is right, share of target steps)] of each row; rate: of a gate by coin."""
    rows = []
    for steps in problems:
        kept = [score >= s['tau'] if rate is None else rate for score, *_ in judged([steps], ranges, s)]
        right = 1.0
        for keep, (found, target) in zip(kept, steps):
            right *= keep * found[s['k']]['right'] + (1 - keep) * target
        rows.append((right, 1 - sum(kept) / len(kept)))
    return rows


def picture(session, draft, tokenizer):
    """Lines: each token of a step, its log-probability and grounding, and the tokens it leans on most."""
    full, n = session.draft.model.full, len(session.tokens)
    path = full.grounded('last', 3, begin=n, sparsify=0.01, residual=0.0)
    session.draft.read(session.tokens, draft.tokens, path, len(draft.tokens))
    word = lambda i: repr(tokenizer.decode([i]))[1:-1]
    for token, low, shade in zip(draft.tokens, loglikes(draft.logits, draft.tokens), path.carry['shades'][0]):
        top = [f'{word(session.tokens[j])} {float(shade[j]):.2f}' for j in shade.topk(4).indices.tolist()]
        yield f'{word(token):>8} {float(low):7.2f} {float(shade.sum()):5.2f}   {", ".join(top)}'


# ---------------------------------------------------------------- the calibration file's section `signals`

def signal_ranges(pairs):
    """[[1st, 99th percentile] of L, the same of G], from the (L, G) of many steps."""
    rank = lambda xs, share: sorted(xs)[round(share * (len(xs) - 1))]
    return [[rank(xs, 0.01), rank(xs, 0.99)] for xs in zip(*pairs)]


def gate_curve(steps, ranges):
    """[dict(beta, tau, target, right)], the share of steps that the target writes and that of the kept right.

    steps: [(L, G, right)].
    """
    curve = []
    for beta in (0.5, 0.25, 0.75, 0.0, 1.0):                # of equals the first is chosen
        scores = [(ensemble([(L, G)], ranges, beta, 'weighted')[0], right) for L, G, right in steps]
        for tau in (i / 20 for i in range(22)):
            kept = [right for score, right in scores if score >= tau]
            curve.append(dict(beta=beta, tau=tau, target=1 - len(kept) / len(steps),
                              right=sum(kept) / len(kept) if kept else 1.0))
    return curve


def choose_gate(curve, accuracy, share=None):
    """The fewest target steps with so many of the kept right; or with at most a `share`, the most right."""
    if share is not None:
        return max((c for c in curve if c['target'] <= share), key=lambda c: (c['right'], c['target']))
    return min((c for c in curve if c['right'] >= accuracy), key=lambda c: (c['target'], -c['right']))


def find_signals(args):
    """The calibration file's section `signals`: percentiles of both models' signals, beta and tau.

    Of steps on the lab's training rows, each behind right ones: the oracle gate keeps what is right.
    """
    engine = bench.engine_for(args.target, args.draft, max_new=160)
    rows = [row for task in ('math', 'table', 'code')
            for row in itertools.islice(tasks.rows(task, args.seed, 'train'), args.rows)]
    engine.open([engine.tokenizer.encode(row['prompt']).ids for row in rows])
    section = {}
    for who in ('target', 'draft'):                         # the draft's last: its curve is printed
        seen = [step for row in tqdm(rows, desc=who, file=sys.stderr, disable=None)
                for step in oracle_steps(engine, row, who)]
        ranges = signal_ranges([step[:2] for step in seen])
        section |= {f'{who}_logp': ranges[0], f'{who}_grounding': ranges[1]}
    best = choose_gate(curve := gate_curve(seen, ranges), args.accuracy, args.share)
    for c in (c for c in curve if c['beta'] == best['beta']):
        print(f'beta {c["beta"]:g} tau {c["tau"]:.2f}: the target writes {c["target"]:4.0%} of the steps, '
              + ('there are no others' if c['target'] == 1 else f'{c["right"]:6.1%} of the others are right')
              + (' <- chosen' if c is best else ''))
    return section | dict(beta=best['beta'], tau=best['tau'], steps=len(seen))
