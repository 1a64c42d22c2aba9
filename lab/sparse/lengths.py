"""Long contexts: tables in a row for the embedded pair, joined rows of its prompts for any other.

Longer ones than the embedded pair learned take rotary positions that are stretched.
"""
import copy
import random
import re
from dataclasses import replace

from lab import tasks
from lab.common import SEED, embedded
from lab.pairs import rows_by_family
from model import encode

NEXT = '\n\nQuestion: '         # between joined rows that are graded; in an answer it begins another one
CALIBRATED = 1024               # tokens of a family that a calibration is measured on


# ------------------------------------------------------------------------------------------- tables in a row


def stretched(model, length):
    """A copy of the network that reads so many positions, by yarn where these are more than it learned.

    Nothing is trained for it: what the copy can do is to be measured. Source: Peng et al. 2023 (yarn).
    """
    learned = model.config.max_position_embeddings
    if length <= learned:
        return model
    rope = model.config.rope | dict(rope_type='yarn', factor=length / learned,
                                    original_max_position_embeddings=learned)
    stretched_copy = copy.deepcopy(model)
    stretched_copy.config = replace(model.config, rope=rope, max_position_embeddings=length)
    stretched_copy.set_context(length)
    return stretched_copy


def without_question(prompt):
    """(table, question) of a prompt of the task `table`."""
    table, question = prompt.rsplit('\n', 1)
    return table, question


def table_without(table, items):
    """The table's lines that are not of these items."""
    lines = []
    for line in table.split('\n'):
        item = line[2:].split(':')[0]
        if item not in items:
            lines.append(line)
    return '\n'.join(lines)


def long_prompt(row, others, tokens, is_first):
    """The row's prompt among as many other tables as fit into so many tokens; it comes first, or last.

    others: rows of tables, an iterator. They lose the items that are asked for, so that one cell answers.
    """
    tokenizer = embedded('target')[1]
    table, question = without_question(row['prompt'])
    items = re.findall(r'of (\w+)', question)
    room = tokens - len(tokenizer.encode(row['prompt']).ids)
    tables = []
    while True:
        other, _ = without_question(next(others)['prompt'])
        other = table_without(other, items)
        room -= len(tokenizer.encode(other + '\n').ids)
        if room < 0:
            break
        tables.append(other)
    tables.insert(0 if is_first else len(tables), table)
    return '\n'.join([*tables, question])


def long_contexts(n, tokens):
    """n contexts as of record.contexts: the table that is asked about stands first, last, first and so on."""
    tokenizer = embedded('target')[1]
    asked = tasks.rows('table', SEED)
    others = tasks.rows('table', SEED + 1, low=20, high=60)
    found = []
    for i in range(n):
        row = next(asked)
        prompt = long_prompt(row, others, tokens, i % 2 == 0)
        found.append((row, tokenizer.encode(prompt).ids, tokenizer.encode(row['solution']).ids))
    return found


# ----------------------------------------------------------------------------------------------- joined rows

def filling(tokenizer, texts, tokens):
    """(the first of these texts, as few as have so many tokens together or else all, how many they have)."""
    texts = list(texts)
    found = []
    there = 0
    for text, ids in zip(texts, encode(tokenizer, texts, special=False)):
        if there >= tokens:
            break
        there += len(ids)
        found.append(text)
    return found, there


def is_graded(pair, row):
    return pair.grade(row, '') is not None


def piece(pair, row):
    """What a row adds to a context: question and solution where it has both, else its text."""
    if is_graded(pair, row):
        return f'{NEXT}{row["prompt"]}\nAnswer: {row.get("solution") or row["answer"]}'
    return f'\n\n{row["prompt"]}'


def parted(pair, family):
    """(rows that contexts are made of, rows to calibrate on: the last tenth of them, one at least)."""
    rows = rows_by_family(pair.prompts)[family]
    spare = max(1, len(rows) // 10)
    return rows[:-spare], rows[-spare:]


def can_fill(pair, family, length):
    """Whether the family's rows have so many tokens, and both models read as many."""
    rows, _ = parted(pair, family)
    _, there = filling(pair.tokenizer, (piece(pair, row) for row in rows), length)
    context = min(pair.network(role)[0].config.max_position_embeddings for role in pair.roles)
    return pair.max_new < length // 2 and length <= min(there, context)


def joined(pair, family, length, place):
    """(row, ids) of the place-th context of a family: so many tokens at most, what is written included.

    Graded rows are worked ones, in another order each time, and `row`, the last, whose answer is open. Others
    are plain text, never in a chat template, and cut where it is full; there is nothing to grade by, {}.
    """
    rows, _ = parted(pair, family)
    row, *others = random.Random(f'{SEED} {place}').sample(rows, len(rows))
    tokens = length - pair.max_new
    if not is_graded(pair, row):
        texts, _ = filling(pair.tokenizer, (piece(pair, other) for other in [row, *others]), tokens)
        (ids,) = encode(pair.tokenizer, [''.join(texts).lstrip()])
        return {}, ids[:tokens]
    asked = f'{NEXT}{row["prompt"]}\nAnswer:'
    room = tokens - len(pair.encode(asked))
    texts, _ = filling(pair.tokenizer, (piece(pair, other) for other in others), room)
    fitting = texts[:-1]                                # the last one may be too long
    return row, pair.encode(''.join([*fitting, asked]).lstrip())


def calibration_ids(pair, family):
    """CALIBRATED ids of joined rows of a family, from those on that no context is made of."""
    rows, spare = parted(pair, family)
    texts, _ = filling(pair.tokenizer, (piece(pair, row) for row in spare + rows), CALIBRATED)
    (ids,) = encode(pair.tokenizer, [''.join(texts).lstrip()])
    return ids[:CALIBRATED]
