"""What the controller asks of others. Plain objects serve these in one process, groups of workers on a cluster.

Every call is about a whole batch; whoever serves it splits it among ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ppo.rollout import PolicyBatch, Rollout, ValueBatch

Sampling = Callable[[], Rollout]  # waits for a rollout that was begun; every call gives the same


class Generator(Protocol):
    def start_sampling(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sampling:
        """Begin one response a prompt, each from its own seed, with the weights that were given last before this call.

        It returns at once where generators are workers of their own; rollouts are made in the order of the calls.
        """
        ...


class Scorer(Protocol):
    def scores(self, rollout: Rollout) -> Tensor:
        """Scores of each response [B, O]; higher is better. NaN = scoring failed: the response is masked and counted.

        O objectives, in the order of the config's `objective_weights`; one where it has none.
        """
        ...

    def first_failure(self) -> str:
        """Why the first of those that had no score in the last call had none; "" where all had one."""
        ...


class Reference(Protocol):
    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        """log π_ref of each response token [B, R], nats, at the sampling temperature; 0 where there is no token."""
        ...


class PolicyLearner(Protocol):
    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        """log π of each response token [B, R], as `reference_logprobs`."""
        ...

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        """One optimizer step. Returns figures, means over the batch's counted tokens."""
        ...

    def sync_weights(self) -> None:
        """Give the learner's weights to the generator, and advance the moving average. Whether they arrived is proved
        before a rollout that they sampled is handed out.
        """
        ...

    def keep_policy(self, folder: Path) -> None:
        """Write the policy as it is now as a model directory, in place of what may lie there."""
        ...

    def export_policy(self, folder: Path) -> None:
        """Write `model/` and `model_ema/`."""
        ...


class ValueLearner(Protocol):
    def values(self, rollout: Rollout) -> Tensor:
        """Value of the state before each response token [B, R]; 0 where there is no token."""
        ...

    def update_value(self, batch: ValueBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        """One optimizer step. Returns figures, means over the batch's counted tokens."""
        ...


class Checkpointed(Protocol):
    def save(
        self, checkpoints: Path, iteration: int, progress: Mapping[str, float], files: Mapping[str, bytes]
    ) -> None:
        """Begin to write a checkpoint: everything needed to continue exactly, `progress`, and `files` by name."""
        ...

    def finish_saving(self) -> None:
        """Wait for what was begun; a checkpoint that failed is reported to the user."""
        ...

    def changed_files(self, folder: Path, sha256: Mapping[str, str]) -> Sequence[str]:
        """Names of those files of a checkpoint whose SHA-256 is not the given one."""
        ...

    def load(self, folder: Path) -> None: ...


class Roles(Generator, Scorer, Reference, PolicyLearner, ValueLearner, Checkpointed, Protocol):
    """All roles in one place, as colocated workers offer them."""
