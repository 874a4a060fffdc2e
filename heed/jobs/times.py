"""Times of a rank's work, and the hardware that `heed plan` knows. They are rough: docs/plan.md compares them.

On a GPU, a pass takes the time of its matrix products at a share of the peak, plus the time in which its other kernels
read and write. What DDP and ZeRO send meanwhile counts only as far as it takes longer. On a CPU, only products count,
and in sampling also what is read.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import lm.native.install  # noqa: F401  # matrix products as a model's layers compute them
from heed.jobs.memory import Counts, Layout, forward_pass
from lm.cache import state_bytes
from lm.config import ModelConfig
from lm.inspection import block_bytes, cache_bytes_per_token, flops_per_source_token, flops_per_token, num_unread
from lm.layers import linear

GIB = 2**30
# Assumed, until they are measured on a GPU.
BLOCK_SECONDS = (1e-4, 2.6e-4)  # least time of a block's forward and backward pass: 17 and 43 launches of 6 µs
STEP_SECONDS = 5e-5  # added per block of a decoding step, in which kernels are small (17 of 3 µs), and twice outside
EXCHANGE_SECONDS = 2e-5  # of an all-reduce of a decoding step's states among a node's GPUs
KEPT_READS = (2, 4)  # passes over a block's kept activations by kernels that are no products: forward, backward
BANDWIDTH_SHARE = 0.8  # of the memory's peak, reached by kernels that read and write much
STEP_BYTES = 28  # that AdamW reads and writes per trained number: weight, two moments and gradient in fp32
LINK_SHARE = 0.8  # of NVLink's and the network's peak, reached by NCCL (nccl-tests on A100: 240 of 300 GB/s)


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
        """The share of `flops` to expect, if the user gives none. On a GPU it is the share that matrix products reach,
        a little below the four fifths of the best ones (792 of an H100's 989 TFLOP/s: S. Bekman, Machine Learning
        Engineering). On a CPU it is that of whole steps, relative to the measured rate of a product.
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
        x, weight = torch.randn(2, 1024, 1024).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        source = torch.zeros(16_000_000)
        rate = 2 * 1024**3 / min(_seconds(lambda: linear(x, weight, None)) for _ in range(8))
        bandwidth = source.nbytes / min(_seconds(source.sum) for _ in range(5))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        at_once = min(ranks, os.cpu_count() or 1)
        return Hardware("cpu", memory // at_once, rate / at_once, bandwidth / at_once, 0.0, is_gpu=False)
    if name not in GPUS:
        raise ValueError(f"--gpu {name!r}: one of cpu, {', '.join(GPUS)} was expected")
    return GPUS[name]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Times:
    """Seconds of work on ranks whose products reach the fraction `share_of_peak` of the hardware's peak.

    `seq_len` is the mean length of rows, and `head_share` the fraction of tokens that have logits.
    """

    layout: Layout
    hardware: Hardware
    share_of_peak: float

    def forward(self, model: ModelConfig, tokens: float, seq_len: int, head_share: float) -> float:
        """Returns the seconds of one rank's pass over `tokens`."""
        return self._pass(model, tokens, seq_len, head_share, 1, is_backward=False)

    def backward(self, counts: Counts, tokens: float, seq_len: int, head_share: float) -> float:
        """Returns the seconds of the backward pass, which stops at frozen blocks. It computes two products per forward
        product, but only one through frozen maps with adapters, whose weights get no gradient. Recomputed blocks run
        forward again.
        """
        model, products = counts.config, 1 if counts.has_adapters else 2
        seconds = self._pass(model, tokens, seq_len, head_share, products, is_backward=True)
        seconds += self.layout.recomputes * self.forward(model, tokens, seq_len, 0.0)
        return seconds * counts.trained_layers / _num_layers(model)

    def _pass(
        self, model: ModelConfig, tokens: float, seq_len: int, head_share: float, products: int, *, is_backward: bool
    ) -> float:
        flops = products * self._flops(model, seq_len, head_share)
        computed = tokens * flops / (self.hardware.flops * self.share_of_peak)
        if not self.layout.is_gpu:
            return computed
        kept = block_bytes(model, forward_pass(self.layout, 1, seq_len)) / seq_len
        logits = (1 + is_backward) * self.layout.compute_bytes * head_share * model.vocab_size
        moved = tokens * (KEPT_READS[is_backward] * _num_layers(model) * kept + logits)
        return max(BLOCK_SECONDS[is_backward] * _num_layers(model), computed + self._reading(moved))

    def _flops(self, model: ModelConfig, seq_len: int, head_share: float) -> float:
        """Returns a forward pass's FLOPs per token. A causal token attends to half of its row on average; on a CPU all
        pairs are computed, as for encoders.
        """
        context = (seq_len + 1) // 2 if model.kind == "decoder" and self.layout.is_gpu else seq_len
        flops = float(flops_per_token(model, context))
        if model.kind == "encoder-decoder":
            flops += flops_per_source_token(model, context)
        head = 0 if model.kind == "encoder" else 2 * model.vocab_size * model.hidden_size
        return flops - (1 - head_share) * head

    def _reading(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.bytes_per_second * BANDWIDTH_SHARE)

    def gather(self, num_bytes: float) -> float:
        """Returns the seconds in which all ranks gather `num_bytes` from the part that each has, or reduce and scatter
        as many. Between nodes, NCCL's rings use the network cards of all of a node's GPUs.
        """
        ranks, rate = self.layout.ranks, self.hardware.link_bytes_per_second
        per_node = self.layout.ranks_per_node or ranks
        if ranks > per_node:
            rate = min(rate, per_node * self.hardware.network_bytes_per_second)
        return num_bytes * (ranks - 1) / ranks / (rate * LINK_SHARE) if self.layout.is_gpu else 0.0

    def step(self, counts: Counts, tokens: float, pass_tokens: int, seq_len: int, head_share: float) -> float:
        """Returns the seconds of one optimizer step over `tokens` per rank, in passes of up to `pass_tokens` of them.

        Each step without ZeRO and at ZeRO-1 has one all-reduce of the gradients, which sends twice, and ZeRO-2 one per
        pass; backward passes hide them. In each pass, ZeRO-3 gathers the weights twice and reduces gradients. Nothing
        hides the gather of weights with which ZeRO-1 and 2 end a step.
        """
        num_passes, stage = max(1, math.ceil(tokens / pass_tokens)), self.layout.zero_stage
        of_one = tokens / num_passes, seq_len, head_share
        forward, backward = self.forward(counts.config, *of_one), self.backward(counts, *of_one)
        gradients, weights = (self.gather(self.layout.weight_bytes * n) for n in (counts.trained, counts.total))
        num_reducing = num_passes if stage >= 2 else 1
        sent, hides = (2 * weights + gradients, forward + backward) if stage == 3 else (2 * gradients, backward)
        last = gradients if stage in (1, 2) else 0.0
        last += self._reading(STEP_BYTES * counts.trained / (self.layout.ranks if stage else 1)) * self.layout.is_gpu
        return num_passes * (forward + backward) + num_reducing * max(0.0, sent - hides) + last

    def sampling(
        self, counts: Counts, rows: int, at_once: int, seq_len: int, response_tokens: int, team_size: int = 1
    ) -> float:
        """Returns the seconds in which each rank samples `rows` responses; `team_size` ranks sample theirs together,
        `at_once` at a time.
        """
        rows *= team_size
        num_steps = math.ceil(rows / at_once) * response_tokens
        step = num_steps * self.decoding_step(counts, min(rows, at_once), seq_len, team_size)
        return self.prefill(counts, rows * (seq_len - response_tokens), seq_len, team_size) + step

    def prefill(self, counts: Counts, tokens: float, seq_len: int, team_size: int = 1) -> float:
        """Returns the seconds in which a team reads `tokens` of prompts, whose keys and values it keeps."""
        flops = self._flops(counts.config, seq_len, 1.0)
        return tokens * flops / (self.hardware.flops * self.share_of_peak * team_size)

    def decoding_step(self, counts: Counts, rows: int, seq_len: int, team_size: int = 1) -> float:
        """Returns the seconds in which a team draws one token in each of `rows`. Each rank has its part of the weights
        and heads.

        A step reads all weights and the cache. A GPU computes meanwhile, and two all-reduces per layer add up the parts
        of a team.
        """
        model, c = counts.config, self.layout.compute_bytes
        read = c * (counts.total - num_unread(model, rows)) + cache_bytes_per_token(model, c) * rows * seq_len
        read += 2 * state_bytes(model, c) * rows  # which it also writes
        computed = self.prefill(counts, rows, seq_len, team_size)
        if not self.layout.is_gpu:
            return read / (self.hardware.bytes_per_second * self.share_of_peak) + computed
        step = max(self._reading(read / team_size), computed)
        step += STEP_SECONDS * (_num_layers(model) + 2)
        return step + 2 * EXCHANGE_SECONDS * _num_layers(model) * (team_size > 1)


def _num_layers(model: ModelConfig) -> int:
    return model.num_hidden_layers + model.num_encoder_layers


def assumptions(chosen: Hardware, share: float) -> str:
    """Returns what estimated times and costs assume, and what they leave out. `share` is that of the peak FLOP/s."""
    read_share, sends = BANDWIDTH_SHARE if chosen.is_gpu else share, ""
    if chosen.is_gpu:
        link, network = chosen.link_bytes_per_second / 1e9, chosen.network_bytes_per_second * 8e-9
        sends = f", and GPUs send {link:,.0f} GB/s in a node and {network:,.3g} Gbit/s between nodes (--network)"
    return (
        f"Times and costs are rough: products run at {share:.0%} of {chosen.flops / 1e12:.3g} TFLOP/s (--share), memory"
        f" is read at {read_share:.0%} of {chosen.bytes_per_second / 1e9:,.0f} GB/s{sends}. A rank costs"
        f" ${chosen.dollars_per_hour:.2f} per hour (--price). Loading, evaluation, checkpoints, offloading and the"
        " overhead of each step, which dominates in steps of less than a second, are not counted."
    )
