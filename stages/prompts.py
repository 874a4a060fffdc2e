"""Prompts are read and measured before anything is sampled from them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lm.tokenizer import Tokenizer
from stages.lengths import Lengths, RowSample
from stages.run import StageRun
from training.data import DataConfig, OnOverlong, Overlong, Prompt, read_prompts, untold

PROMPTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Fitting:
    """Prompts that leave room for a response, and how many others there were."""

    prompts: list[Prompt]
    overlong: Overlong


def fitting_prompts(
    run: StageRun,
    tokenizer: Tokenizer,
    data: DataConfig,
    max_new_tokens: int,
    on_overlong: OnOverlong,
    tell: Callable[[str], None] = untold,
) -> Fitting:
    """Read the prompts, and leave out or shorten those that leave no room for a response. `tell` gets what was read.

    A prompt is shortened by its oldest turns, the system's excepted; one whose last turn is too long is left out.

    Raises: ValueError naming the prompt, or file, line and field of a row that is no prompt; and if none is left.
    """
    room = run.model.max_position_embeddings - max_new_tokens
    found, num_truncated, lines = list[Prompt](), 0, list[str]()
    read = read_prompts(data, lines.append)
    for prompt, num_tokens in zip(read, _lengths(tokenizer, read), strict=True):
        if num_tokens <= room:
            found.append(prompt)
        elif on_overlong == "refuse":
            raise ValueError(
                f"{data.source}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
                f" model.max_position_embeddings for {run.name}.max_new_tokens = {max_new_tokens}"
                f' ({run.name}.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        elif on_overlong == "truncate" and (messages := _shortened(tokenizer, prompt.messages, room)):
            found.append(prompt.model_copy(update={"messages": messages}))
            num_truncated += 1
    overlong = Overlong(len(read), num_truncated, len(read) - len(found))
    if overlong:
        lines.append(f"{data.source}: {overlong} ({run.name}.max_new_tokens leaves {room} tokens for a prompt)")
    if not found:
        raise ValueError(f"{data.source}: every prompt is too long; at most {room} tokens were expected")
    for line in lines:
        tell(line)
    return Fitting(found, overlong)


def prompt_lengths(
    tokenizer: Tokenizer, data: DataConfig, most_tokens: int, tell: Callable[[str], None] = untold
) -> Lengths:
    """The lengths of a source's prompts, of which at most `most_tokens` count. Raises: ValueError as `read_prompts`."""
    sample = RowSample[Prompt]()
    for prompt in read_prompts(data, tell):
        sample.add(prompt, sum(len(message["content"].encode()) for message in prompt.messages))
    return sample.lengths(lambda prompts: ((n, 0) for n in _lengths(tokenizer, prompts)), most_tokens)


def _lengths(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Iterator[int]:
    """The prompts' numbers of tokens; few are encoded at once, so that their tokens take no memory to speak of."""
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        part = prompts[start : start + PROMPTS_AT_ONCE]
        yield from map(len, tokenizer.encode_prompts([prompt.messages for prompt in part]))


def _shortened(
    tokenizer: Tokenizer, messages: tuple[Mapping[str, str], ...], room: int
) -> tuple[Mapping[str, str], ...]:
    """The system's turn and as many of the last turns as there is room for, from a user's on; () if none fit."""
    system = messages[:1] if messages[0]["role"] == "system" else ()
    for start in range(len(system), len(messages)):
        kept = (*system, *messages[start:])
        if messages[start]["role"] == "user" and len(tokenizer.encode_prompt(kept)) <= room:
            return kept
    return ()
