"""Which beta and tau SpecGuard should have on a pair: `python -m lab.specguard.gate --target DIR ...`.

Each step that the draft proposes behind prompts with answers is graded by where the target comes from it. The
gate that is surely as accurate as it should be, with the fewest steps by the target, is printed. It goes to
calibration.json with the ranges of these steps.
"""
import itertools
import math
import sys
from dataclasses import replace

from tqdm import tqdm

from model import require_that, write_calibration
from specmini import exit_status, grade
from train_mask import parse, settings_of, signal_ranges, signal_texts
from verify import Exact, decode, step_score, tokens_of

BETAS = 0.5, 0.25, 0.75, 0.0, 1.0       # of equally good gates the first is chosen
TAUS = [i / 20 for i in range(22)]
ACCURACY = 0.95         # share of the kept steps that is to be right
LEAST = 0.05            # share of the steps that a gate must keep: how right the surest few are says little


def continued_checker(session, right):
    """Function from ids to the grade of the answer to which the target comes, going on greedily from there.

    session: has read its prompt; right: function from an answer to its grade. So a wrong step that the target
    would mend is right. A text on the way of an earlier continuation has its grade, and costs nothing.
    Source: Wang et al. 2024 (Math-Shepherd), the hard estimate, with one greedy continuation.
    """
    begin = len(session.tokens)
    room = begin + session.tokens_left
    ways = []                               # (where a continuation began, all its ids, its grade)

    def check(ids):
        for start, way, verdict in ways:
            if start <= len(ids) and way[:len(ids)] == ids:
                return verdict
        going = replace(session, tokens=ids, tokens_left=room - len(ids))
        going.ended = len(ids) > begin and ids[-1] in session.eos
        way = ids + tokens_of(decode(going, Exact(draft_temperature=0)))
        ways.append((len(ids), way, right(session.text(way[begin:]))))
        return ways[-1][-1]
    return check


def drafted_steps(engine, row, ids, method):
    """[(L, G, right)] of the steps that the draft proposes along a text behind a prompt (ids).

    L, G: the smallest log-probability and grounding of a step. right: see continued_checker; None where the
    target does not come to the answer by itself, or there is none. A step that is not right is written by the
    target, so that all steps stand behind right ones.
    """
    session = engine.start(ids, method)
    right = continued_checker(session, lambda text: grade(row, text))
    graded = right(list(ids))
    found = []
    while session.tokens_left and not session.ended:
        draft = method.propose(session)
        seen = method.score(session, draft)
        good = right(session.tokens + draft.tokens) if graded else None
        found.append((*map(min, zip(*seen)), good))
        session.commit(draft.tokens if good else method.write(session))
    return found


def lower_bound(right, n):
    """The lower end of the 95 % interval of a share of which `right` of n were seen. Source: Wilson 1927."""
    z = 1.96
    middle = right + z * z / 2
    return (middle - z * math.sqrt(right * (n - right) / n + z * z / 4)) / (n + z * z)


def choose_gate(steps, ranges, accuracy):
    """dict(beta, tau, target, sure): the gate with the fewest target steps that is surely so accurate.

    Surely means by the lower bound `sure` of the share of right steps among those kept, because of many gates
    tried on few steps the luckiest looks too good. If none is so accurate, the surest. steps: (L, G, right).
    """
    gates = []
    for beta, tau in itertools.product(BETAS, TAUS):
        kept = [right for L, G, right in steps if step_score([(L, G)], ranges, beta) >= tau]
        if len(kept) >= max(1, LEAST * len(steps)):
            gates.append(dict(beta=beta, tau=tau, target=1 - len(kept) / len(steps),
                              sure=lower_bound(sum(kept), len(kept))))
    good = [gate for gate in gates if gate['sure'] >= accuracy]
    if good:
        return min(good, key=lambda gate: gate['target'])
    return max(gates, key=lambda gate: (gate['sure'], -gate['target']))


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


def main():
    """Runs the program, with the flags of train_mask.py; returns its exit status."""
    def run():
        args = parse(['--signals', *sys.argv[1:]])
        section = find_gate(*signal_texts(args, settings_of(args)))
        write_calibration(args.target, 'signals', section, args.draft, args.draft_dtype)
    return exit_status('lab.specguard.gate', run)


if __name__ == '__main__':
    sys.exit(main())
