"""What a rank does in PPO: it generates, it scores, it learns, or all of that.

Shape letters: B responses, T tokens, R response tokens, C counted positions, V vocabulary.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from lm.generation import generate
from lm.logprobs import token_logprobs
from lm.model import LanguageModel, ScalarModel
from lm.sampling import Choice
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder, load_language_model, save_model
from ppo.algorithm import policy_loss, value_loss
from ppo.broadcast import WeightBroadcast
from ppo.config import PPOConfig
from ppo.controller import ScoreScale
from ppo.roles import Sampling
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from ppo.value import value_source
from reward.elsewhere import Elsewhere, Scored
from reward.scoring import Judge, sequence_scores
from training.config import EngineConfig
from training.data import read_prompts
from training.engine import Engine
from training.objectives import StreamObjective
from training.packing import stream_rows
from training.state import SavedState, state_of, tensor_slots

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@dataclass(frozen=True)
class TokenStream:
    """A file of tokens, cut into rows."""

    path: Path
    row_tokens: int


@dataclass(frozen=True)
class Parents:
    """Where the models come from, and the pretraining stream that PPO-ptx mixes in, if it does."""

    sft: Path
    reward: Path | Elsewhere
    scale: ScoreScale
    pretraining: TokenStream | None


@dataclass(frozen=True)
class SentWeights:
    """Weights on their way, and the sum of their bit patterns."""

    weights: Mapping[str, Tensor]
    checksum: int


class Rank:
    """What every rank of PPO knows. Batches it is given are its own shard; counts in them are global."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, parents: Parents, num_workers: int) -> None:
        self.config, self.engine_config, self.parents, self.num_workers = config, engine_config, parents, num_workers
        self.tokenizer = Tokenizer.load(parents.sft)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Under ZeRO the learner's weights are bf16 themselves; without it autocast rounds them at each use. The frozen
        # models round where the learner does, so that the KL to the reference starts at exactly 0.
        self._bf16 = engine_config.resolved_precision() == "bf16"
        self._autocast = self._bf16 and engine_config.zero_stage == 0

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._bf16 else torch.float32

    def _frozen(self, model: AnyModel) -> AnyModel:
        dtype = torch.float32 if self._autocast else self._compute_dtype
        model = model.to(self.device, dtype).eval().requires_grad_(False)
        if self._autocast:
            _round_products(model)
        return model

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def _parts(self, rollout: Rollout) -> list[Rollout]:
        size = self.config.minibatch.micro_batch_size
        return [rollout.rows(slice(start, start + size)) for start in range(0, len(rollout), size)]

    def _logprobs(self, model: nn.Module, rollout: Rollout) -> Tensor:
        """log π of the response tokens [B, R] at the sampling temperature."""
        logits_CV = model(rollout.tokens_BT.to(self.device), None, rollout.states_BT.to(self.device))
        targets_C = rollout.response_BR[rollout.response_mask_BR].to(self.device)
        return rollout.spread(token_logprobs(logits_CV, targets_C, self.config.temperature))

    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def open_broadcast(self, host: str, port: int, rank: int, num_ranks: int) -> None:
        """Take part in the broadcasts of weights; a collective call of the sender and all receivers."""
        seconds = self.engine_config.collective_timeout_seconds
        self.broadcast = WeightBroadcast(host, port, rank, num_ranks, device=self.device, timeout_seconds=seconds)

    def close(self) -> None:
        """Release memory."""


