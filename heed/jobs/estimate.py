"""What a stage's work takes: memory per rank and time, from the description that the stage gives (`stages.plan`).

No model is allocated. Batches are exact. On a GPU, a pass takes the time of its matrix products at a share of the peak,
plus the time in which its other kernels read and write, but at least as long as the CPU needs to launch its kernels. If
DDP and ZeRO send while they compute, only the time by which sending takes longer counts. On a CPU, products count, and
in sampling what is read. `heed.jobs.memory` has the memory.

Kernels and bytes were counted with the current code on the fake CUDA device; `tests/fake_cuda/on_device_times.py`
checks the counts.

Letters: D width, M MLP width, H head dim, N heads, G key-value heads, c bytes per number.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import lm.native.install  # noqa: F401  # matrix products as a model's layers compute them
from heed.jobs.memory import (
    GENERATION_ROWS,
    RESERVED_BYTES,
    Counts,
    Layout,
    Memory,
    count,
    forward_pass,
    measuring_phase,
    node_copies,
    rows_and_passes,
    rows_at_once,
    sampling_phase,
    scoring_phase,
    scoring_rows,
    training_memory,
)
from heed.jobs.ppo_memory import (
    FROZEN,
    PPOModels,
    PPOWork,
    generator,
    learner,
    models_of,
    ppo_memory,
    rank_work,
    scorer,
)
from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token
from lm.layers import linear
from lm.sequence_parallel import check_sequence_split
from lm.transfer import MAX_TOKENS
from ppo.plan import PPOIteration
from stages.data import PROMPTS_AT_ONCE
from stages.plan import Sampling, Training, Work
from training.config import FineTuningConfig

GIB = 2**30
RANK = "rank"  # the kind of every rank, if all are alike
RESERVED = "CUDA, NCCL, cuBLAS"

# Assumed, like the share of the memory's bandwidth, until they are measured on a GPU. Kernels are counted without
# `lm.native.gpu_layers`, which launches about half as many.
LAUNCH_SECONDS = 6e-6  # of CPU time per kernel of a pass
REPLAYED_SECONDS = 3e-6  # of GPU time per kernel that reads little, in a recorded step
BLOCK_KERNELS = (17, 43)  # of a block's forward and backward pass
STEP_KERNELS = (17, 30)  # of a decoding step: per block, and outside the blocks with the draw
BANDWIDTH_SHARE = 0.8  # of the memory's peak, reached by kernels that read and write much
LINK_SHARE = 0.8  # of NVLink's and the network's peak, reached by NCCL (nccl-tests on A100: 240 of 300 GB/s)
EXCHANGE_SECONDS = 10e-6  # least time of a small collective among a node's GPUs
STEP_BYTES = 28  # that AdamW reads and writes per trained number: weight, two moments and gradient in fp32
# Numbers that fused kernels (lm.native.gpu) read and write per logit: forward, backward, and to draw a token.
LOGIT_NUMBERS = (1, 2, 3)


@dataclass(frozen=True)
class Hardware:
    """The hardware of one rank. `flops` is the dense bf16 peak per second; on a CPU it is a measured rate.

    A GPU sends `link_bytes_per_second` to the GPUs of its node and, through its part of the node's network cards,
    `network_bytes_per_second` to other nodes; each is one direction. `dollars_per_hour` is roughly what clouds charge
    for one, not a quote; `--price` replaces it.
    """

    name: str
    memory_bytes: int
    flops: float
    bytes_per_second: float
    dollars_per_hour: float
    link_bytes_per_second: float = 0.0
    network_bytes_per_second: float = 0.0
    is_gpu: bool = True

    @property
    def usual_share(self) -> float:
        """The share of `flops` to expect, if the user gives none. On a GPU it is that of matrix products, most of the
        four fifths that the best ones reach (792 of an H100's 989 TFLOP/s: S. Bekman, Machine Learning Engineering). On
        a CPU it is that of whole steps, in the measured rate of a product.
        """
        return 0.65 if self.is_gpu else 0.4


# Peaks and bandwidths are from NVIDIA's data sheets, without sparsity (H200, H100 and A100 80 GB as SXM modules, L40S;
# for the B200, an eighth of a DGX B200). Memory is about what CUDA makes available. Links are NVLink's, half of the
# sheets' sum of both directions; an L40S has PCIe 4.0 x16. Networks are those of DGX systems, a card of 400 Gbit/s per
# GPU (A100: 200); for an L40S, half a card of 200 Gbit/s is assumed.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("b200", 178 * GIB, 2250e12, 8.0e12, 6.0, 900e9, 50e9),
        Hardware("h200", 139 * GIB, 989e12, 4.8e12, 4.0, 450e9, 50e9),
        Hardware("h100", 79 * GIB, 989e12, 3.35e12, 3.0, 450e9, 50e9),
        Hardware("a100", 79 * GIB, 312e12, 2.039e12, 2.0, 300e9, 25e9),
        Hardware("l40s", 44 * GIB, 362e12, 0.864e12, 1.2, 32e9, 12.5e9),
    )
}


def hardware(name: str, ranks: int, precision: str) -> Hardware:
    """Returns a GPU by its name; for "cpu", a rank's share of this machine, whose rates are measured in about a second.

    Raises: ValueError for a name that is not known.
    """
    if name == "cpu":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        at_once = min(ranks, os.cpu_count() or 1)
        rate, bandwidth = _product_rate(dtype), _copy_rate()
        return Hardware("cpu", memory // at_once, rate / at_once, bandwidth / at_once, 0.0, is_gpu=False)
    if name not in GPUS:
        raise ValueError(f"--gpu {name!r}: one of cpu, {', '.join(GPUS)} was expected")
    return GPUS[name]


def _product_rate(dtype: torch.dtype) -> float:
    """Measures floating-point operations per second of a square linear map on all cores: the best of a few."""
    size = 1024
    x, weight = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / min(_seconds(lambda: linear(x, weight, None)) for _ in range(8))


def _copy_rate() -> float:
    """Measures how many bytes per second this machine reads."""
    source = torch.zeros(16_000_000)
    return source.nbytes / min(_seconds(source.sum) for _ in range(5))


def _seconds(work: object) -> float:
    assert callable(work)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Times:
    """Times of one model on ranks whose products reach the fraction `share_of_peak` of this hardware's peak."""

    model: ModelConfig
    layout: Layout
    hardware: Hardware
    share_of_peak: float

    @property
    def num_layers(self) -> int:
        return self.model.num_hidden_layers + self.model.num_encoder_layers

    def forward_flops(self, seq_len: int, head_share: float) -> float:
        """Returns a forward pass's FLOPs per token; the head is computed for the fraction `head_share` of tokens."""
        # A causal token attends to half the row on average. On a CPU all pairs are computed, as for encoders.
        is_half = self.model.kind == "decoder" and self.layout.is_gpu
        context = (seq_len + 1) // 2 if is_half else seq_len
        flops = float(flops_per_token(self.model, context))
        if self.model.kind == "encoder-decoder":
            flops += flops_per_source_token(self.model, context)
        has_head = self.model.kind != "encoder"
        return flops - (1 - head_share) * has_head * 2 * self.model.vocab_size * self.model.hidden_size

    def forward_seconds(self, tokens: float, seq_len: int, head_share: float) -> float:
        """Returns the seconds of one rank's pass over `tokens`, in rows of `seq_len`."""
        return self._pass(tokens, self.forward_flops(seq_len, head_share), head_share, is_backward=False)

    def backward_seconds(self, counts: Counts, tokens: float, seq_len: int, head_share: float) -> float:
        """Returns the seconds of the backward pass, which stops at frozen blocks. It computes two products per forward
        product, but only one through frozen maps with adapters, whose weights get no gradient. Recomputed blocks run
        forward again.
        """
        share = counts.trained_layers / self.num_layers
        flops = self.forward_flops(seq_len, head_share)
        seconds = share * self._pass(tokens, (1 if counts.ranks else 2) * flops, head_share, is_backward=True)
        return seconds + self.layout.recomputes * share * self.forward_seconds(tokens, seq_len, 0.0)

    def _pass(self, tokens: float, flops: float, head_share: float, *, is_backward: bool) -> float:
        computed = tokens * flops / (self.hardware.flops * self.share_of_peak)
        if not self.layout.is_gpu:
            return computed
        logits = LOGIT_NUMBERS[is_backward] * self.layout.compute_bytes * head_share * self.model.vocab_size
        moved = tokens * (self.num_layers * self._bytes_per_token(is_backward=is_backward) + logits)
        launched = LAUNCH_SECONDS * self.num_layers * BLOCK_KERNELS[is_backward]
        return max(launched, computed + self._memory_seconds(moved)) + self._exchanged(tokens)

    def _bytes_per_token(self, *, is_backward: bool) -> float:
        """Returns what a block reads and writes per token outside its products and attention, in bf16: norms, the
        activation, rotary positions, additions. Autocast's fp32 stream adds to it.
        """
        model, is_gated = self.model, self.model.is_gated
        turned = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        turned *= model.positions == "rotary"
        in_fp32 = model.hidden_size * self.layout.is_autocast
        if is_backward:
            inner = (22 if is_gated else 6) * model.intermediate_size
            return self.layout.compute_bytes / 2 * (inner + 50 * model.hidden_size + 18 * turned) + 48 * in_fp32
        inner = (10 if is_gated else 4) * model.intermediate_size
        return self.layout.compute_bytes / 2 * (inner + 26 * model.hidden_size + 14 * turned) + 28 * in_fp32

    def _memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.bytes_per_second * BANDWIDTH_SHARE)

    def _exchanged(self, tokens: float) -> float:
        """Returns the seconds of four all-to-alls per layer, if the GPUs of a node share each row's tokens."""
        model, ranks = self.model, self.layout.sequence_ranks
        numbers = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        sent = tokens * numbers * self.layout.compute_bytes * (ranks - 1) / ranks
        return self.num_layers * (4 * EXCHANGE_SECONDS * (ranks > 1) + self._link_seconds(sent))

    def _link_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.link_bytes_per_second * LINK_SHARE) if self.layout.is_gpu else 0.0

    def gather_seconds(self, num_bytes: float, *, in_node: bool = False) -> float:
        """Returns the seconds in which all ranks gather `num_bytes` from the part that each has, or reduce and scatter
        as many. Between nodes, NCCL's rings use the network cards of all of a node's GPUs.
        """
        layout, hardware = self.layout, self.hardware
        per_node = layout.ranks_per_node or layout.ranks
        ranks = per_node if in_node else layout.ranks
        if not layout.is_gpu or ranks == 1:
            return 0.0
        rate = hardware.link_bytes_per_second
        if ranks > per_node:
            rate = min(rate, per_node * hardware.network_bytes_per_second)
        return num_bytes * (ranks - 1) / ranks / (rate * LINK_SHARE)

    def scoring_seconds(self, counts: Counts, num_passes: int, forward: float) -> float:
        """Returns the seconds of passes without gradients through a model in training, `forward` seconds each.

        ZeRO-3 gathers the weights in each pass. In the first one after a step, it gathers over all ranks even if nodes
        keep a copy.
        """
        first, later = (self._weights_seconds(counts, is_first=is_first) for is_first in (True, False))
        return max(forward, first) + (num_passes - 1) * max(forward, later)

    def _weights_seconds(self, counts: Counts, *, is_first: bool) -> float:
        if self.layout.zero_stage < 3:
            return 0.0
        in_node = not is_first and node_copies(counts.total, self.layout) > 1
        return self.gather_seconds(self.layout.weight_bytes * counts.total, in_node=in_node)

    def step_seconds(self, counts: Counts, tokens: float, pass_tokens: int, seq_len: int, head_share: float) -> float:
        """Returns the seconds of one optimizer step over `tokens` per rank, in passes of up to `pass_tokens` of them.

        Backward passes hide the communication during them: ZeRO-2 and 3 reduce gradients in each, DDP and ZeRO-1 in the
        last one, and ZeRO-3 gathers the weights again. Nothing hides the gather of weights with which ZeRO-1 and 2 end
        a step.
        """
        layout = self.layout
        num_passes = max(1, math.ceil(tokens / pass_tokens))
        forward = self.forward_seconds(tokens / num_passes, seq_len, head_share)
        backward = self.backward_seconds(counts, tokens / num_passes, seq_len, head_share)
        gradients = self.gather_seconds(layout.weight_bytes * counts.trained)
        updated = STEP_BYTES * counts.trained / (layout.ranks if layout.zero_stage else 1)
        step = self._memory_seconds(updated) if layout.is_gpu else 0.0
        if layout.zero_stage == 3:
            sent = gradients + self._weights_seconds(counts, is_first=False)
            return step + self.scoring_seconds(counts, num_passes, forward) + num_passes * max(backward, sent)
        num_reducing = num_passes if layout.zero_stage == 2 else 1
        exposed = num_reducing * max(0.0, 2 * gradients - backward)  # DeepSpeed's buckets are all-reduced too
        gathered = gradients if layout.zero_stage else 0.0
        return step + num_passes * (forward + backward) + exposed + gathered

    def sampling_seconds(
        self, parameters: int, rows: int, seq_len: int, response_tokens: int, tensor_parallel: int = 1
    ) -> float:
        """Returns the seconds in which each rank samples `rows` responses; `tensor_parallel` ranks sample theirs
        together, each with its part of the weights and heads.

        For each token, a batch of rows reads all weights and the cache. On a GPU, a step computes while it reads, each
        kernel adds its least time, and two all-reduces per layer add up the parts.
        """
        layout, hardware, c = self.layout, self.hardware, self.layout.compute_bytes
        parts, rows = tensor_parallel, rows * tensor_parallel
        steps, at_once = math.ceil(rows / GENERATION_ROWS) * response_tokens, min(rows, GENERATION_ROWS)
        cache = cache_bytes_per_token(self.model, c) * at_once * seq_len
        flops = self.forward_flops(seq_len, 1.0) / (hardware.flops * self.share_of_peak * parts)
        if not layout.is_gpu:
            read = steps * (c * parameters + cache) / (hardware.bytes_per_second * self.share_of_peak)
            return read + rows * seq_len * flops
        prompts = rows * (seq_len - response_tokens) * flops
        read = self._memory_seconds((c * parameters + cache) / parts)
        drawn = self._memory_seconds(LOGIT_NUMBERS[2] * c * at_once * self.model.vocab_size)
        kernels = REPLAYED_SECONDS * (STEP_KERNELS[0] * self.num_layers + STEP_KERNELS[1])
        added = self._link_seconds(2 * (parts - 1) / parts * at_once * self.model.hidden_size * c)
        reduced = 2 * self.num_layers * (EXCHANGE_SECONDS + added) if parts > 1 else 0.0
        return prompts + steps * (kernels + max(read, at_once * flops) + drawn + reduced)

    def sync_seconds(self, size: int, *, is_apart: bool) -> float:
        """Returns the seconds in which generators get `size` bytes of new weights: gathered from ZeRO-3's shards, and
        copied on the same GPU or, if they have GPUs of their own, broadcast by one of the learners.
        """
        if not self.layout.is_gpu:
            return 0.0
        gathered = self.gather_seconds(size) if self.layout.zero_stage == 3 else 0.0
        rate = min(self.hardware.link_bytes_per_second, self.hardware.network_bytes_per_second) * LINK_SHARE
        return gathered + (size / rate if is_apart else self._memory_seconds(2 * size))


