"""Generated tasks with exact graders: a small twin of each benchmark family, so that a claim takes minutes.

A row is a dict: task, prompt, answer (what is right, as text; None where much is), solution (what a perfect
model writes after the prompt). The train and held-out splits share no text: a hash of the row's text decides
which split it belongs to, whatever the seed.
`python -m lab.tasks math --n 20 --seed 7` prints held-out rows as JSON lines.
"""
import argparse
import ast
import itertools
import json
import operator
import random
import re
import sys
import zlib
from functools import partial

from lab import at_least

NAMES = 'Mia Tom Ana Ben Zoe Sam Eva Leo Ida Max Lia Jon Amy Kai Nora Paul'.split()
ITEMS = ('pens cups books coins apples cards shells stamps eggs keys plums bricks ribbons nuts balls seeds '
         'lamps bowls rings hats bags pears kites drums bells masks ropes dolls plates forks spoons chairs '
         'rugs clocks shoes socks belts boots shirts coats tickets pots nails pins beads flags stones leaves '
         'carrots lemons cakes pies fish hens ducks goats sheep toys boxes cans jars logs wheels '
         'maps').split()
JOBS = 'baker farmer teacher painter sailor doctor singer miller'.split()
HOMES = 'by the river;on the hill;near the forest;by the harbour;in the old mill;near the bridge'.split(';')
WISHES = 'lantern key map drum kite ring basket flute boat horse'.split()
ANIMALS = 'fox bear mouse owl cat rabbit frog duck goat crow'.split()
COLUMNS = 'price stock sold weight cost size made'.split()
GOODS = 'wool salt glass honey iron wine silk rope paper cheese'.split()
STEP = re.compile(r'(\d+) ([-+*/]) (\d+) = (\d+)')

# ---------------------------------------------------------------------------------------- math: GSM8K, MATH

EVENTS = dict(
    gain=['buys {k} more', 'finds {k} more', 'gets {k} from a friend', 'wins {k}'],
    lose=['loses {k}', 'gives {k} away', 'sells {k}', 'breaks {k}'],
    boxes=['buys {d} boxes of {k} {item} each', 'packs {d} bags of {k} {item} each and adds them'],
    times=['works hard and now has {d} times as many', 'trades well and now has {d} times as many'],
    share=['shares them equally among {d} friends and keeps one share',
           'makes {d} equal piles and keeps one'])


def number(rng, top):
    """A whole number from 2 to top, two digits more often than three."""
    if top < 100 or rng.random() < 0.75:
        return rng.randint(2, min(top, 99))
    return rng.randint(100, top)


