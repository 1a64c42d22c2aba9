"""Steps for SpecGuard's claims: candidates, their signals and whether they are right, recorded once.

A wrong step is never mended on the tasks with steps, so a text is right if all of its steps are. From the
record follow accuracy and share of target steps for any gate, selector or threshold, without another run.
`python -m lab.steps` draws what each token of one step leans on.
"""
import itertools
import sys
from bisect import bisect
from collections import Counter, namedtuple
from dataclasses import replace
from math import inf, nan
from os.path import commonprefix

import torch
from tqdm import tqdm

import kernels
import lab.rivals                                       # noqa: F401, enters the baselines in METHODS
import specmini
from lab import bench, tasks
from model import Reader
from verify import METHODS, SpecGuard, central, ensemble, loglikes, write_steps

# whose attention, which n layers of the rollout, its knobs; row: a token's own, or the one that predicts it
Rollout = namedtuple('Rollout', 'who layers n sparsify residual row', defaults=(0.01, 0.0, 'own'))
DRAFTS = Rollout('draft', 'last', 3)                    # what SpecGuard's defaults look at
ROLLOUTS = [DRAFTS, DRAFTS._replace(n=1), DRAFTS._replace(sparsify=0.0), DRAFTS._replace(sparsify=0.05),
            DRAFTS._replace(residual=0.5), DRAFTS._replace(row='predicting'),
            *(Rollout('target', 'last', n) for n in (1, 2, 3, 6)), Rollout('target', 'first', 3),
            Rollout('target', 'middle', 3), Rollout('target', 'all', 3)]
ROWS = dict(common=4)                                   # candidates of a pick whose name is no number of them
USUAL = dict(pick=4, rollout=DRAFTS, beta=0.5, tau=0.5, combine='weighted', scale='range')


def roc_area(scores, labels):
    """The chance that a true one scores above a false one, ties half; nan where either kind is absent."""
    scores, labels = torch.as_tensor(scores, dtype=torch.double), torch.as_tensor(labels).bool()
    good, bad = scores[labels], scores[~labels].sort().values
    if not len(good) or not len(bad):
        return nan
    ranks = torch.searchsorted(bad, good) + torch.searchsorted(bad, good, right=True)
    return float(ranks.double().mean()) / 2 / len(bad)


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
    """{rollout: (lowest log-probability, lowest grounding)} of a step for a model's ROLLOUTS, in one pass."""
    rows, reader, T = [], getattr(session, who), len(draft.tokens)
    mine, full = [r for r in ROLLOUTS if r.who == who], reader.model.full
    cuts = {r.sparsify for r in mine}

    def watch(q, k, v, mask, carry):
        rows.append({cut: kernels.attention_rows(q[:, :, -T:], k, mask[-T:], cut) for cut in cuts})
        return kernels.attend(q, k, v, mask, carry)
    path = replace(full, name='observed', attends=(watch,) * len(full.attends))
    low = float(loglikes(reader.read(session.tokens, draft.tokens, path, T + 1)[:-1], draft.tokens).min())
    found = {}
    for r in mine:
        shades = None
        for weights, attend in zip(rows, full.grounded(r.layers, r.n).attends):
            if attend is kernels.grounded:
                shades = kernels.shade(weights[r.sparsify], shades, r.residual)
        G = shades[0].sum(-1).tolist()
        found[r] = low, min(G) if r.row == 'own' else min([1.0] + G[:-1])   # the first is predicted from afar
    return found


