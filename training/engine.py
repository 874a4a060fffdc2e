"""The engine of every stage: Accelerate, with its DeepSpeed plugin from ZeRO-1 up.

It owns what a loss must not know: precision, sharding, the reduction of gradients over ranks, clipping, the step.
"""

import contextlib
import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from files.atomic import write_json
from files.records import as_json
from lm.experts import balance_biases
from lm.layers import align_heads, cache_weight_casts, read_copies, round_products, trained_products
from lm.model import checkpoint_activations, compile_blocks, freeze_all_but_last, record_routes, split_sequences
from lm.progress import note_progress
from lm.source import ModelSource, load, on_meta
from training.checkpoint import STEP, ParamShard, SavedState, State, state_of, whole_params, whole_tensors
from training.config import EngineConfig, OptimizerConfig, TrainingConfig
from training.distributed import (
    Gatherer,
    build_sharded,
    deepspeed_config,
    make_accelerator,
    make_sequence_group,
    whole_zero3_weights,
    zero_shards,
)
from training.internals import (
    do_not_broadcast_buffers,
    expect_gradients,
    find_overflow_in_norm,
    gradient_norm,
    is_deepspeed_engine,
    release_zero3,
    reset_accelerate,
    set_collective_timeout,
    set_gradient_sync,
    step_without_dynamo,
    without_dynamo,
    write_back,
)
from training.notices import RunError, say
from training.optimizers import Offload, RoundedCopies, make_optimizers
from training.recording import Inputs, RecordedMicroBatches
from training.writer import CheckpointWriter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


AnyModule = TypeVar("AnyModule", bound=nn.Module)
MicroBatch = TypeVar("MicroBatch")
LossAndMetrics = tuple[Tensor, Mapping[str, Tensor]]  # a scalar to minimise; detached sums by name
MAX_SKIPPED_STEPS = 10  # steps in a row without a finite gradient, before a run stops


