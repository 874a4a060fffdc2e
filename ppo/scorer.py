"""A rank that holds what never moves.

Shape letters: B responses, O objectives, R response tokens.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from lm.progress import note_progress
from lm.tokenizer import Messages
from lm.weights import load_language_model
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.rank import Rank
from ppo.rollout import Rollout
from reward.elsewhere import Elsewhere, Scored
from reward.scoring import Judge, sequence_scores
from training.config import EngineConfig
from training.data import read_prompts

AnyModel = TypeVar("AnyModel", bound=nn.Module)


class ScorerWorker(Rank):
    """Holds what never moves: the reward model, or what stands for it elsewhere, and the reference policy."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels, num_workers: int) -> None:
        super().__init__(config, engine_config, models, num_workers)
        self.reference = self._frozen(load_language_model(models.sft))
        reward, weights = models.reward, config.objective_weights
        self.judge = Judge.load(reward, weights) if isinstance(reward, Path) else reward
        if isinstance(self.judge, Judge):
            self._frozen(self.judge.network)
        self._failure = ""

    @property
    def _autocast(self) -> bool:
        """Under ZeRO the learner's weights are bf16 themselves; without it autocast rounds them at each use. The frozen
        models round where the learner does, so that the KL to the reference starts at exactly 0.
        """
        return self._compute_dtype == torch.bfloat16 and self.engine_config.zero_stage == 0

    def _frozen(self, model: AnyModel) -> AnyModel:
        dtype = torch.float32 if self._autocast else self._compute_dtype
        model = model.to(self.device, dtype).eval().requires_grad_(False)
        if self._autocast:
            _round_products(model)
        return model

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    @torch.no_grad()
    def scores(self, rollout: Rollout) -> Tensor:
        prompts, responses = rollout.token_lists()
        if isinstance(self.judge, Judge):
            return self._judged(self.judge, prompts, responses)
        scored = self._asked(self.judge, prompts, responses)
        self._failure = next((found.failure for found in scored if found.failure), "")
        return torch.tensor([[found.score] for found in scored])

    def first_failure(self) -> str:
        return self._failure

    def _judged(self, judge: Judge, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
        reads_texts = judge.tokenizer != self.tokenizer
        conversations = [self._conversations[tuple(prompt)] for prompt in prompts] if reads_texts else []
        sequences = judge.sequences(self.tokenizer, conversations, prompts, responses)
        network, size = judge.network, self.config.minibatch.micro_batch_size
        fitting = [row for row, tokens in enumerate(sequences) if judge.fits(tokens)]
        room, too_long = judge.room_tokens, [len(row) for row in sequences if not judge.fits(row)]
        self._failure = f"it has {too_long[0]} tokens; the reward model reads {room}" if too_long else ""
        scores_BO = torch.full((len(sequences), len(network.labels)), math.nan)
        with self._precision():
            for start in range(0, len(fitting), size):
                note_progress()
                rows = fitting[start : start + size]
                found = sequence_scores(network, [sequences[row] for row in rows], network.config.kind)
                scores_BO[rows] = found.float().cpu()
        order = [network.labels.index(name) for name in self.config.objective_weights] or [0]
        return scores_BO[:, order]

    def _asked(
        self, elsewhere: Elsewhere, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> list[Scored]:
        conversations = [self._conversations[tuple(prompt)] for prompt in prompts]
        texts = [self.tokenizer.decode(response).strip() for response in responses]
        size, scored = self.config.minibatch.micro_batch_size, list[Scored]()
        for start in range(0, len(texts), size):
            scored += elsewhere.score(conversations[start : start + size], texts[start : start + size])
        return scored

    @cached_property
    def _conversations(self) -> dict[tuple[int, ...], Messages]:
        """What each prompt's tokens say."""
        prompts = read_prompts(self.config.prompts)
        return {tuple(self.tokenizer.encode_prompt(prompt.messages)): prompt.messages for prompt in prompts}

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        with self._precision():
            return torch.cat([self._logprobs(self.reference, part).cpu() for part in self._parts(rollout)])


def _round_products(model: nn.Module) -> None:
    """Keep in bf16 what autocast would round at every use: matrices of products, but not an embedding's table that a
    head shares. The same bits come out.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tables:
            module.to(torch.bfloat16)
