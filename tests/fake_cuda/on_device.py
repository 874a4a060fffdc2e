"""What Heed does on a GPU, counted: kernels, host syncs, uploads and bytes. Run by test_fake_cuda.py."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from lm import block as compiled
from lm import layers
from lm.attention import attention_mask, flash_varlen
from lm.decoding import FixedSteps
from lm.generation import generate
from lm.layers import align_heads, rms_norm, swiglu
from lm.model import LanguageModel, compile_blocks
from lm.native import operators  # noqa: F401  (registers the CPU's operators)
from lm.sampling import Choice, token_logprobs
from lm.source import RandomInit
from tests.fake_cuda import attention, kernels, runtime
from tests.gpu.models import SHAPES, pair, prompts, shape, tokens
from training import engine as engines
from training.config import EngineConfig, OptimizerConfig
from training.engine import Engine, LossAndMetrics
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import pack
from training.recording import RecordableLoss

CUDA = torch.device("cuda")


def test_the_device_counts() -> None:
    """A product and a sum: two kernels, no sync until a number is read; its memory is what CUDA would allocate."""
    x = torch.ones(100, 10, device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with kernels.counted() as counts:
        y = (x @ x.T).sum()
    assert counts.num_syncs == 0
    assert counts.num_kernels == 2
    assert torch.cuda.max_memory_allocated() - before == 100 * 100 * 4 // 512 * 512 + 512 + 512
    with kernels.counted() as counts:
        assert float(y) == 100 * 100 * 10
        x[x[:, 0] > 0]
        x.cpu()
        torch.ones(3).to(CUDA)
    assert sorted(what for what, _ in counts.syncs) == ["_local_scalar_dense", "copy to the CPU", "nonzero"]
    assert counts.uploads.total() == 1


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=CUDA) + torch.ones(3)
    with pytest.raises(RuntimeError, match="a CPU's kernel"):
        torch.ops.heed.rms_norm(torch.ones(3, 4, device=CUDA), torch.ones(4, device=CUDA), 1e-5, False)


def test_a_graph_replays_on_its_memory_and_takes_no_sync() -> None:
    x = torch.ones(3, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2).sum() + 1
    x.fill_(5.0)
    graph.replay()
    assert total.item() == 31
    with pytest.raises(RuntimeError, match="stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        total.item()
    assert runtime.CUDAGraph.num_captures >= 1


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "efficient", "math"])
def test_every_attention_kernel_computes_attention(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against PyTorch on the CPU in fp32, with gradients; flash takes grouped keys, the others do not here."""
    monkeypatch.setattr(attention, "chosen_kernel", lambda *_: kernel)
    dtype, num_kv_heads = (torch.bfloat16, 2) if kernel == "flash" else (torch.float32, 4)
    host = [torch.randn(2, heads, 24, 16, dtype=dtype) for heads in (4, num_kv_heads, num_kv_heads)]
    ours = [part.float().clone().requires_grad_() for part in host]
    theirs = [part.to(CUDA).requires_grad_() for part in host]
    expected, found = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kernel == "flash")
        for q, k, v in (ours, theirs)
    )
    expected.square().sum().backward()
    found.square().sum().backward()
    near = 0.02 if kernel == "flash" else 1e-5
    assert torch.allclose(found.float().cpu(), expected, atol=near)
    for part, wanted in zip(theirs, ours, strict=True):
        assert part.grad is not None
        assert wanted.grad is not None
        assert float((part.grad.cpu() - wanted.grad).norm() / wanted.grad.norm()) < near


