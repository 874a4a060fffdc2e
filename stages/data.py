"""A stage's data on the driver: tokens that all ranks map, prompts that leave room for a response, and samples of them.

Texts are tokenized once, before ranks have a place. `RUN/tokens/STAGE-NAME-KEY/` holds the tokens; the key is a hash of
everything they depend on. Prompts are read and measured before any sampling. Sampling is split into parts across all
workers, and each part is saved as soon as it is done.
"""

import hashlib
import itertools
import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from files.atomic import write_text
from files.conversations import num_bytes
from lm.chat_template import with_tools
from lm.tokenizer import Messages, Tokenizer
from stages.lineage import path_hash
from stages.run import StageRun
from stages.sizes import Lengths, Measured, RowSample
from training.data import (
    NO_FIELDS,
    DataConfig,
    OnOverlong,
    Overlong,
    Prompt,
    RowFields,
    SourceConfig,
    SourceRows,
    stream_prompts,
    sum_of,
    untold,
)
from training.tokens import (
    FITS,
    SKIPPED,
    TRUNCATED,
    Part,
    chunks,
    encode_rows,
    read_array,
    read_overlong,
    read_sources,
    unusual_rows,
    write_arrays,
)

TOKENS = "tokens"
TOKENS_FORMAT = 3  # version of the files; a different version makes them again
KEY_DIGITS = 16
SAMPLES = "samples"  # the folder of a stage's samples while it samples
PROMPTS_AT_ONCE = 64  # prompts per worker between updates of the progress bar

NONE_OVERLONG = Overlong()

Parts = Callable[[int], Iterator[Part]]  # the parts from a given row on
Spec = TypeVar("Spec")
Item = TypeVar("Item")


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


class OnAccess(Sequence[Item]):
    """A sequence whose items are made when they are read, for instance from a memory-mapped file."""

    def __init__(self, length: int, make: Callable[[int], Item]) -> None:
        self._numbers, self._make = range(length), make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        numbers = self._numbers[index]
        return self._make(numbers) if isinstance(numbers, int) else [self._make(number) for number in numbers]


PROMPTS = ("tokens", "lengths", "texts", "text_bytes", "overlong")  # the arrays in a folder of prompts


