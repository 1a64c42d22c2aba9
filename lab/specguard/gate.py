"""Which beta and tau SpecGuard should have on a pair: `python -m lab.specguard.gate --target DIR ...`.

Each step that the draft proposes after prompts with answers is graded by where the target comes from it. The
gate that is surely as accurate as it should be, with the fewest steps by the target, is printed. It goes to
calibration.json with the ranges of these steps.
"""
import itertools
import sys

from tqdm import tqdm

from lab.specguard.baselines import continued_checker
from model import require_that, write_calibration
from specmini import exit_status, grade
from train_mask import parse, settings_of, signal_ranges, signal_texts
from verify import step_score

BETAS = 0.5, 0.25, 0.75, 0.0, 1.0       # of equally good gates the first is chosen
TAUS = [i / 20 for i in range(22)]
ACCURACY = 0.95         # share of the kept steps that is to be right


def drafted_steps(engine, row, ids, method):
    """[(L, G, right)] of the steps that the draft proposes along a text after a prompt (ids).

    L, G: the smallest log-probability and grounding of a step. right: see continued_checker; None where the
    target does not come to the answer by itself, or there is none. A step that is not right is written by the
    target, so that all steps stand after right ones.
    """
    session = engine.start(ids, method)
    right = continued_checker(session, lambda text: grade(row, text))
    graded = right(ids)
    steps = []
    while session.tokens_left and not session.ended:
        draft = method.propose(session)
        seen = method.score(session, draft)
        good = right(session.tokens + draft.tokens) if graded else None
        steps.append((*map(min, zip(*seen)), good))
        session.commit(draft.tokens if good else method.write(session))
    return steps


def lower_bound(right, n):
    """The lower end of the 95 % interval of a share, seen in `right` of n; 0 of none. Source: Wilson 1927."""
    z = 1.96
    root = (right * (n - right) / max(n, 1) + z * z / 4) ** 0.5
    return (right + z * z / 2 - z * root) / (n + z * z)


def choose_gate(steps, ranges, accuracy):
    """dict(beta, tau, target, sure): the gate with the fewest target steps that is surely so accurate.

    Surely means by the lower bound `sure` of the share of right steps among those kept, because of many gates
    tried on few steps the luckiest looks too good. If none is so accurate, the surest. steps: (L, G, right).
    """
    gates = []
    for beta, tau in itertools.product(BETAS, TAUS):
        kept = [right for L, G, right in steps if step_score([(L, G)], ranges, beta) >= tau]
        target = 1 - len(kept) / len(steps)
        sure = lower_bound(sum(kept), len(kept))
        gates.append(dict(beta=beta, tau=tau, target=target, sure=sure))
    return min(gates, key=lambda gate: (max(0, accuracy - gate['sure']), gate['target']))


def find_gate(engine, rows, prompts, method):
    """A section `signals` of the engine's pair with beta and tau, from rows and their prompts (ids)."""
    engine.open(prompts)
    steps = []
    for row, ids in tqdm(list(zip(rows, prompts)), desc='graded steps', disable=None):
        steps += drafted_steps(engine, row, ids, method)
    logp, grounding = ranges = signal_ranges(steps)
    graded = [step for step in steps if step[-1] is not None]
    require_that(graded, 'no row has an answer that the target finds: no step can be graded')
    gate = choose_gate(graded, ranges, ACCURACY)
    print(f'of {len(graded)} graded steps the target writes {gate["target"]:.0%}, of the others surely '
          f'{gate["sure"]:.1%} are right; a run: --method specguard --set beta={gate["beta"]:g} '
          f'tau={gate["tau"]:g} delimiter=\'{method.delimiter}\'')
    return dict(draft_logp=logp, draft_grounding=grounding, beta=gate['beta'], tau=gate['tau'])


def run():
    """Measures a pair, with the flags of train_mask.py, and stores what it finds."""
    args = parse(['--signals', *sys.argv[1:]])
    section = find_gate(*signal_texts(args, settings_of(args)))
    write_calibration(args.target, 'signals', section, args.draft)


if __name__ == '__main__':
    sys.exit(exit_status('lab.specguard.gate', run))
