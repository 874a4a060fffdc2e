"""Scoring by the models that stay fixed: what each rank does, and all ranks' scores of a rollout.

Shape letters: B responses, O objectives, R response tokens.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cluster.remote import Handle, Pending
from lm.layers import align_heads, round_products
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.source import PartialSource, load
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder
from ppo.config import PPOConfig
from ppo.frozen_model import FrozenModel, HeldModel, ShardedModel
from ppo.initial_models import InitialModels
from ppo.rank import Rank
from ppo.rollout import Rollout, joined, shares_by_update, shares_of
from reward.external import ExternalReward, Scored, score_in_parts
from reward.scoring import (
    PackedInputs,
    RewardModel,
    RewardNetwork,
    labels_of,
    network_folder,
    scores_of,
    weights_by_label,
)
from training.config import BatchConfig, EngineConfig
from training.packing import pass_tokens, split_passes

AnyModel = TypeVar("AnyModel", bound=nn.Module)

TEXTS_PER_CALL = 16  # of a reward that reads texts, where batches are not counted in responses


class Scorers:
    """The scorers of all ranks, as the controller calls them: with whole rollouts, which are split by rank.

    `conversations` are the job's prompts by row, where the reward reads texts; it may be empty where it reads tokens.
    `reference` are the ranks whose `reference_logprobs` computes those of the reference: scorers, or learners.
    """

    def __init__(
        self,
        ranks: Handle["Scorer"],
        conversations: Sequence[Messages],
        batch: BatchConfig,
        reference: Handle[Any],
    ) -> None:
        self.ranks, self.conversations, self.batch, self.reference = ranks, conversations, batch, reference

    def start_scores(self, rollout: Rollout) -> Pending[Tensor]:
        """Start the scores of each response [B, O]; higher is better. NaN = scoring failed: mask and count it.

        O objectives, in the order of the config's `objective_weights`; one where it has none.
        """
        shares = shares_of(rollout.num_tokens_B, self.ranks.num_ranks, self.batch, with_gradients=False)
        parts = [rollout.rows(share.rows) for share in shares]
        return joined(self.ranks.start_split(Scorer.scores, [(part, self._asked(part)) for part in parts]), shares)

    def _asked(self, rollout: Rollout) -> list[Messages]:
        """What the responses answer; sent along, since a rollout's messages are fewer than a job's."""
        return [self.conversations[row] for row in rollout.prompt_rows_B.tolist()] if self.conversations else []

    def first_failure(self) -> str:
        """Why the first response without a score in the last call has none; "" where all have one."""
        return next(filter(None, self.ranks.call_all(Scorer.first_failure)), "")

    def start_reference_logprobs(self, rollout: Rollout, minibatches: Sequence[Tensor]) -> Pending[Tensor]:
        """Start log π_ref of each response token [B, R], nats, at the sampling temperature; 0 where there is none.

        Packed as the policy's (`Learners.start_policy_logprobs`): with as many scorers as learners the KL begins at
        exactly 0.
        """
        shares = shares_by_update(rollout.num_tokens_B, self.reference.num_ranks, self.batch, minibatches)
        given = [(rollout.rows(share.rows), share.pass_sizes) for share in shares]
        return joined(self.reference.start_split(Scorer.reference_logprobs, given), shares)


class Scorer(Rank):
    """Holds the models that stay fixed: the reward model, or the function or endpoint in its place, and the reference
    policy.
    """

    def __init__(
        self,
        config: PPOConfig,
        engine_config: EngineConfig,
        models: InitialModels,
        network: FrozenModel[RewardNetwork] | None = None,
    ) -> None:
        """`network` is the reward model where another role holds it."""
        super().__init__(config, engine_config, models)
        # With adapters, the learner's policy is the reference once they are off.
        self.reference = self._fixed(ModelFolder(self.models.sft, LanguageModel)) if config.lora is None else None
        reward = self.models.reward
        self.judge: RewardModel | ExternalReward
        if isinstance(reward, Path):
            weights = weights_by_label(str(reward), labels_of(reward), config.objective_weights)
            self.network = network or self._fixed(network_folder(reward))
            self.judge = RewardModel(self.network.module, Tokenizer.load(reward), weights)
        else:
            self.judge = reward
        self._failure = ""

    def _fixed(self, source: PartialSource[AnyModel]) -> FrozenModel[AnyModel]:
        if self.config.memory == "fast":
            whole = (torch.device("cpu"), torch.float32)  # autocast's products are rounded before they go to the device
            device, dtype = whole if self._autocast else (self.device, self._compute_dtype)
            model = load(source, device, dtype).eval().requires_grad_(False)
            self._set_types(model)
            return HeldModel(model.to(self.device))
        limit = self.engine_config.collective_timeout_seconds
        return ShardedModel(source, self._set_types, self.device, limit, by_layer=self.config.memory == "small")

    def _set_types(self, model: nn.Module) -> None:
        """Make its passes round as the learner's do."""
        for parameter in model.parameters():  # a score's bias, a buffer, stays in fp32
            parameter.data = parameter.data.to(torch.float32 if self._autocast else self._compute_dtype)
        if self._autocast:
            round_products(model)
        align_heads(model, self.device)

    @torch.no_grad()
    def scores(self, rollout: Rollout, conversations: Sequence[Messages]) -> Tensor:
        """Scores [B, O]. `conversations` are the prompts' messages, where the reward reads texts."""
        prompts, responses = rollout.token_lists()
        if isinstance(self.judge, RewardModel):
            sequences = self.judge.sequences(self.tokenizer, conversations, prompts, responses)
            return self._network_scores(self.judge, sequences)
        scored = self._text_scores(self.judge, conversations, responses)
        self._failure = next((found.failure for found in scored if found.failure), "")
        return torch.tensor([[found.score] for found in scored])

    def first_failure(self) -> str:
        return self._failure

    def _network_scores(self, judge: RewardModel, sequences: Sequence[Sequence[int]]) -> Tensor:
        network, batch = judge.network, self.config.minibatch
        fitting = [row for row, tokens in enumerate(sequences) if judge.fits(tokens)]
        room, too_long = judge.room_tokens, [len(row) for row in sequences if not judge.fits(row)]
        self._failure = f"it has {too_long[0]} tokens; the reward model reads {room}" if too_long else ""
        scores_BO = torch.full((len(sequences), len(network.labels)), math.nan)
        # The policy's tokens may be others than the reward model's, so only here is it known how many it reads.
        units = [[len(sequences[row])] for row in fitting] or [[1]]
        (passes,) = split_passes(units, 1, pass_tokens(batch, units, with_gradients=False))
        order, found = [fitting[place] for own in passes for place in own] if fitting else [], list[Tensor]()
        with self.network.in_use(), self._precision():
            # As many passes as on every other rank, which may share weights.
            for number in range(self.network.most_passes(len(passes))):
                note_progress()
                rows = [fitting[place] for place in passes[number]] if fitting and number < len(passes) else []
                read = [sequences[row] for row in rows] or [[judge.tokenizer.end_id]]
                packed = PackedInputs.of(read, network.config.kind, self.device)
                found.append(packed.in_order(scores_of(network, packed.read)).float()[: len(rows)])
        scores_BO[order] = torch.cat(found).cpu()
        heads = [network.labels.index(name) for name in self.config.objective_weights] or [0]
        return scores_BO[:, heads]

    def _text_scores(
        self, external_reward: ExternalReward, conversations: Sequence[Messages], responses: Sequence[Sequence[int]]
    ) -> list[Scored]:
        texts = [self.tokenizer.decode(response).strip() for response in responses]
        size = self.config.minibatch.micro_batch_size or TEXTS_PER_CALL
        return score_in_parts(external_reward, conversations, texts, size)

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout, pass_sizes: Sequence[int]) -> Tensor:
        assert self.reference is not None, "the learner is the reference of a policy with adapters"
        with self.reference.in_use(), self._precision():
            return self._by_pass(partial(self._logprobs, self.reference.module), rollout, pass_sizes)
