"""PPO's logs of its rollouts, samples.jsonl and rollouts.jsonl. Training reads neither.

samples.jsonl has responses for people to read, of two kinds: a few of those that each iteration learns from, drawn at
random; and, at intervals, additional responses to the same few prompts, which show how the policy's answers change.
rollouts.jsonl has, for each iteration, which weights sampled its responses, and each response's digest and score;
`heed replay` samples them again and compares.

Shape letter: B responses.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from files.hashes import derive_seed
from files.records import as_json
from lm.samplers.engine import shown
from lm.tokenizer import Messages, Tokenizer
from ppo.prompts import first_distinct, order_of
from ppo.rollout import Rollout
from training.data import Prompt
from training.metrics import StepLines

SAMPLES, ROLLOUTS = "samples.jsonl", "rollouts.jsonl"
NUM_DRAWN = 4  # responses logged per iteration, of those that it learns from
NUM_FOLLOWED = 8  # prompts that are answered repeatedly; more may be sampled, to divide among the ranks


@dataclass(frozen=True)
class TrainingSample:
    """One line of samples.jsonl. `step` is the iteration, counted from 1; responses are sampled before its updates.

    `score` is the score before scaling and penalties, NaN (null) where scoring failed. `kl_nats` is log π - log π_ref
    of the response, and `num_tokens` counts what the policy wrote of it. In a conversation with an environment,
    `response` has a line per turn.
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
    """Responses with the numbers that samples.jsonl records."""

    rollout: Rollout
    scores_B: Tensor  # NaN where scoring failed
    kl_B: Tensor  # nats


def followed_rows(sizes: Sequence[int], weights: Sequence[float], rows_multiple: int, seed: int) -> list[int]:
    """Draw the prompt rows to follow, with the same share of each source as in the iterations. Their number divides
    evenly among the ranks, so some occur twice if the job has few prompts.
    """
    num_followed, own_seed = min(NUM_FOLLOWED, sum(sizes)), derive_seed(seed, "ppo", "followed")
    number = -(-num_followed // rows_multiple) * rows_multiple
    if weights:
        order = np.array(first_distinct(order_of(sizes, weights, 1, own_seed), NUM_FOLLOWED))
    else:
        order = np.random.default_rng(own_seed).permutation(sum(sizes))
    return [int(row) for row in np.resize(order, number)]


class SampleLog:
    """Writes samples.jsonl. On resume, drops lines past the resumed step, as metrics.jsonl does."""

    def __init__(
        self, folder: Path, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, seed: int, resume_step: int
    ) -> None:
        self.prompts, self.tokenizer, self.seed = prompts, tokenizer, seed
        self._lines = StepLines(folder / SAMPLES, resume_step=resume_step)

    def log_drawn(self, iteration: int, scored: ScoredRollout) -> None:
        """Log a few of the responses that an iteration learns from, drawn by (seed, iteration)."""
        generator = np.random.default_rng(derive_seed(self.seed, "ppo", "drawn", iteration))
        number = len(scored.rollout)
        rows = generator.choice(number, size=min(NUM_DRAWN, number), replace=False)
        self._write(iteration, "drawn", scored, sorted(int(row) for row in rows))

    def log_followed(self, iteration: int, scored: ScoredRollout) -> None:
        """Log one response to each followed prompt."""
        prompt_rows: list[int] = scored.rollout.prompt_rows_B.tolist()
        firsts = [row for row, prompt in enumerate(prompt_rows) if prompt not in prompt_rows[:row]][:NUM_FOLLOWED]
        self._write(iteration, "followed", scored, firsts)

    def _write(
        self, iteration: int, kind: Literal["drawn", "followed"], scored: ScoredRollout, rows: Sequence[int]
    ) -> None:
        rollout = scored.rollout
        for row in rows:
            prompt, score = self.prompts[int(rollout.prompt_rows_B[row])], float(scored.scores_B[row])
            sample = TrainingSample(
                step=iteration + 1,
                kind=kind,
                prompt_id=prompt.prompt_id,
                category=prompt.kind,
                messages=list(prompt.messages),
                response="\n".join(self._shown(rollout, row)),
                score=score,
                kl_nats=float(scored.kl_B[row]) if np.isfinite(score) else nan,
                num_tokens=int(rollout.num_written_B[row]),
                finished=bool(rollout.finished_B[row]),
            )
            self._lines.write(as_json(asdict(sample)))

    def _shown(self, rollout: Rollout, row: int) -> Iterator[str]:
        """Yields the texts of a response's turns; those of an environment are marked."""
        for is_written, tokens in rollout.turns(row):
            text = self.tokenizer.decode(tokens).strip()
            yield text if is_written else f"[environment] {text}"

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True)
class RolloutRecord:
    """One line of rollouts.jsonl. `step` is the iteration that learns from the responses, counted from 1.

    All digests are 16 hexadecimal digits. `sampled_by` is one digest per response, of all weights that sampled it; if
    these changed within the response, DIGEST@TOKEN of each, with the first token that they sampled. `responses` are
    digests of each response's tokens and log-probs. `tensors` has a digest of each weight that was sent before this
    iteration; it is empty while the model is as loaded. `scores` are before scaling; NaN (null) where scoring failed.
    """

    step: int
    sampled_by: list[str]
    responses: list[str]
    scores: list[float | None]
    tensors: dict[str, str]


