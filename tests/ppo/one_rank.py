"""All of PPO's roles on one rank in this process, within reach of a test."""

from collections.abc import Sequence

from torch import Tensor

from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.roles import Roles
from ppo.rollout import Rollout
from training.config import EngineConfig


class OneRank:
    """The roles as the controller calls them, and the objects behind them."""

    def __init__(
        self, config: PPOConfig, engine: EngineConfig, models: InitialModels, conversations: Sequence[Messages] = ()
    ) -> None:
        self.config, self.models = config, models
        self.roles = Roles.in_process(config, engine, models, conversations)
        self.learner = self.roles.learners.ranks.kept
        self.generator = self.roles.generators.ranks.kept
        self.scorer = self.roles.scorers.ranks.kept
        self.tokenizer = self.learner.tokenizer

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Rollout:
        """Responses to prompts that are all of the job's, so rows are counted from 0."""
        return self.roles.generators.start_sampling(range(len(prompts)), prompts, seeds)()

    def scores(self, rollout: Rollout) -> Tensor:
        return self.roles.scorers.start_scores(rollout)()

    def close(self) -> None:
        self.roles.close()
