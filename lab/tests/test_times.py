"""Where the time of a run goes, by hand: timed passes, the forecast of a gamma's speed, a plain step."""
from types import SimpleNamespace

import pytest

from lab import times
from verify import Cycle, Judged


def cycle(drafted, *kept, **passes):
    """A Cycle of a second: tokens drafted, verdicts on those judged, then a token of the target's."""
    rows = [Judged([0], 1.0, 1.0, chance=1.0, kept=verdict) for verdict in kept]
    labels = ['draft'] * sum(kept) + ['target']
    return Cycle([0] * drafted, rows, [0] * len(labels), labels, passes, 1.0)


def test_timed_passes_are_the_fastest_and_grow(monkeypatch):
    """The first round warms up, also where time allows one more alone; a longer pass bounds a shorter one."""
    warm, fast = [9.0, 9.0, 9.0], [1.0, 3.0, 2.0]

    def timed(seconds, most):
        seconds, clock = iter(seconds), SimpleNamespace(now=0.0)

        def read(*_):
            clock.now += next(seconds, 1.0)
        monkeypatch.setattr(times, 'moment', lambda: clock.now)
        monkeypatch.setattr(times, 'TIMING', most)
        reader = SimpleNamespace(compiled=None, read=read)
        return times.time_passes(reader, [0] * 9, None, {2}, (0, 1))
    wanted = {0: 1.0, 1: 2.0, 2: 2.0}
    assert timed(warm + fast, 0.0) == timed(warm + (fast + [1.1, 2.5, 2.1]) * 5, 999.0) == (wanted, False)
    assert timed(warm + fast + [1.4, 3.0, 2.0] * 9, 999.0)[1]


@pytest.mark.parametrize('kept, judged, advice', [
    (0, 29, 'does not pay'), (0, 9, 'too few'), (1, 29, 'too few')])
def test_a_draft_whose_guesses_all_fail_does_not_pay(kept, judged, advice):
    cycles = [cycle(1, i < kept, **{'draft/full': [1, 1]}) for i in range(judged)]
    assert advice in list(times.speed_tables(True, cycles, {0: 1.0, 1: 1.0}, 0.2, 1.0))[-1]


def test_the_forecast_is_of_whole_cycles():
    """A cycle's two passes take 0.2 and 0.6 s of its second, so 0.1 besides each; a plain step takes 0.7."""
    passes = {'draft/full': [1, 1], 'target/full': [1, 2]}
    lines = list(times.speed_tables(True, [cycle(1, True, **passes)] * 30, {0: 0.4, 1: 0.6}, 0.2, 0.7))
    assert lines[-2].split()[-2:] == ['1.00', f'{2 * 0.7 / (0.2 + 0.6 + 2 * 0.1):.2f}']


def test_acceptance_by_place_is_of_those_that_were_reached():
    """One block kept whole, one rejected at its second place, one at its first; then two tries at a place."""
    cycles = [cycle(2, True, True), cycle(2, True, False), cycle(1, False), cycle(0)]
    assert times.acceptance_by_place(cycles) == [[2, 3], [1, 2]]
    assert times.acceptance_by_place([cycle(2, False, True, False)]) == [[1, 2], [0, 1]]


def test_speedup_by_hand():
    """(1 + alpha + ... + alpha^gamma) / (gamma c + v)."""
    assert times.speedup(0.5, 2, 0.25, 1.5) == pytest.approx((1 + 0.5 + 0.25) / 2)
    by_formula = (1 - 0.8 ** 4) / ((1 - 0.8) * (3 * 0.25 + 1.5))
    assert times.speedup(0.8, 3, 0.25, 1.5) == pytest.approx(by_formula)
