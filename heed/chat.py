"""Talking to a model directory at the terminal."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lm.best_of import Scorer, best_of
from lm.model import ScalarModel
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, load_scalar_model
from reward.scoring import score_responses
from training.seeds import derive_seed


def converse(folder: Path, *, temperature: float, max_tokens: int, seed: int, num_samples: int, judge: str) -> None:
    """Read turns from standard input and answer each on standard output, the whole conversation as context.

    An answer is what the reward model in the directory `judge` scores highest of `num_samples` responses; with ""
    the first is taken.
    Errors: ValueError for a directory that holds no language model with a chat template, or a judge that reads other
    tokens.
    """
    tokenizer = Tokenizer.load(folder)
    model = load_language_model(folder).eval()
    context = model.config.context_tokens
    score: Scorer = _no_preference
    if judge:
        reward_model = _load_judge(Path(judge), tokenizer, folder)
        # It also reads the end token behind a response that was cut off.
        context = min(context, reward_model.config.context_tokens - 1)
        score = _scorer(reward_model, tokenizer)
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
        (best,) = best_of(
            model,
            [prompt],
            score,
            max_new_tokens=min(max_tokens, context - len(prompt)),
            end_id=tokenizer.end_id,
            choice=Choice(temperature),
            seeds=[[derive_seed(seed, "chat", len(messages), line, sample) for sample in range(num_samples)]],
        )
        answer = tokenizer.decode(best.response).strip()
        print(answer, flush=True)
        messages.append({"role": "assistant", "content": answer})


def _no_preference(_prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
    return [0.0] * len(responses)


def _load_judge(judge: Path, tokenizer: Tokenizer, folder: Path) -> ScalarModel:
    if Tokenizer.load(judge) != tokenizer:
        raise ValueError(
            f"{judge}: its tokenizer or chat template is not that of {folder}, whose tokens it would judge"
        )
    return load_scalar_model(judge).eval()


def _scorer(reward_model: ScalarModel, tokenizer: Tokenizer) -> Scorer:
    def score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
        prompts = [prompt] * len(responses)
        return score_responses(reward_model, prompts, responses, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id)

    return score
