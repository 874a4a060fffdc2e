"""The transformer: custom gradients against autograd, initialisation, packing, causality."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lm.block import BlockInputs
from lm.config import ModelConfig, exact_div
from lm.dropout import sequence_keys
from lm.encoder import EncoderDecoder, SequenceClassifier
from lm.families import family_of
from lm.layers import RMSNorm, _SquaredReLU
from lm.model import (
    LanguageModel,
    ScalarModel,
    count_parameters,
    freeze_all_but_last,
    init_weights,
    initial_weight,
    segment_positions,
)
from lm.positions import sinusoids


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    model = LanguageModel(config)
    init_weights(model, seed)
    return model.eval()


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def test_rms_norm_and_its_gradients_equal_autograd_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(6, eps=0.1)
    norm.weight.data.uniform_(0.5, 2.0, generator=generator)
    x = torch.randn(3, 4, 6, generator=generator, requires_grad=True)
    direction = torch.randn(3, 4, 6, generator=generator)
    wide_x, wide_weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = plain_rms_norm(wide_x, wide_weight, 0.1)
    found = norm(x)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    torch.testing.assert_close(x.grad.double(), wide_x.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norm.weight.grad.double(), wide_weight.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_scores_in_bf16_stay_distinct(tiny_config: ModelConfig, weights: torch.dtype) -> None:
    """The head's product is in fp32: bf16 has only 32 numbers from 4 to 8, so scores there would become equal."""
    model = ScalarModel(tiny_config)
    init_weights(model, 0)
    model.bias.fill_(6.0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(weights)
    tokens_BT = torch.randint(0, tiny_config.vocab_size, (8, 16), generator=torch.Generator().manual_seed(0))
    heard = []
    model.score.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        scores_BT = model(tokens_BT)
    expected_BT = (heard[0].double() @ model.score.weight.double().T)[..., 0] + 6.0
    assert heard[0].dtype == torch.bfloat16
    assert scores_BT.dtype == torch.float32
    torch.testing.assert_close(scores_BT.double(), expected_BT, atol=1e-5, rtol=0)
    assert len(set(scores_BT.flatten().tolist())) > 120 > len(set(scores_BT.bfloat16().flatten().tolist()))


def test_rms_norm_gradients_equal_finite_differences() -> None:
    # The norm computes in fp32, so numerical differences need a large step.
    generator = torch.Generator().manual_seed(1)
    norm = RMSNorm(4, eps=0.2)
    x = torch.randn(2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,), eps=5e-3, atol=2e-3, rtol=1e-2, nondet_tol=0.0)


def test_rms_norm_in_bf16_normalises_in_fp32() -> None:
    x = torch.tensor([[300.0, -300.0, 100.0, 5.0]], dtype=torch.bfloat16)
    norm = RMSNorm(4, eps=1e-5).bfloat16()
    found = norm(x)
    assert found.dtype == torch.bfloat16
    expected = plain_rms_norm(x.double(), torch.ones(4).double(), 1e-5)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=2**-8)


def test_squared_relu_and_its_gradient() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0], requires_grad=True)
    found = _SquaredReLU.apply(x)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.25, 9.0]
    (found * torch.tensor([1.0, 1.0, 1.0, 3.0, -2.0])).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 3.0, -12.0]  # 2·relu(x)·g
    wide = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(_SquaredReLU.apply, (wide,))
    expected = torch.autograd.grad((wide.relu() ** 2).sum(), wide)[0]
    assert torch.equal(torch.autograd.grad(_SquaredReLU.apply(wide).sum(), wide)[0], expected)


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_initialisation_table(mlp: str) -> None:
    D, F_, L = 64, 160, 3
    config = ModelConfig(
        vocab_size=512, max_position_embeddings=8, hidden_size=D, num_hidden_layers=L, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=F_, mlp=mlp, tie_word_embeddings=False,
    )  # fmt: skip
    expected = {
        "embedding.weight": 1 / math.sqrt(D),
        "head.weight": 1 / math.sqrt(D),
        "qkv.weight": 1 / math.sqrt(D),
        "up.weight": 1 / math.sqrt(D),
        "out.weight": 1 / math.sqrt(2 * L * D),
        "down.weight": 1 / math.sqrt(2 * L * F_),
    }
    seen = set()
    for name, weight in build(config).named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones(D)), name
            continue
        kind = next(kind for kind in expected if name.endswith(kind))
        seen.add(kind)
        # The sample standard deviation of n draws has an error of std / √(2n).
        tolerance = 5 * expected[kind] / math.sqrt(2 * weight.numel())
        assert float(weight.detach().std()) == pytest.approx(expected[kind], abs=tolerance), name
        assert abs(float(weight.detach().mean())) < 5 * expected[kind] / math.sqrt(weight.numel()), name
    assert seen == set(expected)