@dataclass(frozen=True)
class Fitting:
    """Prompts that leave room for a response, their tokens, and the number of prompts that do not."""

    prompts: Sequence[Prompt]
    tokens: Sequence[list[int]]
    overlong: Overlong = NONE_OVERLONG
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
    sizes: tuple[int, ...] = ()  # number of prompts per source, in the order of their rows; () = one source
    overlong_by_source: Mapping[str, Overlong] = field(default_factory=dict)  # by source, if there are several

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Memory-map a folder of prompts. Only 16 bytes per prompt stay in memory."""
        tokens, texts = read_array(folder, "tokens"), read_array(folder, "texts")
        token_ends, text_ends = (
            np.cumsum(read_array(folder, name), dtype=np.int64) for name in ("lengths", "text_bytes")
        )

        def prompt(row: int) -> Prompt:
            prompt_id, kind, messages, *fields = json.loads(_entry(texts, text_ends, row).tobytes())
            return Prompt(prompt_id=prompt_id, kind=kind, messages=messages, row=fields[0] if fields else {})

        def tokens_of(row: int) -> list[int]:
            of_row: list[int] = _entry(tokens, token_ends, row).tolist()
            return of_row

        num = len(token_ends)
        return cls(OnAccess(num, prompt), OnAccess(num, tokens_of), read_overlong(folder), read_sources(folder))


def joined(names: Sequence[str], parts: Sequence[Fitting]) -> Fitting:
    """Returns the prompts of several sources, one source after another. The id of a prompt begins with its source's
    name, which also groups it in reports if its row has no `kind`.
    """
    sizes = tuple(len(part.prompts) for part in parts)
    ends = list(itertools.accumulate(sizes))

    def place(row: int) -> tuple[int, int]:
        number = bisect_right(ends, row)
        return number, row - (ends[number] - sizes[number])

    def prompt(row: int) -> Prompt:
        number, own_row = place(row)
        own, name = parts[number].prompts[own_row], names[number]
        return own.model_copy(update={"prompt_id": f"{name}/{own.prompt_id}", "kind": own.kind or name})

    def tokens_of(row: int) -> list[int]:
        number, own_row = place(row)
        return parts[number].tokens[own_row]

    return Fitting(
        OnAccess(ends[-1], prompt),
        OnAccess(ends[-1], tokens_of),
        sum_of(part.overlong for part in parts),
        tuple(itertools.chain.from_iterable(part.sources for part in parts)),
        sizes,
        dict(zip(names, (part.overlong for part in parts), strict=True)),
    )


def _entry(array: NDArray[Any], ends: NDArray[np.int64], row: int) -> NDArray[Any]:
    return array[ends[row - 1] if row else 0 : ends[row]]


@dataclass(frozen=True)
class PromptLimit:
    """How many tokens of the context a stage's responses need, and what happens to prompts that do not leave them."""

    section: str
    context: int
    max_new_tokens: int
    on_overlong: OnOverlong

    @property
    def room(self) -> int:
        """The most tokens of a prompt."""
        return self.context - self.max_new_tokens

    def fit(self, tokenizer: Tokenizer, where: str, prompt: Prompt, tokens: list[int]) -> tuple[Prompt, list[int], int]:
        """Return the prompt, its tokens, and whether it fits, was shortened or is to be skipped.

        A prompt is shortened by dropping its oldest turns, except the system's. It is skipped if its last turn is too
        long. Raises: ValueError naming file and line if prompts that are too long are refused.
        """
        if len(tokens) <= self.room:
            return prompt, tokens, FITS
        if self.on_overlong == "refuse":
            raise ValueError(
                f"{where}: prompt {prompt.prompt_id!r} has {len(tokens)} tokens; at most {self.room} leave room in"
                f" model.max_position_embeddings for {self.section}.max_new_tokens = {self.max_new_tokens}"
                f' ({self.section}.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        if self.on_overlong == "truncate":
            for messages in _shorter(prompt.messages):
                if len(tokens := tokenizer.encode_prompt(messages)) <= self.room:
                    return prompt.model_copy(update={"messages": messages}), tokens, TRUNCATED
        return prompt, [], SKIPPED


def fitting_prompts(
    run: StageRun,
    tokenizer: Tokenizer,
    data: DataConfig,
    max_new_tokens: int,
    on_overlong: OnOverlong,
    tell: Callable[[str], None] = untold,
    keeps: RowFields = NO_FIELDS,
    tools: Sequence[Mapping[str, Any]] = (),
    name: str = "prompts",
) -> Fitting:
    """Read and encode the prompts once, into files, and skip or shorten those that leave no room for a response, as
    `PromptLimit.fit` does. `tell` receives lines about what was read. Each prompt keeps the fields `keeps` of its row,
    and offers `tools` in addition to its own. `name` tells the files of a stage's sources apart.

    Raises: ValueError if no prompt is left, if a prompt is too long or the chat template refuses it (naming file and
        line), or if a row is not a prompt (naming the field too).
    """
    limit = PromptLimit(run.name, run.model.max_position_embeddings, max_new_tokens, on_overlong)

    def parts(first_row: int) -> Iterator[Part]:
        lines, counted = list[str](), list[SourceRows]()
        streamed = stream_prompts(data, lines.append, counted.append, keeps)
        offered: Iterator[tuple[str, Prompt]] = itertools.islice(streamed, first_row, None)
        if tools:
            offered = (
                (where, prompt.model_copy(update={"messages": with_tools(prompt.messages, tools)}))
                for where, prompt in offered
            )
        for chunk in chunks(offered):
            encoded = encode_rows(tokenizer.encode_prompts, [(where, prompt.messages) for where, prompt in chunk])
            of_rows = [limit.fit(tokenizer, *row, tokens) for row, tokens in zip(chunk, encoded, strict=True)]
            kept = [(prompt, tokens) for prompt, tokens, fate in of_rows if fate != SKIPPED]
            texts = [
                json.dumps([of.prompt_id, of.kind, of.messages, *([of.row] * bool(of.row))]).encode() for of, _ in kept
            ]
            arrays = {
                "tokens": np.fromiter(itertools.chain.from_iterable(tokens for _, tokens in kept), np.int32),
                "lengths": np.array([len(tokens) for _, tokens in kept]),
                "texts": np.frombuffer(b"".join(texts), np.uint8),
                "text_bytes": np.array([len(text) for text in texts]),
                "overlong": np.array([fate for *_, fate in of_rows]),
            }
            yield Part(len(chunk), arrays)
        for line in lines:
            tell(line)
        yield from unusual_rows(counted)

    settings = {"room": limit.room, "on_overlong": on_overlong} | ({"fields": keeps.key} if keeps.key else {})
    settings |= {"tools": json.dumps(list(tools))} if tools else {}
    fitting = Fitting.read(token_folder(run, name, tokenizer, (data,), PROMPTS, parts, **settings))
    if fitting.overlong:
        tell(f"{data.source}: {fitting.overlong} ({run.name}.max_new_tokens leaves {limit.room} tokens for a prompt)")
    if not fitting.prompts:
        with_them = ", including the descriptions of the environment's tools," if tools else ""
        raise ValueError(
            f"{data.source}: every prompt is too long; at most {limit.room} tokens{with_them} were expected"
        )
    return fitting


def prompt_lengths(
    tokenizer: Tokenizer, data: DataConfig, limit: PromptLimit, tell: Callable[[str], None] = untold
) -> Lengths:
    """Return the lengths of a source's prompts.

    Raises: ValueError as `stream_prompts` and `PromptLimit.fit`, and naming file and line of a prompt that the chat
        template refuses.
    """
    sample = RowSample[tuple[str, Prompt]]()
    for where, prompt in stream_prompts(data, tell):
        sample.add((where, prompt), num_bytes(prompt.messages))

    def count(prompts: Sequence[tuple[str, Prompt]]) -> Iterator[list[Measured]]:
        encoded = encode_rows(tokenizer.encode_prompts, [(where, prompt.messages) for where, prompt in prompts])
        for row, tokens in zip(prompts, encoded, strict=True):
            _, kept, fate = limit.fit(tokenizer, *row, tokens)
            yield [(len(kept), 0, fate)]

    return sample.lengths(count, limit.room)


def _shorter(messages: Messages) -> Iterator[Messages]:
    """Yield ever shorter conversations: the system's turn and fewer of the last turns, starting with a user's."""
    system = tuple(messages[:1]) if messages[0]["role"] == "system" else ()
    tools = () if system else messages[0].get("tools", ())
    for start in range(len(system), len(messages)):
        if messages[start]["role"] == "user":
            yield tuple(with_tools((*system, *messages[start:]), tools if start else ()))


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
    team_size: int = 1,
) -> list[dict[str, Any]]:
    """Return the rows of `make(spec).sample(prompts)`, computed on all workers. Rows must not depend on how the prompts
    are split. Each worker makes one sampler and keeps it for all its parts. Teams of `team_size` consecutive workers
    get the same parts, and the rows are those of the first worker of each team.

    Each part is saved in the stage's folder, so a stage that runs again continues with the missing parts.
    """
    folder = run.folder / SAMPLES / phase
    for part in (folder.parent, folder):  # not the stage's folder: if that has disappeared, it must stay away
        part.mkdir(exist_ok=True)
    parts = [prompts[start : start + PROMPTS_AT_ONCE] for start in range(0, len(prompts), PROMPTS_AT_ONCE)]
    paths = [folder / f"{number:05d}.jsonl" for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    samplers = run.workers().put(f"{run.name}: {phase}", make, spec)
    num_teams = samplers.num_ranks // team_size
    for start in range(0, len(missing), num_teams):
        turn = missing[start : start + num_teams]
        shares = [parts[number] for number in turn] + [[]] * (num_teams - len(turn))
        of_rank = [(share,) for share in shares for _ in range(team_size)]
        rows_by_team = samplers.call_split(PromptSampler.sample, of_rank)[::team_size]
        for number, rows in zip(turn, rows_by_team, strict=False):  # a team without a share has none
            write_text(paths[number], "".join(json.dumps(row.as_dict()) + "\n" for row in rows))
        num_done = len(parts) - len(missing) + start + len(turn)
        run.show(min(num_done * PROMPTS_AT_ONCE, len(prompts)), len(prompts), shown or phase)
    samplers.close()
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
