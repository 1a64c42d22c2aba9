"""The lanes of one clock and the pictures of the five methods, each of what lab/pictures/cycles.py found."""
import textwrap

from lab.pictures.cycles import beginnings
from lab.pictures.style import (BLACK, BLUE, GREEN, GREY, ORANGE, PALE, SKY, VERMILLION, WIDTH, bar, canvas,
                                headline, rule, token, write)


def lanes(shown):
    """Passes as bars on one clock, and below them the tokens that each brings."""
    figure, axes = canvas(33, 44)
    c, v = shown['c'], shown['v']
    steps = sum(c * len(cycle['drafted']) + v for cycle in shown['cycles'])
    written = [name for cycle in shown['cycles'] for name in cycle['committed']]
    plain = int(steps)
    unit = 42 / steps                                   # of a plain step
    headline(axes, 'The same text, in fewer passes of the target',
             'Time runs from left to right; passes as measured.')
    write(axes, 1, 26.1, f'plain decoding, {plain} tokens: each takes a target pass')
    for i, name in enumerate(written[:plain]):
        bar(axes, (1 + unit * i, 23.1), (unit - 0.25, 2), SKY)
        token(axes, (1 + unit * (i + 0.5), 21.6), name, 'target', unit - 0.5)
    write(axes, 1, 18.6, f'speculative decoding, {len(written)} tokens: one target pass for four guesses')
    x = 1
    for cycle in shown['cycles']:
        for _ in cycle['drafted']:
            bar(axes, (x, 15.6), (unit * c - 0.2, 1.2), ORANGE)
            x += unit * c
        bar(axes, (x, 15.6), (unit * v - 0.25, 2), SKY)
        for i, name in enumerate(cycle['committed']):
            kept = i < cycle['accepted']
            token(axes, (x + unit * v / 2, 14.1 - 2.2 * i), name, 'draft' if kept else 'target', unit - 0.5)
        if cycle['accepted'] < len(cycle['drafted']):
            token(axes, (x - 3.4, 14.1 - 2.2 * i), cycle['drafted'][i], 'out', 6)
        x += unit * v
    for x, name, kind in ((4, 'kept', 'draft'), (12, 'rejected', 'out'), (20, "target's", 'target')):
        token(axes, (x, 1.7), name, kind, 6.6)
    bar(axes, (25, 1.1), (1.2, 1.2), ORANGE)
    write(axes, 26.7, 1.7, 'draft pass')
    bar(axes, (34, 0.7), (2, 2), SKY)
    write(axes, 36.5, 1.7, 'target pass')
    return figure


def cmasd(shown):
    """Confidence of each place as a bar, the threshold across it, what is compared with it as a dot."""
    figure, axes = canvas(37)
    headline(axes, 'cmasd: confidence sets how strictly a guess is judged, and how many there are',
             f'One cycle after “{shown["prompt"]}”')
    left, step, foot, height = 15.5, 5.8, 14, 15
    drafted = len(shown['drafted'])
    for level in (0, 0.5, 1):
        y = foot + height * level
        rule(axes, (left - 3, WIDTH - 2), (y, y), PALE)
        write(axes, left - 3.6, y, f'{level:g}', GREY, 'right')
    for i in range(shown['most']):
        x = left + i * step
        if i >= drafted:
            token(axes, (x, 11), '', 'idle')
            continue
        bar(axes, (x - 1.6, foot), (3.2, height * shown['confidence'][i]), '#BFDDF2')
        tau = foot + height * shown['threshold'][i]
        axes.plot([x - 2.3, x + 2.3], [tau, tau], color=VERMILLION, linewidth=2.5, solid_capstyle='butt')
        axes.plot(x, foot + height * shown['ratio'][i], 'o', color=BLACK, markersize=5)
        token(axes, (x, 11), shown['drafted'][i], 'draft' if shown['kept'][i] else 'out')
        write(axes, x, 8, str(shown['window'][i]), align='center')
        if shown['kept'][i] and shown['drafted'][i] != shown['favourite'][i]:
            token(axes, (x, 5), shown['favourite'][i], 'target')
        else:
            write(axes, x, 5, shown['favourite'][i], GREY, 'center')
    for y, text in ((11, 'guess'), (8, f'{shown["most"]} × mean C'), (5, 'target’s choice')):
        write(axes, 1, y, text, GREY)
    end = left + (drafted - 0.5) * step
    rule(axes, (end, end), (7, foot + height + 0.5), GREY, '--')
    write(axes, end + 0.8, 8, f'{shown["window"][-1]} ≤ {drafted} drafted: stop', GREY)
    write(axes, end + 0.8, 5, 'in a box: forgiven', GREY)
    legend(axes, 2)
    return figure


