"""What shows only in long runs: memory over 300 prompts, 2,000 tokens, the same seed again, fewer bits.

Commands of lab/bench.py on the embedded pair: `endurance`, `long`, `seeds`; `rounding` takes any model. Each
prints a table and fails where a promise is broken.
"""
import gc
import itertools
import math
import multiprocessing
import os
import statistics
from pathlib import Path as File

import torch

import lab.rivals                                       # noqa: F401, enters the baselines in METHODS
from lab import tasks
from lab.common import MODELS, held_out_rows
from lab.cuda import KNOBS, all_right, written
from model import encode, expect
from specmini import Engine, chat, chat_template, read_rows, tokenizer_settings
from verify import METHODS, Autoregressive, decode, knobs_of, tokens_of

EARLY = 20          # prompts after which memory is looked at first
GROWTH = 0.03       # that it may have grown by at the end
SHORT = 5           # tokens of each of these texts
TIE = 1e-4          # logits nearer than this may change places in fp32
EXACT = (           # knobs at which methods are lossless that have them; nothing: some are in any case
    dict(), dict(accept='strict'), dict(lenience=1.0), dict(epsilon=1.0, delta=math.inf),
    dict(escalate=1.1, keep=1.1), dict(most_wrong=0.0), dict(tiers=2), dict(tau=math.inf, target_k=1),
    dict(tau=2.0, tau_slim=2.0), dict(rho=1.0, moe_skip=0.0, form='literal'), dict(rho=1.0, moe_skip=0.0))


def embedded_engine(max_new, prompts, **settings):
    """(an Engine of the embedded models that every method can use, these prompts' ids)."""
    engine = Engine(MODELS / 'target', MODELS / 'draft', mid=MODELS / 'mid', max_new=max_new, **settings)
    ids = [engine.tokenizer.encode(text).ids for text in prompts]
    engine.open(ids)
    return engine, ids


