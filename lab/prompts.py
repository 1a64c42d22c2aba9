"""The texts to run (from the command line or a file, in a checkpoint's chat template) or to calibrate on."""
import json
import time
from pathlib import Path as File

from lab import tasks
from model import expect, read_json


def read_rows(args):
    """The rows to run, dicts with a text under `prompt`: from --prompt, or from a file of JSON lines."""
    rows = [dict(prompt=args.prompt)]
    if args.prompts is not None:
        try:
            lines = File(args.prompts).read_text(encoding='utf-8-sig').split('\n')
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f'--prompts {args.prompts}: cannot be read ({error})') from None
        rows = [row_of(line, f'{args.prompts} line {i}') for i, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise ValueError(f'--prompts {args.prompts}: the file has no rows')
    for i, row in enumerate(rows, 1):
        broken = any('\ud800' <= letter <= '\udfff' for letter in row['prompt'])
        if broken or not row['prompt']:
            raise ValueError(f'prompt {i} is {"not valid UTF-8" if broken else "empty"}; expected a text')
    return rows


def row_of(line, where):
    """The row of one line: prompt, question (GSM8K) or the first of turns (Spec-Bench) becomes `prompt`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where}: not a JSON object ({error})') from None
    found = [row[k] for k in ('prompt', 'question', 'turns') if k in row] if isinstance(row, dict) else []
    text = found[0][0] if found and isinstance(found[0], list) and found[0] else found[0] if found else None
    if not isinstance(text, str):
        raise ValueError(f'{where}: expected an object with a text under prompt, question or turns')
    return row | dict(prompt=text)


def chat(folder, text):
    """The text as the user's message in the checkpoint's own chat template, rendered in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    settings, file = File(folder) / 'tokenizer_config.json', File(folder) / 'chat_template.jinja'
    settings = read_json(settings) if settings.exists() else {}
    try:
        template = file.read_text(encoding='utf-8') if file.exists() else settings.get('chat_template')
    except ValueError as error:
        raise ValueError(f'{file}: expected text in UTF-8 ({error})') from None
    if isinstance(template, list):                      # several by name: [{name, template}]
        template = {t.get('name'): t.get('template') for t in template if isinstance(t, dict)}.get('default')
    if not isinstance(template, str):
        raise ValueError(f'--chat: {folder} has no chat_template.jinja, nor one in tokenizer_config.json')

    def refuse(message):
        raise TemplateError(message)
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.add_extension('jinja2.ext.loopcontrols')
    world.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    world.globals.update({k: v.get('content') if isinstance(v, dict) else v
                          for k, v in settings.items() if k.endswith('_token') and v})
    world.filters['tojson'] = lambda x, **how: json.dumps(x, ensure_ascii=False, **how)
    try:
        message = dict(role='user', content=text)
        return world.from_string(template).render(messages=[message], add_generation_prompt=True)
    except Exception as error:                          # the template is foreign code: it may raise anything
        raise ValueError(f'--chat: the template of {folder} does not render ({error})') from None


def calibration_texts(tokenizer, args):
    """args.windows texts as ids, each ending in the args.window tokens that are scored.

    Of --text: evenly spaced pieces. Else the lab's training rows, task by task, as far into their solutions.
    """
    W, texts = args.window, []
    if args.text:
        ids = tokenizer.encode(File(args.text).read_text(encoding='utf-8'), add_special_tokens=False).ids
        expect(len(ids) >= 2 * W, f'--text {args.text}: {len(ids)} tokens; expected at least {2 * W}')
        ends = (2 * W + i * (len(ids) - 2 * W) // args.windows for i in range(args.windows))
        return [ids[max(0, end - 8 * W):end] for end in ends]
    sources = [tasks.rows(task, args.seed, 'train') for task in tasks.TASKS]
    for source in sources * (10 * args.windows):
        row = next(source)
        begin, ids = (tokenizer.encode(row['prompt'] + end).ids for end in ('', row['solution']))
        texts += [ids[:len(begin) + W]] if len(ids) > W else []
        if len(texts) == args.windows:
            return texts
    raise ValueError(f'--window {W}: hardly a text of the tasks is that long; give a --text FILE or fewer')
