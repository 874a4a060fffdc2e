"""All of PPO's roles on one rank in this process, accessible to a test."""

from collections.abc import Sequence

import torch
from torch import Tensor

from files.rows import Row
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.rank import InitialModels
from ppo.roles import Roles
from ppo.rollout import Rollout
from training.config import EngineConfig


class OneRank:
    """The roles as the controller calls them, and the objects behind them."""

    def __init__(
        self,
        config: PPOConfig,
        engine: EngineConfig,
        models: InitialModels,
        conversations: Sequence[Messages] = (),
        rows: Sequence[Row] = (),
    ) -> None:
        self.config, self.models = config, models
        self.roles = Roles.in_process(config, engine, models, conversations, rows)
        self.learner = self.roles.learners.ranks.kept
        self.generator = self.roles.generators.ranks.kept
        self.scorer = self.roles.scorers.ranks.kept
        self.tokenizer = self.learner.tokenizer

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Rollout:
        """Samples responses to all prompts of the job, so rows are counted from 0."""
        return self.roles.generators.start_sampling(range(len(prompts)), prompts, seeds)()

    def scores(self, rollout: Rollout) -> Tensor:
        return self.roles.scorers.start_scores(rollout)()

    def values(self, rollout: Rollout) -> Tensor:
        """Packs the whole rollout as an update does."""
        return self.roles.learners.start_values(rollout, [torch.arange(len(rollout))])()

    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        """Packs the whole rollout as an update does."""
        return self.roles.learners.start_policy_logprobs(rollout, [torch.arange(len(rollout))])()

    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        return self.roles.scorers.start_reference_logprobs(rollout, [torch.arange(len(rollout))])()

    def close(self) -> None:
        self.roles.close()