def test_varlen_attention_is_that_of_each_sequence() -> None:
    """Two sequences one after another, causal, grouped keys: as two rows of their own."""
    q, k, v = (torch.randn(9, heads, 16, dtype=torch.bfloat16, device=CUDA).requires_grad_() for heads in (4, 2, 2))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=CUDA)
    with kernels.counted() as counts:
        found = varlen_attn(q, k, v, starts, starts, 5, 5, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(found, torch.Tensor)
        found.float().square().sum().backward()
    assert counts.attention == {"varlen": 1, "varlen backward": 1}
    with kernels.counted() as own:  # the ATen operator, without `varlen_attn`'s Python
        again = flash_varlen(*(part.detach().requires_grad_() for part in (q, k, v)), starts, 5, (-1, 0))
        again.float().square().sum().backward()
    assert own.attention == counts.attention
    assert torch.equal(again, found)
    assert counts.kernels - own.kernels == {"zero_": 3}  # a state of random numbers, and gradients of it and of sums
    assert not own.kernels - counts.kernels
    segments = torch.tensor([[1] * 4 + [2] * 5], device=CUDA)
    rows = [part.detach().float().transpose(0, 1)[None].requires_grad_() for part in (q, k, v)]
    mask = attention_mask(segments)[:, None]
    expected = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], mask, enable_gqa=True)
    expected.square().sum().backward()
    assert torch.allclose(found.float(), expected[0].transpose(0, 1), atol=0.02)
    for part, row in zip((q, k, v), rows, strict=True):
        assert part.grad is not None
        assert row.grad is not None
        wanted = row.grad[0].transpose(0, 1)
        assert float((part.grad.float() - wanted).norm() / wanted.norm()) < 0.02
    with pytest.raises(RuntimeError, match="fp16 and bf16"):
        varlen_attn(q.float(), k.float(), v.float(), starts, starts, 5, 5, enable_gqa=True)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_is_never_left_to_cudnn_or_to_the_equation(name: str, dtype: torch.dtype) -> None:
    """Training on packed and on plain rows with gradients, reading prompts, and steps."""
    config = SHAPES[name]
    model = pair(config, dtype)[1]
    rows = pack([([5] * length, [True] * length) for length in (7, 12, 9)], 24, 0)
    layers = config.num_hidden_layers
    with kernels.counted() as packed:
        PackedObjective(rows).loss(model, np.arange(len(rows)), CUDA)[0].backward()
    with kernels.counted() as plain:
        CausalLMObjective(tokens(2, 25)).loss(model, np.arange(2), CUDA)[0].backward()
    with kernels.counted() as sampled:
        generate(
            model, prompts(4, 9), max_new_tokens=3, end_ids=(), choice=Choice(), seeds=range(4), steps="eager"
        )  # fmt: skip
    if dtype == torch.float32:
        assert packed.attention == plain.attention == {"efficient": layers}
        assert sampled.attention == {"efficient": 3 * layers}
        return
    windowed = layers if config.attention_sinks else sum(config.window(layer) > 0 for layer in range(layers))
    assert packed.attention == {"varlen": layers, "varlen backward": layers}
    assert plain.attention == Counter({"flash": layers - windowed}) + Counter(
        {"varlen": windowed, "varlen backward": windowed}
    )
    assert sampled.attention == {"varlen": layers, "efficient": 2 * layers}
    assert not [where for _, where in packed.syncs if "lm/attention" in where]  # segments are on the CPU


# --- norms and SwiGLU ------------------------------------------------------------------------------------------------


def counted_pass(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, autocast: bool = False
) -> tuple[tuple[int, int], ...]:
    """(operations, bytes per number of the result) of a pass and of its gradient."""
    gradient_of = x.detach().requires_grad_()
    with kernels.counted() as forward, torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = function(gradient_of)
    gradient = torch.ones_like(y)
    with kernels.counted() as backward:
        y.backward(gradient)
    return tuple((counts.num_kernels, counts.bytes_moved // y.numel()) for counts in (forward, backward))


@pytest.mark.parametrize(
    ("stream", "expected", "written_out"),
    [(torch.bfloat16, ((1, 4), (1, 6)), ((9, 32), (13, 74))), (torch.float32, ((2, 14), (2, 18)), ((8, 26), (9, 62)))],
    ids=str,
)
def test_a_norm_is_one_pass(
    stream: torch.dtype, expected: tuple[tuple[int, int], ...], written_out: tuple[tuple[int, int], ...]
) -> None:
    """The fused kernel against the formula in PyTorch's operations: with ZeRO's bf16 stream, and under autocast."""
    x = torch.randn(64, 512, device=CUDA, dtype=stream)
    weight = torch.rand(512, device=CUDA, dtype=stream).requires_grad_()
    results = []
    for norm, counts in ((rms_norm, expected), (rms_norm.plain, written_out)):
        run = partial(norm, weight_D=weight, eps=1e-5, dtype=torch.bfloat16)
        assert counted_pass(run, x, autocast=stream == torch.float32) == counts
        assert weight.grad is not None
        results.append((run(x).float(), weight.grad.float()))
        weight.grad = None
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).detach().norm() / wanted.detach().norm()) < 0.01


def test_swiglu_puts_nothing_together() -> None:
    """Four passes over memory for its gradient, into the result itself: 22 bytes per number, of 10 at least."""
    x = torch.randn(64, 1024, device=CUDA, dtype=torch.bfloat16)
    assert counted_pass(swiglu, x) == ((2, 10), (4, 22))


def test_a_vocabulary_that_is_padded_costs_next_to_nothing() -> None:
    """Next to one of 512 tokens: the weight is copied into padded rows, and two ends are set to 0."""
    objective, found = CausalLMObjective(tokens(4, 65) % 500), []
    for vocab_size in (500, 512):
        model = pair(shape(vocab_size=vocab_size), torch.bfloat16)[1]
        align_heads(model, CUDA)
        with kernels.counted() as counts:
            objective.loss(model, np.arange(4), CUDA)[0].backward()
        found.append(counts)
    padded, fitting = found
    assert padded.kernels - fitting.kernels == {"copy_": 1, "fill_": 2}
    num_logits, num_weights = 4 * 64 * 512, 512 * 128
    assert padded.bytes_moved - fitting.bytes_moved < 2 * (2 * num_weights) + 0.1 * 2 * num_logits