class GeneratorWorker(Rank):
    """Holds a copy of the policy in compute precision, and samples from it."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, parents: Parents, num_workers: int) -> None:
        super().__init__(config, engine_config, parents, num_workers)
        self.generator = load_language_model(parents.sft).to(self.device, self._compute_dtype).eval()

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Rollout:
        sampled = generate(
            self.generator,
            prompts,
            max_new_tokens=self.config.max_response_tokens,
            end_id=self.tokenizer.end_id,
            choice=Choice(self.config.temperature),
            seeds=seeds,
        )
        return Rollout.of(
            prompts,
            sampled.responses,
            sampled.finished,
            sampled.logprobs,
            max_response_tokens=self.config.max_response_tokens,
            pad_id=self.tokenizer.pad_id,
        )

    def receive(self, sent: SentWeights) -> None:
        """Take the learner's weights; a checksum over both sides proves it."""
        self.generator.load_state_dict(sent.weights)
        self._require(sent.checksum)

    def receive_broadcast(self) -> None:
        """As `receive`, from the sender's `broadcast_weights`."""
        self._require(self.broadcast.receive(self.generator.state_dict()))

    def _require(self, checksum: int) -> None:
        held = _checksum(self.generator.state_dict())
        assert checksum == held, f"the generator holds weights with checksum {held}; the learner's have {checksum}"


