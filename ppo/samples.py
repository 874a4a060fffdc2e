"""Responses that PPO samples while it trains, kept in samples.jsonl to be read.

Two kinds: a few of the responses that each iteration learns from, drawn at random; and, at intervals, responses to the
same few prompts, sampled in addition, which show how the policy's answers change. Training reads neither.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from files.records import as_json
from lm.tokenizer import Messages, Tokenizer
from ppo.rollout import Rollout
from training.data import Prompt
from training.metrics import StepLines
from training.seeds import derive_seed

SAMPLES = "samples.jsonl"
NUM_DRAWN = 4  # responses kept of those that an iteration learns from
NUM_FOLLOWED = 8  # prompts that are answered again and again, or as many as divide among the ranks


@dataclass(frozen=True)
class TrainingSample:
    """One line of samples.jsonl. `step` is the iteration; its responses are sampled before its updates.

    `score` is the reward's, before scaling and penalties; NaN (null) where it failed. `kl_nats` is log π - log π_ref
    of the response.
    """

    step: int
    kind: Literal["drawn", "followed"]
    prompt_id: str
    category: str
    messages: Messages
    response: str
    score: float
    kl_nats: float
    num_tokens: int
    finished: bool


@dataclass(frozen=True)
class ScoredRollout:
    """Responses with what is logged of them; shape letter: B responses."""

    rollout: Rollout
    scores_B: Tensor  # NaN where it failed
    kl_B: Tensor  # nats


def followed_rows(num_prompts: int, rows_multiple: int, seed: int) -> list[int]:
    """Draw which prompts are followed, by row. Their number divides among the ranks, so some occur twice where the job
    has few prompts.
    """
    number = -(-min(NUM_FOLLOWED, num_prompts) // rows_multiple) * rows_multiple
    order = np.random.default_rng(derive_seed(seed, "ppo", "followed")).permutation(num_prompts)
    return [int(row) for row in np.resize(order, number)]


class SampleLog:
    """Writes samples.jsonl; on resume, as the metrics, without what will be done again."""

    def __init__(
        self, folder: Path, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, seed: int, resume_step: int
    ) -> None:
        self.prompts, self.tokenizer, self.seed = prompts, tokenizer, seed
        self._lines = StepLines(folder / SAMPLES, resume_step=resume_step)

    def log_drawn(self, iteration: int, scored: ScoredRollout) -> None:
        """Keep a few of the responses that an iteration learns from, drawn from (seed, iteration)."""
        generator = np.random.default_rng(derive_seed(self.seed, "ppo", "drawn", iteration))
        number = len(scored.rollout)
        rows = generator.choice(number, size=min(NUM_DRAWN, number), replace=False)
        self._write(iteration, "drawn", scored, sorted(int(row) for row in rows))

    def log_followed(self, iteration: int, scored: ScoredRollout) -> None:
        """Keep one response to each followed prompt."""
        prompt_rows: list[int] = scored.rollout.prompt_rows_B.tolist()
        firsts = [row for row, prompt in enumerate(prompt_rows) if prompt not in prompt_rows[:row]][:NUM_FOLLOWED]
        self._write(iteration, "followed", scored, firsts)

    def _write(
        self, iteration: int, kind: Literal["drawn", "followed"], scored: ScoredRollout, rows: Sequence[int]
    ) -> None:
        rollout, (_, responses) = scored.rollout, scored.rollout.token_lists()
        for row in rows:
            prompt, score = self.prompts[int(rollout.prompt_rows_B[row])], float(scored.scores_B[row])
            sample = TrainingSample(
                step=iteration + 1,
                kind=kind,
                prompt_id=prompt.prompt_id,
                category=prompt.kind,
                messages=list(prompt.messages),
                response=self.tokenizer.decode(responses[row]).strip(),
                score=score,
                kl_nats=float(scored.kl_B[row]) if np.isfinite(score) else nan,
                num_tokens=len(responses[row]),
                finished=bool(rollout.finished_B[row]),
            )
            self._lines.write(as_json(asdict(sample)))

    def close(self) -> None:
        self._lines.close()
