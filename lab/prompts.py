"""The texts to run: from the command line or a file of JSON lines, in a checkpoint's chat template."""
import json
import time
from pathlib import Path as File

from model import read_json


def read_rows(args):
    """The rows to run, dicts with a text under `prompt`: from --prompt, or from a file of JSON lines."""
    rows = [dict(prompt=args.prompt)]
    if args.prompts is not None:
        try:
            lines = File(args.prompts).read_text(encoding='utf-8').split('\n')
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
    template = file.read_text(encoding='utf-8') if file.exists() else settings.get('chat_template')
    if isinstance(template, list):                      # several by name: [{name, template}]
        template = next((t.get('template') for t in template if t.get('name') == 'default'), None)
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
