"""Work on a list of prompts, dealt to all workers in parts; each part is kept as soon as it is done."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from files.atomic import write_text
from stages.run import StageRun
from training.data import Prompt

PROMPTS_AT_ONCE = 64  # a worker's share between two steps of the progress bar
SAMPLES = "samples"  # the folder of a stage's samples while it samples

Spec = TypeVar("Spec")


class Row(Protocol):
    """What is made of a prompt: it has to be a line of JSON."""

    def as_dict(self) -> dict[str, Any]: ...


class PromptSampler(Protocol):
    """What each worker keeps while it samples."""

    def sample(self, prompts: Sequence[Prompt], /) -> Sequence[Row]:
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
