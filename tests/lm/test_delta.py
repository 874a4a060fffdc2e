"""The gated delta rule: its chunks and its step against the equation token by token, and layers that leak nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm.config import ModelConfig
from lm.delta import CHUNK, chunks, running_sums, step
from lm.model import LanguageModel, compile_blocks, init_weights
from lm.native.decoder import what_native_steps_miss
from lm.sequence_parallel import check_sequence_split
from lm.tensor_parallel import largest_team, require_divisible

B, G, N, K, V = 2, 2, 6, 5, 3
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "max_position_embeddings": 300, "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "layer_types": ("linear_attention", "full_attention"), "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "attn_output_gate": True,
}  # fmt: skip


def drawn(num_tokens: int, starts: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, ln α and β; sequences of each row begin at `starts`."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, num_tokens, *shape, generator=generator, dtype=dtype)

    k = torch.nn.functional.normalize(normal(G, K), dim=-1)
    log_alpha = -normal(N).abs()
    log_alpha[:, list(starts)] = -torch.inf
    return [normal(G, K), k, normal(N, V), log_alpha, normal(N).sigmoid()]


def by_token(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The equation, written out: head h of N uses key head h // (N / G)."""
    S, found = v.new_zeros(B, N, K, V), []
    for t in range(q.shape[1]):
        q_t, k_t = (x[:, t].repeat_interleave(N // G, dim=1) for x in (q, k))
        S = log_alpha[:, t].exp()[..., None, None] * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bnkv,bnk->bnv", S, k_t))
        S = S + torch.einsum("bnk,bnv->bnkv", k_t, u)
        found.append(torch.einsum("bnkv,bnk->bnv", S, q_t))
    return torch.stack(found, dim=1), S


@pytest.mark.parametrize("num_terms", [1, 5, CHUNK])
def test_running_sums_in_a_fixed_order(num_terms: int) -> None:
    x = torch.randn(2, num_terms, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, num_terms // 2] = -torch.inf
    torch.testing.assert_close(running_sums(x), x.cumsum(-2), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("num_tokens", "starts"), [(1, (0,)), (CHUNK, (0,)), (150, (0, 1, 63, 64, 100)), (70, (5, 69))]
)
def test_chunks_are_the_equation_token_by_token(num_tokens: int, starts: tuple[int, ...]) -> None:
    """Values, state and gradients, whether sequences begin inside of a chunk or at its ends, or a row before any."""
    given = [x.requires_grad_() for x in drawn(num_tokens, starts)]
    found, expected = chunks(*given), by_token(*given)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    weights = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((o * weights).sum() + S.square().sum(), given) for o, S in (found, expected))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9, msg=str(number))


def test_a_step_continues_what_chunks_have_read() -> None:
    given = drawn(90, (0, 40), torch.float32)
    expected, last = chunks(*given)
    _, S = chunks(*(x[:, :70] for x in given))
    found = [step(*(x[:, t : t + 1] for x in given), S) for t in range(70, 90)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, 70:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(S, last, atol=1e-5, rtol=1e-4)


def test_a_value_is_recalled_by_its_key_and_replaced_under_it() -> None:
    """By hand, with orthogonal keys: α = β = 1 keeps a value as it is, β = ½ moves halfway, α = ½ halves all."""
    e1, e2 = torch.eye(2)
    k = torch.stack([e1, e2, e1, e1, e2])[None, :, None]
    v = torch.tensor([[2.0], [3.0], [6.0], [0.0], [3.0]])[None, :, None]
    beta = torch.tensor([1.0, 1, 0.5, 0, 0])[None, :, None]
    log_alpha = torch.tensor([0.0, 0, 0, 0.5, 1]).log()[None, :, None].clone()
    log_alpha[0, :3, 0] = torch.tensor([-torch.inf, 0, 0])
    log_alpha[0, 4, 0] = 0.0
    q = k.clone()
    o, S = chunks(q, k, v, log_alpha, beta)
    assert o[0, :, 0, 0].tolist() == pytest.approx([2, 3, 4, 2, 1.5])
    assert S[0, 0, :, 0].tolist() == pytest.approx([2, 1.5])


def model_of(**changes: Any) -> LanguageModel:
    model = LanguageModel(ModelConfig.model_validate({**SHAPE, **changes}))
    init_weights(model, 3)
    return model


def test_packed_sequences_and_their_gradients_are_those_of_single_rows() -> None:
    """With padding between and around them, and sequences that are shorter than the convolution."""
    generator = torch.Generator().manual_seed(2)
    lengths = [[2, 70, 1, 30], [100, 3]]
    rows, numbers = [], []
    for of_row in lengths:
        parts = [torch.randint(0, 40, (length,), generator=generator) for length in of_row]
        rows.append(torch.cat([*parts, torch.zeros(110 - sum(of_row), dtype=torch.int64)]))
        ids = [number for number, length in enumerate(of_row, start=1) for _ in range(length)]
        numbers.append(ids + [0] * (110 - len(ids)))
    tokens_BT, segments_BT = torch.stack(rows), torch.tensor(numbers)
    packed, single = model_of(), model_of()
    logits = packed(tokens_BT, segments_BT)
    expected = [
        single(tokens_BT[row, segments_BT[row] == number][None])[0]
        for row, of_row in enumerate(lengths)
        for number in range(1, len(of_row) + 1)
    ]
    real_BT = segments_BT > 0
    torch.testing.assert_close(logits[real_BT], torch.cat(expected), atol=1e-4, rtol=1e-4)
    logits[real_BT].square().sum().backward()
    torch.cat(expected).square().sum().backward()
    for (name, own), other in zip(packed.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-3, rtol=1e-3, msg=name)


@torch.no_grad()
def test_nothing_depends_on_other_rows_or_other_sequences() -> None:
    """To the last bit: what is computed of a sequence is the same whatever is next to it."""
    tokens = torch.randint(0, 40, (4, 80), generator=torch.Generator().manual_seed(4))
    segments = torch.tensor([[1] * 30 + [2] * 50] * 4)
    model = model_of(layer_types=("linear_attention",), attn_output_gate=False)
    logits, changed = model(tokens, segments), tokens.clone()
    changed[1:] = changed[1:].flip(1)
    changed[0, :30] += 1
    changed[0, :30] %= 40
    assert torch.equal(model(changed, segments)[0, 30:], logits[0, 30:])


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_a_further_chunk_takes_a_few_operations() -> None:
    calls = []
    for num_chunks in (1, 2, 3):
        with _Count() as count:
            chunks(*drawn(num_chunks * CHUNK, (0,)))
        calls.append(count.calls)
    assert calls[2] - calls[1] == calls[1] - calls[0] < 40 < CHUNK


def test_what_linear_layers_do_not_go_with_is_refused() -> None:
    model = model_of()
    config = model.config
    assert what_native_steps_miss(model.eval().requires_grad_(False)) != ""
    with pytest.raises(ValueError, match="compile_blocks is true, but linear attention cannot be compiled"):
        compile_blocks(copy.deepcopy(model))
    with pytest.raises(ValueError, match=r"engine\.sequence_parallel_size is 2, but .* linear_attention, .* 1 was"):
        check_sequence_split(config, 2)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size is 2, but .* linear_attention or an output gate; 1 was"
    ):
        require_divisible(config, 2)
    assert largest_team(config, 2, 2) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_key_head_dim": 0}, "model.linear_key_head_dim is 0, but .* a positive number was expected"),
        ({"layer_types": ("full_attention",)}, "linear_num_key_heads is 2, but .* 0, without linear_attention, was"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads over .*: 5 is not a multiple of 2"),
        ({"layer_types": ("linear",)}, "layer_types"),
        ({"layer_types": ("linear_attention",) * 4}, "4 entries for 3 layers"),
        ({"kind": "encoder"}, "layer_types has linear_attention, but model.kind is 'encoder', not 'decoder'"),
    ],
)
def test_shapes_that_make_no_layer_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate({**SHAPE, **changes})


def test_added_blocks_continue_the_pattern() -> None:
    config = ModelConfig.model_validate({**SHAPE, "num_hidden_layers": 4})
    longer = config.with_blocks(1, 3)
    assert [longer.is_linear(layer) for layer in range(6)] == [True, False] * 3
    assert longer.num_linear_layers == 3