def legend(axes, y):
    """What the marks of cmasd's picture are, in a line."""
    bar(axes, (1, y - 0.7), (2, 1.4), '#BFDDF2')
    write(axes, 3.7, y, 'C, the draft’s confidence')
    axes.plot([22.5, 26], [y, y], color=VERMILLION, linewidth=2.5, solid_capstyle='butt')
    write(axes, 26.8, y, 'τ, the threshold: high where C is low')
    axes.plot(53, y, 'o', color=BLACK, markersize=5)
    write(axes, 54.2, y, 'p(x) / max p: kept from τ on')


def ecsv(shown):
    """The branches as a tree, as thick as they are many, above the elected block and its shares."""
    figure, axes = canvas(36)
    headline(axes, 'ecsv: four sampled branches vote on each place, the target verifies the winner',
             f'A cycle after “{shown["before"]}”. 3 × 1.3: three branches of weight 1.3 each')
    left, step, top = 17, 12.5, 27
    places = {}                                         # beginning: where its box is
    begun = beginnings(shown['branches'])
    for row, line in enumerate(distinct(shown['branches'])):
        for n in range(1, len(line) + 1):
            places.setdefault(tuple(line[:n]), (left + (n - 1) * step, top - 5 * row))
    for begin, (x, y) in places.items():
        if len(begin) > 1:
            before_x, before_y = places[begin[:-1]]
            axes.plot([before_x + 3.2, before_x + 5, x - 4.6, x - 3.2], [before_y, before_y, y, y],
                      color=GREY, linewidth=1.2 * begun[begin], solid_joinstyle='round', zorder=0)
        n = len(begin) - 1
        token(axes, (x, y), begin[-1], 'draft' if begin[-1] == shown['elected'][n] else 'idle', 6.4)
        b = [tuple(line[:n + 1]) for line in shown['branches']].index(begin)
        write(axes, x, y - 2, f'{begun[begin]} × {shown["weights"][b][n]:.1f}', GREY, 'center')
    write(axes, 1, top, 'branches', GREY)
    for i, name in enumerate(shown['elected']):
        x = left + i * step
        share = vote_share(shown, i)
        bar(axes, (x - 3.2, 8.5), (6.4, 1.2), PALE)
        bar(axes, (x - 3.2, 8.5), (6.4 * share, 1.2), GREEN)
        write(axes, x, 11, f'{share:.0%}', align='center')
        token(axes, (x, 6), name, 'draft' if shown['kept'][i] else 'out', 6.4)
    write(axes, 1, 9.1, 'share of the vote', GREY)
    write(axes, 1, 6, 'elected', GREY)
    write(axes, 1, 2.4, 'target', GREY)
    kept = sum(shown['kept'])
    verdict = f'one pass over {len(shown["elected"]) + 1} positions: {kept} kept, and its own next token'
    write(axes, left - 3.2, 2.4, verdict)
    token(axes, (left + 4 * step, 2.4), shown['committed'][-1], 'target', 6.4)
    return figure


def distinct(lines):
    """The lines, equal ones once, so ordered that those with a common beginning stand together."""
    found = {}
    for line in lines:
        # of each of its beginnings, the first line with it
        begun = [[other[:n] for other in lines].index(line[:n]) for n in range(1, len(line) + 1)]
        found[tuple(begun)] = line
    return [found[begun] for begun in sorted(found)]