def mixed_prompts(n, names=tuple(tasks.TASKS)):
    """n prompts of these tasks by turns."""
    rows = [held_out_rows(task, -(-n // len(names))) for task in names]
    return [row['prompt'] for row in itertools.chain(*zip(*rows))][:n]


# ------------------------------------------------------------------------------------------------- memory

def resident():
    """Bytes that this process has in memory now; Linux tells."""
    pages = File('/proc/self/statm').read_text().split()[1]
    return int(pages) * os.sysconf('SC_PAGE_SIZE')


def live_tensors():
    """How many tensors Python can reach."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def grown(engine, prompts, name):
    """[(tensors, resident bytes) after the first EARLY prompts, after them all] of texts by this method."""
    seen = []
    for number, ids in enumerate(prompts, 1):
        written(engine, ids, name)
        if number in (EARLY, len(prompts)):
            seen.append((live_tensors(), resident()))
    return seen


def endurance(n):
    """Prints a line a method: what n prompts leave in memory; returns 1 where it has grown."""
    expect(n > EARLY, f'--n {n}: expected more than {EARLY} prompts')
    engine, prompts = embedded_engine(SHORT, mixed_prompts(n, ('math', 'qa', 'story')))
    prompts.sort(key=len, reverse=True)                 # the longest first: room for them is no leak
    print(f'| method | tensors after {EARLY} prompts | after {n} | resident after {EARLY} | after {n} | |')
    print('|---|--:|--:|--:|--:|---|', flush=True)
    failures = 0
    for name in METHODS:
        (tensors, early), (more, late) = grown(engine, prompts, name)
        good = max(more / tensors, late / early) <= 1 + GROWTH
        failures += not good
        print(f'| `{name}` | {tensors} | {more} | {early / 1e6:.1f} MB | {late / 1e6:.1f} MB '
              f'({late / early - 1:+.1%}) | {"ok" if good else "GROWS"} |', flush=True)
    return int(failures > 0)


# ------------------------------------------------------------------------------------------------ long texts

def exact_methods():
    """[(name and knobs, method)] of what is lossless: each method as it is, else at each set of EXACT."""
    found = []
    for name, make in METHODS.items():
        options = knobs_of(make)
        for knobs in EXACT:
            if not knobs.keys() <= options.keys():
                continue
            values = {options[knob].name: value for knob, value in knobs.items()}
            try:
                method = make(**KNOBS.get(name, {}), **values)
            except ValueError:                          # its knob of this name has another range
                continue
            if method.lossless:
                found.append((' '.join([name, *map(str, knobs.values())]), method))
                if not knobs:
                    break                               # others change nothing
    return found


def departures(engine, ids, tokens):
    """Logit gaps, one for each of these tokens that plain decoding would not have written there.

    Plain decoding is led along the text, so that one near tie does not hide what comes behind it.
    """
    reader = engine.readers['target']
    reader.forget()
    text = ids + tokens
    gaps = []
    for place in range(len(ids), len(text)):
        logits = reader.read(text[:place], [], reader.model.full, 1)[0].float()
        gap = float(logits.max() - logits[text[place]])
        if gap > 0:
            gaps.append(gap)
    return gaps


def long_texts(length):
    """Prints a line a lossless method: a text beside plain decoding's; returns 1 if more than ties differ."""
    engine, (ids,) = embedded_engine(length, mixed_prompts(1), ignore_eos=True)
    expect(len(ids) + length <= engine.context,
           f'--length {length}: expected {engine.context - len(ids)} at most')
    plain = tokens_of(engine.write(ids, Autoregressive()))
    print(f'| method | tokens as plain decoding writes them, of {length} | near ties, widest gap | |')
    print('|---|--:|--:|---|', flush=True)
    failures = 0
    for name, method in exact_methods():
        session = engine.start(ids, method)
        session.checker = all_right
        tokens = tokens_of(decode(session, method))
        gaps = [] if tokens == plain else departures(engine, ids, tokens)
        widest = max(gaps, default=0.0)
        good = widest < TIE and len(tokens) == length
        failures += not good
        print(f'| `{name}` | {len(tokens) - len(gaps)} | {len(gaps)}, {widest:.1g} | '
              f'{"ok" if good else "DIFFERS"} |', flush=True)
    return int(failures > 0)


# ---------------------------------------------------------------------------------------------- equal seeds

def sampled_texts(names, length, compiled=False):
    """{method: ids of two texts} at temperature 0.8, each prompt's written anew after the other's.

    ValueError where a text is then another one: something was left over from the texts before.
    """
    engine, prompts = embedded_engine(length, mixed_prompts(2), compile=compiled)
    found = {}
    for name in names:
        texts = []
        for ids in (*prompts, prompts[0]):
            texts.append(tokens_of(written(engine, ids, name, temperature=0.8)))
        first, second, again = texts
        same = shared(first, again)
        expect(first == again, f'{name}: the same seed gives another text after {same} tokens')
        found[name] = first, second
    return found


def shared(a, b):
    """How many tokens two texts have in common from their beginnings."""
    return len(os.path.commonprefix([a, b]))


def seeds(length, compiled):
    """Prints a line a method: the same seed in another process, or by compiled passes; returns 1 if unlike.

    Compiled passes round otherwise: where two texts part is told, and is no failure.
    """
    names = ('ar', 'sd', 'cmasd', 'sparse') if compiled else list(METHODS)
    here = sampled_texts(names, length)
    if compiled:
        there = sampled_texts(names, length, compiled)
    else:
        with multiprocessing.get_context('spawn').Pool(1) as other:
            there = other.apply(sampled_texts, (names, length))
    print(f'| method | tokens | the same {"compiled" if compiled else "in another process"} |\n|---|--:|--:|')
    failures = 0
    for name in names:
        total = same = 0
        for mine, other in zip(here[name], there[name]):
            total += len(mine)
            same += shared(mine, other)
        failures += same < total
        print(f'| `{name}` | {total} | {same} |')
    return int(failures > 0 and not compiled)


# ------------------------------------------------------------------------------------------------ fewer bits

def prompts_of(engine, file, n):
    """Ids of the first n prompts of a file, in the target's chat template if there is one, or of the lab."""
    if file is None:
        return encode(engine.tokenizer, mixed_prompts(n))
    texts = [row['prompt'] for row in read_rows(None, file)[:n]]
    is_chat = chat_template(File(engine.target), tokenizer_settings(engine.target)) is not None
    if is_chat:
        texts = [chat(engine.target, text) for text in texts]
    return encode(engine.tokenizer, texts, not is_chat)


def greedy_texts(engine, prompts):
    """Plain decoding's text (ids) behind each of these prompts."""
    engine.open(prompts)
    return [tokens_of(engine.write(ids, Autoregressive())) for ids in prompts]


def rounding(folder, file, n, length):
    """Prints a line a dtype: how far greedy texts are those of fp32, and fp32's logit gap where they part."""
    exact = Engine(folder, 'none', max_new=length, dtype='fp32')
    prompts = prompts_of(exact, file, n)
    texts = greedy_texts(exact, prompts)
    reader = exact.readers['target']
    total = sum(map(len, texts))
    print(f'{File(folder).name}, {len(texts)} greedy texts, {total} tokens in fp32')
    print('| dtype | texts that part | tokens until then, median (least) | gap there, median (widest) |')
    print('|---|--:|--:|--:|', flush=True)
    for dtype in ('bf16', 'fp16'):
        others = greedy_texts(Engine(folder, 'none', max_new=length, dtype=dtype), prompts)
        lengths, gaps = [], []
        for ids, text, other in zip(prompts, texts, others):
            same = shared(text, other)
            if same < min(len(text), len(other)):
                logits = reader.read(ids + text[:same], [], reader.model.full, 1)[0]
                lengths.append(same)
                gaps.append(float(logits[text[same]] - logits[other[same]]))
        said = '- | -'
        if gaps:
            said = (f'{statistics.median(lengths):.0f} ({min(lengths)}) | '
                    f'{statistics.median(gaps):.2g} ({max(gaps):.2g})')
        print(f'| {dtype} | {len(gaps)} | {said} |', flush=True)
