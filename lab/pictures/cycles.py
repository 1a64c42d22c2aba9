"""What the lanes and the pictures of the methods show: real greedy cycles of the embedded pair, as dicts.

Which text, and by what rule a cycle of it was taken, stands in each function. Words are texts of tokens.
"""
import copy
import itertools
from collections import Counter

from lab import tasks
from lab.judge import Records
from lab.page.traced import watched
from lab.measure import EMBEDDED, cached_engine, held_out_rows
from verify import CmAsd, Draft, Ecsv, Exact, Score, Sparse, SpecGuard, ViaSd, decode

FOX = 'One evening Mia the fox went to the market with a map.'
CROW = 'Last winter Tom the crow went to the forest with a basket.'
RABBIT = 'One morning Tom the rabbit went to the market with a map.'
BELLS = 8               # which of the held-out math problems specguard solves
TABLE = 400, 450        # tokens of the prompt that sparse verification reads
BLOCK = 8               # tokens of one of its blocks


def words(tokens):
    """The text of each token; a line's end as an arrow."""
    texts = [EMBEDDED.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    return [text.strip(' ').replace('\n', '↵') for text in texts]


def column(judged, name):
    """Of each Judged its field of this name, or what its signals say."""
    return [getattr(row, name, row.signals.get(name)) for row in judged]


def begun(text, method):
    """A Session of the embedded pair that has read this text."""
    ids = EMBEDDED.encode(text)
    engine = cached_engine(EMBEDDED)
    engine.open([ids])
    return engine.start(ids, method)


# ------------------------------------------------------------------------------------ the lanes of one clock

def raced():
    """The first three cycles of sd, and what its passes take in plain steps, as stored for the pair."""
    method = Exact()
    cycles = [dict(drafted=words(cycle.drafted), accepted=cycle.accepted, committed=words(cycle.tokens))
              for cycle in itertools.islice(decode(begun(FOX, method), method), 3)]
    costs = Records('cmasd', 'embedded').costs
    return dict(prompt=FOX, cycles=cycles, c=costs.of_pass('draft/full', 1),
                v=costs.of_pass('target/full', method.gamma + 1))


# -------------------------------------------------------------------------------------------- CM-ASD, ECSV

def confident():
    """A cycle of cmasd: the one that keeps what the target would not have written, at the least confidence.

    window: how many tokens the mean confidence of the block so far allows, at each place.
    """
    method = CmAsd()
    session = begun(FOX, method)
    cycles = []
    for cycle in decode(session, method):
        before = copy.copy(session)
        before.tokens = session.tokens[:-len(cycle.tokens)]
        model = session.target.model
        score = Score(before, Draft.points(cycle.drafted, model), model.full)
        best = score.logits.argmax(-1).tolist()
        bent = any(row.kept and row.tokens != [token] for row, token in zip(cycle.judged, best))
        confidence = column(cycle.judged, 'confidence')
        shown = dict(prompt=FOX, drafted=words(cycle.drafted), confidence=confidence,
                     window=[method.window(cycle.signals[:n + 1]) for n in range(len(confidence))],
                     most=method.gamma, ratio=column(score.table, 'ratio'),
                     threshold=column(cycle.judged, 'threshold'), kept=column(cycle.judged, 'kept'),
                     favourite=words(best), committed=words(cycle.tokens))
        cycles.append((bent, -min(confidence, default=1.0), shown))
    return max(cycles, key=lambda one: one[:2])[-1]


def voted():
    """A cycle of ecsv: the one whose branches part into most different beginnings."""
    method = Ecsv(5)
    session = begun(CROW, method)
    widest = 0
    for cycle in decode(session, method):
        branches = method.ballot.tokens.tolist()
        nodes = len(beginnings(branches))
        if 0 < cycle.accepted == len(cycle.drafted) and nodes > widest:
            widest = nodes
            before = EMBEDDED.tokenizer.decode(session.tokens[:-len(cycle.tokens)]).split()
            found = dict(before=' '.join(['…', *before[-6:]]), branches=[words(ids) for ids in branches],
                         weights=method.weights.tolist(), elected=words(cycle.drafted),
                         committed=words(cycle.tokens), kept=column(cycle.judged, 'kept'))
    return found


def beginnings(lines):
    """{beginning: how many of the lines have it}, lists of anything, each beginning a tuple."""
    return Counter(tuple(line[:n]) for line in lines for n in range(1, len(line) + 1))


def doubted():
    """Two cycles of via in one text: the first that slim rewrites, the first that it hands to the target."""
    method = ViaSd()
    session = begun(RABBIT, method)
    found = {}
    for number, cycle in enumerate(decode(session, method), 1):
        last = cycle.judged[-1]
        if not last.kept:
            found.setdefault(last.signals['by'], dict(
                number=number, drafted=words(cycle.drafted), ratio=column(cycle.judged, 'ratio'),
                by=column(cycle.judged, 'by'), kept=column(cycle.judged, 'kept'),
                committed=words(cycle.tokens), read=sorted(cycle.passes)))
    return dict(prompt=RABBIT, escalate=method.escalate, keep=method.keep,
                cycles=[found['slim'], found['target']])


def guarded():
    """All steps of specguard on one problem, with both signals on their scale of 0 to 1."""
    row = held_out_rows('math', BELLS + 1)[BELLS]
    method = SpecGuard(k=1, draft_temperature=0.0)
    session = begun(row['prompt'], method)
    steps = []
    for cycle in decode(session, method):
        (step,) = cycle.judged
        steps.append(dict(text=text_of(cycle.drafted), confidence=step.signals['scaled_L'],
                          grounding=step.signals['scaled_G'], score=step.signals['score'],
                          kept=step.kept, committed=text_of(cycle.tokens)))
    return dict(prompt=row['prompt'], tau=method.tau, steps=steps)


def text_of(tokens):
    """The text of a step in one line, without blanks at its ends."""
    return EMBEDDED.tokenizer.decode(tokens).strip()


def sparsified():
    """The blocks of keys that one verifying pass reads, in each layer by each of its key heads.

    The pass: the root and four right guesses after the first held-out table of a middling length.
    """
    low, high = TABLE
    row = next(row for row in tasks.rows('table', 7) if low < len(EMBEDDED.encode(row['prompt'])) < high)
    ids = EMBEDDED.encode(row['prompt'])
    draft = EMBEDDED.encode(row['solution'])[:4]
    method = Sparse(block=BLOCK)
    session = begun(row['prompt'], method)
    reader = session.target
    path = method.sparse_path(reader.model.full, session)
    log = []
    reader.read(ids + draft, watched(path, log), len(draft) + 1)
    anchors, read = [], []
    for sublayer, carry in log[::2]:                    # the others are feed-forward
        chooses, _ = path.attends[sublayer // 2].keywords['how']
        if chooses:
            anchors.append(sublayer // 2)
        read.append([sorted(blocks) for blocks in carry['blocks'][0].tolist()])
    return dict(positions=len(draft) + 1, cached=len(ids) - 1, block=BLOCK, sinks=method.sinks,
                locals=method.locals, anchors=anchors, read=read)


CYCLES = dict(lanes=raced, cmasd=confident, ecsv=voted, via=doubted, specguard=guarded, sparse=sparsified)
