"""Attention, its masks and positions against loops, PyTorch's own product, complex numbers and papers' equations."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lm.attention import GroupedMask, attend, attention_mask, grouped_mask, sliding_window_mask, with_window
from lm.cache import KVCache, PromptWriter, TokenWriter
from lm.config import ModelConfig, RopeScaling
from lm.model import ScalarModel
from lm.positions import attention_sharpening, rotary_frequencies, rotary_tables, rotate, sinusoids


def looped_attention(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, allowed_BTS: Tensor) -> Tensor:
    """Attention for one head and one query at a time, in double precision."""
    B, N, T, H = q_BNTH.shape
    G, S = k_BGSH.shape[1:3]
    out = torch.zeros(B, N, T, H, dtype=torch.float64)
    for b in range(B):
        for n in range(N):
            g = n // (N // G)
            for t in range(T):
                keys = [s for s in range(S) if allowed_BTS[b, t, s]]
                scores = [float(q_BNTH[b, n, t].double() @ k_BGSH[b, g, s].double()) / math.sqrt(H) for s in keys]
                exps = [math.exp(score - max(scores)) for score in scores]
                for weight, s in zip(exps, keys, strict=True):
                    out[b, n, t] += weight / sum(exps) * v_BGSH[b, g, s].double()
    return out.float()


def draw(N: int, G: int, B: int = 2, T: int = 7, H: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, heads, T, H, generator=generator) for heads in (N, G, G))
    return q, k, v


SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 3]])


@pytest.mark.parametrize(("N", "G"), [(4, 4), (4, 2), (6, 1), (1, 1)])
def test_attend_equals_a_loop_over_heads_and_queries(N: int, G: int) -> None:
    q, k, v = draw(N, G)
    causal = torch.tensor([[[s <= t for s in range(7)] for t in range(7)]] * 2)
    torch.testing.assert_close(attend(q, k, v, None), looped_attention(q, k, v, causal), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("N", "G"), [(4, 4), (4, 2)])
def test_attend_over_packed_segments_equals_a_loop(N: int, G: int) -> None:
    q, k, v = draw(N, G)
    rows = SEGMENTS.tolist()
    allowed = torch.tensor([[[s <= t and row[s] == row[t] for s in range(7)] for t in range(7)] for row in rows])
    found = attend(q, k, v, attention_mask(SEGMENTS))
    torch.testing.assert_close(found, looped_attention(q, k, v, allowed), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("N", "G"), [(4, 4), (4, 2), (4, 1)])
def test_the_cpu_path_equals_pytorchs_product_in_value_and_gradient(N: int, G: int, packed: bool) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in draw(N, G))
    mask = attention_mask(SEGMENTS) if packed else None
    theirs = scaled_dot_product_attention(
        q, k, v, None if mask is None else mask[:, None], is_causal=mask is None, enable_gqa=True
    )
    ours = attend(q, k, v, mask)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad((theirs * direction).sum(), (q, k, v))
    found = torch.autograd.grad((ours * direction).sum(), (q, k, v))
    for ours_gradient, their_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_gradient, their_gradient, atol=1e-5, rtol=1e-4)


def test_one_query_over_many_keys_equals_the_last_row_of_all_queries() -> None:
    q, k, v = draw(4, 2)
    everything = torch.ones(2, 1, 7, dtype=torch.bool)
    torch.testing.assert_close(attend(q[:, :, -1:], k, v, everything), attend(q, k, v, None)[:, :, -1:])


def test_mask_of_a_packed_row_by_hand() -> None:
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert attention_mask(torch.tensor([[1, 1, 2, 2, 0]]))[0].int().tolist() == expected


def test_rotation_is_multiplication_by_a_unit_complex_number() -> None:
    H, theta = 8, 500.0
    x_BTNH = torch.randn(2, 5, 3, H, generator=torch.Generator().manual_seed(1))
    positions_BT = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 1, 30, 2]])
    found = rotate(x_BTNH, rotary_tables(positions_BT, H, theta, None, torch.float32))
    for b in range(2):
        for t in range(5):
            for i in range(H // 2):
                angle = float(positions_BT[b, t]) * theta ** (-2 * i / H)
                turn = complex(math.cos(angle), math.sin(angle))
                for n in range(3):
                    pair = complex(float(x_BTNH[b, t, n, i]), float(x_BTNH[b, t, n, i + H // 2])) * turn
                    assert float(found[b, t, n, i]) == pytest.approx(pair.real, abs=1e-5)
                    assert float(found[b, t, n, i + H // 2]) == pytest.approx(pair.imag, abs=1e-5)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 1, 6, generator=generator) for _ in range(2))

    def product(at_q: int, at_k: int) -> float:
        tables = [rotary_tables(torch.tensor([[at]]), 6, 100.0, None, torch.float32) for at in (at_q, at_k)]
        return float((rotate(q, tables[0]) * rotate(k, tables[1])).sum())

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


CACHED = ModelConfig(
    vocab_size=8, max_position_embeddings=8, hidden_size=4, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, intermediate_size=4,
)  # fmt: skip


def test_a_step_reads_what_prompts_and_steps_wrote() -> None:
    """Two prompts of 3 and 2 tokens, padded on the left, followed by one token each."""
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(2, 2, 1, 4, 4, generator=generator) for _ in range(2))  # [layer, B, G, T, H]
    cache = KVCache.empty(CACHED, 3, 5, like=k)
    places, slots, columns = torch.tensor([0, 1, 2, 4, 5]), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    for layer in range(2):
        writer = PromptWriter(cache, places, slots, columns)
        keys, values = writer.append(layer, k[layer, :, :, :3], v[layer, :, :, :3])
        assert torch.equal(keys, k[layer, :, :, :3])
        assert torch.equal(values, v[layer, :, :, :3])
        for found, given in zip(TokenWriter(cache, torch.tensor([3, 2]), 4).append(
            layer, k[layer, :, :, 3:], v[layer, :, :, 3:]
        ), (k[layer], v[layer]), strict=True):  # fmt: skip
            assert torch.equal(found[0], given[0])
            assert torch.equal(found[1, :, :3], given[1, :, 1:])
    assert not cache.keys[:, 2].any()


def test_slots_are_copied_as_if_all_at_once() -> None:
    k = torch.arange(2 * 4 * 5.0).view(2, 4, 1, 5, 1).expand(-1, -1, -1, -1, 4).clone()
    cache = KVCache(k.clone(), -k)
    cache.copy_slots([(1, 0), (0, 1), (1, 3)], num_columns=3)
    assert torch.equal(cache.keys[:, [0, 1, 3], :, :3], k[:, [1, 0, 1], :, :3])
    assert torch.equal(cache.keys[:, :, :, 3:], k[:, :, :, 3:])
    assert torch.equal(cache.keys[:, 2], k[:, 2])
    assert torch.equal(cache.values, -cache.keys)


@pytest.mark.parametrize("window", [1, 3, 6])
def test_a_band_by_hand(window: int) -> None:
    expected = torch.tensor([[[0 <= t - s < window for s in range(6)] for t in range(6)]])
    everything = torch.tensor([[[s <= t for s in range(6)] for t in range(6)]] * 2)
    found = sliding_window_mask(everything, window, 6, torch.device("cpu"))
    assert found is not None
    assert torch.equal(found, expected.expand(2, 6, 6))
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    plain = sliding_window_mask(None, window, 6, torch.device("cpu"))
    if window == 6:
        assert plain is None
    else:
        assert plain is not None
        assert torch.equal(plain, causal & causal.triu(1 - window))


PACKED = torch.tensor([[1, 1, 1, 2, 2, 3, 4, 4, 4, 4], [1, 2, 2, 2, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 2, 0, 0, 0, 0]])


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("N", "G"), [(4, 4), (4, 2)])
def test_groups_of_sequences_equal_a_mask_in_value_and_gradient(N: int, G: int, causal: bool, window: int) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in draw(N, G, B=3, T=10))
    whole = sliding_window_mask(attention_mask(PACKED, causal=causal), window, 10, torch.device("cpu"))
    grouped = with_window(grouped_mask(PACKED, causal=causal), window, PACKED, packs=False)
    assert isinstance(grouped, GroupedMask)
    assert [(g.num_sequences, g.longest) for g in grouped.groups] == [(2, 7), (2, 4), (1, 2), (3, 1)]
    real_B1T1 = (PACKED > 0)[:, None, :, None]
    theirs, ours = (attend(q, k, v, mask) * real_B1T1 for mask in (whole, grouped))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad((theirs * direction).sum(), (q, k, v))
    found = torch.autograd.grad((ours * direction).sum(), (q, k, v))
    for ours_gradient, their_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_gradient, their_gradient, atol=1e-5, rtol=1e-4)


def test_no_score_between_two_sequences_is_computed() -> None:
    """20 sequences of 5 in a row of 100 cost 20 squares of 5, not a square of 100."""
    grouped = grouped_mask(torch.arange(1, 21).repeat_interleave(5)[None], causal=True)
    assert [(g.num_sequences, g.longest, g.mask) for g in grouped.groups] == [(20, 5, None)]


@pytest.mark.parametrize("segments", [[1, 1, 1, 0], [1, 2, 2, 0]])
def test_only_a_lookup_reads_the_embedding(segments: list[int]) -> None:
    """ZeRO-3 gathers a weight wherever a pass reads it, so this must not depend on what is in a rank's rows."""
    reads: list[str] = []

    class Watched(dict[str, nn.Parameter | None]):
        def __getitem__(self, name: str) -> nn.Parameter | None:
            reads.append(name)
            return super().__getitem__(name)

    model = ScalarModel(CACHED)
    embedding = model.decoder.embedding
    embedding._parameters = Watched(embedding._parameters)
    model(torch.tensor([[3, 4, 5, 0]]), torch.tensor([segments]))
    assert reads == ["weight"]


