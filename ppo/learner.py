"""Learning: `Learners` takes whole batches from the controller, `Learner` trains on one rank's share of them, and
`MovingAverage` averages the policy's weights, which a run may export instead of the last ones.

Shape letters: B responses, R response tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import repeat
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.remote import Handle, Pending
from files.atomic import atomic_folder
from files.hashes import derive_seed
from lm.adapters import adapted, save_trained
from lm.experts import Replay
from lm.lora import is_adapter, merged, without_adapters
from lm.model import LanguageModel, ScalarModel
from lm.progress import note_progress
from lm.samplers.draws import NO_EVIDENCE, Draws, Evidence, evidence
from lm.samplers.engine import SentWeights, chunks, noted
from lm.source import ModelSource, on_meta
from lm.transfer import uploaded
from lm.weights import ModelFolder, save_model
from ppo.algorithm import GAE, policy_loss, response_kl_loss, value_loss
from ppo.config import PPOConfig
from ppo.kept_passes import NOT_REPEATED, KeptPasses, Repeated, Taken
from ppo.rank import InitialModels, PackedRollout, Rank, spread_inputs, value_source
from ppo.rollout import (
    Drawn,
    PolicyBatch,
    Rollout,
    Share,
    ValueBatch,
    joined,
    shares_by_update,
    shares_of,
    start_on_groups,
)
from ppo.routes import NUM_UNREPLAYED, RouteChanges
from training.checkpoint import ParamShard, SavedState, State, changed_files, share_of_files, state_of, step_of
from training.config import BatchConfig, EngineConfig
from training.engine import Engine
from training.notices import say
from training.objectives import CausalLMObjective
from training.packing import stream_rows
from training.recording import Inputs, segments_of

PTX = "ptx_"  # before the names of what the pretraining loss reads
AnyBatch = TypeVar("AnyBatch", PolicyBatch, ValueBatch)


class Learners:
    """The learners of all ranks. The controller passes whole batches, which are split among the ranks, or among groups
    of `sequence_parallel_size` adjacent ranks that split their share's tokens.

    Raises:
        ValueError: a batch does not divide among the ranks.
    """

    def __init__(self, ranks: Handle["Learner"], batch: BatchConfig, sequence_parallel_size: int = 1) -> None:
        self.ranks, self.batch = ranks, batch
        self.num_shares = ranks.num_ranks // sequence_parallel_size

    def start_policy_logprobs(
        self,
        rollout: Rollout,
        minibatches: Sequence[Tensor],
        *,
        keeps: bool = False,
        tests_draws: bool = False,
        compares_routes: bool = False,
    ) -> Pending[Tensor]:
        """Start computing log π of each response token [B, R], nats, at the sampling temperature; 0 at padding.

        With `tests_draws`, learners also keep tokens, to test whether they are draws from π (`take_evidence`).
        That requires all responses that were sampled with these weights, not a selection. With `compares_routes`, they
        count what replaying the rollout's routes changes (`take_route_changes`).

        Responses are packed as the updates on `minibatches` (row numbers of the rollout) will pack them. With `keeps`,
        learners keep passes for the first of those updates to reuse; it must come next (`ppo.kept_passes`).
        """
        shares, repeated = self._by_update(rollout, minibatches, keeps=keeps)
        drawn = Drawn.of(rollout) if tests_draws else None
        arguments = [
            (part, share.pass_sizes, repeated, drawn and drawn.rows(share.rows), compares_routes)
            for part, share in zip(rollout.shares(shares), shares, strict=True)
        ]
        return joined(start_on_groups(self.ranks, Learner.policy_logprobs, arguments), shares)

    def start_values(self, rollout: Rollout, minibatches: Sequence[Tensor], *, keeps: bool = False) -> Pending[Tensor]:
        """Start computing the value of the state before each response token [B, R]; 0 at padding.

        Responses are packed as for log-probs, unless `forward_tokens` sets another size for passes without gradients.
        """
        if self.batch.forward_tokens:
            shares = shares_of(rollout.num_tokens_B, self.num_shares, self.batch, with_gradients=False)
            repeated = NOT_REPEATED
        else:
            shares, repeated = self._by_update(rollout, minibatches, keeps=keeps)
        parts = zip(rollout.shares(shares), shares, strict=True)
        arguments = [(part, share.pass_sizes, repeated) for part, share in parts]
        return joined(start_on_groups(self.ranks, Learner.values, arguments), shares)

    def _by_update(
        self, rollout: Rollout, minibatches: Sequence[Tensor], *, keeps: bool
    ) -> tuple[list[Share], Repeated]:
        shares = shares_by_update(rollout.num_tokens_B, self.num_shares, self.batch, minibatches)
        if not keeps:
            return shares, NOT_REPEATED
        first, *_ = shares_by_update(rollout.num_tokens_B, self.num_shares, self.batch, minibatches[:1])
        return shares, Repeated.of(rollout, shares, len(first.pass_sizes))

    def update(
        self,
        method: Callable[["Learner", AnyBatch, float, int], Mapping[str, float]],
        batch: AnyBatch,
        learning_rate: float,
        update: int,
    ) -> dict[str, float]:
        """Take one optimizer step: call `Learner.update_policy` or `Learner.update_value` with each rank's share.

        Returns metrics: means over the batch's counted tokens.
        """
        shares = [(share, learning_rate, update) for share in batch.shares(self.shares(batch.rollout))]
        return _total(start_on_groups(self.ranks, method, shares)())

    def shares(self, minibatch: Rollout) -> list[Share]:
        """Split an update's minibatch among the ranks."""
        return shares_of(minibatch.num_tokens_B, self.num_shares, self.batch, with_gradients=True)

    def make_room(self) -> None:
        """Move what only updates need to CPU memory, until the next update or checkpoint."""
        self.ranks.call_all(Learner.make_room)

    def keep_policy(self, folder: Path) -> None:
        """Write the current policy as a model directory, replacing whatever is there."""
        self.ranks.call_all(Learner.keep_policy, folder)

    def export_policy(self, folder: Path) -> None:
        """Write `model/` and `model_ema/`, and with `lora` the adapter of `model/`."""
        self.ranks.call_all(Learner.export_policy, folder)

    def take_evidence(self) -> Evidence:
        """Returns the evidence from all passes with `tests_draws` since the last call."""
        return sum(self.ranks.call_all(Learner.take_evidence), NO_EVIDENCE)

    def take_route_changes(self) -> RouteChanges | None:
        """Returns what replay changed in the last passes with `compares_routes`; None if no routes were replayed."""
        found = [changes for changes in self.ranks.call_all(Learner.take_route_changes) if changes is not None]
        return reduce(add, found) if found else None

    def sent_digests(self) -> Mapping[str, int]:
        """Returns the digest of each weight last sent to the generators; empty before the first time."""
        (digests,) = self.ranks.start_first(Learner.sent_digests)()  # all ranks send the same
        return digests

    def save(
        self, checkpoints: Path, iteration: int, progress: Mapping[str, float], files: Mapping[str, bytes]
    ) -> None:
        """Start writing a checkpoint: everything needed to continue exactly, `progress`, and `files` by name."""
        # Only rank 0 writes whole files, which may be large (rollouts), so only rank 0 is sent them.
        others: Sequence[Mapping[str, bytes]] = [{}] * (self.ranks.num_ranks - 1)
        shares = [(checkpoints, iteration, progress, own) for own in (files, *others)]
        self.ranks.call_split(Learner.save, shares)

    def finish_saving(self) -> None:
        """Wait for checkpoints that are being written; report a failed one to the user."""
        self.ranks.call_all(Learner.finish_saving)

    def changed_files(self, folder: Path, sha256: Mapping[str, str]) -> list[str]:
        """Returns the names of a checkpoint's files whose SHA-256 differs from the given one."""
        return [name for names in self.ranks.call_all(Learner.changed_files, folder, sha256) for name in names]

    def load(self, folder: Path) -> None:
        """Load a checkpoint."""
        self.ranks.call_all(Learner.load, folder)


