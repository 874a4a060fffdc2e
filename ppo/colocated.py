"""A rank that has all roles."""

from collections.abc import Sequence
from pathlib import Path

from ppo.generator import GeneratorWorker
from ppo.learner import LearnerWorker
from ppo.roles import Sampling
from ppo.scorer import ScorerWorker


class ColocatedWorker(LearnerWorker, GeneratorWorker, ScorerWorker):
    """All roles on one rank (implements `ppo.roles.Roles`)."""

    def start_sampling(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sampling:
        rollout = self.generate(prompts, seeds)
        return lambda: rollout

    def sync_weights(self) -> None:
        self.receive(self.advance_and_send())

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.receive(self.send())
