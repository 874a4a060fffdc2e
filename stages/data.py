"""A stage's data on the driver: tokens that all ranks map, prompts that leave room for a response, and samples of them.

Texts are tokenized once, before ranks have a place. `RUN/tokens/STAGE-NAME-KEY/` holds the tokens; the key is a hash of
whatever they depend on. Prompts are read and measured before anything is sampled from them. Work on them is dealt to
all workers in parts, and each part is kept as soon as it is done.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from files.atomic import write_text
from lm.tokenizer import Tokenizer
from stages.lineage import path_hash
from stages.run import StageRun
from stages.sizes import Lengths, RowSample
from training.data import (
    DataConfig,
    OnOverlong,
    Overlong,
    Prompt,
    SourceConfig,
    SourceRows,
    read_located_prompts,
    untold,
)
from training.tokens import Part, encode_rows, write_arrays

TOKENS = "tokens"
TOKENS_FORMAT = 3  # of the files; another one makes them again
KEY_DIGITS = 16
ENCODED_AT_ONCE = 1024  # prompts, to measure them
SAMPLES = "samples"  # the folder of a stage's samples while it samples
PROMPTS_AT_ONCE = 64  # a worker's share between two steps of the progress bar

Parts = Callable[[int], Iterator[Part]]  # from a number of a row on
Spec = TypeVar("Spec")


def token_folder(
    run: StageRun,
    name: str,
    tokenizer: Tokenizer,
    sources: Sequence[SourceConfig],
    arrays: Sequence[str],
    parts: Parts,
    **settings: int | str,
) -> Path:
    """The folder with the tokens of these sources, which `parts` writes unless they are there.

    `settings` are the values besides tokenizer and sources that the tokens, or the checks of them, depend on. Tokens of
    the same stage and name with another key are removed: they can be made again.

    Raises: ValueError of `parts`, naming file, line and field.
    """
    read = [[data.model_dump(mode="json", exclude={"source"}), path_hash(data.source)] for data in sources]
    made_from = json.dumps([TOKENS_FORMAT, tokenizer.sha256, sorted(settings.items()), read], sort_keys=True)
    prefix = f"{run.name}-{name}-"
    folder = run.run_folder / TOKENS / f"{prefix}{hashlib.sha256(made_from.encode()).hexdigest()[:KEY_DIGITS]}"
    folder.parent.mkdir(exist_ok=True)
    write_arrays(folder, arrays, parts)
    for other in folder.parent.glob(f"*{prefix}{'?' * KEY_DIGITS}"):
        if other != folder:
            shutil.rmtree(other)
    return folder


@dataclass(frozen=True)
class Fitting:
    """Prompts that leave room for a response, and how many others there were."""

    prompts: list[Prompt]
    overlong: Overlong
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual


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

    Raises: ValueError naming file and line of a prompt that is too long or that the chat template refuses, or also the
    field of a row that is no prompt; and if none is left.
    """
    room = run.model.max_position_embeddings - max_new_tokens
    found, num_truncated, lines, counted = list[Prompt](), 0, list[str](), list[SourceRows]()
    read = read_located_prompts(data, lines.append, counted.append)
    for (where, prompt), num_tokens in zip(read, _num_tokens(tokenizer, read), strict=True):
        if num_tokens <= room:
            found.append(prompt)
        elif on_overlong == "refuse":
            raise ValueError(
                f"{where}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
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
    return Fitting(found, overlong, tuple(rows for rows in counted if rows))


def prompt_lengths(
    tokenizer: Tokenizer, data: DataConfig, most_tokens: int, tell: Callable[[str], None] = untold
) -> Lengths:
    """The lengths of a source's prompts, of which at most `most_tokens` count.

    Raises: ValueError as `read_located_prompts`, and naming file and line of a prompt that the chat template refuses.
    """
    sample = RowSample[tuple[str, Prompt]]()
    for where, prompt in read_located_prompts(data, tell):
        sample.add((where, prompt), sum(len(message["content"].encode()) for message in prompt.messages))
    return sample.lengths(lambda prompts: ((n, 0) for n in _num_tokens(tokenizer, prompts)), most_tokens)


def _num_tokens(tokenizer: Tokenizer, prompts: Sequence[tuple[str, Prompt]]) -> Iterator[int]:
    """The prompts' numbers of tokens; few are encoded at once, so that their tokens take no memory to speak of."""
    for start in range(0, len(prompts), ENCODED_AT_ONCE):
        part = prompts[start : start + ENCODED_AT_ONCE]
        yield from map(len, encode_rows(tokenizer.encode_prompts, [(where, prompt.messages) for where, prompt in part]))


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


class SampleRow(Protocol):
    """What is made of a prompt: it has to be a line of JSON."""

    def as_dict(self) -> dict[str, Any]: ...


class PromptSampler(Protocol):
    """What each worker keeps while it samples."""

    def sample(self, prompts: Sequence[Prompt], /) -> Sequence[SampleRow]:
        """Returns the rows of a part of the prompts; none for no prompts."""
        ...

    def close(self) -> None: ...


def sample_in_parts(
    run: StageRun,
    phase: str,
    make: Callable[[Spec], PromptSampler],
    spec: Spec,
    prompts: Sequence[Prompt],
) -> list[dict[str, Any]]:
    """Return the rows of `make(spec).sample(prompts)`, made on all workers; they must not depend on how prompts are
    split. Each worker makes one sampler and keeps it for all its parts.

    Each part is kept in the stage's folder, so a stage that is run again continues with the parts that are missing.
    """
    folder = run.folder / SAMPLES / phase
    for part in (folder.parent, folder):  # the stage's own folder is there, or is away and must not be made again
        part.mkdir(exist_ok=True)
    parts = [prompts[start : start + PROMPTS_AT_ONCE] for start in range(0, len(prompts), PROMPTS_AT_ONCE)]
    paths = [folder / f"{number:05d}.jsonl" for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    samplers = run.workers().put(f"{run.name}: {phase}", make, spec)
    for start in range(0, len(missing), samplers.num_ranks):
        turn = missing[start : start + samplers.num_ranks]
        shares = [parts[number] for number in turn] + [[]] * (samplers.num_ranks - len(turn))
        found = samplers.call_split(PromptSampler.sample, [(share,) for share in shares])
        for number, rows in zip(turn, found, strict=False):  # a rank without a share has none
            write_text(paths[number], "".join(json.dumps(row.as_dict()) + "\n" for row in rows))
        num_done = len(parts) - len(missing) + start + len(turn)
        run.show(min(num_done * PROMPTS_AT_ONCE, len(prompts)), len(prompts), phase)
    samplers.close()
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
