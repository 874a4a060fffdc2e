"""Talking to a model directory at the terminal."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lm.best_of import Scorer, best_of
from lm.encoder_decoder import EncoderDecoder
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.tokenizer import Messages, Tokenizer
from lm.weights import load_language_model, load_model, purpose_of
from reward.scoring import Judge
from training.seeds import derive_seed


def converse(
    folder: Path,
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    num_samples: int,
    judge: str,
    weights: Mapping[str, float],
) -> None:
    """Read turns from standard input and answer each on standard output, the whole conversation as context.

    An answer is what the reward model in the directory `judge` scores highest of `num_samples` responses, its
    objectives by their `weights`; with "" the first is taken.
    Errors: ValueError for a directory that holds no model that writes, and weights that do not fit the judge.
    """
    tokenizer, model = Tokenizer.load(folder), load_writer(folder).eval()
    context = model.config.max_position_embeddings
    reward_model = Judge.load(Path(judge), weights) if judge else None
    if reward_model is not None:  # it also reads the end token behind a response that was cut off
        context = min(context, reward_model.network.config.max_position_embeddings - 1)
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
            _no_preference if reward_model is None else _scorer(reward_model, tokenizer, messages),
            max_new_tokens=min(max_new_tokens, context - (1 if isinstance(model, EncoderDecoder) else len(prompt))),
            end_id=tokenizer.end_id,
            choice=Choice(temperature),
            seeds=[[derive_seed(seed, "chat", len(messages), line, sample) for sample in range(num_samples)]],
        )
        answer = tokenizer.decode(best.response).strip()
        print(answer, flush=True)
        messages.append({"role": "assistant", "content": answer})


def load_writer(folder: Path) -> LanguageModel | EncoderDecoder:
    """A decoder, or an encoder-decoder."""
    return load_model(folder, EncoderDecoder) if purpose_of(folder) == "translate" else load_language_model(folder)


def _no_preference(_prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
    return [0.0] * len(responses)


def _scorer(judge: Judge, tokenizer: Tokenizer, messages: Messages) -> Scorer:
    def score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
        num = len(responses)
        scores = judge.score(tokenizer, [messages] * num, [prompt] * num, responses)
        if any(map(math.isnan, scores)):
            raise ValueError(
                f"the judge reads at most {judge.network.config.max_position_embeddings} tokens; these are more"
            )
        return scores

    return score
