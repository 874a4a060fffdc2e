"""Environments that fail: a share of a job's conversations hangs, dies, answers nonsense or floods.

Which ones, and how, follows from their seeds. So the undisturbed run has the same failures as those under faults, and
metrics can be compared with what was planned: a failure must cost its own response, and no other.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Literal

import tomli_w
from pydantic import Field, TypeAdapter

from files.hashes import derive_seed
from files.rows import Row
from heed.jobs.job import JobConfig
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage
from ppo.environments.environment import Environment, Episode, Reply
from ppo.environments.kinds import AnyEnvironment
from ppo.stage import STAGE as PPO
from training.data import RowFields

Failure = Literal["hang", "death", "nonsense", "flood"]
REASONS: Mapping[Failure, str] = {"hang": "deadline", "death": "error", "nonsense": "invalid", "flood": "too_long"}
FLOOD_CHARACTERS = 10_000_000
HANG_SECONDS = 10.0  # beyond its deadline; a thread that never ended would outlive the run
MOST_FAILED = 0.99  # of an iteration's responses; with more, the run stops
PREFIX = "environment_failed/"  # of metrics
DEADLINE_SECONDS = 2.0  # of a job with failures, which waits for every one that hangs


class FailingEnvironment(Environment):
    """Another environment, in which a share of the conversations fails."""

    environment: str = Field(description="The table of the other environment, as JSON.")
    share: float = Field(gt=0, lt=1, description="The share of conversations that fail.")

    @cached_property
    def other(self) -> Environment:
        return TypeAdapter[Environment](AnyEnvironment).validate_json(self.environment)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.other.tools

    @property
    def row_fields(self) -> RowFields:
        return self.other.row_fields

    def check(self, rows: Sequence[Row]) -> None:
        self.other.check(rows)

    def load(self) -> None:
        self.other.load()

    def open(self, conversation: Messages, row: Row, seed: int) -> Episode:
        episode, failure = self.other.open(conversation, row, seed), planned(seed, self.share)
        return FailingEpisode(episode, failure, seed, self.deadline_seconds) if failure else episode


def planned(seed: int, share: float) -> Failure | None:
    """Returns how the episode with that seed fails; None for most."""
    chance = Random(seed)
    return chance.choice(tuple(REASONS)) if chance.random() < share else None


class FailingEpisode(Episode):
    """An episode that fails once: when it begins, at its first reply or, if it gets no turn, when it is scored."""

    def __init__(self, other: Episode, failure: Failure, seed: int, deadline_seconds: float) -> None:
        self._other, self._failure, self._deadline_seconds = other, failure, deadline_seconds
        # A score cannot be too long, and a conversation may get no reply.
        self._begins = failure == "flood" or bool(derive_seed(seed, "begins") % 2)

    async def begin(self) -> Messages:
        if not self._begins:
            return await self._other.begin()
        return self._fail([{"role": "user", "content": "x" * FLOOD_CHARACTERS}])

    async def reply(self, _message: AssistantMessage) -> Reply:
        return self._fail(Reply())

    async def score(self) -> float:
        return self._fail(0.0)

    async def close(self) -> None:
        await self._other.close()

    def _fail(self, flood: Any) -> Any:
        match self._failure:
            case "hang":
                time.sleep(self._deadline_seconds + HANG_SECONDS)
            case "death":
                raise SystemExit(3)
            case "nonsense":
                return "nonsense"
        return flood


def with_failures(job: JobConfig, share: float) -> list[str]:
    """Returns the settings that make a share of the job's conversations fail.

    Raises: ValueError for a job without conversations, or one that drops some of them.
    """
    ppo = job.section(PPO)
    if ppo is None or ppo.environment is None:
        raise ValueError(f"--environment-failures: job {job.name!r} has no conversations; ppo.environment was expected")
    if ppo.sampled_batch_size != ppo.rollout_batch_size:
        raise ValueError("--environment-failures: a job without ppo.advantage.oversample was expected")
    table = {
        "kind": "class",
        "class_name": f"{__name__}:{FailingEnvironment.__name__}",
        "max_turns": ppo.environment.max_turns,
        "deadline_seconds": DEADLINE_SECONDS,
        "settings": {"environment": ppo.environment.model_dump_json(), "share": share},
    }
    return [f"ppo.environment={_inline(table)}", f"ppo.max_failed_share={MOST_FAILED}"]


def _inline(value: Any) -> str:
    """Returns a value as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(part)}" for key, part in value.items()) + "}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def planned_failures(job: JobConfig, share: float) -> Counter[str]:
    """Returns how many responses of a job have to fail, by reason."""
    ppo, found = job.section_of(PPO), Counter[str]()
    for iteration in range(ppo.num_iterations):
        for place in range(ppo.rollout_batch_size):
            seed = derive_seed(derive_seed(job.seed, "ppo", "sample", iteration, place), "environment")
            if failure := planned(seed, share):
                found[REASONS[failure]] += 1
    return found


def failures_of(job: JobConfig, run: Path) -> Counter[str]:
    """Returns how many of a run's responses failed, by reason."""
    number, found = job.section_of(PPO).rollout_batch_size, Counter[str]()
    for line in (run / PPO.name / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for name, share in json.loads(line).items():
            if name.startswith(PREFIX) and share:
                found[name.removeprefix(PREFIX)] += round(share * number)
    return found
