"""Talking to a model directory at the terminal."""

import sys
from pathlib import Path

from lm.generation import generate
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model
from training.seeds import derive_seed


def converse(folder: Path, *, temperature: float, max_tokens: int, seed: int) -> None:
    """Read turns from standard input and answer each on standard output, the whole conversation as context.

    Errors: ValueError for a directory that holds no language model with a chat template.
    """
    tokenizer = Tokenizer.load(folder)
    model = load_language_model(folder).eval()
    context = model.config.context_tokens
    messages: list[dict[str, str]] = []
    interactive = sys.stdin.isatty()
    while True:
        print("> " if interactive else "", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": line.strip()})
        prompt = tokenizer.encode_prompt(messages)
        # The oldest turns leave when the context is full.
        while len(prompt) >= context and len(messages) > 1:
            messages = messages[2:]
            prompt = tokenizer.encode_prompt(messages)
        if len(prompt) >= context:
            print(f"(that is {len(prompt)} tokens; the model reads at most {context - 1})")
            messages = []
            continue
        sampled = generate(
            model,
            [prompt],
            max_new_tokens=min(max_tokens, context - len(prompt)),
            end_id=tokenizer.end_id,
            choice=Choice(temperature),
            seeds=[derive_seed(seed, "chat", len(messages), line)],
        )
        answer = tokenizer.decode(sampled.responses[0]).strip()
        print(answer, flush=True)
        messages.append({"role": "assistant", "content": answer})
