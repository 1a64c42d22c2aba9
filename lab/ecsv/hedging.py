"""What hedge is worth, measured: sd beside drafts that have side branches, of many lengths and at many places.

At temperature 0 the text is the target's, whatever is proposed, and a side branch matters only where its
second choice is what stands there: what the draft writes behind it is then what it writes behind the text.
So its greedy blocks behind every place of the text, a pass for each depth, say what becomes of every setting.
"""
import os
from functools import partial
from typing import NamedTuple

import torch

from lab.ecsv.rivals import Hedge
from lab.pairs import Record
from lab.replay import pass_costs
from model import fetch, send
from verify import Exact, tokens_of, until_end

GAMMAS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32      # draft tokens of a block
GAMMAS_ELSEWHERE = GAMMAS[:10]
SEVERAL = 4             # places of a text whose blocks are drafted together are a multiple of that


class Setting(NamedTuple):
    """Knobs of Hedge."""
    side: int = 1
    places: int = 1
    below: float = 1.0
    reach: bool = False


SETTINGS = {
    'sd': Setting(places=0),
    'side 1': Setting(),
    'side 2': Setting(2),
    'side 4': Setting(4),
    'side 1, reach': Setting(reach=True),
    'side 2, reach': Setting(2, reach=True),
    'side 4, reach': Setting(4, reach=True),
    'side 1, 2 places': Setting(1, 2),
    'side 1, 2 places, reach': Setting(1, 2, reach=True),
    'side 1, 4 places': Setting(1, 4),
    'side 1, all places': Setting(1, 99),
    'side 2, 2 places, reach': Setting(2, 2, reach=True),
    'side 1, below 0.9': Setting(below=0.9),
    'side 2, below 0.9': Setting(2, below=0.9),
    'side 2, below 0.5': Setting(2, below=0.5),
    'side 4, below 0.9': Setting(4, below=0.9),
    'side 4, below 0.5': Setting(4, below=0.5)}
