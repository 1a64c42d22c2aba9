"""Generated tasks with exact graders: a small twin of each benchmark family, so that a claim takes minutes.

A row is a dict: task, prompt, answer (what is right, as text; None where much is), solution (what a perfect
model writes after the prompt), and for a story the nats that its grammar spent on it. The train and held-out
splits share no text: a hash of the row's text decides which split it belongs to, whatever the seed.
`python -m lab.tasks math --n 20 --seed 7` prints held-out rows as JSON lines.
"""
import argparse
import ast
import json
import math as maths
import operator
import random
import re
import sys
import zlib
from collections import Counter

NAMES = 'Mia Tom Ana Ben Zoe Sam Eva Leo Ida Max Lia Jon Amy Kai Nora Paul'.split()
ITEMS = ('pens cups books coins apples cards shells stamps eggs keys plums bricks ribbons nuts balls seeds '
         'lamps bowls rings hats bags pears kites drums bells masks ropes dolls plates forks spoons chairs '
         'rugs clocks shoes socks belts boots shirts coats tickets pots nails pins beads flags stones leaves '
         'carrots lemons cakes pies fish hens ducks goats sheep toys boxes cans jars logs wheels '
         'maps').split()
JOBS = 'baker farmer teacher painter sailor doctor singer miller'.split()
HOMES = 'by the river;on the hill;near the forest;by the harbour;in the old mill;near the bridge'.split(';')
WISHES = 'lantern key map drum kite ring basket flute boat horse'.split()
COLUMNS = 'price stock sold weight cost size made'.split()
STEP = re.compile(r'(\d+) ([-+*/]) (\d+) = (\d+)')

# ---------------------------------------------------------------------------------------- math: GSM8K, MATH

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


def math(rng, low=2, high=4, task='math'):
    """A word problem of low to high steps. Stands for GSM8K."""
    wanted, name, item = rng.randint(low, high), rng.choice(NAMES), rng.choice(ITEMS)
    n = number(rng, 400)
    text, steps = [f'{name} has {n} {item}.'], []
    while len(steps) < wanted:
        phrases, values, new, n = event(rng, n, wanted - len(steps))
        text.append(f'{name} {rng.choice(phrases).format(item=item, **values)}.')
        steps += new
    text.append(f'How many {item} does {name} have?')
    return worked(task, ' '.join(text), steps, n)


def math_hard(rng, low=5, high=8):
    """A word problem of 5 to 8 steps. Stands for MATH."""
    return math(rng, low, high, 'math-hard')


def worked(task, prompt, lines, n):
    """A row whose solution is lines of work and a last line with the answer n."""
    return dict(task=task, prompt=prompt, answer=str(n), solution='\n'.join(['', *lines, f'Answer: {n}']))


# -------------------------------------------------------------------------------------------- table: TabMWP

def cells(rng, low, high, columns):
    """A table of low to high rows, mostly short, of a number of columns in a range: (text, {cell: value}).

    The first column holds numbers, the others words that a reader must pass over.
    """
    rows, column = round(low * (high / low) ** rng.random()), rng.choice(COLUMNS)
    values = {(item, column): number(rng, 499) for item in rng.sample(ITEMS, rows)}
    words = ([f'by a {job}' for job in JOBS], HOMES, [f'for {name}' for name in NAMES],
             [f'with a {wish}' for wish in WISHES], [f'of {good}' for good in GOODS])
    words = words[:rng.randint(*columns) - 1]
    lines = [', '.join([f'| {item}: {column} {n}', *map(rng.choice, words)])
             for (item, _), n in values.items()]
    return '\n'.join(lines), values