def whole_rollout(model, line, layers, sparsify, residual):
    """[N, N], the rollout of a text (ids) as the paper has it: whole matrices of these layers, multiplied.

    Made head by head and row by row, for the tests of kernels.shade, and for grounding in a few tokens alone.
    """
    seen, product = [], torch.eye(len(line), dtype=torch.float64)

    def watch(q, k, v, mask, carry):
        share = q.shape[1] // k.shape[1]
        heads = [(a @ k[0, h // share].T / len(a[0]) ** 0.5 + mask).softmax(-1) for h, a in enumerate(q[0])]
        for row in itertools.chain(*heads):
            if row.max() >= sparsify:
                row *= (row >= sparsify) / row[row >= sparsify].sum()
        seen.append(sum(heads) / len(heads))
        return kernels.attend(q, k, v, mask, carry)
    Reader(model, 64).read(line, [], replace(model.full, attends=(watch,) * len(model.full.attends)), 1)
    for i in layers:
        product = (1 - residual) * seen[i] @ product + residual * product
    return product


def record_step(session, k=8):
    """({n: the most central of the first n candidates, 'common': the commonest of 4}, the target's own step).

    Each step has its tokens and whether it is right; the candidates have signals, those of `observe`, and the
    draft passes that they took side by side, until the longest was over.
    """
    method, known = SpecGuard(k=k, tau=inf), {}
    drafts = write_steps(session, method, session.draft, k)
    lines, sure = [d.tokens for d in drafts], [float(loglikes(d.logits, d.tokens).mean()) for d in drafts]
    picks = {n: central(lines[:n], sure[:n]) for n in (1, 2, 4, 8)}
    picks['common'] = lines.index(list(Counter(map(tuple, lines[:4])).most_common(1)[0][0]))
    passes = {pick: max(map(len, lines[:ROWS.get(pick, pick)])) for pick in picks}
    grade = lambda tokens: dict(tokens=tokens, right=session.checker(session.tokens + tokens))
    for i in picks.values():
        if tuple(lines[i]) not in known:
            known[tuple(lines[i])] = grade(lines[i]) | dict(
                signals=observe(session, 'draft', drafts[i]) | observe(session, 'target', drafts[i]))
    target = write_steps(session, method, session.target, 1)[0]
    found = {pick: known[tuple(lines[i])] | dict(passes=passes[pick]) for pick, i in picks.items()}
    return found, grade(target.tokens)


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


def judged(problems, scales, s=USUAL):
    """[(score, L, G, right, tokens)] of the chosen candidate of each recorded step, at settings s.

    scales: {rollout: (percentiles of L and of G, all L and all G of other steps, sorted)}; scale 'rank' of
    the settings scores by the share of those others that are lower.
    """
    (ranges, others), rows = scales[s['rollout']], []
    for c in (found[s['pick']] for found, _ in itertools.chain(*problems)):
        unit, scale = (seen := c['signals'][s['rollout']]), ranges
        if s['scale'] == 'rank':
            unit, scale = [bisect(xs, x) / len(xs) for xs, x in zip(others, seen)], [(0, 1), (0, 1)]
        score = ensemble([unit], scale, s['beta'], s['combine'])[0]
        rows.append((score, *seen, c['right'], len(c['tokens'])))
    return rows


Outcome = namedtuple('Outcome', 'right wrote tokens drafts targets drafted verified')


def outcomes(problems, scales, s=USUAL, rate=None):
    """An Outcome, all of it expected, of each recorded problem; rate: of a gate by coin.

    right: the chance that the text is right; wrote: share of target steps; drafts, targets: passes; drafted,
    verified: their positions, k in a pass with k candidates. The model that gives the signals looks back at a
    step in one pass more. What the other wrote a model reads later, the target only if it writes again.
    """
    k, own, rows = ROWS.get(s['pick'], s['pick']), s['rollout'].who == 'draft', []
    held = own or k == 1                                # whether the draft's cache has what was chosen
    for steps in problems:
        chances = [float(score >= s['tau']) if rate is None else rate
                   for score, *_ in judged([steps], scales, s)]
        right, behind, unread, tokens, drafts, targets, drafted, verified = 1.0, 1.0, *[0.0] * 6
        for keep, (found, alone) in zip(chances, steps):
            mine, anew = found[s['pick']], 1 - keep
            T, N = len(mine['tokens']), len(alone['tokens'])
            right *= keep * mine['right'] + anew * alone['right']
            tokens += keep * T + anew * N
            drafts += mine['passes'] + own
            targets += anew * N + (not own)
            drafted += behind + k * (mine['passes'] - 1) + own * T
            verified += anew * (N + unread) + (not own) * (T + 1)
            same = len(commonprefix([mine['tokens'], alone['tokens']])) if held else 0
            behind = 1 + anew * max(0, N - 1 - same) + (not held) * keep * (T - 1)
            unread = own * keep * (unread + T)
        wrote = 1 - sum(chances) / len(chances)
        rows.append(Outcome(right, wrote, tokens, drafts, targets, drafted, verified))
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

LEAST = 0.05        # share of the steps that a gate must keep: how right the surest few are says little


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
    """The fewest target steps with so many of the kept right; or with at most a `share`, the most right.

    Gates that keep less than LEAST do not count; if none of the others is so accurate, the nearest is chosen.
    """
    curve = [c for c in curve if c['target'] <= 1 - LEAST]
    if share is not None:
        return max((c for c in curve if c['target'] <= share), key=lambda c: (c['right'], c['target']))
    nearest = max(curve, key=lambda c: (c['right'], -c['target']))
    good = [c for c in curve if c['right'] >= accuracy]
    return min(good, key=lambda c: (c['target'], -c['right'])) if good else nearest


def print_curve(curve, best, args):
    """Prints a line of each tau, what was chosen, and where that is not what was asked for."""
    for c in (c for c in curve if c['beta'] == best['beta']):
        print(f'beta {c["beta"]:g} tau {c["tau"]:.2f}: the target writes {c["target"]:4.0%} of the steps, '
              + ('there are no others' if c['target'] == 1 else f'{c["right"]:6.1%} of the others are right')
              + (' <- chosen' if c is best else ''))
    if args.share is None and best['right'] < args.accuracy:
        print(f'no gate that keeps {LEAST:.0%} of the steps has {args.accuracy:.1%} of them right; '
              f'the nearest, {best["right"]:.1%}, is chosen')
    print(f'a run with this choice: --method specguard --set beta={best["beta"]:g} tau={best["tau"]:g}')


def find_signals(args):
    """The calibration file's section `signals`: percentiles of both models' signals, beta and tau.

    Percentiles of steps on the lab's training rows, beta and tau chosen on held-out rows (of another seed
    than the claims'). Each step stands behind right ones: the oracle gate keeps what is right.
    """
    engine = bench.engine_for(args.target, args.draft, max_new=160)
    splits = {split: [row for task in ('math', 'table', 'code')
                      for row in itertools.islice(tasks.rows(task, seed, split), args.rows)]
              for split, seed in (('train', args.seed), ('held-out', args.seed + 100))}
    engine.open([engine.tokenizer.encode(row['prompt']).ids for rows in splits.values() for row in rows])

    def steps(split, who):
        rows = tqdm(splits[split], desc=f'{who}, {split}', file=sys.stderr, disable=None)
        return [step for row in rows for step in oracle_steps(engine, row, who)]
    ranges = {who: signal_ranges([step[:2] for step in steps('train', who)]) for who in ('target', 'draft')}
    seen = steps('held-out', 'draft')
    best = choose_gate(curve := gate_curve(seen, ranges['draft']), args.accuracy, args.share)
    print_curve(curve, best, args)
    ends = {f'{who}_{name}': pair for who in ranges for name, pair in zip(('logp', 'grounding'), ranges[who])}
    return ends | dict(beta=best['beta'], tau=best['tau'], steps=len(seen))


def main():
    """Prints the first step that specguard's draft writes for a held-out problem, and what it leaned on."""
    engine, row = bench.engine_for(bench.HOME / 'target', bench.HOME / 'draft'), next(tasks.rows('math', 11))
    engine.open([ids := engine.tokenizer.encode(row['prompt']).ids])
    session, method = engine.start(ids, 'specguard')
    print(row['prompt'], *picture(session, method.propose(session), engine.tokenizer), sep='\n')


if __name__ == '__main__':
    main()
