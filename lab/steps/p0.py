"""p0: plain decoding without a cache. Every step reads the whole text again: `python -m lab.steps.p0`."""
import torch

from model import load
from specmini import EMBEDDED

PROMPT = 'One evening Mia the fox went to the market with a map.'
N = 80          # tokens to write


def logits_of(model, ids):
    """Logits [T, V]: row i tells what comes after ids[:i + 1]."""
    positions = torch.arange(len(ids))
    hidden = model(torch.tensor([ids]), positions, model.full)      # [1, T, C]; full: all layers run
    return model.logits(hidden)[0]


def generate(target, draft, ids, n):
    """(the ids and n more, passes of the target, of the draft, which is of no use yet)."""
    ids = list(ids)
    for _ in range(n):
        logits = logits_of(target, ids)
        ids.append(int(logits[-1].argmax()))
    return ids, n, 0


def demo(generate):
    """Writes N tokens after PROMPT with the embedded pair; prints them and the passes that they took."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target, tokenizer, _ = load(EMBEDDED / 'target')
    draft, _, _ = load(EMBEDDED / 'draft')
    prompt = tokenizer.encode(PROMPT).ids
    with torch.inference_mode():
        ids, passes, drafted = generate(target, draft, prompt, N)
    print(tokenizer.decode(ids))
    print(f'{N} tokens, {passes} target passes, {drafted} draft passes: '
          f'{N / passes:.2f} tokens a target pass')


if __name__ == '__main__':
    demo(generate)
