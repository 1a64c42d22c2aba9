"""Generated tasks with exact checkers, so that a claim can be tried without a download.

A row is a dict: task, prompt, answer (the final number as text; None where there is none), solution (what a
perfect model writes after the prompt). The train and held-out splits can share no text: a hash of the row's
text decides which split it belongs to, whatever the seed. `python -m lab.tasks math --n 20 --seed 7` prints
held-out rows as JSON lines.
"""
import argparse
import json
import random
import re
import sys
import zlib

NAMES = 'Mia Tom Ana Ben Zoe Sam Eva Leo Ida Max Lia Jon Amy Kai Nora Paul'.split()
ITEMS = ('pens cups books coins apples cards shells stamps eggs keys plums bricks ribbons nuts balls '
         'seeds').split()
COLUMNS = 'price stock sold weight'.split()
STEP = re.compile(r'(\d+) ([-+*/]) (\d+) = (\d+)')

# ------------------------------------------------------------------------------------------ math: GSM8K, MATH

GAIN = ['buys {k} more', 'finds {k} more', 'gets {k} from a friend', 'wins {k}']
LOSE = ['loses {k}', 'gives {k} away', 'sells {k}', 'breaks {k}']
BOXES = ['buys {d} boxes of {k} {item} each', 'packs {d} bags of {k} {item} each and adds them']
TIMES = ['works hard and now has {d} times as many', 'trades well and now has {d} times as many']
SHARE = ['shares them equally among {d} friends and keeps one share', 'makes {d} equal piles and keeps one']


def number(rng, top):
    """A whole number from 2 to top, two digits more often than three."""
    return rng.randint(2, min(top, 99)) if top < 100 or rng.random() < 0.75 else rng.randint(100, top)