def test_compiled_blocks_of_packed_rows_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a block is left to Python: also variable-length attention and the fused norm are in the graph."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.utils.counters.clear()
    rows = pack([([5] * length, [True] * length) for length in (7, 12, 9)], 24, 0)
    losses = []
    for is_compiled in (False, True):
        model = pair(SHAPES["llama"], torch.bfloat16)[1]
        if is_compiled:
            compile_blocks(model)
        with kernels.counted() as counts:
            loss, _ = PackedObjective(rows).loss(model, np.arange(len(rows)), CUDA)
            loss.backward()
        losses.append(float(loss))
        if is_compiled:
            assert counts.attention == {"varlen": 2, "varlen backward": 2}
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- generation ------------------------------------------------------------------------------------------------------


def test_what_a_step_of_generation_launches_and_waits_for() -> None:
    """24 responses of 40 tokens in three lots of 8 rows, once the steps are recorded."""
    _, model = pair(SHAPES["llama"], torch.bfloat16)
    steps = FixedSteps(model)

    def run(max_new_tokens: int) -> kernels.Counts:
        with kernels.counted() as counts:
            generate(
                model, prompts(24, 30), max_new_tokens=max_new_tokens, end_ids=(), choice=Choice(), seeds=range(24),
                max_rows=8, steps=steps,
            )  # fmt: skip
        return counts

    run(40)
    captures = runtime.CUDAGraph.num_captures
    longer, shorter = run(40), run(32)
    assert runtime.CUDAGraph.num_captures == captures
    assert longer.attention == {"varlen": 3 * 2}  # each lot of prompts is read in one pass of two layers
    # Tokens and log-probs of 8 steps at a time are copied back, and nothing else is waited for.
    assert {what for what, _ in longer.syncs} == {"copy to the CPU"}
    assert (longer.num_syncs, shorter.num_syncs) == (3 * 2 * 5, 3 * 2 * 4)
    assert longer.uploads.total() == shorter.uploads.total() <= 3 * 12
    per_step = (longer.num_kernels - shorter.num_kernels) / (3 * 8)
    # The replay counts as one; the others draw a token and copy it into the recorded buffers.
    assert per_step <= 36, longer.kernels