CPU = torch.device("cpu")


def test_sinusoids_by_hand() -> None:
    found = sinusoids(torch.tensor([[0, 3]]), 4)[0]
    assert found[0].tolist() == [0.0, 1.0, 0.0, 1.0]
    expected = [math.sin(3), math.cos(3), math.sin(3 / 100), math.cos(3 / 100)]
    assert found[1].tolist() == pytest.approx(expected, abs=1e-6)


def shift_matrix(num_tokens: int, width: int) -> Tensor:
    """Returns the linear map [D, D] with `sinusoids(t + n) = shift_matrix(n) @ sinusoids(t)` for every t.

    It rotates each pair (sin, cos) by its own angle, num_tokens · 10000^(-2i/D): relative positions are linear.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    angles_i = num_tokens * 10_000.0**-exponents
    turns = [torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) for a in angles_i.tolist()]
    return torch.block_diag(*turns)


@pytest.mark.parametrize("width", [4, 18])
@pytest.mark.parametrize("k", [1, 7, -5])
def test_a_shift_by_k_is_the_linear_map_e_of_t_plus_k_is_t_to_the_k_e_of_t(width: int, k: int) -> None:
    one = shift_matrix(1, width).double()
    shift = torch.linalg.matrix_power(one, k)  # T^k; for negative k, the power of the inverse
    torch.testing.assert_close(shift, shift_matrix(k, width).double(), atol=1e-5, rtol=0)
    t = torch.arange(8, 40)
    here, there = sinusoids(t[None], width)[0].double(), sinusoids(t[None] + k, width)[0].double()
    torch.testing.assert_close(here @ shift.T, there, atol=1e-4, rtol=0)


def test_linear_scaling_is_a_slower_clock() -> None:
    scaling = RopeScaling(rope_type="linear", factor=4)
    positions = torch.arange(12)[None]
    x = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0))
    plain = rotate(x, rotary_tables(positions / 4, 8, 100.0, None, torch.float32))
    torch.testing.assert_close(rotate(x, rotary_tables(positions, 8, 100.0, scaling, torch.float32)), plain)


def test_llama_3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    # Wavelengths 2π·θ^(i/2): about 6.3, 62.8, 628 and 6283 tokens against 512 / 4 = 128 and 512 / 1.
    scaling = RopeScaling(rope_type="llama3", factor=8, original_max_position_embeddings=512)
    plain = rotary_frequencies(8, 10_000.0, None, CPU)
    ratio = (rotary_frequencies(8, 10_000.0, scaling, CPU) / plain).tolist()
    assert ratio == pytest.approx([1, 1, 1 / 8, 1 / 8])
    # A wavelength of 256 lies between: with 2 turns in 512 tokens, the share kept is (2 - 1) / (4 - 1).
    between = rotary_frequencies(4, (256 / (2 * math.pi)) ** 2, scaling, CPU)[1]
    assert float(between) == pytest.approx(2 * math.pi / 256 * (1 / 3 + 2 / 3 / 8), rel=1e-5)


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_sharpens() -> None:
    scaling = RopeScaling(rope_type="yarn", factor=4, original_max_position_embeddings=512)
    plain = rotary_frequencies(64, 10_000.0, None, CPU)
    ratio = rotary_frequencies(64, 10_000.0, scaling, CPU) / plain
    turns = 512 * plain / (2 * math.pi)
    assert ratio[turns > 40].tolist() == pytest.approx([1] * int((turns > 40).sum()))
    assert ratio[turns < 0.8].tolist() == pytest.approx([0.25] * int((turns < 0.8).sum()))
    assert bool((ratio.diff() <= 1e-6).all())
    assert attention_sharpening(scaling) == pytest.approx(0.1 * math.log(4) + 1)
    q = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1))
    turned = rotate(q, rotary_tables(torch.zeros(1, 1), 64, 10_000.0, scaling, torch.float32))
    torch.testing.assert_close(turned, q * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope_type": "llama3", "factor": 8},
        "original_max_position_embeddings is missing; 'llama3' scaling needs it"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8, "low_freq_factor": 4},
        "4.0 is not below"), ({"kind": "dynamic", "factor": 2}, "kind"),
    ],
)  # fmt: skip
def test_impossible_scalings_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RopeScaling.model_validate(values)