class Learner(Rank):
    """Trains the policy and, where advantages need one, the value function; keeps the policy's moving average.

    Updates return this share's part of each metric's mean: summed over the batch's shares, the parts give the mean.
    """

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels, num_workers: int) -> None:
        super().__init__(config, engine_config, models)
        self.num_workers = num_workers
        frozen, seed = ModelFolder(self.models.sft, LanguageModel), self.models.adapter_seed
        self.plain = on_meta(frozen.build)  # the policy without adapters, as model files describe it
        policy = adapted(frozen, config.lora, derive_seed(seed, "policy"))
        micro = config.minibatch.micro_batch_size or 1  # DeepSpeed only counts with it; no result depends on it
        self.policy: Engine[LanguageModel] = Engine(
            policy, config.policy_optimizer, engine_config, world_size=num_workers, micro_batch=micro
        )
        self.sequences = self.policy.sequences
        self.engines: dict[str, Engine[Any]] = {"policy": self.policy}
        if config.value_optimizer is not None:
            self.engines["value"] = Engine(
                self._value_source(), config.value_optimizer, engine_config, world_size=num_workers, micro_batch=micro
            )
        self.average = MovingAverage(self.policy, config.ema.decay, on_cpu=config.memory != "fast")
        self.writer = self.policy.checkpoint_writer()
        self.kept = KeptPasses(config, self.engines)
        self._sent_digests = dict[str, int]()
        self._route_changes: RouteChanges | None = None
        stream = models.pretraining
        self.stream = CausalLMObjective(stream_rows(stream.path, stream.seq_len)) if stream else None

    def _value_source(self) -> ModelSource[ScalarModel]:
        """Returns the initial value function. It is called when the policy is in memory."""
        weights, scale = self.config.reward.objective_weights, self.models.scale
        whole = value_source(self.models.sft, self.models.reward, weights, scale, self.models.chat_template)
        return adapted(whole, self.config.lora, derive_seed(self.models.adapter_seed, "value"))

    @property
    def value(self) -> Engine[ScalarModel]:
        assert "value" in self.engines, f"advantage {self.config.advantage.kind!r} has no value function; 'gae' has one"
        return self.engines["value"]

    def policy_logprobs(
        self,
        rollout: Rollout,
        pass_sizes: Sequence[int],
        repeated: Repeated = NOT_REPEATED,
        drawn: Drawn | None = None,
        compares_routes: bool = False,
    ) -> Tensor:
        of_pass = iter(drawn.parts(pass_sizes)) if drawn else repeat(None)
        replays = list[Replay]()
        logprobs_BR = self._measure(
            "policy",
            lambda part: self._logprobs(self.policy.model, part, next(of_pass), replays),
            rollout,
            pass_sizes,
            repeated,
        )
        if compares_routes and replays:
            self._compare_routes(replays, rollout, pass_sizes)
        return logprobs_BR

    @torch.no_grad()
    def _compare_routes(self, replays: Sequence[Replay], rollout: Rollout, pass_sizes: Sequence[int]) -> None:
        """Count what the passes' replays changed, and compute a few log-probs again without replay."""
        counted = [replay for replay, size in zip(replays, pass_sizes, strict=True) if size]
        first = rollout.rows(slice(0, max(1, min(NUM_UNREPLAYED, pass_sizes[0])))).without_routes
        with self.policy.cache_weight_casts():  # all ranks gather weights for it
            unreplayed_BR = self._logprobs(self.policy.model, first).cpu()
        self._route_changes = RouteChanges.of(counted, rollout, unreplayed_BR) if counted else None

    def take_route_changes(self) -> RouteChanges | None:
        found, self._route_changes = self._route_changes, None
        return found

    def take_evidence(self) -> Evidence:
        """Returns the evidence from the tokens that this rank has kept since the last call."""
        if not self.tested:
            return NO_EVIDENCE
        logits, draws = zip(*self.tested, strict=True)
        self.tested = []
        return evidence(torch.cat(logits), Draws.cat(draws), self.config.temperature, self.tokenizer.end_ids)

    def _measure(
        self,
        name: str,
        measure: Callable[[Rollout], Tensor],
        rollout: Rollout,
        pass_sizes: Sequence[int],
        repeated: Repeated,
    ) -> Tensor:
        """As `_by_pass`, but keeps as many passes for the next update as there is room for."""
        engine, parts = self.engines[name], rollout.parts(pass_sizes)
        num_kept = self.kept.reserve(name, repeated)
        outputs = list[Tensor]()
        if num_kept:
            with engine.forward_ahead():
                outputs += map(measure, parts[:num_kept])
            self.kept.put(name, parts[:num_kept], outputs)
        with torch.no_grad(), engine.cache_weight_casts():
            outputs += map(measure, parts[num_kept:])
        return self._joined(outputs, pass_sizes)

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout, pass_sizes: Sequence[int]) -> Tensor:
        """Compute log-probs under the reference, which is the policy without its adapters."""
        with without_adapters(self.policy.module):
            return self.policy_logprobs(rollout, pass_sizes)

    def values(self, rollout: Rollout, pass_sizes: Sequence[int], repeated: Repeated = NOT_REPEATED) -> Tensor:
        return self._measure("value", self._values, rollout, pass_sizes, repeated)

    def _values(self, rollout: Rollout) -> Tensor:
        note_progress()
        packed = PackedRollout.of(rollout, self.device)
        return packed.spread(self.value.model(packed.tokens_LT, packed.segments_LT, packed.states_LT).float())

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        """Take one optimizer step of the policy; `update` is its number, counted from 0."""
        self.policy.set_learning_rate(learning_rate)
        kept = self.kept.take("policy")
        num_tokens = 0.0
        if self.policy.routers is not None:
            ptx_tokens = self.stream.num_tokens(batch.ptx_rows.numpy()) if self.stream else 0
            own = torch.tensor(float(batch.rollout.num_tokens_B.sum()) + ptx_tokens, device=self.device)
            num_tokens = float(self.policy.sum_over_shares(own))
        if self.engine_config.record_micro_batches:
            inputs = (
                self._pass_inputs(part, _policy_terms(part, batch), self._ptx_inputs(part, batch))
                for part in batch.parts()
            )
            shares = self.policy.accumulate_recorded(inputs, self._recorded_policy_loss)
        else:
            loss = partial(self._policy_loss, whole=batch, kept=kept)
            shares = self.policy.accumulate(batch.parts(), loss, num_tokens)
        _, norm = self.policy.step()
        self._say_skipped("policy", self.policy, update)
        means = {**self.policy.router_metrics, "policy_gradient_norm": norm}
        return {**_floats(shares), **{name: mean / self.policy.data_parallel_size for name, mean in means.items()}}

    def _policy_loss(self, part: PolicyBatch, whole: PolicyBatch, kept: Taken) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the share of a part in the whole minibatch's loss and metrics."""
        logprobs_BR = kept.next(part.rollout)
        if logprobs_BR is None:
            logprobs_BR = self._logprobs(self.policy.model, part.rollout)
        inputs = {**_policy_terms(part, whole), **self._ptx_inputs(part, whole)}
        return self._policy_loss_of(logprobs_BR, uploaded(inputs, self.device))

    def _recorded_policy_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_C = self.policy.model(
            inputs["tokens_BT"],
            segments_of(inputs),
            inputs["places_C"],
            targets=inputs["targets_C"],
            temperature=self.config.temperature,
        )
        return self._policy_loss_of(spread_inputs(logprobs_C, inputs, inputs["logprobs_BR"].shape), inputs)

    def _policy_loss_of(self, logprobs_BR: Tensor, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the share of a part, given its log-probs and the rest on the device."""
        config, num_tokens = self.config, inputs["num_tokens"]
        loss, sums = policy_loss(
            logprobs_BR,
            inputs["logprobs_BR"],
            inputs["advantages_BR"],
            inputs["weight_BR"],
            config.loss.clip_range,
            config.loss.clip_range_high,
            by_response=config.loss.is_per_response,
        )
        shares, loss = _shares_of_mean({"policy_loss": loss, **sums}, num_tokens), loss / num_tokens
        if "ref_logprob_B" in inputs:
            kl_loss = response_kl_loss(logprobs_BR, inputs["ref_logprob_B"], inputs["kl_weight_B"])
            loss, shares = loss + kl_loss, shares | _shares_of_mean({"kl_loss": kl_loss}, 1)
        if "num_ptx_tokens" not in inputs:
            return loss, shares
        assert self.stream is not None, "the controller draws rows of a stream only where there is one"
        assert config.ptx is not None, "as above"
        own = {name.removeprefix(PTX): value for name, value in inputs.items() if name.startswith(PTX)}
        ptx_sum, _ = self.stream.loss_of(self.policy.model, own)
        shares |= _shares_of_mean({"ptx_loss": ptx_sum}, inputs["num_ptx_tokens"])
        return loss + config.ptx.coef * ptx_sum / inputs["num_ptx_tokens"], shares

    def _ptx_inputs(self, part: PolicyBatch, whole: PolicyBatch) -> Inputs:
        """Returns what the loss of a part's pretraining rows reads; nothing if it has none."""
        if self.stream is None or not len(part.ptx_rows):
            return {}
        rows = part.ptx_rows.numpy()
        num_tokens = torch.tensor(float(whole.num_ptx_rows * self.stream.count(rows) // len(rows)))
        return {"num_ptx_tokens": num_tokens, **{PTX + k: v for k, v in self.stream.inputs(rows, seed=0).items()}}

    def _pass_inputs(self, part: PolicyBatch | ValueBatch, terms: Inputs, ptx: Inputs = MappingProxyType({})) -> Inputs:
        return {**PackedRollout.of(part.rollout, self.device, uploads=False).inputs(terms), **ptx}

    def update_value(self, batch: ValueBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        """Take one optimizer step of the value function; `update` is its number, counted from 0."""
        self.value.set_learning_rate(learning_rate)
        kept = self.kept.take("value")
        if self.engine_config.record_micro_batches:
            inputs = (self._pass_inputs(part, _value_terms(part, batch)) for part in batch.parts())
            shares = self.value.accumulate_recorded(inputs, self._recorded_value_loss)
        else:
            shares = self.value.accumulate(batch.parts(), lambda part: self._value_loss(part, batch, kept))
        _, norm = self.value.step()
        self._say_skipped("value", self.value, update)
        return {**_floats(shares), "value_gradient_norm": norm / self.value.data_parallel_size}

    def _value_loss(self, part: ValueBatch, whole: ValueBatch, kept: Taken) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the share of a part in the whole minibatch's loss and metrics."""
        values_BR = kept.next(part.rollout)
        values_BR = self._values(part.rollout) if values_BR is None else values_BR
        return self._value_loss_of(values_BR, uploaded(_value_terms(part, whole), self.device))

    def _recorded_value_loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        values_C = self.value.model(inputs["tokens_BT"], segments_of(inputs), inputs["places_C"]).float()
        return self._value_loss_of(spread_inputs(values_C, inputs, inputs["values_BR"].shape), inputs)

    def _value_loss_of(self, values_BR: Tensor, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(self.config.advantage, GAE), "only GAE has a value function"
        read = inputs["values_BR"], inputs["returns_BR"], inputs["mask_BR"]
        loss, sums = value_loss(values_BR, *read, self.config.advantage.value_clip_range)
        num_tokens = inputs["num_tokens"]
        return loss / num_tokens, _shares_of_mean({"value_loss": loss, **sums}, num_tokens)

    def _say_skipped(self, role: str, engine: Engine[Any], update: int) -> None:
        if engine.has_skipped and engine.is_main:
            say(f"ppo: update {update + 1} of the {role} is skipped: its gradient is not finite")

    def make_room(self) -> None:
        for engine in self.engines.values():
            engine.offload_optimizer()

    def send(self) -> Iterator[SentWeights]:
        """Yields the policy's weights in the form that generators hold, gathered one by one. A collective call.

        If generators are on other ranks, only rank 0 gathers them.
        """
        self._sent_digests = {}
        return noted(map(SentWeights.of, chunks(self._sampled_weights())), self._sent_digests)

    def _sampled_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Adapters are merged in fp32, and the sum is rounded once, here or by generators (`ppo.generator.Merging`)."""
        alone, dtype = self.config.samples_apart, self.compute_dtype
        if self.config.lora is None:
            return self.policy.weights(dtype, on_main_alone=alone)
        if self.config.lora.sends == "adapter":
            return self.policy.weights(torch.float32, on_main_alone=alone, wanted=is_adapter)
        whole = merged(self.policy.module, self.policy.weights(torch.float32, on_main_alone=alone))
        return ((name, tensor.to(dtype)) for name, tensor in whole)

    def sent_digests(self) -> Mapping[str, int]:
        """Returns the digest of each weight last sent by this rank; empty if it has sent none."""
        return self._sent_digests

    def advance_and_send(self) -> Iterator[SentWeights]:
        """As `send`, after advancing the moving average."""
        self.average.advance()
        return self.send()

    def broadcast_weights(self) -> None:
        """As `send`, by broadcast from rank 0."""
        self._broadcast(self.send())

    def advance_and_broadcast(self) -> None:
        """As `advance_and_send`, by broadcast from rank 0."""
        self._broadcast(self.advance_and_send())

    def _broadcast(self, sent: Iterator[SentWeights]) -> None:
        for chunk in sent:
            if self.policy.is_main:
                self.broadcast.send(chunk.weights, chunk.digests, self.policy.module.config)

    def save(
        self, checkpoints: Path, iteration: int, progress: Mapping[str, float], files: Mapping[str, bytes]
    ) -> None:
        models = {name: engine.state() for name, engine in self.engines.items()}
        if self.config.ema.decay:
            models["average"] = self.average.state()
        self.writer.save(checkpoints, iteration, models, progress, files)

    def finish_saving(self) -> None:
        self.writer.wait()

    def changed_files(self, folder: Path, sha256: Mapping[str, str]) -> list[str]:
        """Returns the checkpoint files that do not verify, out of this rank's share of them."""
        return changed_files(folder, share_of_files(sha256, self.policy.rank, self.num_workers))

    def load(self, folder: Path) -> None:
        self.writer.sound_step = step_of(folder)
        for name, engine in self.engines.items():
            engine.load(folder / name)
        self.average.load(folder / "average")

    def keep_policy(self, folder: Path) -> None:
        weights = self.policy.weights_for_file()
        if self.policy.is_main:
            folder.parent.mkdir(exist_ok=True)
            with atomic_folder(folder) as temporary:
                save_model(temporary, self.plain, merged(self.policy.module, weights), self.tokenizer)
        self.policy.barrier()

    def export_policy(self, folder: Path) -> None:
        # model/ comes last, so that the adapter on disk is the one of model/.
        sources = {"model_ema": self.average.weights_for_file, "model": self.policy.weights_for_file}
        for name, weights_for_file in sources.items():
            weights = weights_for_file()
            if self.policy.is_main:
                network, base = self.policy.module, self.models.sft
                save_trained(folder, self.plain, network, weights, self.tokenizer, self.config.lora, base, name=name)
        self.policy.barrier()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


class MovingAverage:
    """average ← decay · average + (1 - decay) · weights, once per iteration, of the trained weights in fp32.

    Each rank holds the average of its own shard of the weights, on the same device, or in CPU memory with `on_cpu`.
    With a decay of 0 the average equals the last weights, and nothing is stored.
    """

    def __init__(self, engine: Engine[Any], decay: float, *, on_cpu: bool = False) -> None:
        self.engine, self.decay = engine, decay
        self._device = torch.device("cpu") if on_cpu else None
        self.shards: dict[str, ParamShard] = {}
        for shard in engine.shards() if decay else ():
            held = shard.view(shard.storage).to(self._device, torch.float32, copy=True)
            self.shards[shard.name] = ParamShard(shard.name, shard.offset, held, 0, shard.length, {})

    def advance(self) -> None:
        """Move the average one step towards the weights."""
        for shard in self.engine.shards() if self.decay else ():
            average = self.shards[shard.name].storage
            average.lerp_(shard.view(shard.storage).to(average.device), 1 - self.decay)

    def weights_for_file(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.weights_for_file`, for the averaged weights."""
        own = {name: shard.storage for name, shard in self.shards.items()}
        return self.engine.weights_for_file(own if self.decay else None)

    def state(self) -> State:
        """Returns this rank's part for a checkpoint, without copying it."""
        return state_of([*self.shards.values()])

    def load(self, folder: Path) -> None:
        if self.decay:
            saved = SavedState(folder)
            for shard in self.shards.values():
                shard.restore(saved)


def _policy_terms(part: PolicyBatch, whole: PolicyBatch) -> dict[str, Tensor]:
    """Returns what the loss of a part reads besides log-probs."""
    own = {"logprobs_BR": part.logprobs_BR, "advantages_BR": part.advantages_BR, "weight_BR": part.weight_BR}
    kl = {} if part.kl is None else {"ref_logprob_B": part.kl.ref_logprob_B, "kl_weight_B": part.kl.weight_B}
    return {**own, **kl, "num_tokens": torch.tensor(float(whole.num_tokens))}


def _value_terms(part: ValueBatch, whole: ValueBatch) -> dict[str, Tensor]:
    own = {"values_BR": part.values_BR, "returns_BR": part.returns_BR, "mask_BR": part.mask_BR}
    return {**own, "num_tokens": torch.tensor(float(whole.num_tokens))}


def _shares_of_mean(sums: Mapping[str, Tensor], count: Tensor | int) -> dict[str, Tensor]:
    """Divide sums over a part by the count of the whole, so that the parts' shares add up to the mean."""
    return {name: value.detach().double() / count for name, value in sums.items()}


def _floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    values: list[float] = torch.stack([*metrics.values()]).tolist()  # one wait for a GPU, not one per metric
    return dict(zip(metrics, values, strict=True))


def _total(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(share[name] for share in shares) for name in shares[0]}