def test_score_head_deviation() -> None:
    config = ModelConfig(
        vocab_size=8,
        max_position_embeddings=2,
        hidden_size=4000,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
    )
    weight = initial_weight("score.weight", (1, 4000), config, torch.Generator().manual_seed(5))
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(4001), rel=0.06)


def test_initialisation_is_a_function_of_the_seed(tiny_config: ModelConfig) -> None:
    torch.manual_seed(1)
    first = build(tiny_config, seed=11).state_dict()
    torch.manual_seed(2)
    again, other = build(tiny_config, seed=11).state_dict(), build(tiny_config, seed=12).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["decoder.embedding.weight"], other["decoder.embedding.weight"])


def test_tied_head_is_the_embedding_and_counts_once(tiny_config: ModelConfig) -> None:
    tied, untied = build(tiny_config), build(tiny_config.model_copy(update={"tie_word_embeddings": False}))
    assert tied.head.weight is tied.decoder.embedding.weight
    D, M, V, qkv = 16, 24, 288, (4 + 2 * 2) * 4
    block = D * qkv + D * D + 3 * D * M + 2 * D
    assert count_parameters([tied]) == V * D + 2 * block + D
    assert count_parameters([untied]) == 2 * V * D + 2 * block + D


def test_positions_restart_in_every_segment() -> None:
    segments = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]])
    assert segment_positions(segments).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
@pytest.mark.parametrize("num_key_value_heads", [4, 2])
def test_a_packed_row_gives_each_sequence_what_it_gets_alone(
    tiny_config: ModelConfig, mlp: str, num_key_value_heads: int
) -> None:
    model = build(tiny_config.model_copy(update={"mlp": mlp, "num_key_value_heads": num_key_value_heads}))
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 288, (length,), generator=generator) for length in (5, 1, 7)]
    row = torch.cat([*parts, torch.zeros(3, dtype=torch.long)])[None]
    segments = torch.tensor([[1] * 5 + [2] + [3] * 7 + [0] * 3])
    logits = model(row, segments)[0]
    start = 0
    for part in parts:
        alone = model(part[None])[0]
        torch.testing.assert_close(logits[start : start + len(part)], alone, atol=1e-5, rtol=1e-5)
        start += len(part)
    assert torch.isfinite(logits).all()


def test_a_later_token_changes_no_earlier_logits(tiny_config: ModelConfig) -> None:
    model = build(tiny_config)
    tokens = torch.randint(0, 288, (1, 12), generator=torch.Generator().manual_seed(3))
    before = model(tokens)
    for t in (0, 4, 11):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 1) % 288
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
        assert not torch.allclose(after[:, t], before[:, t], atol=1e-4)


def test_order_of_earlier_tokens_matters(tiny_config: ModelConfig) -> None:
    model = build(tiny_config)
    forwards, swapped = model(torch.tensor([[5, 9, 40]])), model(torch.tensor([[9, 5, 40]]))
    assert not torch.allclose(forwards[0, 2], swapped[0, 2], atol=1e-4)


@pytest.mark.parametrize("kind", [LanguageModel, ScalarModel])
def test_selected_positions_are_rows_of_all_positions(
    tiny_config: ModelConfig, kind: type[LanguageModel] | type[ScalarModel]
) -> None:
    model = kind(tiny_config).eval()
    init_weights(model, 0)
    tokens = torch.randint(0, 288, (2, 6), generator=torch.Generator().manual_seed(3))
    selected = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]).bool()
    everything = model(tokens)
    expected = torch.stack([everything[0, 1], everything[0, 4], everything[1, 5]])
    torch.testing.assert_close(model(tokens, None, selected), expected)


def test_scalar_model_is_a_linear_map_of_the_hidden_state_plus_bias(tiny_config: ModelConfig) -> None:
    model = ScalarModel(tiny_config).eval()
    init_weights(model, 3)
    model.bias.fill_(2.5)
    tokens = torch.tensor([[1, 2, 3]])
    hidden = model.decoder.hidden(tokens, None).detach()
    expected = [float((hidden[0, t] * model.score.weight[0].detach()).sum()) + 2.5 for t in range(3)]
    assert model(tokens)[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert "bias" not in dict(model.named_parameters())  # weight decay and the optimizer must not change it


def test_dropout_acts_in_training_only(tiny_config: ModelConfig) -> None:
    model = LanguageModel(tiny_config, dropout=0.5)
    init_weights(model, 0)
    tokens = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(model.eval()(tokens), build(tiny_config)(tokens))
    keys = sequence_keys(0, np.array([[0]]), torch.device("cpu"))
    dropped = model.train()(tokens, sequence_keys_BT=keys)
    assert not torch.allclose(dropped, build(tiny_config)(tokens), atol=1e-3)
    with pytest.raises(AssertionError, match="none were given"):
        model(tokens)


def test_bf16_autocast_stays_near_fp32(tiny_config: ModelConfig) -> None:
    model = build(tiny_config)
    tokens = torch.randint(0, 288, (2, 9), generator=torch.Generator().manual_seed(3))
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens)
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.float() - exact).detach().abs().max()) < 0.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 18}, "model.hidden_size over model.num_attention_heads: 18 is not a multiple of 4"),
        (
            {"num_key_value_heads": 3},
            "model.num_attention_heads over model.num_key_value_heads: 4 is not a multiple of 3",
        ),
        ({"positions_every_layer": True}, "positions_every_layer is true, but model.positions is 'rotary'"),
        ({"hidden_size": 12}, "3; rotary positions need an even number"),
        ({"depth": 3}, "depth"),
    ],
)
def test_impossible_shapes_are_refused(tiny_config: ModelConfig, change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{**tiny_config.model_dump(exclude={"head_dim"}), **change})