@dataclass(frozen=True)
class StagePlan:
    """The estimate for one stage. `batch` maps names to numbers. A step is one optimizer step, one PPO iteration, or
    the whole of a stage that only samples. `memory` is per rank, by kind of rank. `once_seconds` are spent in addition
    to the steps, before or after all of them.
    """

    name: str
    unit: str
    batch: Mapping[str, int]
    memory: Mapping[str, Memory]
    num_steps: int
    seconds_per_step: float
    assumptions: tuple[str, ...] = ()
    once_seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most memory."""
        return max(memory.peak for memory in self.memory.values())

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step + self.once_seconds


@dataclass(frozen=True)
class Estimator:
    """Estimates one stage on ranks of this hardware. `times` is of the policy's shape."""

    name: str
    layout: Layout
    times: Times

    def estimate(self, work: Work | None) -> StagePlan:
        """Returns the stage's plan without its assumptions. A GPU also holds what its libraries take."""
        match work:
            case Training():
                plan = self._training(work)
            case Sampling():
                plan = self._sampling(work)
            case PPOIteration():
                plan = self._ppo(work)
            case _:
                plan = self._plan("–", {"ranks": self.layout.ranks}, {RANK: Memory({}, {"unknown": {}})}, 0, 0.0)
        if not self.layout.is_gpu:
            return plan
        reserved = {RESERVED: RESERVED_BYTES}
        memory = {k: replace(of, held={**of.held, **reserved}) if of.peak else of for k, of in plan.memory.items()}
        return replace(plan, memory=memory)

    def _plan(
        self, unit: str, numbers: Mapping[str, int], memory: Mapping[str, Memory], num_steps: int, seconds: float
    ) -> StagePlan:
        return StagePlan(self.name, unit, numbers, memory, num_steps, seconds)

    @property
    def _gpu_bytes(self) -> int:
        """Bytes of a GPU that tensors may take; 0 without one."""
        return self.times.hardware.memory_bytes - RESERVED_BYTES if self.layout.is_gpu else 0

    def _training(self, work: Training) -> StagePlan:
        """Plan the training of one model, with what is sampled before it."""
        config, layout, model, lengths = work.config, self.layout, work.model, work.lengths
        batch, times, per_unit = config.batch, replace(self.times, model=model), work.rows_per_unit
        width = layout.packed_width(lengths.longest) if config.packs_sequences else lengths.longest
        check_sequence_split(model, layout.sequence_ranks)
        rows, micro_batches = rows_and_passes(batch, layout.shares, width, per_unit)
        # Only responses have logits. A pass may be full of rows with the largest share of response tokens.
        head_share = lengths.response_share if work.has_logits else 0.0
        num_logits = math.ceil(rows * width * head_share) * model.vocab_size
        lora = config.lora if isinstance(config, FineTuningConfig) else None
        counts = count(model, config.optimizer, num_scores=work.num_scores, lora=lora)
        of = forward_pass(layout, rows, width, dropout=config.dropout, is_trained=True)
        memory = training_memory(model, counts, layout, of, num_logits, micro_batches)
        if work.num_scores:
            memory = replace(memory, phases={**memory.phases, **self._held_out_phases(work, counts, width)})
        mean = round(lengths.mean) or lengths.longest
        tokens = batch.batch_size * per_unit * mean
        numbers = {
            "batch_size": batch.batch_size,
            **batch.given_size,
            "ranks": layout.ranks,
            **layout.numbers,
            "micro-batches per rank and step": micro_batches,
            "steps": work.num_steps,
            "tokens per step": tokens,
        }
        if work.num_scores > 1:
            numbers["heads, one per objective"] = work.num_scores
        if per_unit > 1:
            numbers["responses per comparison"] = per_unit
        seconds = times.step_seconds(counts, tokens / layout.ranks, of.num_tokens, mean, head_share)
        each, once = (
            times.forward_seconds(read / layout.ranks, mean, head_share) if read else 0.0
            for read in (work.read_tokens, work.read_first)
        )
        plan = self._plan(work.unit, numbers, {RANK: memory}, work.num_steps, seconds + each)
        plan = replace(plan, once_seconds=once)
        return self._with_samples(plan, work.samples) if work.samples else plan

    def _held_out_phases(self, work: Training, counts: Counts, width: int) -> dict[str, dict[str, int]]:
        """Returns the phases in which the trained model scores the held-out comparisons."""
        rows = {
            "evaluate": scoring_rows(work.config.batch, width, work.rows_per_unit),
            "score held-out": max(1, MAX_TOKENS // width),
        }
        return {
            name: scoring_phase(work.model, counts, self.layout, forward_pass(self.layout, n, width, is_trained=True))
            for name, n in rows.items()
        }

    def _with_samples(self, plan: StagePlan, work: Sampling) -> StagePlan:
        """Add the samples that a stage trains on, as the same number of seconds for each step."""
        sampled = self._sampling(work)
        names = ("prompts", "responses per prompt")
        return replace(
            plan,
            batch={**plan.batch, **{name: sampled.batch[name] for name in names}},
            memory={"rank that samples": sampled.memory[RANK], "rank that trains": plan.memory[RANK]},
            seconds_per_step=plan.seconds_per_step + sampled.seconds / plan.num_steps,
        )

    def _sampling(self, work: Sampling) -> StagePlan:
        """Plan a stage that samples on all workers, and reads the samples with other models."""
        layout, model, seq_len, new = self.layout, work.model, work.lengths.longest, work.response_tokens
        total, c = count(model, FROZEN).total, layout.compute_bytes
        # Reward models of such a stage are bf16 on a GPU, otherwise fp32 (`lm.source`).
        widths = {"reference": c, "reward model": 2 if layout.is_gpu else 4}
        held = {name: widths[name] * total for name in work.measured_by}
        free = self._gpu_bytes - c * total - sum(held.values())
        rows = rows_at_once(model, layout, free, min(GENERATION_ROWS, PROMPTS_AT_ONCE * work.at_once), seq_len)
        phases = {"generate": sampling_phase(model, layout, total, rows, seq_len - new, new)}
        if held:
            phases["generate"] |= held  # a worker keeps these models across parts of the prompts
            phases["measure"] = {**held, **measuring_phase(model, layout, seq_len, new)}
        numbers = {"prompts": work.num_prompts, "responses per prompt": work.responses_per_prompt}
        per_rank = math.ceil(work.num_prompts * work.responses_per_prompt / layout.ranks)
        seconds = self.times.sampling_seconds(total, per_rank, round(work.lengths.mean), new)
        memory = {RANK: Memory({"weights": c * total}, phases)}
        return self._plan("responses", {**numbers, "ranks": layout.ranks}, memory, 1, seconds)

    def _ppo(self, work: PPOIteration) -> StagePlan:
        """Plan an iteration: sampling, the passes before the updates, and the updates."""
        config, layout, times, batch = work.config, self.layout, self.times, work.config.minibatch
        models, mean = models_of(work), round(work.lengths.mean)
        for trained in (work.policy, work.critic if models.value_counts else work.policy):
            check_sequence_split(trained, layout.sequence_ranks)
        rank, iterations = (
            rank_work(work, layout, times.hardware.memory_bytes if layout.is_gpu else 0),
            config.num_iterations,
        )
        numbers = {
            "rollout_batch_size": config.rollout_batch_size,
            "samples per prompt": config.advantage.samples_per_prompt,
            "batch_size": batch.batch_size,
            **batch.given_size,
            "ranks": layout.ranks,
            **layout.numbers,
            "micro-batches per rank and update": rank.num_micro_batches,
            "updates per iteration": config.updates_per_iteration,
            "iterations": iterations,
            "updates": iterations * config.updates_per_iteration,
            "responses": iterations * config.rollout_batch_size,
            "tokens per iteration": config.rollout_batch_size * mean,
        }
        is_colocated, size = config.placement.roles_share_ranks, models.policy_counts.total
        # An adapter that is sent alone is in fp32: generators merge it before they round.
        sends_adapter = config.lora is not None and config.lora.sends == "adapter"
        sent = 4 * models.policy_counts.trained if sends_adapter else layout.compute_bytes * size
        learning = self._learning_seconds(work, models, rank, mean)
        learning += times.sync_seconds(sent, is_apart=not is_colocated)
        sampling = times.sampling_seconds(size, rank.rollout_rows, mean, config.max_new_tokens, rank.team_size)
        seconds = max(learning, sampling) if config.placement.max_staleness else learning + sampling
        if is_colocated:
            memory = {RANK: ppo_memory(models, layout, rank)}
        else:
            roles = {"learner": learner, "generator": generator, "scorer": scorer}
            memory = {name: role(models, layout, rank) for name, role in roles.items()}
        return self._plan("responses", numbers, memory, iterations, seconds)

    def _learning_seconds(self, work: PPOIteration, models: PPOModels, rank: PPOWork, seq_len: int) -> float:
        """Returns the seconds of an iteration without sampling.

        They are one pass each of policy and reference, and of teachers, judges, value function and reward model if
        there are any; then the epochs' updates of policy and value function; and the pretraining rows. Heads read only
        the responses. Passes hold as many tokens as those of the updates, or for scores and values as many as
        `forward_tokens` says.
        """
        config, policy, critic = work.config, self.times, replace(self.times, model=models.critic)
        tokens = config.rollout_batch_size * seq_len / self.layout.ranks
        head_share, pass_tokens = config.max_new_tokens / seq_len, rank.critic_pass.num_tokens
        num_passes = config.num_minibatches * math.ceil(tokens / config.num_minibatches / pass_tokens)
        num_scored = math.ceil(tokens / rank.scoring_pass.num_tokens)

        def one_pass(shape: ModelConfig) -> float:
            return replace(self.times, model=shape).forward_seconds(tokens / num_passes, seq_len, head_share)

        one_score = critic.forward_seconds(tokens / num_scored, seq_len, 0.0)
        measured = policy.scoring_seconds(models.policy_counts, num_passes, one_pass(models.policy))
        frozen = [] if models.policy_counts.ranks else [(models.policy, models.policy_counts)]
        seconds = measured if frozen else 2 * measured  # the reference may be the policy without its adapters
        for shape, counts in (*frozen, *models.teachers):
            seconds += self._frozen_seconds(rank, counts, num_passes, one_pass(shape))
        for (shape, _), judge in zip(models.judges, config.local_judges, strict=True):
            graded = config.advantage.oversample * tokens * judge.num_questions
            seconds += replace(self.times, model=shape).forward_seconds(graded, seq_len, 0.0)
        if models.reward_counts is not None:
            num_rewards = math.ceil(config.advantage.oversample * num_scored)
            seconds += self._frozen_seconds(rank, models.reward_counts, num_rewards, one_score)
        step_tokens = tokens / config.num_minibatches
        update = policy.step_seconds(models.policy_counts, step_tokens, pass_tokens, seq_len, head_share)
        if models.value_counts is not None:
            seconds += critic.scoring_seconds(models.value_counts, num_scored, one_score)
            update += critic.step_seconds(models.value_counts, step_tokens, pass_tokens, seq_len, 0.0)
        if work.ptx_tokens:
            ptx = config.ptx_rows * work.ptx_tokens / self.layout.ranks, work.ptx_tokens, 1.0
            update += policy.forward_seconds(*ptx) + policy.backward_seconds(models.policy_counts, *ptx)
        return seconds + config.updates_per_iteration * update

    def _frozen_seconds(self, rank: PPOWork, counts: Counts, num_passes: int, one_pass: float) -> float:
        """Returns the seconds of passes through a frozen model, which `ppo.memory` may gather once or in each pass."""
        num_gathers = 0 if rank.shares_body else {"fast": 0, "balanced": 1, "small": num_passes}[rank.mode]
        gather = self.times.gather_seconds(self.layout.compute_bytes * counts.total)
        return num_passes * one_pass + num_gathers * gather
