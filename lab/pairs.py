"""The pairs of models that claims are measured on, and the prompts of each: the embedded pair, or any other.

`python -m lab.claims cmasd --target DIR --draft DIR --prompts FILE --chat` measures on two folders and the
rows of a file. What is measured in a Record runs on any pair; what needs more of the lab says what.
"""
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as File
from typing import NamedTuple

import torch

from lab import tasks
from lab.common import LAB, MODELS, SEED, embedded, round_to_4_bits
from lab.files import write_text
from model import Reader, encode, expect, fingerprint, load, same_vocabulary
from specmini import DTYPES, Engine, chat, grade, read_rows
from verify import Exact, Session, chain, decode, lookup, tokens_of

MARGIN = 64             # positions of a cache beyond prompt and room, for what is drafted there


class Prompt(NamedTuple):
    """A prompt that is measured on."""
    family: str         # its task, or whatever its file calls it
    place: int          # 0, 1, ... among the prompts of this family
    row: dict           # of the task or file, its text under `prompt`
    ids: list

    @property
    def name(self):
        """What a stored row begins with: it tells which text it is of."""
        return dict(family=self.family, place=self.place)


class Record(NamedTuple):
    """What is measured row by row, each row of one item: on any pair, and resumed where it was broken off."""
    items: Callable     # function (pair, n) -> list, always the same one; n: prompts of each family
    row: Callable       # function (pair, item) -> dict
    drafts: bool = True     # whether it takes a draft model
    lab_models: tuple = ()  # names of models that rows of the embedded pair are of, too
    calibrated: bool = False    # whether rows hang on the target's calibration.json


class LabRecord(NamedTuple):
    """What is measured on models and tasks of the lab alone."""
    models: tuple       # their names in lab/models
    rows: Callable      # function of n -> dicts
    needs: str          # what no other pair has, as words


@dataclass(frozen=True)
class Pair:
    """Two models, how they run, and the prompts that they are given; as it stands, the embedded pair.

    On CUDA passes are the same; times are not, and a record says where it was measured.
    """
    target: str = str(MODELS / 'target')
    draft: str = str(MODELS / 'draft')          # none: '', what is drafted is looked up in the text
    prompts: tuple = ()         # files of JSON lines; none: held-out rows of the lab's tasks
    chat: bool = False          # whether a prompt is put into the target's chat template
    max_new: int = 160          # tokens that a text has at most
    longest: int = 300          # tokens of a prompt; longer ones are passed over
    device: str = 'cpu'
    dtype: str = 'fp32'

    @property
    def is_embedded(self):
        return not self.prompts

    @property
    def name(self):
        """What its results are stored under: nothing for the embedded pair, else the folders' names."""
        if self.is_embedded:
            return ''
        target = File(self.target).resolve().name
        return f'{target} with {File(self.draft).resolve().name}' if self.draft else target

    @property
    def roles(self):
        return ('target', 'draft') if self.draft else ('target',)

    def network(self, role, rounded=False):
        """(Transformer, tokenizer, end ids) of target or draft; rounded: its linear layers to 4 bits."""
        return network(getattr(self, role), self.device, self.dtype, rounded)

    @property
    def tokenizer(self):
        return self.network('target')[1]

    def text(self, ids):
        return self.tokenizer.decode(list(ids))

    def head(self, record, n):
        """The first line of a record: what is measured, on what; not when."""
        models = {role: fingerprint(getattr(self, role)) for role in self.roles}
        head = dict(record=record, n=n, seed=SEED, models=models, device=self.device)
        if self.is_embedded:
            return head
        files = {}
        for file in self.prompts:
            files[str(File(file).name)] = digest_of(file)
        expect(len(files) == len(self.prompts), '--prompts: two files of one name; rename one')
        return head | dict(dtype=self.dtype, prompts=files, chat=self.chat, max_new=self.max_new,
                           longest=self.longest)

    def families(self, usual):
        """The families of its prompts: `usual`, tasks of the lab, or those that the files name."""
        return tuple(usual) if self.is_embedded else tuple(rows_by_family(self.prompts))

    def texts(self, usual, n, seed=SEED):
        """The same first n Prompts of each family; usual: see families, seed: of the lab's rows."""
        found = []
        for family in self.families(usual):
            rows = tasks.rows(family, seed) if self.is_embedded else rows_by_family(self.prompts)[family]
            found += self.short(family, rows, n)
        return found

    def short(self, family, rows, n):
        """The first n Prompts of these rows with `longest` tokens or fewer, and room for max_new more."""
        contexts = [self.network(role)[0].config.max_position_embeddings for role in self.roles]
        most = min(self.longest, min(contexts) - self.max_new)
        found = []
        for row in rows:
            if len(found) == n:
                break
            ids = self.encode(row['prompt'])
            if len(ids) <= most:
                found.append(Prompt(family, len(found), row, ids))
        return found

    def encode(self, text):
        """The ids of a prompt, in the chat template where that is wanted."""
        if self.chat:
            text = chat(self.target, text)
        (ids,) = encode(self.tokenizer, [text], not self.chat)
        return ids

    def grade(self, row, text):
        """1 if a text is right for its row, 0 if it is not, None where nothing can be graded."""
        right = grade(row, text)
        return None if right is None else int(right)

    def session(self, ids, rounded=''):
        """A Session of the pair that has read its prompt; rounded: which of the two has 4 bits, if any."""
        readers = dict(draft=None)
        for role in self.roles:
            network = self.network(role, rounded == role)[0]
            readers[role] = Reader(network, len(ids) + self.max_new + MARGIN)
        source = chain if self.draft else lookup
        eos = self.network('target')[2]
        session = Session(**readers, source=source, tokens=list(ids), room=self.max_new, eos=eos)
        session.read_prompt()
        return session

    def written(self, session, ids, method, temperature=0.0, seed=0):
        """The Cycles of a text from this prompt; what the caches hold of earlier texts is used."""
        session.tokens = list(ids)
        session.room = self.max_new
        session.ended = False
        session.heard = []
        session.own = set()
        session.settled = session.begin
        session.temperature = temperature
        session.generator = torch.Generator().manual_seed(seed)
        return list(decode(session, method))

    def own_text(self, ids):
        """The ids that the target writes greedily behind a prompt (ids), as plain decoding but for ties.

        Of another pair they are remembered in lab/texts: a big model takes a minute, and every paper asks.
        """
        if self.is_embedded:
            return self.greedy_text(ids)
        key = [fingerprint(self.target), self.device, self.dtype, self.max_new, ids]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        file = LAB / 'texts' / self.name / f'{digest}.json'
        if not file.exists():
            found = self.greedy_text(ids)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(found))
        return json.loads(file.read_text())

    def greedy_text(self, ids):
        session = self.session(ids)
        return tokens_of(decode(session, Exact(draft_temperature=0)))

    def engine(self, prompts, draft=None, max_new=None):
        """An Engine of the pair with caches for these Prompts; draft, max_new: other than the pair's."""
        kind = Engine if self.is_embedded else SharingEngine
        engine = kind(self.target, draft or self.draft or 'lookup', max_new=max_new or self.max_new,
                      device=self.device, dtype=self.dtype)
        engine.open([prompt.ids for prompt in prompts])
        return engine