@pytest.mark.parametrize("norm_place", ["pre", "post"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@torch.no_grad()
def test_positions_are_added_to_the_input_of_every_layer(
    tiny_config: ModelConfig, positions: str, norm_place: str
) -> None:
    """Against blocks called one by one, each with positions added before it."""
    changes = {"positions": positions, "norm_place": norm_place, "num_hidden_layers": 3}
    config = tiny_config.model_copy(update={**changes, "positions_every_layer": True})
    model, once = build(config), build(config.model_copy(update={"positions_every_layer": False}))
    tokens = torch.randint(0, 288, (2, 7), generator=torch.Generator().manual_seed(3))
    stack = model.decoder
    learned = stack.positions
    added = sinusoids(torch.arange(7), config.hidden_size) if learned is None else learned.weight[:7]
    x_BTD = stack.embedding(tokens)
    for layer, block in enumerate(stack.blocks):
        x_BTD = block(x_BTD + added, BlockInputs([None] * 3, [None] * 3), layer)
    torch.testing.assert_close(model(tokens), model.head(stack.norm(x_BTD)))
    assert not torch.allclose(model(tokens), once(tokens), atol=1e-2)
    # Packed sequences count their own positions, in every layer.
    packed = torch.cat([tokens[:1], tokens[1:, :4]], dim=1)
    segments = torch.tensor([[1] * 7 + [2] * 4])
    torch.testing.assert_close(model(packed, segments)[:, 7:], model(tokens[1:, :4]))


def test_no_published_family_has_positions_in_every_layer(tiny_config: ModelConfig) -> None:
    classic = {"mlp": "gelu_tanh", "mlp_bias": True, "attention_bias": "all", "positions": "learned", "norm": "layer"}
    once = ModelConfig(**{**tiny_config.model_dump(), **classic, "num_key_value_heads": 4})
    assert family_of(once, "language").model_type == "gpt2"
    assert family_of(once.model_copy(update={"positions_every_layer": True}), "language").model_type == "heed"


def test_exact_div() -> None:
    assert exact_div(12, 4, "x") == 3
    for numerator, denominator in ((12, 5), (12, 0), (12, -4)):
        with pytest.raises(ValueError, match=r"^x: 12"):
            exact_div(numerator, denominator, "x")


def trained(model: nn.Module) -> set[str]:
    """Names what is trained in readable terms: heads, norms, blocks by stack and number."""
    names = [name.split(".") for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {".".join(parts[: 3 if "blocks" in parts else 2]) for parts in names}


OTHER = {
    "vocab_size": 40, "max_position_embeddings": 16, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 12, "mlp": "gelu", "positions": "learned", "embedding_norm": True,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_freezing_all_but_an_encoders_last_block() -> None:
    model = SequenceClassifier(ModelConfig(kind="encoder", norm_place="post", type_vocab_size=2, **OTHER), "abc")
    freeze_all_but_last(model, 1)
    assert trained(model) == {
        "encoder.blocks.1", "pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_blocks", "moving"),
    [
        (0, set()),
        (1, {"decoder.blocks.1"}),
        (3, {"decoder.blocks.0", "decoder.blocks.1", "encoder.blocks.1", "encoder.norm"}),
    ],
)
def test_an_encoder_decoders_encoder_lies_before_its_decoder(num_blocks: int, moving: set[str]) -> None:
    model = EncoderDecoder(ModelConfig(kind="encoder-decoder", num_encoder_layers=2, **OTHER))
    freeze_all_but_last(model, num_blocks)
    assert trained(model) == moving | {"decoder.norm", "head.weight"}
    with pytest.raises(ValueError, match="5 blocks are to be trained; the model has 4"):
        freeze_all_but_last(model, 5)