def vote_share(shown, i):
    """The share of the weights at a place that went to what was elected."""
    weights = [row[i] for row in shown['weights']]
    won = [weight for weight, line in zip(weights, shown['branches']) if line[i] == shown['elected'][i]]
    return sum(won) / sum(weights)


def via(shown):
    """The ratio of each guess among the three regions, and who has read it."""
    figure, axes = canvas(43)
    headline(axes, 'via: a slim target judges, and asks the whole one only where it doubts',
             f'Two cycles of a story that begins “{shown["prompt"]}”')
    foot, height = 17.5, 16
    bounds = 0, shown['escalate'], shown['keep'], 1.06
    regions = (('target decides', '#DCEBF5'), ('slim rewrites', '#FFF3D6'), ('kept', '#E2F3ED'))
    for low, high, (name, ground) in zip(bounds, bounds[1:], regions):
        bar(axes, (14, foot + height * low), (WIDTH - 16, height * (high - low)), ground)
        write(axes, 1, foot + height * (low + high) / 2, name)
        if low:
            y = foot + height * low
            rule(axes, (14, WIDTH - 2), (y, y), GREY, '--')
            write(axes, 13.4, y, f'{low:g}', GREY, 'right')
    write(axes, 13.4, foot + height, '1', GREY, 'right')
    write(axes, 1, foot + height + 2.6, 'r = s(x) / max s of each guess', GREY)
    for y, name in ((15, 'guess'), (11.5, 'slim reads'), (8.7, 'target reads'), (5, 'committed')):
        write(axes, 1, y, name, GREY)
    for left, cycle in zip((18, 47), shown['cycles']):
        via_cycle(axes, left, cycle, (foot, height))
    return figure


def via_cycle(axes, left, cycle, scale):
    """One cycle from x = left on; scale: foot and height of r."""
    foot, height = scale
    step = 5.3
    whole = 'target/full' in cycle['read']
    for i, name in enumerate(cycle['drafted']):
        x = left + i * step
        kept = cycle['kept'][i]
        y = foot + height * cycle['ratio'][i]
        if kept:
            axes.plot(x, y, 'o', color=GREEN, markersize=6)
        else:
            axes.plot(x, y, 'X', color=VERMILLION, markersize=9)
        rule(axes, (x, x), (foot - 1, y - 0.5), '#AAAAAA', ':')
        token(axes, (x, 15), name, 'draft' if kept else 'out', 4.8)
        if not kept:
            write(axes, x - 1.2, y - 1.5, f'r = {cycle["ratio"][i]:.2f}', align='right')
    end = left + 4 * step + 2.4
    bar(axes, (left - 2.4, 10.9), (end - left + 2.4, 1.2), ORANGE)
    if whole:
        bar(axes, (left - 2.4, 8.1), (end - left + 2.4, 1.2), BLUE)
    else:
        write(axes, left - 2.4, 8.7, 'nothing: no full pass at all', GREY)
    for i, name in enumerate(cycle['committed']):
        kind = 'draft' if cycle['kept'][i] else cycle['by'][i]
        token(axes, (left + i * step, 5), name, kind, 4.8)
    who = 'the target wrote' if whole else 'slim wrote'
    write(axes, end, 2.4, f'{who} the last one', align='right')