class Engine(Generic[AnyModule]):
    """A model under training on this rank and its peers.

    The environment names the ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without it, there is one.
    A second engine in the same process, such as PPO's value function, shares the process group. Under ZeRO-3, each
    tensor goes to its shards as the source yields it, so no rank ever holds the whole model.
    """

    def __init__(
        self,
        source: ModelSource[AnyModule],
        optimizer: OptimizerConfig,
        config: EngineConfig,
        *,
        world_size: int,
        micro_batch: int,
    ) -> None:
        stage, config = config.zero_stage, config.on_ranks(world_size)
        if stage != config.zero_stage:
            _note_plain(stage)
        self.config, self.optimizer_config = config, optimizer
        optimizer.check_sharding(config)
        num_parameters, num_trained = _count(source, optimizer)
        settings = deepspeed_config(config, optimizer.max_grad_norm, micro_batch, num_trained)
        self._accelerator = make_accelerator(config, settings, world_size, num_parameters)
        self.rank, self.world_size = self._accelerator.process_index, world_size
        # The ranks of a group, which are adjacent, share their rows and have the same place among the batch's shares.
        self.data_parallel_size = config.data_parallel_size(world_size)
        self.data_rank = self.rank // config.sequence_parallel_size
        self.sequences = make_sequence_group(config)
        self.device = self._accelerator.device
        if config.zero_stage == 3:
            model = build_sharded(source, settings, self.device)
        else:
            # DeepSpeed rounds the weights in any case, and takes its fp32 copies from the rounded ones.
            model = load(source, self.device, self.held_dtype)
        if optimizer.trained_layers is not None:
            freeze_all_but_last(model, optimizer.trained_layers)
        if self.sequences is not None:
            split_sequences(model, self.sequences)
        self.routers = record_routes(model, self.device, config.router_aux_loss_coef, config.router_z_loss_coef)
        self.router_metrics: Mapping[str, float] = {}  # of the last step; empty without experts
        if self.routers is not None and config.record_micro_batches:
            raise ValueError("engine.record_micro_batches is true, but a mixture of experts cannot be recorded")
        if config.checkpoint_activations:
            checkpoint_activations(model)
        if config.compile_blocks:
            compile_blocks(model)
        self._rounds_frozen = config.zero_stage == 0 and config.resolved_precision() == "bf16"
        if self._rounds_frozen:
            round_products(model)
        # DDP needs each weight's own gradient. Compiled blocks read the weights themselves.
        has_copies = (
            self._rounds_frozen and world_size == 1 and self.device.type == "cuda" and not config.compile_blocks
        )
        self._copies = RoundedCopies(trained_products(model) if has_copies else [])
        align_heads(model, self.device)
        self._source, self.module = source, model
        step_without_dynamo(config.zero_stage)
        self.model, self._optimizers = self._prepared(model, make_optimizers(model, optimizer, self.device))
        self._gatherer: Gatherer | None = None
        self._loss_sum = torch.zeros((), device=self.device)
        self._skipped_in_row = 0
        self.offload = Offload(self.device)
        self._recorded: RecordedMicroBatches | None = None  # set by `accumulate_recorded`

    def _prepared(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Any, list[Any]]:
        """Prepare the model and its optimizers for all ranks, by DeepSpeed if ZeRO shards them."""
        stage, buffers = self.config.zero_stage, [buffer.clone() for buffer in model.buffers()]
        with without_dynamo():
            if stage == 0:
                whole, of_optimizers = self._replicated(model), [*map(self._accelerator.prepare_optimizer, optimizers)]
            else:
                whole, *of_optimizers = self._accelerator.prepare(model, *optimizers)
        is_deepspeed = is_deepspeed_engine(whole)
        assert is_deepspeed == (stage > 0), f"ZeRO {stage} gave a {type(whole).__name__}"
        if is_deepspeed:  # it creates a process group of its own, with PyTorch's default time limit
            set_collective_timeout(whole, timedelta(seconds=self.config.collective_timeout_seconds))
        if stage in (1, 2):
            find_overflow_in_norm(whole.optimizer)
        for buffer, exact in zip(model.buffers(), buffers, strict=True):  # DeepSpeed rounds them too
            buffer.data = exact
        return whole, of_optimizers

    def _replicated(self, model: nn.Module) -> Any:
        """Prepare the whole model on every rank: under autocast in bf16, and in DDP if there are several ranks.

        Accelerate would convert the model's outputs, such as logits, to fp32 and wrap a single rank too. That costs
        copies of logits and gradients that no loss here needs.
        """
        if self.config.resolved_precision() == "bf16":
            model.forward = torch.autocast(self.device.type, torch.bfloat16)(model.forward)
        if self.world_size == 1:
            return model
        # The only buffer, a score's bias, is the same on every rank; DDP would broadcast it in every pass.
        do_not_broadcast_buffers(model)
        # The model is already on its device. Accelerate names CPUs by rank ("cpu:1") and would copy weights that models
        # share.
        return self._accelerator.prepare_model(model, device_placement=False)

    @property
    def held_dtype(self) -> torch.dtype:
        """Dtype of the weights that passes read: bf16 under DeepSpeed in bf16, else fp32, which autocast rounds."""
        is_rounded = self.config.zero_stage > 0 and self.config.resolved_precision() == "bf16"
        return torch.bfloat16 if is_rounded else torch.float32

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        self._accelerator.wait_for_everyone()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        return values if self.world_size == 1 else self._accelerator.reduce(values, reduction="sum")

    def sum_over_shares(self, values: Tensor) -> Tensor:
        """Element-wise sum over the shares of a batch. The ranks of a sequence group all have their share's values."""
        total = self.sum_over_ranks(values)
        return total if self.sequences is None else total / self.config.sequence_parallel_size

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; a collective call."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[[MicroBatch], LossAndMetrics],
        num_tokens: float = 0,
    ) -> dict[str, Tensor]:
        """Add up the gradients of this rank's micro-batches, which are its share of one global batch; `step` follows.

        `loss` returns a micro-batch's share of the loss, and metrics. The share is the micro-batch's sum divided by the
        count of the whole global batch, so shares add up over micro-batches and ranks however the batch is split. Its
        passes may already have run in `forward_ahead`. Routers' losses (`engine.router_aux_loss_coef`) are means over
        the global batch's `num_tokens`; 0 = without them. Returns the metrics summed over this rank's micro-batches.
        """
        if self.routers is not None:
            of_all = self.routers.num_layers * num_tokens
            self.routers.scale = self.data_parallel_size / of_all if of_all else 0.0
        self.offload.bring_back()  # DeepSpeed steps in the last backward
        sums: dict[str, Tensor] = {}
        with (
            deterministic_kernels(self.config.deterministic),
            self.cache_weight_casts(),
            read_copies(self._copies.by_weight()),
        ):
            for number, micro_batch in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with self._gradients_reduced(is_last):
                    share, metrics = loss(micro_batch)
                    self._backward(share, is_last)
                for name, value in metrics.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
        return sums

    def accumulate_recorded(
        self, micro_batches: Iterable[Inputs], loss: Callable[[Inputs], LossAndMetrics]
    ) -> dict[str, Tensor]:
        """As `accumulate`, with one recording per shape of micro-batches (`training.recording`), on one rank.

        `loss` has to be the same function in all calls, and read nothing that changes but inputs and weights.
        """
        if self._recorded is None:
            self._recorded = RecordedMicroBatches(functools.partial(self._add_gradients, loss), self.device)
        self.offload.bring_back()
        set_gradient_sync(self._accelerator, True)
        # Casts of weights are parts of recordings, so none is cached between them.
        with deterministic_kernels(self.config.deterministic), read_copies(self._copies.by_weight()):
            for inputs in micro_batches:
                self._recorded.add(inputs)
        return self._recorded.take()

    def _add_gradients(self, loss: Callable[[Inputs], LossAndMetrics], inputs: Inputs) -> Mapping[str, Tensor]:
        share, metrics = loss(inputs)
        self._backward(share, is_last=True)
        return metrics

    @contextlib.contextmanager
    def cache_weight_casts(self) -> Iterator[None]:
        """Caches each weight's bf16 cast across passes. Use it while weights are fixed.

        Use separate contexts for passes with gradients and passes without.
        """
        # Autocast drops its casts when the outermost context ends, even one that casts nothing itself.
        with cache_weight_casts(), torch.autocast(self.device.type, enabled=False):
            yield

    @property
    def runs_ahead(self) -> bool:
        """Whether forward passes may run before the `accumulate` that computes their gradients (`forward_ahead`).

        DeepSpeed pairs each forward with the next backward, and so do recordings; recomputed and compiled blocks decide
        in the forward what the backward does.
        """
        config = self.config
        pairs = config.checkpoint_activations or config.compile_blocks or config.record_micro_batches
        return config.zero_stage == 0 and not pairs

    @contextlib.contextmanager
    def forward_ahead(self) -> Iterator[None]:
        """Context for forward passes whose outputs the `loss` of a later `accumulate` uses.

        No weight may change in between, or PyTorch refuses the backward.
        """
        assert self.runs_ahead, f"passes cannot run ahead of their updates with {self.config}"
        with (
            deterministic_kernels(self.config.deterministic),
            self.cache_weight_casts(),
            read_copies(self._copies.by_weight()),
            torch.enable_grad(),
            self._gradients_reduced(is_last=False),
        ):
            yield

    @contextlib.contextmanager
    def _gradients_reduced(self, is_last: bool) -> Iterator[None]:
        """Context for the forward and backward of one micro-batch. Ranks reduce their gradients in the last one only.

        DDP decides in the forward whether the backward will reduce gradients, so the forward belongs inside, unless it
        was in `forward_ahead`.
        """
        set_gradient_sync(self._accelerator, is_last)
        with self._accelerator.no_sync(self.model) if self._is_ddp and not is_last else contextlib.nullcontext():
            yield

    @property
    def _is_ddp(self) -> bool:
        return self.world_size > 1 and self.config.zero_stage == 0

    def _backward(self, share: Tensor, is_last: bool) -> None:
        """Add a micro-batch's gradients. If any rank's loss is not finite, all ranks skip the step."""
        note_progress()
        self._loss_sum += share.detach()
        if is_last:  # the gradient may still be finite, and DeepSpeed steps inside the backward
            share = share * self._one_or_nan()
            if self._is_ddp:
                expect_gradients(self.model)
        # Backends average over ranks; the factor undoes that. All ranks of a sequence group have the same share.
        self._accelerator.backward(share * self.data_parallel_size)
        self._copies.add_gradients()

    def step(self) -> tuple[float, float]:
        """Clip, update the weights, clear the gradients. Returns the global loss and gradient norm.

        If one of them is not finite, the step is skipped: neither weights nor optimizer states change. All ranks agree,
        since both are global.

        Raises:
            RunError: more than `MAX_SKIPPED_STEPS` steps in a row were skipped.
        """
        loss_sum = self.sum_over_shares(self._loss_sum.clone())
        self._loss_sum.zero_()
        if self.config.zero_stage > 0:  # DeepSpeed stepped in the last backward, with the learning rate set before it
            loss, norm = float(loss_sum), gradient_norm(self.model)
            self._count_skipped(loss, norm)
            self._step_routers()
            return loss, norm
        # Before AdamW's first step takes memory for its states; recordings read the same memory again.
        self._copies.expire(keeps_memory=self._recorded is not None)
        parameters = self.module.parameters()
        with deterministic_kernels(self.config.deterministic):
            norm_tensor = nn.utils.clip_grad_norm_(parameters, self.optimizer_config.max_grad_norm)
            loss, norm = torch.stack([loss_sum.float(), norm_tensor.float()]).tolist()  # one wait for a GPU
            for optimizer in self._optimizers:
                if math.isfinite(norm):
                    optimizer.step()
                optimizer.zero_grad(set_to_none=self._recorded is None)  # recordings add to the same memory
        self._count_skipped(loss, norm)
        self._step_routers()
        return loss, norm

    def _step_routers(self) -> None:
        """Measure the load of a mixture's experts in the step's passes, and move the biases that choose experts."""
        if self.routers is None:
            return
        sums = self.sum_over_ranks(self.routers.take())  # the ranks of a sequence group have different tokens
        self.router_metrics = self.routers.metrics(sums)
        if self.config.router_bias_speed and not self.has_skipped:
            balance_biases(self.module, sums, self.config.router_bias_speed)

    @contextlib.contextmanager
    def routes_counted(self, *, is_on: bool) -> Iterator[None]:
        """Context for forward passes whose tokens routers count and learn from, or not."""
        if self.routers is not None:
            self.routers.counts_batch = is_on
        yield
        if self.routers is not None:
            self.routers.counts_batch = True

    @property
    def has_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self._skipped_in_row > 0

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set it before the first backward of a step: DeepSpeed steps inside the last one."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    def _one_or_nan(self) -> Tensor:
        """Return 1 if every rank's loss is finite, else NaN. A collective call that the CPU does not wait for."""
        return 1 + self.sum_over_ranks(0 * self._loss_sum)

    def _count_skipped(self, loss: float, norm: float) -> None:
        """Raises RunError after too many consecutive steps without a finite gradient."""
        self._skipped_in_row = 0 if math.isfinite(norm) else self._skipped_in_row + 1
        if self._skipped_in_row > MAX_SKIPPED_STEPS:
            raise RunError(
                f"{self._skipped_in_row} steps in a row had no finite gradient (the last: loss {loss}, norm {norm});"
                f" at most {MAX_SKIPPED_STEPS} were expected. No weight was changed; a lower learning_rate, or"
                ' engine.precision = "fp32", may help'
            )

    def weights(
        self, dtype: torch.dtype, *, on_main_alone: bool = False, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that passes read, rounded to `dtype`, as whole tensors on this rank's device.

        Parameters are rounded to `dtype`; `wanted` chooses among them by name. By default, buffers come too.

        Tied weights come once. A tensor may be the weight itself, so copy what you keep. Under ZeRO-3 this is a
        collective call, and every rank has to consume all tensors; with `on_main_alone`, other ranks take part but get
        none.
        """
        keep = self.is_main or not on_main_alone
        found = [(name, held) for name, held in self.module.named_parameters() if wanted is None or wanted(name)]
        if self.config.zero_stage == 3:
            gathered = whole_zero3_weights(found, self.rank, self.world_size, self.device, on_main_alone=on_main_alone)
            yield from ((name, whole.to(dtype)) for name, whole in gathered)
        elif keep:
            yield from ((name, held.detach().to(dtype)) for name, held in found)
        if keep and wanted is None:
            yield from (
                (name, buffer.detach()) for name, buffer in self.module.named_buffers()
            )  # fp32 (`lm.source.load`)

    def weights_for_file(self, own: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the fp32 weights on rank 0, one whole tensor at a time, tied ones once. Every rank calls it.

        Rank 0 has to consume all of them: each is gathered as it is taken, into CPU memory if ranks hold shards. Other
        ranks send their shards in this call and get no tensors. `own` replaces the trained weights by other values:
        this rank's numbers [length] by name, laid out as in `shards`.
        """
        if self.config.zero_stage == 0 and own is None:
            return self._whole_tensors() if self.is_main else iter([])
        self._gatherer = self._gatherer or Gatherer(self.shards(), self.rank, self.device, self.gather)
        own = {shard.name: shard.view(shard.storage) for shard in self.shards()} if own is None else own
        reads = self.config.zero_stage > 0 or self._rounds_frozen
        frozen = self._source.tensors() if reads else self.module.named_parameters()
        gathered = self._gatherer.tensors(self.module, own, frozen)
        return gathered if self.is_main else iter([*gathered])

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a model that every rank holds whole. Frozen weights held rounded are read again."""
        originals = iter(self._source.tensors())
        for name, parameter in self.module.named_parameters():
            is_rounded = self._rounds_frozen and not parameter.requires_grad
            whole = next(tensor for original, tensor in originals if original == name) if is_rounded else parameter
            yield name, whole.detach().to(self.device)
            del whole  # before the next one is read
        yield from ((name, buffer.detach()) for name, buffer in self.module.named_buffers())

    def offload_optimizer(self) -> None:
        """Send the optimizer's states, and under ZeRO the fp32 weights, to CPU memory until they are needed."""
        shards = self.shards()
        states = [value for shard in shards for kind, value in shard.optimizer_state.items() if kind != STEP]
        self.offload.send_away(states + [shard.storage for shard in shards if self.config.zero_stage > 0])

    def shards(self) -> list[ParamShard]:
        """This rank's part of the trained weights in fp32. The parts of all ranks cover each number once."""
        self.offload.bring_back()
        if self.config.zero_stage == 0:
            return [shard.share(self.rank, self.world_size) for shard in whole_params(self.module, self._optimizers)]
        return zero_shards(self.module, self.model.optimizer, self.config.zero_stage, self.rank)

    def state(self) -> State:
        """This rank's part of the trained weights and optimizer states, for a checkpoint; not copied."""
        buffers = [shard.share(self.rank, self.world_size) for shard in whole_tensors(self.module.named_buffers())]
        return state_of(self.shards() + buffers)

    def load(self, folder: Path) -> None:
        """Load a state that any number of ranks wrote at any ZeRO stage; a collective call."""
        self.offload.bring_back()
        saved = SavedState(folder)
        shards = whole_params(self.module, self._optimizers) if self.config.zero_stage == 0 else self.shards()
        for shard in shards + whole_tensors(self.module.named_buffers()):
            shard.restore(saved)
        if self.config.zero_stage > 0:
            write_back(self.model.optimizer, self.config.zero_stage)
        self.barrier()

    def checkpoint_writer(self) -> CheckpointWriter:
        """This rank's writer; one serves all engines of a process."""
        config = self.config
        return CheckpointWriter(
            self.rank, self.world_size, config.keep_checkpoints, config.collective_timeout_seconds, self.gather
        )

    def close(self) -> None:
        """Release memory. The process group stays for the next stage in this process."""
        self._accelerator.free_memory()
        if self.config.zero_stage == 3:
            release_zero3(self.module)
        if self.sequences is not None:
            torch.distributed.destroy_process_group(self.sequences.processes)
        del self.model, self.module, self._optimizers, self._copies, self._recorded
        reset_accelerate()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class StageContext:
    """A stage's folder, seed and engine config; the same on every rank."""

    folder: Path
    seed: int
    num_workers: int
    engine: EngineConfig

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def write_results(self, results: "DataclassInstance | Mapping[str, Any]") -> None:
        """Write the stage's results.json, which the report and later stages read back (`files.records`)."""
        write_json(self.folder / "results.json", as_json(results))


def build_engine(context: StageContext, source: ModelSource[AnyModule], config: TrainingConfig) -> Engine[AnyModule]:
    """Build this rank's engine for a stage that trains one model."""
    micro_batch = config.batch.micro_batch_size or 1  # DeepSpeed uses it only for counting
    return Engine(source, config.optimizer, context.engine, world_size=context.num_workers, micro_batch=micro_batch)


@functools.cache
def _note_plain(zero_stage: int) -> None:
    """Say once per process that ZeRO is not used, for those who resume a run of several ranks."""
    say(
        f"engine.zero_stage {zero_stage} shards nothing on one rank, which runs without DeepSpeed. Checkpoints of both"
        " fit; in bf16, weights stay fp32 and are rounded at each use, so results differ by rounding"
    )


def _count(source: ModelSource[Any], optimizer: OptimizerConfig) -> tuple[int, int]:
    """Count a model's parameters, and those that are trained, without reading any weights."""
    model = on_meta(source.build)
    if optimizer.trained_layers is not None:
        freeze_all_but_last(model, optimizer.trained_layers)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


@contextlib.contextmanager
def deterministic_kernels(is_on: bool) -> Iterator[None]:
    """Use bitwise reproducible GPU kernels for forward, backward and step, if `is_on` (`engine.deterministic`).

    Gradients of attention, embeddings and indexed positions are then added in a fixed order. Passes without gradients
    do not need it: none of their kernels adds in a varying order. On CPUs, all of Heed's kernels are reproducible.

    Raises: ValueError naming the operation that has no reproducible kernel.
    """
    if not (is_on and torch.cuda.is_available()):
        yield
        return
    # Read at the process's first matrix product. Without it, PyTorch refuses matrix products in this context.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    was_on, was_filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # costs a pass over every new tensor; none is read before it is set
    try:
        yield
    except RuntimeError as error:
        operation, separator, _ = str(error).partition(" does not have a deterministic implementation")
        if not separator:
            raise
        raise ValueError(
            f"engine.deterministic: {operation.split()[-1]} has no deterministic GPU kernel in torch"
            f" {torch.__version__}; false was expected for this model and objective"
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_on)
        settings.fill_uninitialized_memory = was_filled
