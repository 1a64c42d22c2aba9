"""lab.shipped: each reported rule comes out as the file says, and a swapped one is noticed."""
from unittest.mock import patch

import pytest

from lab import shipped
from lab.tests.helpers import program, refused
from verify import Exact


@pytest.mark.slow
def test_every_report_comes_out_as_the_file_says(capsys):
    with patch.dict(shipped.WALKS, {'lossless': 5, 'not seen': 5}):
        status, out, _ = program(capsys, main=shipped.main)
    assert status == 0 and len(shipped.RULES) >= 16, out
    for where, kind in shipped.RULES.items():
        (line,) = [line for line in out.splitlines() if line.startswith(where.split('/')[1] + ' ')]
        assert f'  {kind.expected} ' in line


@pytest.mark.parametrize('expected, kind, says', [
    ('WRONG', Exact, 'name#7: no difference; expected WRONG'),
    ('lossless', shipped.ReplacedByP, 'name#7: WRONG; expected lossless')])
def test_a_rule_in_a_slot_of_the_other_kind_is_told(expected, kind, says, capsys):
    with patch.dict(shipped.WALKS, {expected: 9}), patch.dict(shipped.RULES, clear=True):
        shipped.report('owner/name#7', 'open', expected)(type('Swapped', (kind,), dict(__doc__='Swapped.')))
        status, out, _ = program(capsys, 7, main=shipped.main)
        assert status == 1 and out.endswith(f'{says}\n') and 'owner/name#7: open' in out
        refused(capsys, 'no report has the number 8', 8, main=shipped.main)