def table(rng, low=3, high=60, columns=(1, 6), task='table'):
    """A table, and a question of one or two look-ups and one or two operations. Stands for TabMWP."""
    text, values = cells(rng, low, high, columns)
    (a, x), (b, y) = rng.sample(sorted(values.items()), 2)
    kind = rng.choice(['plus', 'minus', 'times'])
    if kind == 'minus' and x < y:
        a, x, b, y = b, y, a, x
    named = [f'| {column} of {item} {n}' for (item, column), n in ((a, x), (b, y))]
    if kind == 'times':
        d = rng.randint(2, min(9, 999 // x))
        ask, steps, n = f'What is the {a[1]} of {a[0]} times {d}', named[:1] + [f'{x} * {d} = {x * d}'], x * d
    else:
        n = x + y if kind == 'plus' else x - y
        ask = f'What is the {a[1]} of {a[0]} {kind} the {b[1]} of {b[0]}'
        steps = named + [f'{x} {"+" if kind == "plus" else "-"} {y} = {n}']
    if 2 <= n <= 300 and rng.random() < 0.4:
        d = rng.randint(2, min(9, 999 // n))
        ask, steps, n = f'{ask}, all times {d}', steps + [f'{n} * {d} = {n * d}'], n * d
    return worked(task, f'{text}\n{ask}?', steps, n)


def table_long(rng):
    """A table of 60 rows, a number and five words each, about 1,730 tokens; the question as in `table`."""
    return table(rng, 60, 60, (6, 6), 'table-long')


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
    if depth == 0:
        if rng.random() < 0.25:
            return (text := str(rng.randint(2, 9))), text, False
        return *rng.choice(list(LEAVES.items())), False
    unary = rng.random() < 0.25
    english, code = rng.choice(list((UNARY if unary else BINARY).items()))
    left = 0 if unary else rng.randint(0, depth - 1)
    parts = [expression(rng, n) for n in ([depth - 1] if unary else [left, depth - 1 - left])]
    called = code.endswith(')')
    inner = [f'({c})' if wrap and not called else c for _, c, wrap in parts]
    return english.format(*(e for e, *_ in parts)), code.format(*inner), not called


def code(rng):
    """A comment that says what a one-line function returns, and the function. Stands for MBPP."""
    new = function(rng)
    return new if outputs(new['answer']) else code(rng)     # a remainder by zero is no example


def function(rng):
    english, text, _ = expression(rng, rng.randint(1, 3))
    if rng.random() < 0.2:
        other, then, _ = expression(rng, 1)
        english, text = f'{english} if a is greater than b, else {other}', f'{text} if a > b else {then}'
    used = [name for name in ('a', 'b', 'c', 'xs') if re.search(rf'\b{name}\b', text)] or ['a']
    answer = f'def f({", ".join(used)}): return {text}'
    return dict(task='code', prompt=f'# Return {english}.', answer=answer, solution='\n' + answer)


def evaluate(node, names):
    """The value of a syntax tree of the task's small grammar; ValueError for anything outside it."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, names), evaluate(node.right, names)
        if not type(left) is type(right) is int:        # a list times a number can be as long as the memory
            raise ValueError('an operand that is no number')
        if isinstance(node.op, ast.Pow) and (right != 2 or abs(left) > 1e6):
            raise ValueError('a power other than the square')
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and [type(op) for op in node.ops] == [ast.Gt]:
        return evaluate(node.left, names) > evaluate(node.comparators[0], names)
    if isinstance(node, ast.IfExp):
        return evaluate(node.body if evaluate(node.test, names) else node.orelse, names)
    if isinstance(node, ast.Subscript):
        return evaluate(node.value, names)[evaluate(node.slice, names)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        return CALLS[node.func.id](*(evaluate(x, names) for x in node.args))
    raise ValueError(f'{type(node).__name__} is not in the grammar')


def outputs(text):
    """What a one-line function returns on each of TRIALS; None if it is not one, or fails."""
    found = re.fullmatch(r'def f\(([\w, ]*)\): return (.{1,200})', text.strip().split('\n')[0])
    if not found:
        return None
    try:
        tree = ast.parse(found[2], mode='eval').body
        return [evaluate(tree, {k: trial[k] for k in found[1].split(', ')}) for trial in TRIALS]
    except (SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


# ----------------------------------------------------------------------------------------- translate: WMT14

NOUNS = dict(cat='miro', dog='kano', bird='luma', horse='tarvo', king='rego', girl='nila', boy='palo',
             farmer='agrano', baker='pana', tree='silva', house='dema', river='vada', road='strado',
             boat='navo', book='libra', stone='peto', ring='zola', cup='kupa')    # the last letter agrees
ADJECTIVES = dict(small='pit', old='vek', red='ros', good='bon', tall='alt', young='jun', green='verd',
                  happy='fel')
VERBS = dict(see='vid', love='am', find='trov', carry='port', follow='sek', wash='lav', hear='aud',
             paint='pikt')
PAST = dict(see='saw', love='loved', find='found', carry='carried', follow='followed', wash='washed',
            hear='heard', paint='painted')
PLACED = dict(near='ner', behind='post', under='sub', beside='lat')
DETERMINERS = dict(the='ol', a='un', some='mul')


def phrase(rng):
    """A noun phrase: (English, translation, whether it is plural). Adjectives follow and agree."""
    plural, noun = rng.random() < 0.4, rng.choice(list(NOUNS))
    determiner = 'the' if rng.random() < 0.5 else 'some' if plural else 'a'
    english, stem = [noun + 's' * plural], NOUNS[noun]
    theirs = [DETERMINERS[determiner], stem + 'n' * plural]
    if rng.random() < 0.5:
        adjective = rng.choice(list(ADJECTIVES))
        english.insert(0, adjective)
        theirs.append(ADJECTIVES[adjective] + stem[-1] + 'n' * plural)
    if determiner == 'a' and english[0][0] in 'aeiou':
        determiner = 'an'
    return ' '.join([determiner] + english), ' '.join(theirs), plural


def translate(rng):
    """English to an invented language: object, subject, place, verb, which agrees. Stands for WMT14."""
    (subject, ours, plural), (thing, theirs, _) = phrase(rng), phrase(rng)
    verb, past = rng.choice(list(VERBS)), rng.random() < 0.5
    ending = {'carry': 'carries', 'wash': 'washes'}.get(verb, verb + 's')
    english, words = [subject, PAST[verb] if past else verb if plural else ending, thing], [theirs, ours]
    if rng.random() < 0.5:
        place, there, _ = phrase(rng)
        relation = rng.choice(list(PLACED))
        english += [relation, place]
        words += [there, PLACED[relation]]                  # a postposition
    answer = ' '.join(words + [VERBS[verb] + ('ud' if past else 'at') + 'e' * plural]) + '.'
    return dict(task='translate', prompt=f'Translate: {" ".join(english)}.', answer=answer,
                solution='\n' + answer)


# ----------------------------------------------------------------------------------- summary: CNN/DailyMail

SUMMARY = re.compile(r'\w+ (\w+) (\w+) (.+)\.')       # a trade, the goods, a home
TRADES = 'sells buys makes keeps packs wants finds breaks'.split()
NOISE = ['{a} was tired.', '{a} ate some bread.', '{a} laughed.', 'It rained all day.', '{a} sat down.',
         '{a} met {b}.', '{a} slept well.', '{a} looked at {b}.']


def statements(rng, low, high):
    """Shuffled statements about low to high people: (text, {name: what matters about them}).

    What somebody does matters (present tense), what happened once does not (past).
    """
    people, lines = rng.sample(NAMES, rng.randint(low, high)), []
    facts = zip(people, rng.sample(TRADES, len(people)), rng.sample(ITEMS, len(people)))
    answers = {a: f'{a} {trade} {item} {rng.choice(HOMES)}.' for a, trade, item in facts}
    for a in people:
        lines += [rng.choice(NOISE).format(a=a, b=rng.choice(NAMES)) for _ in range(rng.randint(0, 5))]
    lines += answers.values()
    rng.shuffle(lines)
    return ' '.join(lines), answers


def summary(rng, low=2, high=8):
    """Statements about several people; what one does, with what and where. Stands for CNN/DailyMail."""
    text, answers = statements(rng, low, high)
    a = rng.choice([*answers])
    return dict(task='summary', prompt=f'{text}\nWhat matters about {a}?\nSummary:', answer=answers[a],
                solution=' ' + answers[a])


def facts_found(row, text):
    """The share of the three facts of a summary's answer that the text states: 0 to 1."""
    return sum(fact in text for fact in SUMMARY.fullmatch(row['answer']).groups()) / 3


# ------------------------------------------------------------- qa: TriviaQA, WebQuestions, NaturalQuestions

joined = lambda heads, tails: [a + b for a in heads.split() for b in tails.split()]
TOWNS = joined('Bel Dor Fen Gal Hul Kar Lor Mir Nor Pel', 'dan mar wick ton vale stad')
RULERS = joined('Ar Bo Ce Du El Fa', 'ric wen dil mon gar')
RIVERS = joined('Is An Um Ov', 'sel ter dra ka lin')
GOODS = 'wool salt glass honey iron wine silk rope paper cheese'.split()
RELATIONS = dict(
    ruler=(['Who rules {}?', 'What is the name of the ruler of {}?'], RULERS),
    river=(['Which river runs by {}?', 'What is the name of the river of {}?'], RIVERS),
    goods=(['What does {} sell?', 'Which goods come from {}?'], GOODS),
    beast=(['Which animal is on the flag of {}?', 'What animal does the flag of {} show?'],
           'fox bear mouse owl cat rabbit frog duck goat crow'.split()),
    year=(['In which year was {} built?', 'When was {} built?'], [str(y) for y in range(103, 999, 7)]))
OPENINGS = 'Q: ', 'Question: ', 'Tell me: ', 'Please say: '


def world():
    """{(relation, town): value} of the invented world; always the same."""
    rng = random.Random('world')
    return {(relation, town): rng.choice(RELATIONS[relation][1]) for town in TOWNS for relation in RELATIONS}


FACTS = world()


def qa(rng):
    """A closed-book fact; wordings are held out, never facts. Stands for TriviaQA, WebQuestions, NQ."""
    (relation, town), value = rng.choice(list(FACTS.items()))
    question = rng.choice(OPENINGS) + rng.choice(RELATIONS[relation][0]).format(town)
    return dict(task='qa', prompt=question, answer=value, solution='\nA: ' + value)


# -------------------------------------------------------------------------------- story: WikiText, The Pile

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


def pick(rng, options, spent):
    """One of the options, the first the likeliest (1 / rank^1.5); its surprise in nats goes to `spent`."""
    weights = [(i + 1) ** -1.5 for i in range(len(options))]
    i = rng.choices(range(len(options)), weights)[0]
    spent.append(-maths.log(weights[i] / sum(weights)))
    return options[i]


def story(rng):
    """A story of a grammar with real choice, and the nats spent on it. Stands for WikiText and The Pile."""
    (a, b), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    spent = [maths.log(len(NAMES) - 1), maths.log(4)]       # who is b; how many sentences of the search
    prompt = f'{rng.choice(WHEN)} {a} the {rng.choice(ANIMALS)} went to {rng.choice(PLACES)} with a {thing}.'
    known, choices = dict(a=a, b=b, thing=thing), dict(place=PLACES, thing2=THINGS, animal2=ANIMALS)
    draw = lambda found: known.get(found[1]) or pick(rng, choices[found[1]], spent)
    fill = lambda text: re.sub(r'{(\w+)}', draw, text)
    text = [fill(f'{a} met {b} the {{animal2}} there.'), fill(pick(rng, LOST, spent))]
    left = list(SEARCH)
    for _ in range(rng.randint(2, 5)):
        text.append(fill(left.pop(left.index(pick(rng, left, spent)))))
    text += [fill(pick(rng, FOUND, spent)), fill(pick(rng, END, spent))]
    return dict(task='story', prompt=prompt, answer=None, solution=' ' + ' '.join(text), nats=sum(spent))


# ----------------------------------------------------------------------------------------- rows and graders

TASKS = {'math': math, 'math-hard': math_hard, 'table': table, 'table-long': table_long, 'code': code,
         'translate': translate, 'summary': summary, 'qa': qa, 'story': story}


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


def grade(row, text):
    """Whether the text is right for the row, None where nothing can be graded.

    A row of a task here: by its grader. Any other row with an `answer`: by the last number of the text where
    the answer is a number (GSM8K writes it after ####), else by exact match.
    """
    task, answer = row.get('task'), row.get('answer')
    if not isinstance(answer, (str, int, float)):
        return None
    answer = str(answer)
    if task in ('math', 'math-hard', 'table', 'table-long'):
        found = re.findall(r'^Answer: (\d+)\s*$', text, re.M)
        return bool(found) and found[-1] == answer
    if task == 'code':
        return (found := outputs(text)) is not None and found == outputs(answer)
    if task == 'summary' and SUMMARY.fullmatch(answer):
        return facts_found(row, text) == 1
    if task in ('translate', 'qa'):
        return text.strip().removeprefix('A: ') == answer
    wanted, plain = answer.rpartition('####')[2].strip(), lambda text: re.sub(r'(?<=\d),(?=\d{3})', '', text)
    if not re.fullmatch(r'-?\d+(\.\d+)?', plain(wanted)):
        return text.strip() == wanted
    found = re.findall(r'(?:(?<![\w)])-)?\d+(?:\.\d+)?', plain(text))     # 10-20 has no -20
    return bool(found) and float(found[-1]) == float(plain(wanted))


def steps_right(row, text):
    """For each line of work in the text, whether it is right: [bool]; for tasks whose solutions have steps.

    A step 'a op b = c' is right if its arithmetic holds and c is what the reference has there; any other line
    (a cell looked up) if it is the reference's.
    """
    wanted = [line for line in row['solution'].strip().split('\n') if not line.startswith('Answer:')]
    lines = [line.strip() for line in text.strip().split('\n') if line and not line.startswith('Answer:')]
    return [i < len(wanted) and step_right(line, wanted[i]) for i, line in enumerate(lines)]


def step_right(line, wanted):
    found, reference = STEP.fullmatch(line), STEP.fullmatch(wanted)
    if not found or not reference:
        return line == wanted
    a, op, b, c = found.groups()
    a, b = int(a), int(b)
    value = {'+': a + b, '-': a - b, '*': a * b, '/': a // b if b and a % b == 0 else None}[op]
    return str(value) == c == reference[4]


def bleu(references, texts, order=4):
    """Corpus BLEU of texts, each against its list of references, over words: 0 to 1.

    Source: Papineni et al. 2002, sections 2.1 to 2.3 (clipped n-gram precision, brevity penalty).
    """
    grams = lambda words, n: Counter(zip(*(words[i:] for i in range(n))))
    hits, counts, length, wanted = [0] * order, [0] * order, 0, 0
    for many, text in zip(references, texts):
        many, words = [r.split() for r in many], text.split()
        length += len(words)
        wanted += min((abs(len(r) - len(words)), len(r)) for r in many)[1]
        for n in range(1, order + 1):
            mine, best = grams(words, n), Counter()
            for r in many:
                best |= grams(r, n)
            hits[n - 1] += sum((mine & best).values())
            counts[n - 1] += sum(mine.values())
    if not all(hits):
        return 0.0
    brevity = min(0.0, 1 - wanted / length)
    return maths.exp(brevity + sum(maths.log(h / c) for h, c in zip(hits, counts)) / order)


def rouge_l(reference, text):
    """F1 of the longest common subsequence of words: 0 to 1. Source: Lin 2004, section 3.1 (beta = 1)."""
    a, b = reference.split(), text.split()
    best = [0] * (len(b) + 1)
    for x in a:
        previous = best[:]
        for j, y in enumerate(b):
            best[j + 1] = previous[j] + 1 if x == y else max(best[j], previous[j + 1])
    return 2 * best[-1] / max(1, len(a) + len(b))


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
