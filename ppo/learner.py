"""A rank that trains the policy and the value function.

Shape letters: B responses, R response tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files.atomic import atomic_folder
from lm.model import LanguageModel, ScalarModel
from lm.progress import note_progress
from lm.weights import ModelFolder, save_model
from ppo.algorithm import policy_loss, value_loss
from ppo.config import PPOConfig
from ppo.initial_models import InitialModels
from ppo.rank import Rank, SentWeights, checksum_of
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from ppo.value import value_source
from training.checkpoint import changed_files, share_of_files, step_of
from training.config import EngineConfig
from training.engine import Engine
from training.notices import say
from training.objectives import StreamObjective
from training.packing import stream_rows
from training.state import SavedState, state_of, whole_tensors


class LearnerWorker(Rank):
    """Trains the policy and the value function, and keeps the policy's moving average.

    Figures that updates return are shares of a mean: they add up over ranks.
    """

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels, num_workers: int) -> None:
        super().__init__(config, engine_config, models, num_workers)
        policy = ModelFolder(models.sft, LanguageModel)
        value = value_source(models.sft, models.reward, config.objective_weights, models.scale)
        micro = config.minibatch.micro_batch_size
        self.policy: Engine[LanguageModel] = Engine(
            policy, config.policy_optimizer, engine_config, world_size=num_workers, micro_batch=micro
        )
        self.value: Engine[ScalarModel] = Engine(
            value, config.value_optimizer, engine_config, world_size=num_workers, micro_batch=micro
        )
        self.average = _copies(self.policy.full_weights())
        self.writer = self.policy.checkpoint_writer()
        stream = models.pretraining
        self.stream = StreamObjective(stream_rows(stream.path, stream.seq_len)) if stream else None

    @torch.no_grad()
    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        with self.policy.cache_weight_casts():
            return torch.cat([self._logprobs(self.policy.model, part).cpu() for part in self._parts(rollout)])

    @torch.no_grad()
    def values(self, rollout: Rollout) -> Tensor:
        with self.value.cache_weight_casts():
            return torch.cat([self._values(part).cpu() for part in self._parts(rollout)])

    def _values(self, rollout: Rollout) -> Tensor:
        note_progress()
        return rollout.spread(
            self.value.model(rollout.tokens_BT.to(self.device), None, rollout.states_BT.to(self.device)).float()
        )

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        size = self.config.minibatch.micro_batch_size
        self.policy.set_learning_rate(learning_rate)
        starts = range(0, len(batch.rollout), size)
        ptx_size = -(-len(batch.ptx_rows) // max(1, len(starts)))  # pretraining rows ride along, spread evenly
        parts = [
            batch.rows(slice(start, start + size), slice(number * ptx_size, (number + 1) * ptx_size))
            for number, start in enumerate(starts)
        ]
        shares = self.policy.accumulate(parts, lambda part: self._policy_loss(part, batch))
        _, norm = self.policy.step()
        self._say_skipped("policy", self.policy, update)
        return {**_floats(shares), "policy_gradient_norm": norm / self.num_workers}

    def _policy_loss(self, part: PolicyBatch, whole: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The part's share of the whole minibatch's loss and metrics."""
        loss, sums = policy_loss(
            self._logprobs(self.policy.model, part.rollout),
            part.logprobs_BR.to(self.device),
            part.advantages_BR.to(self.device),
            part.mask_BR.to(self.device),
            self.config.clip_range,
        )
        shares = _shares({"policy_loss": loss, **sums}, whole.num_tokens)
        loss = loss / whole.num_tokens
        if not len(part.ptx_rows):
            return loss, shares
        assert self.stream is not None, "the controller draws rows of a stream only where there is one"
        rows = part.ptx_rows.numpy()
        ptx_sum, _ = self.stream.loss(self.policy.model, rows, self.device)
        num_ptx_tokens = whole.num_ptx_rows * self.stream.count(rows) // len(rows)
        shares |= _shares({"ptx_loss": ptx_sum}, num_ptx_tokens)
        return loss + self.config.ptx_coef * ptx_sum / num_ptx_tokens, shares

    def update_value(self, batch: ValueBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        size = self.config.minibatch.micro_batch_size
        self.value.set_learning_rate(learning_rate)
        parts = [batch.rows(slice(start, start + size)) for start in range(0, len(batch.rollout), size)]
        shares = self.value.accumulate(parts, lambda part: self._value_loss(part, batch))
        _, norm = self.value.step()
        self._say_skipped("value", self.value, update)
        return {**_floats(shares), "value_gradient_norm": norm / self.num_workers}

    def _value_loss(self, part: ValueBatch, whole: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The part's share of the whole minibatch's loss and metrics."""
        loss, sums = value_loss(
            self._values(part.rollout),
            part.values_BR.to(self.device),
            part.returns_BR.to(self.device),
            part.mask_BR.to(self.device),
            self.config.value_clip_range,
        )
        return loss / whole.num_tokens, _shares({"value_loss": loss, **sums}, whole.num_tokens)

    def _say_skipped(self, role: str, engine: Engine[Any], update: int) -> None:
        if engine.has_skipped and engine.is_main:
            say(f"ppo: update {update + 1} of the {role} is skipped: its gradient is not finite")

    def send(self) -> SentWeights:
        """The policy's weights as a generator holds them; a collective call."""
        return self._as_generated(self.policy.full_weights())

    def advance_and_send(self) -> SentWeights:
        """As `send`, and the moving average takes a step towards the weights, which are gathered once for both."""
        weights = self.policy.full_weights()
        for name, average in _distinct(self.average).items():
            average.lerp_(weights[name].to(average.dtype), 1 - self.config.ema_decay)
        return self._as_generated(weights)

    def broadcast_weights(self) -> None:
        """`send` by `broadcast`, from the rank that has it."""
        self._broadcast(self.send())

    def advance_and_broadcast(self) -> None:
        """`advance_and_send` by `broadcast`, from the rank that has it."""
        self._broadcast(self.advance_and_send())

    def _broadcast(self, sent: SentWeights) -> None:
        if self.policy.is_main:
            self.broadcast.send(sent.weights, sent.checksum)

    def _as_generated(self, weights: Mapping[str, Tensor]) -> SentWeights:
        rounded = {name: tensor.to(self._compute_dtype) for name, tensor in weights.items()}
        return SentWeights(rounded, checksum_of(rounded))

    def save(
        self, checkpoints: Path, iteration: int, progress: Mapping[str, float], files: Mapping[str, bytes]
    ) -> None:
        average = [
            shard.share(self.policy.rank, self.num_workers) for shard in whole_tensors(_distinct(self.average).items())
        ]
        models = {"policy": self.policy.state(), "value": self.value.state(), "average": state_of(average)}
        self.writer.save(checkpoints, iteration, models, progress, files)

    def finish_saving(self) -> None:
        self.writer.wait()

    def changed_files(self, folder: Path, sha256: Mapping[str, str]) -> list[str]:
        """Of the files of a checkpoint those that do not verify; a rank reads its share."""
        return changed_files(folder, share_of_files(sha256, self.policy.rank, self.num_workers))

    def load(self, folder: Path) -> None:
        self.writer.sound_step = step_of(folder)
        self.policy.load(folder / "policy")
        self.value.load(folder / "value")
        held = SavedState(folder / "average")
        for shard in whole_tensors(_distinct(self.average).items()):
            shard.restore(held)

    def keep_policy(self, folder: Path) -> None:
        weights = self.policy.full_weights(on_main_alone=True)
        if self.policy.is_main:
            folder.parent.mkdir(exist_ok=True)
            with atomic_folder(folder) as temporary:
                save_model(temporary, self.policy.module, weights, self.tokenizer)
        self.policy.barrier()

    def export_policy(self, folder: Path) -> None:
        weights = self.policy.full_weights(on_main_alone=True)
        if self.policy.is_main:
            final = weights if self.config.final_weights == "last" else self.average
            save_model(folder / "model", self.policy.module, final, self.tokenizer)
            save_model(folder / "model_ema", self.policy.module, self.average, self.tokenizer)
        self.policy.barrier()

    def close(self) -> None:
        self.policy.close()
        self.value.close()


def _shares(sums: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Sums over a part, divided by the count of the whole: parts' shares add up to the mean."""
    return {name: value.detach().double() / count for name, value in sums.items()}


def _floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor; tied weights are one, by all their names."""
    copied: dict[int, Tensor] = {}
    for tensor in weights.values():
        if tensor.data_ptr() not in copied:
            copied[tensor.data_ptr()] = tensor.clone()
    return {name: copied[tensor.data_ptr()] for name, tensor in weights.items()}


def _distinct(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor by the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    return {name: weights[name] for name in first.values()}
