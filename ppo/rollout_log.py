"""rollouts.jsonl: for each iteration, which weights sampled its responses, and a digest and the score of each.

`heed replay` samples them again and compares.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from files.records import as_json
from lm.samplers.sent_weights import shown
from ppo.rollout import Rollout
from training.metrics import StepLines

ROLLOUTS = "rollouts.jsonl"


@dataclass(frozen=True)
class RolloutRecord:
    """One line. `step` is the iteration that learns from the responses, counted from 1.

    All digests are 16 hexadecimal digits: `sampled_by` of all weights that sampled a response, `responses` of its
    tokens and log-probs, and `tensors` of each weight that was sent before this iteration; none where the model is
    still as loaded. `scores` are the reward's, before scaling; NaN (null) where it failed.
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
        sampled_by = [shown(digest) for digest in rollout.sampled_by_B.tolist()]
        record = RolloutRecord(iteration + 1, sampled_by, response_digests(rollout), scores_B.tolist(), tensors)
        self._lines.write(as_json(asdict(record)))

    def close(self) -> None:
        self._lines.close()


def response_digests(rollout: Rollout) -> list[str]:
    """Of each response, a digest of its prompt's and its own tokens, and of the bits of their log-probs."""
    found, lengths = [], zip(rollout.num_tokens_B.tolist(), rollout.response_tokens_B.tolist(), strict=True)
    for row, (num_tokens, num_response) in enumerate(lengths):
        tokens = rollout.tokens_BT[row, :num_tokens].contiguous().numpy().tobytes()
        logprobs = rollout.behaviour_logprobs_BR[row, :num_response].contiguous().numpy().tobytes()
        found.append(hashlib.sha256(tokens + logprobs).hexdigest()[:16])
    return found


def read_rollouts(lines: Sequence[Mapping[str, object]]) -> dict[int, RolloutRecord]:
    """The records by step."""
    records = [RolloutRecord(**line) for line in lines]  # type: ignore[arg-type]
    return {record.step: record for record in records}