class ScorerWorker(Rank):
    """Holds what never moves: the reward model, or what stands for it elsewhere, and the reference policy."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, parents: Parents, num_workers: int) -> None:
        super().__init__(config, engine_config, parents, num_workers)
        self.reference = self._frozen(load_language_model(parents.sft))
        reward, weights = parents.reward, config.objective_weights
        self.judge = Judge.load(reward, weights) if isinstance(reward, Path) else reward
        if isinstance(self.judge, Judge):
            self._frozen(self.judge.network)
        self._failure = ""

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
        room, too_long = network.config.context_tokens, [len(row) for row in sequences if not judge.fits(row)]
        self._failure = f"it has {too_long[0]} tokens; the reward model reads {room}" if too_long else ""
        scores_BO = torch.full((len(sequences), len(network.labels)), math.nan)
        with self._precision():
            for start in range(0, len(fitting), size):
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


class LearnerWorker(Rank):
    """Trains the policy and the value function, and keeps the policy's moving average.

    Figures that updates return are shares of a mean: they add up over ranks.
    """

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, parents: Parents, num_workers: int) -> None:
        super().__init__(config, engine_config, parents, num_workers)
        policy = ModelFolder(parents.sft, LanguageModel)
        value = value_source(parents.sft, parents.reward, config.objective_weights, parents.scale)
        micro = config.minibatch.micro_batch_size
        self.policy: Engine[LanguageModel] = Engine(
            policy, config.policy_optimizer, engine_config, world_size=num_workers, micro_batch=micro
        )
        self.value: Engine[ScalarModel] = Engine(
            value, config.value_optimizer, engine_config, world_size=num_workers, micro_batch=micro
        )
        self.average = _copies(self.policy.full_weights())
        self.writer = self.policy.checkpoint_writer()
        stream = parents.pretraining
        self.stream = StreamObjective(stream_rows(stream.path, stream.row_tokens)) if stream else None

    @torch.no_grad()
    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        with self.policy.same_weights():
            return torch.cat([self._logprobs(self.policy.model, part).cpu() for part in self._parts(rollout)])

    @torch.no_grad()
    def values(self, rollout: Rollout) -> Tensor:
        with self.value.same_weights():
            return torch.cat([self._values(part).cpu() for part in self._parts(rollout)])

    def _values(self, rollout: Rollout) -> Tensor:
        return rollout.spread(
            self.value.model(rollout.tokens_BT.to(self.device), None, rollout.states_BT.to(self.device)).float()
        )

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        size = self.config.minibatch.micro_batch_size
        self.writer.check()
        self.policy.set_learning_rate(learning_rate)
        shares: dict[str, float] = {}
        starts = range(0, len(batch.rollout), size)
        ptx_size = -(-len(batch.ptx_rows) // max(1, len(starts)))  # pretraining rows ride along, spread evenly
        with self.policy.same_weights():
            for number, start in enumerate(starts):
                ptx = slice(number * ptx_size, (number + 1) * ptx_size)
                part = batch.rows(slice(start, start + size), ptx)
                with self.policy.micro_batch(is_last=number == len(starts) - 1):
                    self.policy.backward(self._policy_loss(part, batch, shares), step=update)
        _, norm = self.policy.step()
        return {**shares, "policy_gradient_norm": norm / self.num_workers}

    def _policy_loss(self, part: PolicyBatch, whole: PolicyBatch, shares: dict[str, float]) -> Tensor:
        """The part's share of the whole minibatch's loss; what is reported of it is added to `shares`."""
        loss, sums = policy_loss(
            self._logprobs(self.policy.model, part.rollout),
            part.logprobs_BR.to(self.device),
            part.advantages_BR.to(self.device),
            part.mask_BR.to(self.device),
            self.config.clip,
        )
        _add(shares, {"policy_loss": loss.detach(), **sums}, whole.num_tokens)
        loss = loss / whole.num_tokens
        if not len(part.ptx_rows):
            return loss
        assert self.stream is not None, "the controller draws rows of a stream only where there is one"
        rows = part.ptx_rows.numpy()
        ptx_sum, _ = self.stream.loss(self.policy.model, rows, self.device)
        num_ptx_tokens = whole.num_ptx_rows * self.stream.count(rows) // len(rows)
        _add(shares, {"ptx_loss": ptx_sum.detach()}, num_ptx_tokens)
        return loss + self.config.ptx_coef * ptx_sum / num_ptx_tokens

    def update_value(self, batch: ValueBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        size = self.config.minibatch.micro_batch_size
        self.value.set_learning_rate(learning_rate)
        shares: dict[str, float] = {}
        starts = range(0, len(batch.rollout), size)
        with self.value.same_weights():
            for number, start in enumerate(starts):
                part = batch.rows(slice(start, start + size))
                with self.value.micro_batch(is_last=number == len(starts) - 1):
                    loss, sums = value_loss(
                        self._values(part.rollout),
                        part.values_BR.to(self.device),
                        part.returns_BR.to(self.device),
                        part.mask_BR.to(self.device),
                        self.config.value_clip,
                    )
                    _add(shares, {"value_loss": loss.detach(), **sums}, batch.num_tokens)
                    self.value.backward(loss / batch.num_tokens, step=update)
        _, norm = self.value.step()
        return {**shares, "value_gradient_norm": norm / self.num_workers}

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
        return SentWeights(rounded, _checksum(rounded))

    def save(
        self, checkpoints: Path, iteration: int, progress: Mapping[str, float], files: Mapping[str, bytes]
    ) -> None:
        average = [
            slot.share(self.policy.rank, self.num_workers) for slot in tensor_slots(_distinct(self.average).items())
        ]
        models = {"policy": self.policy.state(), "value": self.value.state(), "average": state_of(average)}
        self.writer.save(checkpoints, iteration, models, progress, files)

    def finish_saving(self) -> None:
        self.writer.wait()

    def load(self, folder: Path) -> None:
        self.policy.load(folder / "policy")
        self.value.load(folder / "value")
        held = SavedState(folder / "average")
        for slot in tensor_slots(_distinct(self.average).items()):
            slot.restore(held)

    def keep_policy(self, folder: Path) -> None:
        weights = self.policy.full_weights(on_main_alone=True)
        if self.policy.is_main:
            aside = folder.with_name(f".writing-{folder.name}")
            for left_over in (aside, folder):
                shutil.rmtree(left_over, ignore_errors=True)
            save_model(aside, self.policy.module, weights, self.tokenizer)
            aside.rename(folder)
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


def _add(shares: dict[str, float], sums: Mapping[str, Tensor], count: int) -> None:
    for name, value in sums.items():
        shares[name] = shares.get(name, 0.0) + float(value) / count


def _round_products(model: nn.Module) -> None:
    """Keep in bf16 what autocast would round at every use: matrices of products, but not an embedding's table that a
    head shares. The same bits come out.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tables:
            module.to(torch.bfloat16)


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


def _checksum(weights: Mapping[str, Tensor]) -> int:
    """Sum of the bit patterns of all weights."""
    integers = {2: torch.int16, 4: torch.int32}
    return sum(int(t.contiguous().view(integers[t.element_size()]).sum(dtype=torch.int64)) for t in weights.values())