def event(rng, n, left):
    """An event that changes count n in at most `left` steps 'a op b = c': (kind, values, steps, new n)."""
    divisors = [d for d in range(2, 10) if n % d == 0 and n >= 2 * d]
    possible = dict(gain=n <= 900, lose=n >= 4, boxes=n <= 800 and left >= 2, times=n <= 300, share=divisors)
    shares = dict(gain=3, lose=3, boxes=3, times=2, share=3)
    kind = rng.choice([kind for kind in EVENTS if possible[kind] for _ in range(shares[kind])])
    if kind == 'gain':
        k = number(rng, 999 - n)
        return kind, dict(k=k), [f'{n} + {k} = {n + k}'], n + k
    if kind == 'lose':
        k = number(rng, n - 1)
        return kind, dict(k=k), [f'{n} - {k} = {n - k}'], n - k
    if kind == 'boxes':                                 # two steps: d boxes of k each are added
        d = rng.randint(2, 9)
        k = rng.randint(2, min(99, (999 - n) // d))
        steps = [f'{d} * {k} = {d * k}', f'{n} + {d * k} = {n + d * k}']
        return kind, dict(d=d, k=k), steps, n + d * k
    if kind == 'times':
        d = rng.randint(2, min(9, 999 // n))
        return kind, dict(d=d), [f'{n} * {d} = {n * d}'], n * d
    d = rng.choice(divisors)
    return kind, dict(d=d), [f'{n} / {d} = {n // d}'], n // d


def math(rng, low=2, high=4, task='math'):
    """A word problem of low to high steps. Stands for GSM8K."""
    wanted = rng.randint(low, high)
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    n = number(rng, 400)
    text = [f'{name} has {n} {item}.']
    steps = []
    while len(steps) < wanted:
        kind, values, new, n = event(rng, n, wanted - len(steps))
        action = rng.choice(EVENTS[kind]).format(item=item, **values)
        text.append(f'{name} {action}.')
        steps += new
    text.append(f'How many {item} does {name} have?')
    return worked(task, ' '.join(text), steps, n)


def worked(task, prompt, lines, n):
    """A row whose solution is lines of work and a last line with the answer n."""
    solution = '\n'.join(['', *lines, f'Answer: {n}'])
    return dict(task=task, prompt=prompt, answer=str(n), solution=solution)


# -------------------------------------------------------------------------------------------- table: TabMWP

WORDS = ([f'by a {job}' for job in JOBS], HOMES, [f'for {name}' for name in NAMES],
         [f'with a {wish}' for wish in WISHES], [f'of {good}' for good in GOODS])      # of columns 2 to 6


def table(rng, low=3, high=60, columns=(1, 6), task='table'):
    """A table, and a question of one or two look-ups and one or two operations. Stands for TabMWP.

    It has low to high rows, mostly few; all columns but the first hold words that a reader must pass over.
    """
    rows = round(low * (high / low) ** rng.random())
    column = rng.choice(COLUMNS)
    values = {item: number(rng, 499) for item in rng.sample(ITEMS, rows)}
    others = WORDS[:rng.randint(*columns) - 1]
    lines = []
    for item, n in values.items():
        line = [f'| {item}: {column} {n}', *map(rng.choice, others)]
        lines.append(', '.join(line))
    (a, x), (b, y) = rng.sample(sorted(values.items()), 2)
    kind = rng.choice(['plus', 'minus', 'times'])
    if kind == 'minus' and x < y:
        a, x, b, y = b, y, a, x
    steps = [f'| {column} of {a} {x}']
    if kind == 'times':
        d = rng.randint(2, min(9, 999 // x))
        n = x * d
        ask = f'What is the {column} of {a} times {d}'
        steps.append(f'{x} * {d} = {n}')
    else:
        sign, n = ('+', x + y) if kind == 'plus' else ('-', x - y)
        ask = f'What is the {column} of {a} {kind} the {column} of {b}'
        steps += [f'| {column} of {b} {y}', f'{x} {sign} {y} = {n}']
    if 2 <= n <= 300 and rng.random() < 0.4:
        d = rng.randint(2, min(9, 999 // n))
        ask += f', all times {d}'
        steps.append(f'{n} * {d} = {n * d}')
        n *= d
    return worked(task, '\n'.join([*lines, f'{ask}?']), steps, n)


# ----------------------------------------------------------------------------------------------- code: MBPP

BINARY = {'the sum of {} and {}': '{} + {}', 'the difference of {} and {}': '{} - {}',
          'the product of {} and {}': '{} * {}', 'the remainder of {} by {}': '{} % {}',
          'the larger of {} and {}': 'max({}, {})', 'the smaller of {} and {}': 'min({}, {})'}
UNARY = {'twice {}': '2 * {}', 'the square of {}': '{} ** 2', 'the size of {}': 'abs({})'}
LEAVES = {'a': 'a', 'b': 'b', 'c': 'c', 'the sum of xs': 'sum(xs)', 'the length of xs': 'len(xs)',
          'the first of xs': 'xs[0]', 'the last of xs': 'xs[-1]'}
CALLS = dict(max=max, min=min, abs=abs, sum=sum, len=len)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
             ast.Pow: operator.pow}
TRIALS = [dict(a=a, b=b, c=c, xs=xs) for a, b, c, xs in
          ((7, 3, 2, [4, 9, 1]), (2, 8, 5, [6]), (-4, 5, 9, [3, 3, -8, 2]), (12, 12, 1, [-7, 10]))]


def expression(rng, depth):
    """(English, code, whether it needs brackets as an operand) of an expression with `depth` operators."""
    if depth == 0 and rng.random() < 0.25:
        digit = str(rng.randint(2, 9))
        return digit, digit, False
    if depth == 0:
        return *rng.choice(list(LEAVES.items())), False
    if rng.random() < 0.25:
        english, text = rng.choice(list(UNARY.items()))
        depths = [depth - 1]
    else:
        english, text = rng.choice(list(BINARY.items()))
        left = rng.randint(0, depth - 1)
        depths = [left, depth - 1 - left]
    called = text.endswith(')')                         # a call's brackets are enough
    words = []
    operands = []
    for n in depths:
        said, operand, wrap = expression(rng, n)
        words.append(said)
        operands.append(f'({operand})' if wrap and not called else operand)
    return english.format(*words), text.format(*operands), not called


def code(rng):
    """A comment that says what a one-line function returns, and the function. Stands for MBPP."""
    while True:
        english, text, _ = expression(rng, rng.randint(1, 3))
        if rng.random() < 0.2:
            other, then, _ = expression(rng, 1)
            english = f'{english} if a is greater than b, else {other}'
            text = f'{text} if a > b else {then}'
        used = [name for name in ('a', 'b', 'c', 'xs') if re.search(rf'\b{name}\b', text)]
        arguments = ', '.join(used or ['a'])
        answer = f'def f({arguments}): return {text}'
        if outputs(answer):                             # a remainder by zero is no example
            return dict(task='code', prompt=f'# Return {english}.', answer=answer, solution='\n' + answer)


def evaluate(node, names):
    """The value of a syntax tree of the task's small grammar; ValueError for anything outside it."""
    match node:
        case ast.Constant(value) if type(value) is int:
            return value
        case ast.Name(name) if name in names:
            return names[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluate(operand, names)
        case ast.BinOp(a, sign, b) if type(sign) in OPERATORS:
            left, right = evaluate(a, names), evaluate(b, names)
            small = type(sign) is not ast.Pow or right == 2 and abs(left) <= 1e6
            if type(left) is type(right) is int and small:      # a list times a number could fill the memory
                return OPERATORS[type(sign)](left, right)
        case ast.Compare(a, [ast.Gt()], [b]):
            return evaluate(a, names) > evaluate(b, names)
        case ast.IfExp(test, then, other):
            return evaluate(then if evaluate(test, names) else other, names)
        case ast.Subscript(whole, index):
            return evaluate(whole, names)[evaluate(index, names)]
        case ast.Call(ast.Name(name), arguments) if name in CALLS:
            return CALLS[name](*[evaluate(argument, names) for argument in arguments])
    raise ValueError('not in the grammar')


def outputs(text):
    """What a one-line function returns on each of TRIALS; None if it is not one, or fails."""
    found = re.fullmatch(r'def f\(([\w, ]*)\): return (.{1,200})', text.strip().split('\n')[0])
    if not found:
        return None
    arguments = found[1].split(', ')
    try:
        tree = ast.parse(found[2], mode='eval')
        return [evaluate(tree.body, {name: trial[name] for name in arguments}) for trial in TRIALS]
    except (SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


# ----------------------------------------------------------------------------------------- translate: WMT14

NOUNS = dict(cat='miro', dog='kano', bird='luma', horse='tarvo', king='rego', girl='nila', boy='palo',
             farmer='agrano', baker='pana', tree='silva', house='dema', river='vada', road='strado',
             boat='navo', book='libra', stone='peto', ring='zola', cup='kupa')    # the last letter agrees
ADJECTIVES = dict(small='pit', old='vek', red='ros', good='bon', tall='alt', young='jun', green='verd',
                  happy='fel')
VERBS = dict(see=('saw', 'vid'), love=('loved', 'am'), find=('found', 'trov'), carry=('carried', 'port'),
             follow=('followed', 'sek'), wash=('washed', 'lav'), hear=('heard', 'aud'),
             paint=('painted', 'pikt'))                 # past, and the stem of the translation
PLACED = dict(near='ner', behind='post', under='sub', beside='lat')
DETERMINERS = dict(the='ol', a='un', some='mul')


def phrase(rng):
    """A noun phrase: (English, translation, whether it is plural). Adjectives follow and agree."""
    plural = rng.random() < 0.4
    noun = rng.choice(list(NOUNS))
    determiner = 'some' if plural else 'a'
    if rng.random() < 0.5:
        determiner = 'the'
    stem = NOUNS[noun]
    ending = 'n' if plural else ''
    english = [noun + 's' if plural else noun]
    theirs = [DETERMINERS[determiner], stem + ending]
    if rng.random() < 0.5:
        adjective = rng.choice(list(ADJECTIVES))
        english.insert(0, adjective)
        theirs.append(ADJECTIVES[adjective] + stem[-1] + ending)
    if determiner == 'a' and english[0][0] in 'aeiou':
        determiner = 'an'
    return ' '.join([determiner, *english]), ' '.join(theirs), plural


def translate(rng):
    """English to an invented language: object, subject, place, verb, which agrees. Stands for WMT14."""
    subject, ours, plural = phrase(rng)
    thing, theirs, _ = phrase(rng)
    verb = rng.choice(list(VERBS))
    past, stem = VERBS[verb]
    in_past = rng.random() < 0.5
    third = dict(carry='carries', wash='washes').get(verb, verb + 's')
    present = verb if plural else third
    english = [subject, past if in_past else present, thing]
    words = [theirs, ours]
    if rng.random() < 0.5:
        place, there, _ = phrase(rng)
        relation = rng.choice(list(PLACED))
        english += [relation, place]
        words += [there, PLACED[relation]]                  # a postposition
    words.append(stem + ('ud' if in_past else 'at') + ('e' if plural else ''))
    answer = ' '.join(words) + '.'
    return dict(task='translate', prompt=f'Translate: {" ".join(english)}.', answer=answer,
                solution='\n' + answer)


# ----------------------------------------------------------------------------------- summary: CNN/DailyMail

SUMMARY = re.compile(r'\w+ (\w+) (\w+) (.+)\.')       # a trade, the goods, a home
TRADES = 'sells buys makes keeps packs wants finds breaks'.split()
NOISE = ['{a} was tired.', '{a} ate some bread.', '{a} laughed.', 'It rained all day.', '{a} sat down.',
         '{a} met {b}.', '{a} slept well.', '{a} looked at {b}.']


def summary(rng):
    """Statements about several people; what one does, with what and where. Stands for CNN/DailyMail.

    What somebody does matters (present tense), what happened once does not (past).
    """
    people = rng.sample(NAMES, rng.randint(2, 8))
    trades = rng.sample(TRADES, len(people))
    items = rng.sample(ITEMS, len(people))
    answers = {name: f'{name} {trade} {item} {rng.choice(HOMES)}.'
               for name, trade, item in zip(people, trades, items)}
    lines = []
    for name in people:
        for _ in range(rng.randint(0, 5)):
            lines.append(rng.choice(NOISE).format(a=name, b=rng.choice(NAMES)))
    lines += answers.values()
    rng.shuffle(lines)
    name = rng.choice(list(answers))
    prompt = f'{" ".join(lines)}\nWhat matters about {name}?\nSummary:'
    return dict(task='summary', prompt=prompt, answer=answers[name], solution=' ' + answers[name])


# ------------------------------------------------------------- qa: TriviaQA, WebQuestions, NaturalQuestions

def joined(heads, tails):
    """Each head with each tail; both are words in one text."""
    return [head + tail for head in heads.split() for tail in tails.split()]


TOWNS = joined('Bel Dor Fen Gal Hul Kar Lor Mir Nor Pel', 'dan mar wick ton vale stad')
RULERS = joined('Ar Bo Ce Du El Fa', 'ric wen dil mon gar')
RIVERS = joined('Is An Um Ov', 'sel ter dra ka lin')
RELATIONS = dict(
    ruler=(['Who rules {}?', 'What is the name of the ruler of {}?'], RULERS),
    river=(['Which river runs by {}?', 'What is the name of the river of {}?'], RIVERS),
    goods=(['What does {} sell?', 'Which goods come from {}?'], GOODS),
    beast=(['Which animal is on the flag of {}?', 'What animal does the flag of {} show?'], ANIMALS),
    year=(['In which year was {} built?', 'When was {} built?'], [str(y) for y in range(103, 999, 7)]))
OPENINGS = 'Q: ', 'Question: ', 'Tell me: ', 'Please say: '
DICE = random.Random('world')       # the invented world is always the same
FACTS = {(relation, town): DICE.choice(values)
         for town in TOWNS for relation, (_, values) in RELATIONS.items()}


def qa(rng):
    """A closed-book fact; wordings are held out, never facts. Stands for TriviaQA, WebQuestions, NQ."""
    (relation, town), value = rng.choice(list(FACTS.items()))
    questions, _ = RELATIONS[relation]
    prompt = rng.choice(OPENINGS) + rng.choice(questions).format(town)
    return dict(task='qa', prompt=prompt, answer=value, solution='\nA: ' + value)


# -------------------------------------------------------------------------------- story: WikiText, The Pile

PLACES = 'the river;the old mill;the forest;the market;the hill;the harbour;the garden;the bridge'.split(';')
THINGS = WISHES[:8]
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
    """One of the options, the first the likeliest (1 / rank^1.5)."""
    weights = [rank ** -1.5 for rank in range(1, len(options) + 1)]
    return rng.choices(options, weights)[0]


def fill(rng, template, known):
    """The template with words for its {names}: those known, the others picked."""
    choices = dict(place=PLACES, thing2=THINGS, animal2=ANIMALS)
    word = lambda found: known.get(found[1]) or pick(rng, choices[found[1]])
    return re.sub(r'{(\w+)}', word, template)


def story(rng):
    """A story of a grammar with real choice. Stands for WikiText and The Pile."""
    a, b = rng.sample(NAMES, 2)
    thing, when, animal, place = map(rng.choice, (THINGS, WHEN, ANIMALS, PLACES))
    prompt = f'{when} {a} the {animal} went to {place} with a {thing}.'

    known = dict(a=a, b=b, thing=thing)
    text = [fill(rng, '{a} met {b} the {animal2} there.', known), fill(rng, pick(rng, LOST), known)]
    left = list(SEARCH)
    for _ in range(rng.randint(2, 5)):
        template = pick(rng, left)
        left.remove(template)
        text.append(fill(rng, template, known))
    text += [fill(rng, pick(rng, templates), known) for templates in (FOUND, END)]
    return dict(task='story', prompt=prompt, answer=None, solution=' ' + ' '.join(text))


# ----------------------------------------------------------------------------------------- rows and graders

TASKS = {
    'math': math,
    'math-hard': partial(math, low=5, high=8, task='math-hard'),                # stands for MATH
    'table': table,
    'table-long': partial(table, low=60, columns=(6, 6), task='table-long'),    # about 1,730 tokens
    'code': code, 'translate': translate, 'summary': summary, 'qa': qa, 'story': story}
WORKED = 'math', 'math-hard', 'table', 'table-long'    # the tasks whose texts end in 'Answer: n'


def rows(task, seed, split='held-out'):
    """Endless rows of one task and one split ('train' or 'held-out'); the same seed gives the same rows."""
    rng = random.Random(f'{task} {seed} {split}')
    while True:
        row = TASKS[task](rng)
        text = row['prompt'] + row['solution']
        held_out = zlib.crc32(text.encode()) % 8 == 0
        if held_out == (split == 'held-out'):
            yield row


def is_own(row):
    """Whether a grader here knows the row; one of the same name but from elsewhere is none of ours."""
    if row.get('task') == 'summary':
        return bool(SUMMARY.fullmatch(str(row.get('answer'))))
    return row.get('task') in (*WORKED, 'code', 'translate', 'qa') and 'answer' in row


def grade(row, text):
    """Whether the text is right for a row of these tasks; None for a story, where much is right."""
    task, answer = row['task'], row['answer']
    if task in WORKED:
        return re.findall(r'^Answer: (\d+)\s*$', text, re.M)[-1:] == [str(answer)]
    if task == 'code':
        values = outputs(text)
        return values is not None and values == outputs(str(answer))
    if task == 'summary':
        return all(fact in text for fact in SUMMARY.fullmatch(answer).groups())
    if task == 'story':
        return None
    return text.strip().removeprefix('A: ') == str(answer)


def steps_right(row, text):
    """For each line of work in the text, whether it is right: [bool]; for tasks whose solutions have steps.

    A step 'a op b = c' is right if its arithmetic holds and c is what the reference has there; any other line
    (a cell looked up) if it is the reference's.
    """
    wanted = [line for line in row['solution'].strip().split('\n') if not line.startswith('Answer:')]
    lines = [line.strip() for line in text.strip().split('\n') if line and not line.startswith('Answer:')]
    right = [step_right(line, reference) for line, reference in zip(lines, wanted)]
    return right + [False] * (len(lines) - len(right))


def step_right(line, wanted):
    """Whether one line of work is right, where the reference has the line `wanted`."""
    found = STEP.fullmatch(line)
    reference = STEP.fullmatch(wanted)
    if not found or not reference:
        return line == wanted
    a, b, c = map(int, found.group(1, 3, 4))
    holds = {'+': a + b == c, '-': a - b == c, '*': a * b == c, '/': b > 0 and a == b * c}
    return holds[found[2]] and found[4] == reference[4]


def step_checker(row, tokenizer, begin):
    """Function from ids to whether their last line is right and whole; begin: where the answer begins."""
    def right(ids):
        text = tokenizer.decode(ids[begin:])
        last = text.strip().split('\n')[-1]
        if 'Answer:' not in row.get('solution', '') or last.startswith('Answer:'):
            return bool(grade(row, text))
        return text.endswith('\n') and steps_right(row, text)[-1:] == [True]
    return right


def main():
    parser = argparse.ArgumentParser(description='print held-out rows of a task as JSON lines')
    parser.add_argument('task', choices=TASKS)
    parser.add_argument('--n', type=at_least(1), default=20)
    parser.add_argument('--seed', type=at_least(0), default=7)
    args = parser.parse_args()
    for row in itertools.islice(rows(args.task, args.seed), args.n):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == '__main__':
    from specmini import exit_status                    # here, because it imports torch
    sys.exit(exit_status('lab.tasks', main))
