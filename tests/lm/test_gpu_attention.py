"""Which kernel each path calls on a GPU, with which shapes and masks: stand-ins record the calls and compute.

The kernels themselves run in tests/gpu.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm import attention, decoding, generation, model
from lm.attention import flash_takes, packed_mask, takes_packed_rows
from lm.config import ModelConfig
from lm.decoding import FixedSteps
from lm.encoder import EncoderDecoder, EncoderModel
from lm.generation import Batch
from lm.model import LanguageModel, init_weights
from tests.lm.conftest import DECODERS, small_decoder

Call = tuple[Any, ...]
SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]])
STARTS = [0, 3, 5, 6, 7, 12]
TOKENS = torch.tensor([[5, 1, 2, 4, 6, 0], [7, 9, 9, 0, 11, 10]])
sdpa = F.scaled_dot_product_attention


def looped(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: tuple[int, int]) -> Tensor:
    """Variable-length attention, for one sequence and one query at a time."""
    assert starts.dtype == torch.int32
    assert starts[-1] == len(q)
    left, right = window
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    rows = []
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        assert 0 < end - start <= longest
        for place in range(start, end):
            first = start if left < 0 else max(start, place - left)
            last = end if right < 0 else min(end, place + right + 1)
            scores = torch.einsum("nh,snh->ns", q[place], k[first:last]) / q.shape[2] ** 0.5
            rows.append(torch.einsum("ns,snh->nh", scores.softmax(dim=-1), v[first:last]))
    return torch.stack(rows)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Call]]:
    """Makes attention run as on a GPU; returns the recorded calls."""
    calls: list[Call] = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: tuple[int, int]) -> Tensor:
        calls.append(("varlen", tuple(q.shape), tuple(k.shape), starts.tolist(), window))
        return looped(q, k, v, starts, longest, window)

    def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: bool) -> Tensor:
        flags = tuple(sorted(name for name, value in options.items() if value))
        seen = None if mask is None else (tuple(mask.shape), mask.dtype)
        calls.append(("fused", tuple(q.shape), tuple(k.shape), seen, flags))
        assert "enable_gqa" not in flags or mask is None, "no kernel has both"
        return sdpa(q, k, v, mask, **options)

    def start() -> list[Call]:
        for module in (attention, model):
            monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
        monkeypatch.setattr(attention, "flash_varlen", varlen)
        monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
        monkeypatch.setattr(attention, "flash_takes", lambda *_: True)  # the small models are in fp32
        return calls

    return start


@pytest.fixture(autouse=True)
def _no_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


def windows(config: ModelConfig) -> list[tuple[int, int]]:
    found = [config.window(layer) for layer in range(config.num_hidden_layers) if not config.is_linear(layer)]
    return [(window - 1 if window else -1, 0) for window in found]


def in_kernels(config: ModelConfig, calls: list[Call]) -> list[Call]:
    """Returns the calls, or none where scores are capped, which no kernel does."""
    return [] if config.attn_logit_softcapping else calls


def heads(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


def test_packed_rows_and_their_gradients(decoder: LanguageModel, on_gpu: Callable[[], list[Call]]) -> None:
    def run() -> tuple[Tensor, list[Tensor]]:
        logits = decoder(TOKENS, SEGMENTS, SEGMENTS > 0)
        gradients = torch.autograd.grad(logits.square().sum(), list(decoder.parameters()))
        return logits, list(gradients)

    expected, expected_gradients = run()
    calls = on_gpu()
    found, gradients = run()
    N, G, H = heads(decoder.config)
    expected_calls: list[Call] = [
        ("varlen", (12, N, H), (12, G, H), STARTS, window) for window in windows(decoder.config)
    ]
    assert calls == in_kernels(decoder.config, expected_calls)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-4, rtol=1e-4)


def test_rows_of_one_sequence(decoder: LanguageModel, on_gpu: Callable[[], list[Call]]) -> None:
    expected = decoder(TOKENS)
    calls = on_gpu()
    torch.testing.assert_close(decoder(TOKENS), expected, atol=1e-5, rtol=1e-5)
    N, G, H = heads(decoder.config)
    causal = ("fused", (2, N, 6, H), (2, G, 6, H), None, ("enable_gqa", "is_causal"))
    # A window as long as the row excludes nothing.
    expected_calls: list[Call] = [
        ("varlen", (12, N, H), (12, G, H), [0, 6, 12], (left, right)) if 0 <= left < 5 else causal
        for left, right in windows(decoder.config)
    ]
    assert calls == in_kernels(decoder.config, expected_calls)


@pytest.mark.parametrize("recorded", [False, True])
def test_prompts_and_steps(
    decoder: LanguageModel, recorded: bool, on_gpu: Callable[[], list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1, 5, 2 and 3 tokens, at most 8 per pass, followed by two tokens each."""
    prompts = [[5], [1, 2, 4, 6, 7], [9, 9], [0, 11, 10]]
    steps = FixedSteps(decoder) if recorded else None

    def run() -> list[Tensor]:
        running = Batch.start(decoder, range(4), prompts, 3)
        logits = [running.logits_BV.clone()]
        for tokens in ([3, 1, 4, 1], [5, 9, 2, 6]):
            running.feed(torch.tensor(tokens), steps)
            logits.append(running.logits_BV.clone())
        return logits

    expected = run()
    calls = on_gpu()
    monkeypatch.setattr(generation, "reads_packed", lambda _: True)
    monkeypatch.setattr(decoding, "PROMPT_TOKENS", 8)
    torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-5)
    N, G, H = heads(decoder.config)
    reads = [("varlen", (8, N, H), (8, G, H), [0, 1, 6, 8], window) for window in windows(decoder.config)]
    alone = ("fused", (1, N, 3, H), (1, G, 3, H), None, ("enable_gqa", "is_causal"))
    reads += [
        ("varlen", (3, N, H), (3, G, H), [0, 3], (left, right)) if 0 <= left < 2 else alone
        for left, right in windows(decoder.config)
    ]
    # 8 columns: the whole cache if the step is recorded.
    own_steps: list[Call] = [
        ("fused", (4, G, N // G, H), (4, G, S, H), ((4, 1, 1, S), torch.float32), ())
        for S in ((8, 8) if recorded else (6, 7))
        for _ in windows(decoder.config)
    ]
    if decoder.config.num_linear_layers:  # prompts are padded, with a mask
        assert calls[-len(own_steps) :] == own_steps
    else:
        assert calls == in_kernels(decoder.config, [*reads, *own_steps])


def test_an_encoder_s_padding(on_gpu: Callable[[], list[Call]]) -> None:
    config = ModelConfig(
        kind="encoder", vocab_size=12, max_position_embeddings=16, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
    )  # fmt: skip
    model = EncoderModel(config, 0.0).eval()
    init_weights(model, 0)
    padded = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    expected = [model.hidden(TOKENS, segments, None, None) for segments in (padded, None)]
    calls = on_gpu()
    found = [model.hidden(TOKENS, segments, None, None) for segments in (padded, None)]
    torch.testing.assert_close(found[0][padded > 0], expected[0][padded > 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    assert [call[3:] for call in calls] == [([0, 4, 6, 12], (-1, -1)), ([0, 6, 12], (-1, -1))]


def test_an_encoder_decoder(on_gpu: Callable[[], list[Call]]) -> None:
    """Four query heads share two key heads. If every row has its own source, keys are repeated, except with one query
    at a time, when the heads share them."""
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=12, max_position_embeddings=16, hidden_size=16, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16,
    )  # fmt: skip
    model = EncoderDecoder(config).eval()
    init_weights(model, 0)

    def run() -> list[Tensor]:
        running = Batch.start(model, [0, 1], [[3], [3]], 2, [[5, 1, 2], [7, 9]])
        running.feed(torch.tensor([4, 4]))
        padded = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
        return [running.logits_BV, model(TOKENS, TOKENS[:, :4], padded)]

    expected = run()
    calls = on_gpu()
    torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-5)
    one, several = ("fused", (2, 2, 2, 4), (2, 2, 3, 4)), ("fused", (2, 4, 4, 4), (2, 4, 6, 4))
    assert [call[:3] for call in calls if call[0] == "fused" and call[2][2] == 3] == [one, one]
    assert [call[:3] for call in calls if call[0] == "fused" and call[2][2] == 6] == [several]
    assert all("enable_gqa" not in call[4] for call in calls if call[0] == "fused" and call[3] is not None)


def test_fp32_has_its_own_kernel(on_gpu: Callable[[], list[Call]], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder(DECODERS["llama"])
    expected = decoder(TOKENS), decoder(TOKENS, SEGMENTS, SEGMENTS > 0)
    calls = on_gpu()
    monkeypatch.setattr(attention, "flash_takes", flash_takes)
    torch.testing.assert_close(
        (decoder(TOKENS), decoder(TOKENS, SEGMENTS, SEGMENTS > 0)), expected, atol=1e-5, rtol=1e-5
    )
    N, _, H = heads(decoder.config)
    assert {call[:3] for call in calls} == {("fused", (2, N, 6, H), (2, N, 6, H))}
    assert [call[3] for call in calls] == [None] * 2 + [((2, 1, 6, 6), torch.bool)] * 2


def test_flash_attention_takes_half_precision_and_heads_of_multiples_of_8() -> None:
    assert flash_takes(torch.bfloat16, 128)
    assert flash_takes(torch.float16, 256)
    assert not flash_takes(torch.float32, 128)
    assert not flash_takes(torch.bfloat16, 100)
    assert not flash_takes(torch.bfloat16, 264)
    weight = torch.ones(1)
    assert not takes_packed_rows(weight.bfloat16(), 64)  # on a CPU


def test_autocast_decides_the_type(on_gpu: Callable[[], list[Call]]) -> None:
    on_gpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "flash_takes", flash_takes)
        assert not takes_packed_rows(torch.ones(1), 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert takes_packed_rows(torch.ones(1), 64)


def test_sequences_of_packed_rows_by_hand() -> None:
    found = packed_mask(SEGMENTS, torch.device("cpu"), causal=True)
    assert found.starts.tolist() == STARTS
    assert found.longest == 6


def test_cudnn_is_not_used() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()
