"""`heed chat`: talk to a model directory at the terminal."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.options import Weights, read_weights

if TYPE_CHECKING:
    from lm.best_of import Scorer
    from lm.encoder_decoder import EncoderDecoder
    from lm.model import LanguageModel
    from lm.tokenizer import Messages, Tokenizer
    from reward.scoring import RewardModel


def chat(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a response, in tokens.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    best_of: Annotated[
        int, typer.Option(min=1, help="Number of responses to sample; the one that --judge scores highest is shown.")
    ] = 1,
    judge: Annotated[str, typer.Option(help="A reward model's directory, such as runs/demo/reward/model.")] = "",
    weight: Weights = None,
) -> None:
    """Talk to a model. Each line is a turn, an empty line starts over, end of input quits."""
    if (best_of > 1) != bool(judge):
        raise ValueError(
            f"--best-of is {best_of}, --judge {judge!r}; expected either several responses and a reward model to"
            " choose among them, or neither"
        )
    if weight and not judge:
        raise ValueError("--weight applies to the objectives of --judge, which is missing")
    converse(
        model,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        num_samples=best_of,
        judge=judge,
        weights=read_weights(weight),
    )


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
    """Reads turns from standard input and answers each on standard output, with the whole conversation as context.

    The answer is the response, out of `num_samples`, that the reward model in the directory `judge` scores highest,
    its objectives weighted by `weights`; if `judge` is "", the first response.
    Raises: ValueError for a directory without a generative model, and for weights that do not fit the judge.
    """
    from lm.best_of import best_of
    from lm.encoder_decoder import EncoderDecoder
    from lm.sampling import Choice
    from lm.tokenizer import Tokenizer
    from reward.scoring import RewardModel
    from training.seeds import derive_seed

    tokenizer, model = Tokenizer.load(folder), load_writer(folder)
    context = model.config.max_position_embeddings
    reward_model = RewardModel.load(Path(judge), weights) if judge else None
    if reward_model is not None:  # it also reads the end token after a truncated response
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
        # Drop the oldest turns when the context is full.
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


def load_writer(folder: Path) -> "LanguageModel | EncoderDecoder":
    """Loads a decoder, or an encoder-decoder, on the device that `lm.inference` chooses."""
    from lm.encoder_decoder import EncoderDecoder
    from lm.inference import load_for_inference
    from lm.model import LanguageModel
    from lm.weights import ModelFolder, purpose_of

    if purpose_of(folder) == "translate":
        return load_for_inference(ModelFolder(folder, EncoderDecoder))
    return load_for_inference(ModelFolder(folder, LanguageModel))


def _no_preference(_prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
    return [0.0] * len(responses)


def _scorer(judge: "RewardModel", tokenizer: "Tokenizer", messages: "Messages") -> "Scorer":
    def score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
        num = len(responses)
        scores = judge.score(tokenizer, [messages] * num, [prompt] * num, responses)
        if any(map(math.isnan, scores)):
            most = judge.network.config.max_position_embeddings
            raise ValueError(f"the judge reads at most {most} tokens; the conversation has more")
        return scores

    return score
