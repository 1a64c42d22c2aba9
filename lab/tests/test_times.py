"""Where the time of a run goes, by hand: advice, and the forecast of a gamma's speed."""
import pytest

from lab import times
from verify import Cycle, Judged


def cycle(drafted, *kept, **passes):
    """A Cycle of a second: tokens drafted, verdicts on those judged, then a token of the target's."""
    rows = [Judged([0], 1.0, 1.0, chance=1.0, kept=verdict) for verdict in kept]
    labels = ['draft'] * sum(kept) + ['target']
    return Cycle([0] * drafted, rows, [0] * len(labels), labels, passes, 1.0)


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


def test_a_busy_machine_gets_no_verdict():
    cycles = [cycle(1, True, **{'draft/full': [1, 1]})] * 40
    lines = list(times.speed_tables(True, cycles, {0: 1.0, 1: 1.0}, 0.2, 1.0, busy=True))
    assert lines[-1].endswith('no verdict, because the machine is busy')