class RolloutLog:
    """Writes rollouts.jsonl. On resume, drops lines past the resumed step, as metrics.jsonl does."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        self._lines = StepLines(folder / ROLLOUTS, resume_step=resume_step)

    def write(self, iteration: int, rollout: Rollout, scores_B: Tensor, sent_digests: Mapping[str, int]) -> None:
        tensors = {name: shown(digest) for name, digest in sent_digests.items()}
        record = RolloutRecord(
            iteration + 1, samplers_of(rollout), response_digests(rollout), scores_B.tolist(), tensors
        )
        self._lines.write(as_json(asdict(record)))

    def close(self) -> None:
        self._lines.close()


def samplers_of(rollout: Rollout) -> list[str]:
    """Returns which weights sampled each response, as in `RolloutRecord.sampled_by`."""
    sampled_by_BR, found = rollout.sampled_by_BR, [dict[int, int]() for _ in range(len(rollout))]
    begins_BR = (sampled_by_BR != F.pad(sampled_by_BR, (1, -1))) & (sampled_by_BR != 0)
    for row, place in begins_BR.nonzero().tolist():
        found[row].setdefault(int(sampled_by_BR[row, place]), place)
    return [
        " ".join(f"{shown(digest)}@{first}" if len(of_row) > 1 else shown(digest) for digest, first in of_row.items())
        for of_row in found
    ]


def response_digests(rollout: Rollout) -> list[str]:
    """Returns a digest per response, of the tokens of its prompt and its own, of the bits of its log-probs, and of the
    routes of all these tokens, if there are any.
    """
    digests, lengths = [], zip(rollout.num_tokens_B.tolist(), rollout.response_tokens_B.tolist(), strict=True)
    for row, (num_tokens, num_response) in enumerate(lengths):
        tokens = rollout.tokens_BT[row, :num_tokens].contiguous().numpy().tobytes()
        logprobs = rollout.behaviour_logprobs_BR[row, :num_response].contiguous().numpy().tobytes()
        routes = rollout.routes_BTLK[row, :num_tokens].contiguous().numpy().tobytes()
        digests.append(hashlib.sha256(tokens + logprobs + routes).hexdigest()[:16])
    return digests


def read_rollouts(lines: Sequence[Mapping[str, object]]) -> dict[int, RolloutRecord]:
    """Returns the records by step."""
    records = [RolloutRecord(**line) for line in lines]  # type: ignore[arg-type]
    return {record.step: record for record in records}