class SharingEngine(Engine):
    """An Engine of networks that a pair has loaded already, so that none is held twice."""

    def network(self, folder):
        return network(folder, self.device, self.dtype, False)      # as Pair.network asks for it: cached


EMBEDDED = Pair()


@functools.cache
def network(folder, device, dtype, rounded=False):
    """(Transformer, tokenizer, end ids) of a folder; rounded: its linear layers to 4 bits."""
    on_cpu = device == 'cpu' and dtype == 'fp32'
    if on_cpu and File(folder).parent == MODELS:
        return embedded(File(folder).name, rounded)
    loaded = load(folder, device, DTYPES[dtype])
    model, _, _ = loaded
    if rounded:
        round_to_4_bits(model)
    if on_cpu:
        model.pack()
    return loaded


def digest_of(file):
    """16 hex digits of a file's contents."""
    return hashlib.sha256(File(file).read_bytes()).hexdigest()[:16]


@functools.cache
def rows_by_family(files):
    """{family: rows} of files; a row's family is its `category` or `task`, else the file's name."""
    found = {}
    for file in files:
        for row in read_rows(None, file):
            family = row.get('category') or row.get('task') or File(file).stem
            found.setdefault(str(family), []).append(row)
    return found


def check(pair, least):
    """ValueError in one line where models do not fit together or fewer than `least` prompts are of use."""
    for name in ('longest', 'max_new'):
        tokens = getattr(pair, name)
        expect(tokens > 0, f'--{name.replace("_", "-")} {tokens}: expected above 0')
    pair.families(())                                   # a file that cannot be read is told before a minute
    target, _, _ = pair.network('target')
    if pair.draft:
        same_vocabulary(target, pair.network('draft')[0], f'--draft {pair.draft}')
    there = len(pair.texts((), least))
    expect(there >= least, f'{there} prompts of {pair.longest} tokens at most leave room for {pair.max_new} '
           f'more; expected {least}: give other prompts, or a target of a longer context')
