"""A stage's data on the driver: tokens that all ranks map, prompts that leave room for a response, and samples of them.

Texts are tokenized once, before ranks have a place. `RUN/tokens/STAGE-NAME-KEY/` holds the tokens; the key is a hash of
everything they depend on. Prompts are read and measured before any sampling. Sampling is split into parts across all
workers, and each part is saved as soon as it is done.
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
TOKENS_FORMAT = 3  # version of the files; a different version makes them again
KEY_DIGITS = 16
ENCODED_AT_ONCE = 1024  # prompts that are encoded together to measure their lengths
SAMPLES = "samples"  # the folder of a stage's samples while it samples
PROMPTS_AT_ONCE = 64  # prompts per worker between updates of the progress bar

Parts = Callable[[int], Iterator[Part]]  # the parts from a given row on
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
    """Return the folder with the tokens of these sources. `parts` makes them unless they already exist.

    `settings` are the values, in addition to tokenizer and sources, that the tokens or their checks depend on. Tokens
    of the same stage and name with another key are removed, since they can be made again.

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
    """Read the prompts, and skip or shorten those that leave no room for a response. `tell` receives what was read.

    A prompt is shortened by dropping its oldest turns, except the system's. If its last turn is too long, it is
    skipped.

    Raises: ValueError if no prompt is left, if a prompt is too long or the chat template refuses it (naming file and
        line), or if a row is not a prompt (naming the field too).
    """
    room = run.model.max_position_embeddings - max_new_tokens
    fitting, num_truncated, lines, counted = list[Prompt](), 0, list[str](), list[SourceRows]()
    read = read_located_prompts(data, lines.append, counted.append)
    for (where, prompt), num_tokens in zip(read, _num_tokens(tokenizer, read), strict=True):
        if num_tokens <= room:
            fitting.append(prompt)
        elif on_overlong == "refuse":
            raise ValueError(
                f"{where}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
                f" model.max_position_embeddings for {run.name}.max_new_tokens = {max_new_tokens}"
                f' ({run.name}.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        elif on_overlong == "truncate" and (messages := _shortened(tokenizer, prompt.messages, room)):
            fitting.append(prompt.model_copy(update={"messages": messages}))
            num_truncated += 1
    overlong = Overlong(len(read), num_truncated, len(read) - len(fitting))
    if overlong:
        lines.append(f"{data.source}: {overlong} ({run.name}.max_new_tokens leaves {room} tokens for a prompt)")
    if not fitting:
        raise ValueError(f"{data.source}: every prompt is too long; at most {room} tokens were expected")
    for line in lines:
        tell(line)
    return Fitting(fitting, overlong, tuple(rows for rows in counted if rows))


def prompt_lengths(
    tokenizer: Tokenizer, data: DataConfig, most_tokens: int, tell: Callable[[str], None] = untold
) -> Lengths:
    """Return the lengths of a source's prompts, each counted as at most `most_tokens`.

    Raises: ValueError as `read_located_prompts`, and naming file and line of a prompt that the chat template refuses.
    """
    sample = RowSample[tuple[str, Prompt]]()
    for where, prompt in read_located_prompts(data, tell):
        sample.add((where, prompt), sum(len(message["content"].encode()) for message in prompt.messages))
    return sample.lengths(lambda prompts: ((n, 0) for n in _num_tokens(tokenizer, prompts)), most_tokens)


def _num_tokens(tokenizer: Tokenizer, prompts: Sequence[tuple[str, Prompt]]) -> Iterator[int]:
    """Count the prompts' tokens. Few are encoded at once, so that their tokens take little memory."""
    for start in range(0, len(prompts), ENCODED_AT_ONCE):
        part = prompts[start : start + ENCODED_AT_ONCE]
        yield from map(len, encode_rows(tokenizer.encode_prompts, [(where, prompt.messages) for where, prompt in part]))


def _shortened(
    tokenizer: Tokenizer, messages: tuple[Mapping[str, str], ...], room: int
) -> tuple[Mapping[str, str], ...]:
    """Return the system's turn and as many of the last turns as fit, starting with a user's; () if none fit."""
    system = messages[:1] if messages[0]["role"] == "system" else ()
    for start in range(len(system), len(messages)):
        kept = (*system, *messages[start:])
        if messages[start]["role"] == "user" and len(tokenizer.encode_prompt(kept)) <= room:
            return kept
    return ()


class SampleRow(Protocol):
    """A sample for one prompt, which must be writable as a line of JSON."""

    def as_dict(self) -> dict[str, Any]: ...


class PromptSampler(Protocol):
    """The sampler that each worker keeps while it samples."""

    def sample(self, prompts: Sequence[Prompt], /) -> Sequence[SampleRow]:
        """Return the rows for a part of the prompts; no rows for no prompts."""
        ...

    def close(self) -> None: ...


def sample_in_parts(
    run: StageRun,
    phase: str,
    make: Callable[[Spec], PromptSampler],
    spec: Spec,
    prompts: Sequence[Prompt],
    *,
    shown: str = "",
) -> list[dict[str, Any]]:
    """Return the rows of `make(spec).sample(prompts)`, computed on all workers. Rows must not depend on how the prompts
    are split. Each worker makes one sampler and keeps it for all its parts.

    Each part is saved in the stage's folder, so a stage that runs again continues with the missing parts.
    """
    folder = run.folder / SAMPLES / phase
    for part in (folder.parent, folder):  # not the stage's folder: if that has disappeared, it must stay away
        part.mkdir(exist_ok=True)
    parts = [prompts[start : start + PROMPTS_AT_ONCE] for start in range(0, len(prompts), PROMPTS_AT_ONCE)]
    paths = [folder / f"{number:05d}.jsonl" for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    samplers = run.workers().put(f"{run.name}: {phase}", make, spec)
    for start in range(0, len(missing), samplers.num_ranks):
        turn = missing[start : start + samplers.num_ranks]
        shares = [parts[number] for number in turn] + [[]] * (samplers.num_ranks - len(turn))
        rows_by_rank = samplers.call_split(PromptSampler.sample, [(share,) for share in shares])
        for number, rows in zip(turn, rows_by_rank, strict=False):  # a rank without a share has none
            write_text(paths[number], "".join(json.dumps(row.as_dict()) + "\n" for row in rows))
        num_done = len(parts) - len(missing) + start + len(turn)
        run.show(min(num_done * PROMPTS_AT_ONCE, len(prompts)), len(prompts), shown or phase)
    samplers.close()
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