# --- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_gradients", [True, False])
def test_a_head_reads_its_logits_in_chunks(takes_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 positions of 8,192 logits in eight chunks: the same numbers, in 1/8 of the memory for logits."""
    _, model = pair(shape(vocab_size=8192), torch.bfloat16)
    head, generator = model.head, torch.Generator().manual_seed(0)
    states = torch.randn(4, 64, 128, generator=generator).to(CUDA, torch.bfloat16).requires_grad_(takes_gradients)
    targets, weights = torch.randint(8192, (4, 64), generator=generator).to(CUDA), torch.randn(4, 64).to(CUDA)
    found, peaks = [], []
    for chunk in (2**28, 2**18):
        monkeypatch.setattr(layers, "CHUNK_LOGITS", chunk)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(takes_gradients):
            logprobs = head(states, token_logprobs, targets)
            assert logprobs.shape == targets.shape
            results = [logprobs.detach().clone()]
            if takes_gradients:
                results += torch.autograd.grad((logprobs * weights).sum(), [states, head.weight])
        peaks.append(torch.cuda.max_memory_allocated() - held)
        found.append([part.float() for part in results])
        del logprobs, results
    for whole, parts in zip(*found, strict=True):
        assert float((whole - parts).norm() / whole.norm()) < 0.01
    table = 2 * 256 * 8192
    assert peaks[0] - peaks[1] > 0.8 * table * (2 if takes_gradients else 1), peaks


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_grouped", "per_layer"), [(False, 106), (True, 90)])
def test_what_a_training_step_launches(is_grouped: bool, per_layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a layer in two micro-batches. Clip, AdamW and zeroing take as many with any number of layers.

    Grouped, the layer's four weights are not rounded (4), nor their gradients widened (8) and added (4) by themselves.
    """
    if not is_grouped:
        monkeypatch.setattr(engines, "trained_products", lambda _: [])
    objective, found = CausalLMObjective(tokens(8, 33)), []
    config = EngineConfig(precision="bf16", trackers=())
    for num_layers in (1, 2):
        source = RandomInit(partial(LanguageModel, shape(num_hidden_layers=num_layers)), seed=0)
        optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant")
        engine: Engine[LanguageModel] = Engine(source, optimizer, config, world_size=1, micro_batch=4)

        def loss(rows: np.ndarray, engine: Engine[LanguageModel] = engine) -> LossAndMetrics:
            return objective.loss(engine.model, rows, engine.device)[0] / 256, {}

        for _ in range(2):  # the first step makes the optimizer's states
            with kernels.counted() as passes:
                engine.accumulate(np.split(np.arange(8), 2), loss)
            with kernels.counted() as step:
                engine.step()
        found.append((passes, step))
        engine.close()
    (one, one_step), (two, two_step) = found
    assert two.num_kernels - one.num_kernels == per_layer
    assert one_step.num_kernels == two_step.num_kernels == 16, two_step.kernels
    assert two.num_syncs == 0
    assert (two_step.num_syncs, two_step.kernels["_fused_adamw_"]) == (1, 2)  # loss and norm; matrices and vectors
    calls = {name: count for name, count in two.kernels.items() if name.startswith("_foreach")}
    assert calls == ({"_foreach_copy_": 3, "_foreach_add_": 1} if is_grouped else {})


# --- recorded micro-batches ------------------------------------------------------------------------------------------

# 64 counted tokens in each row and 4 sequences in each pair of rows: nothing is padded.
EVEN = [([5 + place % 400 for place in range(66)], [place > 1 for place in range(66)]) for _ in range(8)]
RAGGED = [([7 + place % 90 for place in range(n)], [place > n // 3 for place in range(n)]) for n in range(9, 57)]


def recorded_steps(
    objective: CausalLMObjective | PackedObjective, *, records: bool, **options: object
) -> tuple[list[tuple[float, float]], list[torch.Tensor], list[kernels.Counts], Engine[LanguageModel]]:
    """Losses and norms of steps of two micro-batches, the weights after them, and what each step's passes did."""
    source = RandomInit(partial(LanguageModel, SHAPES["llama"], 0.1), seed=0)
    config = EngineConfig.model_validate(
        {"precision": "bf16", "trackers": (), "record_micro_batches": records, **options}
    )
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant")
    engine: Engine[LanguageModel] = Engine(source, optimizer, config, world_size=1, micro_batch=2)
    engine.model.train()
    found, counts = [], []

    recorded_loss = RecordableLoss(objective, engine.model)
    for number in range(3):
        parts = np.split((np.arange(4) + number) % len(objective), 2)
        count = sum(objective.count(part) for part in parts)

        def plain_loss(rows: np.ndarray, count: float = count, seed: int = number) -> LossAndMetrics:
            return objective.loss(engine.model, rows, engine.device, seed)[0] / count, {}

        with kernels.counted() as passes:
            if records:
                engine.accumulate_recorded(recorded_loss.inputs(parts, count, number), recorded_loss)
            else:
                engine.accumulate(parts, plain_loss)
        counts.append(passes)
        found.append(engine.step())
    weights = [parameter.detach().cpu() for parameter in engine.module.parameters()]
    return found, weights, counts, engine


@pytest.mark.parametrize("rows", ["whole", "packed"])
def test_a_recorded_micro_batch_is_one_launch_of_the_same_bits(rows: str) -> None:
    """Copies of inputs, a replay, and nothing that waits: where nothing is padded, the bits of plain steps."""
    objective = CausalLMObjective(tokens(8, 33)) if rows == "whole" else PackedObjective(pack(EVEN, 133, 0))
    expected, weights, plain, engine = recorded_steps(objective, records=False)
    engine.close()
    captures = runtime.CUDAGraph.num_captures
    found, recorded_weights, counts, engine = recorded_steps(objective, records=True)
    engine.close()
    assert runtime.CUDAGraph.num_captures == captures + 1
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(recorded_weights, weights, strict=True))
    num_inputs = {"whole": 4, "packed": 9}[rows]
    last = counts[-1]
    assert not last.syncs
    assert not last.uploads
    assert last.kernels == {"copy_": 2 * num_inputs, "graph": 2, "_foreach_copy_": 1}  # the last rounds all weights
    assert plain[-1].num_kernels > 500


@pytest.mark.parametrize(
    "options",
    [{"checkpoint_activations": True}, pytest.param({"compile_blocks": True}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_recordings_serve_batches_of_other_lengths(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted tokens and sequences are padded, so few recordings serve all batches, with the losses of plain steps."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(layers, "CHUNK_LOGITS", 512 * 32)  # the head's backward pass computes logits again
    objective = PackedObjective(pack(RAGGED, 128, 0))
    expected, _, _, engine = recorded_steps(objective, records=False, **options)
    engine.close()
    captures = runtime.CUDAGraph.num_captures
    found, _, _, engine = recorded_steps(objective, records=True, **options)
    assert engine._recorded is not None
    assert engine._recorded.num_recordings == runtime.CUDAGraph.num_captures - captures <= 4
    engine.close()
    assert np.allclose(found, expected, rtol=0.01)
