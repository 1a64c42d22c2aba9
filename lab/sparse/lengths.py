"""Contexts longer than the embedded pair learned: tables in a row, rotary positions that are stretched."""
import copy
import re
from dataclasses import replace

from lab import tasks
from lab.common import SEED, embedded


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
