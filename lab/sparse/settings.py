"""The settings of a verifying pass that are tried, by name: knobs of verify.Sparse that differ from OFF.

By default calibrated anchors choose, half of the layers.
"""
from verify import Sparse

# The texts are short, so small blocks and no L0: else most keys of most texts would be read at any rho.
OFF = dict(rho=1.0, ffn_threshold=0.0, moe_skip=0, dense_below=0, block=4, locals=1)
LONG = 256                          # tokens of a table's prompt, at least
SEEDS = 5                           # calibrations, each on other training rows, that the prompts take in turn
MEDIUM = 'attn 75 %'                # named by what is left out: here 75 % of the keys
BOTH = 'attn 75 %, ffn 60 %'
HARD = 'attn 90 %, ffn 60 %'
CHANNELS = 'ffn 60 %'               # a token leaves out its own; as in BOTH and HARD
BY_ROOT = 'ffn 60 %, by the root'   # all rows of a pass leave out those that are small in the root

GRID = {                            # tried on every task
    'dense': {},
    'attn 50 %': dict(rho=0.5),
    MEDIUM: dict(rho=0.25),
    'attn 90 %': dict(rho=0.1),
    'attn 75 %, every second layer chooses': dict(rho=0.25, anchors=0),
    'attn 75 %, every layer chooses': dict(rho=0.25, anchors=99),
    CHANNELS: dict(ffn_quantile=0.6),
    BY_ROOT: dict(ffn_share=0.4),
    'ffn 20 %, by the root': dict(ffn_share=0.8),
    'ffn 60 %, literal form': dict(ffn_quantile=0.6, form='literal'),
    'ffn 60 %, union form': dict(ffn_quantile=0.6, form='union'),
    BOTH: dict(rho=0.25, ffn_quantile=0.6),
    HARD: dict(rho=0.1, ffn_quantile=0.6),
    'as --method sparse': {knob: getattr(Sparse, knob) for knob in OFF},
}
SELECTIONS = {                      # of tables: other choices of blocks and channels
    'recent 75 %': dict(rho=0.25, select='recent'),
    'random 75 %': dict(rho=0.25, select='random'),
    'oracle 75 %': dict(rho=0.25, select='oracle'),
    'quest 75 %': dict(rho=0.25, select='quest'),
    'joint 75 %': dict(rho=0.25, select='joint'),
    'token 75 %': dict(rho=0.25, select='token'),
    'union 75 %': dict(rho=0.25, select='union'),
    'attn 75 %, query last': dict(rho=0.25, query_from='last'),
    'attn 75 %, query mean': dict(rho=0.25, query_from='mean'),
    'ffn 60 %, by all rows': dict(ffn_share=0.4, form='loudest'),
    'ffn 60 %, guessed': dict(ffn_share=0.4, form='guessed'),
}
REFRESH = {                         # of stories: a dense pass now and then
    f'{BOTH}, dense every 8 cycles': GRID[BOTH] | dict(refresh_every=8),
    f'{BOTH}, dense every 4 cycles': GRID[BOTH] | dict(refresh_every=4),
    f'{BOTH}, dense every 2 cycles': GRID[BOTH] | dict(refresh_every=2),
}


def swept(words, knob, values, **others):
    """{name: knobs}: a quarter of the keys, one knob at these values."""
    return {words.format(value): dict(rho=0.25, **others) | {knob: value} for value in values}


SWEEPS = dict(      # of tables; title: the settings of one table
    dense_below=swept('L0 of {}', 'dense_below', (0, 16, 64, 128, 256)),
    sinks=swept('sinks: {}', 'sinks', (0, 1, 2, 4, 8)),
    locals=swept('locals: {}', 'locals', (0, 1, 2, 4, 8)),
    anchors=swept('anchors: {}', 'anchors', (1, 2, 3, 5, 7, 10)),
    block=swept('blocks of {}', 'block', (4, 8, 16, 32, 64, 128)),
)
USUAL = dict(dense_below=128, block=16, locals=2)       # the method's defaults
LENGTHS = dict(     # of long contexts
    dense={},
    calibrated=dict(rho=0.25) | USUAL,
    second=dict(rho=0.25, anchors=0) | USUAL,
    recent=dict(rho=0.25, select='recent') | USUAL,
    random=dict(rho=0.25, select='random') | USUAL,
    quest=dict(rho=0.25, select='quest') | USUAL,
    oracle=dict(rho=0.25, select='oracle') | USUAL,
    tenth=dict(rho=0.1, anchors=0) | USUAL,
)
WRITTEN = 'calibrated', 'recent', 'random'      # of these, what writes where a text takes seconds


def keeping(share, every):
    """Knobs of rivals.Kept."""
    return dict(rho=share, every=every) | USUAL


KEPT_SHARES = 0.05, 0.1, 0.25
KEPT = {f'{share:.0%}, R = {every}': keeping(share, every) for share in KEPT_SHARES for every in (1, 4, 16)}
KEPT_DRAFTER = '10%, R = 4'         # whose drafting is judged: named before anything was measured
KEPT_ELSEWHERE = {                  # of another pair: what is read, and by what gammas it drafts
    '10%, R = 1': (), KEPT_DRAFTER: (2, 4), '10%, R = 16': (4,),
    '25%, R = 1': (), '25%, R = 4': (), '25%, R = 16': ()}


def skipping(experts, quantile, **knobs):
    """Knobs with which a token skips at most so many experts, where their share is below this quantile."""
    return dict(moe_skip=experts, moe_quantile=quantile, **knobs)


MIXTURE = {     # tried on a mixture. Of 23 quantiles, since record.mixture_rows adds `never` and `always`
    'experts, 1, median rule': skipping(1, 1 / 2),
    'experts, 1, always': skipping(1, 1.0),
    'experts, 2, median rule': skipping(2, 1 / 2),
    'experts, 2, always': skipping(2, 1.0),
    'experts, 3, median rule': skipping(3, 1 / 2),
    'experts, 3, always': skipping(3, 1.0),
    'experts, 1, lowest tenth': skipping(1, 3 / 22),            # the third of the 21 measured ones
    'attn 75 %': skipping(1, 0.0, rho=0.25),
    'attn 75 %, experts, 1': skipping(1, 1 / 2, rho=0.25),
}
WHOLE_MIXTURE = skipping(1, 0.0)    # skips nothing, and notes the experts that were read
