"""The settings of a verifying pass that are tried, by name: knobs of verify.Sparse that differ from OFF."""
from verify import Sparse

OFF = dict(rho=1.0, ffn_threshold=0.0, moe_skip=0, dense_below=16, block=4)     # small: the texts are short
LONG = 256                          # tokens of a table's prompt, at least
MEDIUM = 'attn 75 %'                # named by what is left out: here 75 % of the keys
BOTH = 'attn 75 %, ffn 60 %'
HARD = 'attn 90 %, ffn 60 %'

GRID = {                            # tried on every task
    'dense': {},
    'attn 50 %': dict(rho=0.5),
    MEDIUM: dict(rho=0.25),
    'attn 90 %': dict(rho=0.1),
    'attn 75 %, every layer chooses': dict(rho=0.25, anchors=99),
    'ffn 60 %': dict(ffn_share=0.4),
    'ffn 60 % of a token': dict(ffn_quantile=0.6),
    BOTH: dict(rho=0.25, ffn_share=0.4),
    HARD: dict(rho=0.1, ffn_share=0.4),
    'as --method sparse': {knob: getattr(Sparse, knob) for knob in OFF},
    'ffn, literal form': dict(ffn_quantile=0.6, form='literal'),
    'ffn, union form': dict(ffn_quantile=0.6, form='union'),
}
SELECTIONS = {                      # of tables: other choices of blocks
    'recent 75 %': dict(rho=0.25, select='recent'),
    'random 75 %': dict(rho=0.25, select='random'),
    'oracle 75 %': dict(rho=0.25, select='oracle'),
    'quest 75 %': dict(rho=0.25, select='quest'),
    'joint 75 %': dict(rho=0.25, select='joint'),
    'token 75 %': dict(rho=0.25, select='token'),
    'union 75 %': dict(rho=0.25, select='union'),
    'attn 75 %, query last': dict(rho=0.25, query_from='last'),
    'attn 75 %, query mean': dict(rho=0.25, query_from='mean'),
    'attn 75 %, calibrated anchors': dict(rho=0.25, anchors=5),     # as many as every second layer
    'ffn 60 %, guessed': dict(ffn_share=0.4, form='guessed'),
}
SIZES = {                           # of tables: blocks of so many tokens, at one fixed L0
    'blocks of 8': dict(dense_below=128, rho=0.25, block=8, locals=1),
    'blocks of 16': dict(dense_below=128, rho=0.25, block=16, locals=1),
    'blocks of 32': dict(dense_below=128, rho=0.25, block=32, locals=1),
    'blocks of 64': dict(dense_below=128, rho=0.25, block=64, locals=1),
    'blocks of 128': dict(dense_below=128, rho=0.25, block=128, locals=1),
    'blocks of 256': dict(dense_below=128, rho=0.25, block=256, locals=1),
}
REFRESH = {                         # of stories: a dense pass now and then
    f'{BOTH}, dense every 8 cycles': GRID[BOTH] | dict(refresh_every=8),
    f'{BOTH}, dense every 4 cycles': GRID[BOTH] | dict(refresh_every=4),
    f'{BOTH}, dense every 2 cycles': GRID[BOTH] | dict(refresh_every=2),
}


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