def event(rng, n, left):
    """An event that changes count n in at most `left` steps 'a op b = c': (phrases, values, steps, new n)."""
    kinds = []
    if n <= 900: kinds += ['gain'] * 3
    if n >= 4: kinds += ['lose'] * 3
    if n <= 800 and left >= 2: kinds += ['boxes'] * 3
    if n <= 300: kinds += ['times'] * 2
    divisors = [d for d in range(2, 10) if n % d == 0 and n >= 2 * d]
    if divisors: kinds += ['share'] * 3
    kind = rng.choice(kinds)
    if kind == 'gain':
        k = number(rng, 999 - n)
        return GAIN, dict(k=k), [f'{n} + {k} = {n + k}'], n + k
    if kind == 'lose':
        k = number(rng, n - 1)
        return LOSE, dict(k=k), [f'{n} - {k} = {n - k}'], n - k
    if kind == 'boxes':
        d = rng.randint(2, 9)
        k = rng.randint(2, min(99, (999 - n) // d))
        return BOXES, dict(d=d, k=k), [f'{d} * {k} = {d * k}', f'{n} + {d * k} = {n + d * k}'], n + d * k
    if kind == 'times':
        d = rng.randint(2, min(9, 999 // n))
        return TIMES, dict(d=d), [f'{n} * {d} = {n * d}'], n * d
    d = rng.choice(divisors)
    return SHARE, dict(d=d), [f'{n} / {d} = {n // d}'], n // d


def math(rng, low=2, high=6):
    """A word problem of low to high steps. Stands for GSM8K and MATH."""
    wanted, name, item = rng.randint(low, high), rng.choice(NAMES), rng.choice(ITEMS)
    n = number(rng, 400)
    text, steps = [f'{name} has {n} {item}.'], []
    while len(steps) < wanted:
        phrases, values, new, n = event(rng, n, wanted - len(steps))
        text.append(f'{name} {rng.choice(phrases).format(item=item, **values)}.')
        steps += new
    text.append(f'How many {item} does {name} have?')
    return row('math', ' '.join(text), steps, n)


# ---------------------------------------------------------------------------------------------- table: TabMWP

def table(rng, low=3, high=5):
    """A table of low to high rows, a question that takes a look-up and one operation. Stands for TabMWP."""
    column, items = rng.choice(COLUMNS), rng.sample(ITEMS, rng.randint(low, high))
    cells = {item: number(rng, 499) for item in items}
    (a, b), kind = rng.sample(items, 2), rng.choice(['plus', 'minus', 'times'])
    if kind == 'minus' and cells[a] < cells[b]:
        a, b = b, a
    x, y = cells[a], cells[b]
    if kind == 'times':
        d = rng.randint(2, min(9, 999 // x))
        ask, step, n = f'What is {d} times the {column} of {a}?', f'{d} * {x} = {d * x}', d * x
    else:
        n = x + y if kind == 'plus' else x - y
        ask = f'What is the {column} of {a} {kind} the {column} of {b}?'
        step = f'{x} {"+" if kind == "plus" else "-"} {y} = {n}'
    lines = [f'item | {column}'] + [f'{item} | {n}' for item, n in cells.items()]
    return row('table', '\n'.join(lines + [ask]), [step], n)


# ---------------------------------------------------------------------------------- story: WikiText, The Pile

ANIMALS = 'fox bear mouse owl cat rabbit frog duck goat crow'.split()
PLACES = 'the river;the old mill;the forest;the market;the hill;the harbour;the garden;the bridge'.split(';')
THINGS = 'lantern key map drum kite ring basket flute'.split()
WHEN = 'One morning;One evening;Last winter;A long time ago;On a rainy day'.split(';')
SEARCH = ['They looked behind {place}, but they only found a {thing2}.',
          '"Have you seen my {thing}?" asked {a}. "No," said {b}, "but let us ask the {animal2}."',
          '{b} climbed a tall tree and saw smoke near {place}.',
          'The {animal2} told them to walk to {place} before dark.',
          '{a} was tired and sat down by {place}.',
          'Then the wind blew hard, and {a} held the hand of {b}.']
LOST = ['But the {thing} was gone.', 'There {a} dropped the {thing} into the dark water.',
        'A {animal2} took the {thing} and ran away.', 'Suddenly the {thing} broke into two pieces.']
FOUND = ['At last {b} found the {thing} under a stone.', 'In the end the {animal2} gave the {thing} back.',
         'So they made a new {thing} together.', 'They never saw the {thing} again.']
END = ['{a} laughed, and the two friends went home.', '{a} thanked {b} and gave {b} a {thing2}.',
       'From that day on {a} and {b} met at {place} every week.', 'And {a} slept well that night.']


def pick(rng, options):
    """One of the options, the first the likeliest (1 / rank^1.5): the grammar has a mode and real choice."""
    return rng.choices(options, [(i + 1) ** -1.5 for i in range(len(options))])[0]


def story(rng):
    """A story of 60 to 200 tokens from a grammar with real choice in it. Stands for WikiText and The Pile."""
    a, b = rng.sample(NAMES, 2)
    fill = lambda text: text.format(a=a, b=b, thing=thing, place=pick(rng, PLACES), thing2=pick(rng, THINGS),
                                    animal2=pick(rng, ANIMALS))
    thing = rng.choice(THINGS)
    prompt = f'{pick(rng, WHEN)} {a} the {rng.choice(ANIMALS)} went to {rng.choice(PLACES)} with a {thing}.'
    text = [f'{a} met {b} the {pick(rng, ANIMALS)} there.', fill(pick(rng, LOST))]
    left = list(SEARCH)
    for _ in range(rng.randint(2, 5)):
        text.append(fill(left.pop(left.index(pick(rng, left)))))
    text += [fill(pick(rng, FOUND)), fill(pick(rng, END))]
    return dict(task='story', prompt=prompt, answer=None, solution=' ' + ' '.join(text))


# ------------------------------------------------------------------------------------------ rows and checkers

TASKS = dict(math=math, table=table, story=story)


def row(task, prompt, steps, n):
    return dict(task=task, prompt=prompt, answer=str(n), solution='\n' + '\n'.join(steps + [f'Answer: {n}']))


def held_out(row):
    """Whether this text belongs to the held-out eighth of all texts."""
    return zlib.crc32((row['prompt'] + row['solution']).encode()) % 8 == 0


def rows(task, seed, split='held-out', **knobs):
    """Endless rows of one task and one split ('train' or 'held-out'); the same seed gives the same rows."""
    if task not in TASKS:
        raise ValueError(f'unknown task {task!r}; the tasks are {", ".join(TASKS)}')
    rng = random.Random(f'{task} {seed} {split}')
    while True:
        new = TASKS[task](rng, **knobs)
        if held_out(new) == (split == 'held-out'):
            yield new


def right(row, text):
    """Whether the text's final answer, the number after its last 'Answer:', is the row's."""
    found = re.findall(r'^Answer: (\d+)\s*$', text, re.M)
    return bool(found) and found[-1] == row['answer']


def steps_right(row, text):
    """For each line of the text that is a step or should be one, whether it is right: [bool].

    A step is right if it reads 'a op b = c', its arithmetic holds, and c is what the reference has there.
    """
    wanted = [c for *_, c in STEP.findall(row['solution'])]
    lines = [line for line in text.strip().split('\n') if line and not line.startswith('Answer:')]
    return [i < len(wanted) and step_right(line, wanted[i]) for i, line in enumerate(lines)]


def step_right(line, wanted):
    found = STEP.fullmatch(line.strip())
    if not found:
        return False
    a, op, b, c = found.groups()
    a, b = int(a), int(b)
    value = {'+': a + b, '-': a - b, '*': a * b, '/': a // b if b and a % b == 0 else None}[op]
    return str(value) == c == wanted


def main():
    parser = argparse.ArgumentParser(description='print held-out rows of a task as JSON lines')
    parser.add_argument('task', choices=TASKS)
    parser.add_argument('--n', type=int, default=20)
    parser.add_argument('--seed', type=int, default=7)
    args = parser.parse_args()
    for _, new in zip(range(args.n), rows(args.task, args.seed)):
        print(json.dumps(new, ensure_ascii=False))


if __name__ == '__main__':
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