def specguard(shown):
    """A step a line: both signals, their mean against tau, what became of it."""
    height = 15 + 5 * len(shown['steps'])
    figure, axes = canvas(height)
    headline(axes, 'specguard: a whole step is kept if the draft was sure and looked back',
             f'All steps after “{textwrap.shorten(shown["prompt"], 76, placeholder=" …")}”')
    columns = dict(confidence=(18, '#BFDDF2'), grounding=(30, '#BFDDF2'), score=(42, SKY))
    top = height - 8
    write(axes, 1, top, 'step of the draft', GREY)
    for name, (x, _) in columns.items():
        write(axes, x, top, name, GREY)
    foot = top - 5 * len(shown['steps']) + 0.5
    tau = 42 + 10 * shown['tau']
    rule(axes, (tau, tau), (foot, top - 1.5), VERMILLION, '--')
    write(axes, tau, foot - 1.3, f'τ = {shown["tau"]:g}', VERMILLION, 'center')
    for i, step in enumerate(shown['steps']):
        y = top - 4 - 5 * i
        kept = step['kept']
        token(axes, (8.5, y), step['text'], 'draft' if kept else 'out', 15)
        for name, (x, color) in columns.items():
            bar(axes, (x, y - 0.8), (10, 1.6), '#EEEEEE')
            bar(axes, (x, y - 0.8), (10 * step[name], 1.6), color)
            write(axes, x + 9.6, y, f'{step[name]:.2f}', align='right')
        rule(axes, (tau, tau), (y - 1.2, y + 1.2), VERMILLION)
        if kept:
            write(axes, 54.5, y, 'kept')
        else:
            same = step['text'] == step['committed']
            write(axes, 54.5, y + 1.4, f'the target {"writes the same" if same else "mends it"}', GREY)
            token(axes, (62, y - 0.9), step['committed'], 'target', 15)
    write(axes, 1, 2, 'confidence: the step’s least log q(x); grounding: its least attention on what '
          'stood before; score: their mean', GREY)
    return figure


def sparse(shown):
    """A strip of key blocks for each key head of each layer: what it reads is inked."""
    read = shown['read']
    height = 16.5 + 2.8 * len(read)
    figure, axes = canvas(height)
    said = (f'One pass over {shown["positions"]} positions after {shown["cached"]} cached tokens, '
            f'in blocks of {shown["block"]}')
    headline(axes, 'sparse: the verifying pass reads some blocks of keys, chosen in half of the layers', said)
    left, top = 15, height - 9.5
    blocks = shown['cached'] // shown['block']
    width = (WIDTH - 3 - left) / (blocks + 1)
    foot = top - 2.8 * len(read)
    last = left + width * (blocks - shown['locals'])
    bar(axes, (left, foot), (width * shown['sinks'], top - foot), '#FFE9B8')
    bar(axes, (last, foot), (WIDTH - 3 - last, top - foot), '#FFE9B8')
    write(axes, left, top + 1.2, 'first block', GREY)
    write(axes, WIDTH - 3, top + 1.2, 'last blocks and the pass itself', GREY, 'right')
    for layer, heads in enumerate(read):
        y = top - 2.8 * layer - 1.4
        chooses = layer in shown['anchors']
        write(axes, 1, y, f'layer {layer}', BLACK if chooses else GREY)
        write(axes, 8, y, 'chooses' if chooses else 'as above', BLACK if chooses else GREY)
        for side, chosen in zip((0.5, -0.5), heads):
            strip(axes, (left, y + side), width, [*chosen, blocks], BLUE if chooses else '#8FC1E3')
    inked = sum(map(len, read[0])) / len(read[0]) / blocks
    write(axes, 1, 4.3, f'Two strips a layer, one for each key head. Each reads {inked:.0%} of the blocks; '
          'the shaded ones always.', GREY)
    write(axes, 1, 2, 'The root’s query chooses, for all positions of the pass and for the layers that '
          'choose nothing.', GREY)
    return figure


def strip(axes, begin, width, chosen, color):
    """A line of blocks from a point on, those that are chosen inked."""
    x, y = begin
    xs = []
    for block in chosen:
        xs += [x + width * (block + 0.08), x + width * (block + 0.92), float('nan')]
    axes.plot(xs, [y] * len(xs), color=color, linewidth=5, solid_capstyle='butt')


DRAWN = dict(lanes=lanes, cmasd=cmasd, ecsv=ecsv, via=via, specguard=specguard, sparse=sparse)
