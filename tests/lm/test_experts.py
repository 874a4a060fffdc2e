"""Mixtures of experts: the equation, what a token gets whatever its batch, gradients, and what is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lm import decoding, layers
from lm.config import ModelConfig
from lm.decoding import decoding_steps, fixed_steps, prepacked
from lm.experts import Mixture, Replay, Routers, balance_biases, has_route, no_routes
from lm.generation import Partial, generate, generate_in_rounds
from lm.inspection import flops_per_token, parameter_table
from lm.lora import LoRAConfig, LoRAExperts, WithAdapters, adapted_maps, add_adapters, merged, read_by, without_adapters
from lm.model import LanguageModel, checkpoint_activations, compile_blocks, init_weights, record_routes
from lm.native.decoder import NativeSteps
from lm.sampling import Choice
from lm.source import RandomInit, load
from lm.tensor_parallel import require_divisible
from training.config import OptimizerConfig
from training.optimizers import make_optimizers

SHAPE: dict[str, Any] = {
    "vocab_size": 32, "max_position_embeddings": 32, "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}  # fmt: skip


GPT_OSS: dict[str, Any] = {
    "mlp": "clamped_swiglu", "mlp_bias": True, "attention_bias": "all", "attention_sinks": True,
    "sliding_window": (4, 0), "num_key_value_heads": 1,
}  # fmt: skip


def mixture(**changes: Any) -> LanguageModel:
    model = LanguageModel(ModelConfig.model_validate({**SHAPE, **changes}))
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", ".sinks")):  # otherwise 0
            parameter.data.normal_(generator=generator)
    return model.eval()


def one_by_one(layer: Mixture, x_ND: Tensor, num_chosen: int, *, divided: bool) -> Tensor:
    """The equation, token by token and expert by expert; SwiGLU with biases is gpt-oss's."""
    E = layer.experts.up.num_experts
    ups, downs = layer.experts.up.weight.chunk(E), layer.experts.down.weight.chunk(E)
    biases = [[torch.zeros(())] * E] * 3
    if (router_bias := layer.router.bias) is not None:
        found = router_bias, layer.experts.up.bias, layer.experts.down.bias
        biases = [list(bias.chunk(E)) for bias in found if bias is not None]
    of_router, of_up, of_down = biases
    rows = []
    for x_D in x_ND:
        p_E = (layer.router.weight @ x_D + torch.stack(of_router).flatten()).softmax(dim=0)
        chosen = sorted(range(E), key=lambda expert, p_E=p_E: -float(p_E[expert]))[:num_chosen]
        total = sum(p_E[expert] for expert in chosen) if divided else 1.0
        y_D = torch.zeros_like(x_D)
        for expert in chosen:
            gate_M, up_M = (ups[expert] @ x_D + of_up[expert]).chunk(2)
            if router_bias is None:
                inner_M = F.silu(gate_M) * up_M
            else:
                gate_M = torch.minimum(gate_M, torch.tensor(7.0))
                inner_M = (up_M.clamp(-7, 7) + 1) * gate_M / (1 + torch.exp(-1.702 * gate_M))
            y_D = y_D + p_E[expert] / total * (downs[expert] @ inner_M + of_down[expert])
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("num_chosen", "divided", "changes"),
    [(1, False, {}), (2, True, {}), (2, False, {}), (6, True, {}), (2, True, GPT_OSS), (3, True, GPT_OSS)],
)
def test_the_equation_and_its_gradients(num_chosen: int, divided: bool, changes: dict[str, Any]) -> None:
    layer = mixture(**changes, num_experts_per_tok=num_chosen, norm_topk_prob=divided).decoder.blocks[0].mlp
    assert isinstance(layer, Mixture)
    x_BTD = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    if changes:
        x_BTD = 5 * x_BTD
        inner = layer.experts.up(x_BTD.flatten(0, 1), torch.tensor([18] * 6, dtype=torch.int32), torch.arange(18))
        assert inner.max() > 7, "no gate or up is clamped"
        assert inner.min() < -7, "no up is clamped from below"
    found = layer(x_BTD)
    found.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    expected = one_by_one(layer, x_BTD.flatten(0, 1), num_chosen, divided=divided)
    torch.testing.assert_close(found.flatten(0, 1), expected, atol=1e-5, rtol=1e-5)
    expected.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("changes", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
def test_a_token_gets_the_same_whatever_its_batch(changes: dict[str, Any]) -> None:
    """No expert is ever full, in rows of any length, packed or not."""
    model = mixture(**changes)
    rows = [torch.randint(2, 32, (length,)) for length in (5, 17, 9)]
    alone = [model(row[None])[0] for row in rows]
    packed = torch.cat(rows)[None]
    segments = torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows, 1)])[None]
    torch.testing.assert_close(model(packed, segments)[0], torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_one_expert_that_every_token_chooses_is_a_plain_mlp() -> None:
    model = mixture(num_experts=1, num_experts_per_tok=1, norm_topk_prob=True, moe_intermediate_size=24)
    plain = LanguageModel(
        ModelConfig.model_validate({**{k: v for k, v in SHAPE.items() if "exp" not in k and "moe" not in k}})
    )
    weights = {name.replace(".experts", ""): tensor for name, tensor in model.state_dict().items()}
    plain.load_state_dict({name: tensor for name, tensor in weights.items() if "router" not in name})
    tokens = torch.randint(0, 32, (2, 12))
    torch.testing.assert_close(model(tokens), plain(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, GPT_OSS], ids=["a plain layer", "gpt-oss"])
@pytest.mark.parametrize("steps", ["eager", "fixed"])
def test_generation_gives_the_log_probs_of_a_pass_over_whole_rows(steps: Any, changes: dict[str, Any]) -> None:
    model = mixture(**changes)
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
    found = generate(
        model, prompts, max_new_tokens=9, end_ids=[], choice=Choice(), seeds=range(3), steps=steps, max_rows=2
    )
    for prompt, response, logprobs in zip(prompts, found.responses, found.logprobs, strict=True):
        tokens = torch.tensor([prompt + response])
        expected = model(tokens)[0, len(prompt) - 1 : -1].log_softmax(dim=-1).gather(1, tokens[0, len(prompt) :, None])
        torch.testing.assert_close(torch.tensor(logprobs), expected[:, 0].detach(), atol=1e-4, rtol=1e-4)


def test_plain_layers_and_counts_by_hand() -> None:
    config = ModelConfig.model_validate({**SHAPE, "mlp_only_layers": [1]})
    model = LanguageModel(config)
    assert [isinstance(block.mlp, Mixture) for block in model.decoder.blocks] == [True, False, True]
    parts = {part.name: part.num_parameters for part in parameter_table(config)}
    assert parts["blocks.*.mlp.experts.up.weight"] == 2 * 6 * 2 * 8 * 16
    # Per token: attention, the plain MLP, two routers, and two of six experts in two layers; then the head.
    products = 3 * 4 * 16 * 16 + 3 * 16 * 24 + 2 * 6 * 16 + 2 * 2 * 3 * 16 * 8 + 16 * 32
    assert flops_per_token(config, 5) == 2 * products + 4 * 16 * 3 * 5


def test_adapters_are_of_attention_and_plain_mlps() -> None:
    model = add_adapters(mixture(mlp_only_layers=[1]), LoRAConfig(rank=2))
    names = {name.removeprefix("decoder.blocks.") for name in adapted_maps(model)}
    assert names == {f"{n}.attention.{kind}" for n in range(3) for kind in ("qkv", "out")} | {"1.mlp.up", "1.mlp.down"}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora" in name for name in trained)
    with pytest.raises(ValueError, match=r"lora\.targets is 'mlp', but all MLPs are mixtures"):
        add_adapters(mixture(), LoRAConfig(targets="mlp"))
    dense = ModelConfig(vocab_size=32, max_position_embeddings=32, hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=2, intermediate_size=24)  # fmt: skip
    with pytest.raises(ValueError, match=r"lora\.targets is 'experts', but the model has none; 'all' was expected"):
        add_adapters(LanguageModel(dense), LoRAConfig(targets="experts"))


def with_adapters(seed: int) -> LanguageModel:
    """A mixture whose experts have adapters that have learned something, on the same frozen weights."""
    plain = RandomInit(lambda: LanguageModel(ModelConfig.model_validate(SHAPE)), 3)
    model = load(WithAdapters(plain, LoRAConfig(rank=3, alpha=6, targets="experts"), seed))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval()


def test_an_expert_with_an_adapter_is_its_sum_of_matrices() -> None:
    model = with_adapters(5)
    maps = model.decoder.blocks[1].mlp.experts.up
    assert isinstance(maps, LoRAExperts)
    x_SD, experts_S = torch.randn(7, 16), torch.tensor([0, 0, 2, 3, 3, 3, 5])
    ends_E = torch.tensor([2, 2, 3, 6, 6, 7], dtype=torch.int32)
    found = maps(x_SD, ends_E, torch.arange(7))
    for x_D, expert, y_F in zip(x_SD, experts_S.tolist(), found, strict=True):
        a, b = maps.lora_a[3 * expert : 3 * expert + 3], maps.lora_b[16 * expert : 16 * expert + 16]
        weight = maps.weight[16 * expert : 16 * expert + 16] + 2.0 * b @ a
        torch.testing.assert_close(y_F, weight @ x_D, atol=1e-5, rtol=1e-5)
    tokens = torch.arange(20).view(2, 10)
    plain = mixture()
    with without_adapters(model):
        assert torch.equal(model(tokens), plain(tokens))
    with_them = model(tokens)
    plain.load_state_dict(dict(merged(model, model.named_parameters())), strict=False)
    torch.testing.assert_close(plain(tokens), with_them, atol=2e-5, rtol=1e-5)


def test_a_joint_pass_gives_each_part_of_a_batch_its_readers_adapters() -> None:
    first, second, tokens = with_adapters(5), with_adapters(6), torch.arange(20).view(2, 10)
    with torch.no_grad(), read_by(first, [second, None, first]):
        found = first(tokens.repeat(3, 1)).chunk(3)
    for part, expected in zip(found, (second(tokens), mixture()(tokens), first(tokens)), strict=True):
        torch.testing.assert_close(part, expected, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(found[0], found[2], atol=1e-2)


def test_cached_casts_are_those_of_weights_alone() -> None:
    """A further pass casts nothing, or the cache would keep each pass's tensors until the optimizer's step."""
    model, tokens = with_adapters(5), torch.arange(20).view(2, 10)
    with layers.cache_weight_casts(), torch.autocast("cpu", torch.bfloat16):
        model(tokens)
        known = layers._rounded.get()
        assert known is not None
        num_known = len(known)
        model(tokens)
        assert len(known) == num_known > 0


def test_what_experts_do_not_go_with_is_refused() -> None:
    model = mixture()
    assert not isinstance(decoding_steps(model, "auto"), NativeSteps)
    with pytest.raises(ValueError, match="a mixture of experts cannot be compiled"):
        compile_blocks(copy.deepcopy(model))
    with pytest.raises(ValueError, match="tensor_parallel_size is 4; a divisor of the model's num_experts = 6 was"):
        require_divisible(model.config.model_copy(update={"num_attention_heads": 4, "num_key_value_heads": 4}), 4)
    with pytest.raises(ValueError, match="'muon', which does not train mixtures of experts"):
        make_optimizers(model, OptimizerConfig(kind="muon", learning_rate=0.1), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "model.num_experts_per_tok is 2, but model.num_experts is 0"),
        ({"num_experts_per_tok": 7}, "model.num_experts_per_tok is 7; 1 to 6"),
        ({"moe_intermediate_size": 12}, "model.moe_intermediate_size is 12, in a mixture of experts; a multiple of 8"),
        (
            {"mlp": "relu"},
            "experts are gated MLPs in a decoder; found model.kind 'decoder', model.mlp 'relu'",
        ),
        ({"shared_expert_gate": True}, "model.shared_expert_intermediate_size is 0; the width"),
        ({"n_group": 4}, "model.num_experts over model.n_group: 6 is not a multiple of 4"),
        ({"n_group": 2, "topk_group": 3}, "model.topk_group is 3, of 2 groups of 3 experts; 1 to 2 groups"),
        ({"n_group": 6}, "model.topk_group is 1, of 6 groups of 1 experts; 2 to 6 groups"),
        ({"n_group": 6, "topk_group": 6, "router_bias": True}, "with router_bias of at least two experts"),
        ({"mlp_only_layers": [3]}, r"model.mlp_only_layers is \[3\]; different numbers from 0 to 2"),
        ({"mlp_only_layers": [0, 1, 2]}, "and not all of them were expected"),
    ],
)
def test_a_shape_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({**SHAPE, **changes})


def test_a_pass_keeps_the_weight_itself_and_no_view_of_what_was_gathered() -> None:
    """ZeRO-3 frees a gathered weight after its pass, which a saved view would keep."""
    layer = mixture().decoder.blocks[0].mlp
    assert isinstance(layer, Mixture)
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(torch.randn(1, 4, 16))
    weights = list(layer.experts.parameters())
    stored = {weight.untyped_storage().data_ptr() for weight in weights}
    of_weights = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() in stored]
    assert len(of_weights) == 2
    assert all(any(tensor is weight for weight in weights) for tensor in of_weights)


def test_a_recorded_step_needs_products_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_is_on_gpu", lambda _: True)
    for capability, dtype, records in (((9, 0), "bf16", True), ((9, 0), "fp32", False), ((8, 0), "bf16", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        model = mixture().to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
        assert (fixed_steps(model, "auto") is not None) == records


def test_a_router_stays_in_fp32_when_weights_are_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = list[torch.nn.Module]()
    monkeypatch.setattr(decoding, "gains", lambda _: True)
    monkeypatch.setattr(decoding, "PrepackedLinear", lambda linear, _rows: (packed.append(linear), linear.forward)[1])
    with prepacked(mixture(), 4):
        assert len(packed) == 3 * 2 + 1  # attention's maps, and the head


class _Own(Replay):
    """Lets the routers choose and keeps what they chose."""

    def __init__(self, num_tokens: int, config: ModelConfig) -> None:
        super().__init__(no_routes(config, 1, num_tokens, config.num_hidden_layers, like=torch.empty(0)))
        self.chosen: dict[int, Tensor] = {}

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        self.chosen[layer] = experts_NK
        return super().choose(layer, experts_NK)


def own_routes(model: LanguageModel, tokens: list[int]) -> Tensor:
    """Returns the routes [T, L, K] that a pass over one row takes."""
    own = _Own(len(tokens), model.config)
    model(torch.tensor([tokens]), routes=own)
    found = no_routes(model.config, len(tokens), model.config.num_hidden_layers, like=torch.empty(0))
    for layer, experts_NK in own.chosen.items():
        found[:, layer] = experts_NK.to(found.dtype)
    assert not own.differs_LN.any()
    return found


@pytest.mark.parametrize("steps", ["eager", "fixed"])
@pytest.mark.parametrize("num_experts", [6, 256])
def test_generation_records_the_routes_of_prompts_and_responses(steps: Any, num_experts: int) -> None:
    """Rows enter, leave and move to other slots; two prompts are equal, and some responses end early."""
    model = mixture(mlp_only_layers=[1], num_experts=num_experts)
    prompts = [[3, 4, 5], [6], [3, 4, 5], [7, 8, 9, 10, 11], [12, 13], [6]]
    limits = [9, 2, 4, 1, 7, 5]
    found = generate(
        model, prompts, max_new_tokens=limits, end_ids=[1, 2, 3, 4], choice=Choice(), seeds=range(6), steps=steps,
        max_rows=3,
    )  # fmt: skip
    assert len({len(response) for response in found.responses}) > 2
    for prompt, response, routes in zip(prompts, found.responses, found.routes, strict=True):
        assert routes.dtype == (torch.uint8 if num_experts == 6 else torch.int16)
        assert torch.equal(routes, own_routes(model, prompt + response[:-1]))
        assert has_route(routes).any(dim=0).tolist() == [True, False, True]


@pytest.mark.parametrize("steps", ["eager", "fixed"])
def test_a_token_of_a_continued_response_has_the_routes_of_the_weights_that_draw_the_next(steps: Any) -> None:
    """Five tokens of older weights, then those of newer ones, which read them again; some responses end before that."""
    older, newer = mixture(mlp_only_layers=[1]), mixture(mlp_only_layers=[1])
    init_weights(newer, 99)
    partials = [Partial(number, prompt, seed=number) for number, prompt in enumerate([[3, 4, 5], [6], [7, 8, 9, 10]])]

    def sample_rounds(model: LanguageModel, entering: list[list[Partial]]) -> None:
        generate_in_rounds(
            model, lambda _ended: entering.pop(0) if entering else None, num_steps=5, num_rows=3, num_columns=16,
            max_new_tokens=12, end_ids=[], choice=Choice(), steps=steps,
        )  # fmt: skip

    sample_rounds(older, [partials])
    drawn = [[*partial.tokens] for partial in partials]
    for partial, tokens in zip(partials, drawn, strict=True):
        assert torch.equal(partial.routes, own_routes(older, [*partial.prompt, *tokens[:-1]]))
    sample_rounds(newer, [partials, [], []])
    for partial, tokens in zip(partials, drawn, strict=True):
        assert len(partial.tokens) == 12
        assert partial.tokens[:5] == tokens
        read = [*partial.prompt, *partial.tokens[:-1]]
        num_older = len(partial.prompt) + 4
        expected = torch.cat([own_routes(older, read)[:num_older], own_routes(newer, read)[num_older:]])
        assert torch.equal(partial.routes, expected)
        assert not torch.equal(partial.routes, own_routes(newer, read))


def test_replayed_routes_are_the_experts_that_are_used() -> None:
    """Other routes than the router's, against the equation, token by token."""
    layer = mixture(norm_topk_prob=True).decoder.blocks[0].mlp
    assert isinstance(layer, Mixture)
    x_BTD = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    routes_BTLK = torch.stack([torch.randperm(6)[:2] for _ in range(7)]).to(torch.uint8)[None, :, None]
    routes_BTLK[0, 3] = 255  # not recorded: the router chooses
    replay = Replay(routes_BTLK)
    found = layer(x_BTD, routes=replay)
    found.square().sum().backward()
    gradient = layer.router.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0
    layer.zero_grad(set_to_none=True)
    E, rows, differs = 6, [], []
    ups, downs = layer.experts.up.weight.chunk(E), layer.experts.down.weight.chunk(E)
    for x_D, route in zip(x_BTD[0], routes_BTLK[0, :, 0].tolist(), strict=True):
        p_E = (layer.router.weight @ x_D).softmax(dim=0)
        own = p_E.topk(2).indices.tolist()
        route = own if route == [255, 255] else route
        differs.append({*route} != {*own})
        outputs = [downs[e] @ (F.silu((ups[e] @ x_D).chunk(2)[0]) * (ups[e] @ x_D).chunk(2)[1]) for e in route]
        rows.append(sum(p_E[e] * y_D for e, y_D in zip(route, outputs, strict=True)) / sum(p_E[e] for e in route))
    expected = torch.stack(rows)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
    assert replay.differs_LN[0].tolist() == differs
    assert any(differs)
    expected.square().sum().backward()
    torch.testing.assert_close(gradient, layer.router.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recomputes", [False, True])
def test_replaying_own_routes_gives_the_same_bits(recomputes: bool) -> None:
    model = mixture(mlp_only_layers=[1])
    model.decoder.recomputes = recomputes
    rows = [torch.randint(2, 32, (length,)).tolist() for length in (5, 9)]
    packed = torch.tensor([rows[0] + rows[1] + [0, 0]])
    segments = torch.tensor([[1] * 5 + [2] * 9 + [0, 0]])
    routes = torch.cat([own_routes(model, row) for row in rows])
    routes = torch.cat([routes, no_routes(model.config, 2, 3, like=routes)])
    results = []
    for replay in (None, Replay(routes[None])):
        model.zero_grad(set_to_none=True)
        logits = model(packed, segments, routes=replay)
        logits[:, :14].logsumexp(dim=-1).sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))
    assert replay is not None
    assert not replay.differs_LN.any()


# --- what routers learn in training ---------------------------------------------------------------------------------


BALANCED: dict[str, Any] = {
    "num_hidden_layers": 1, "scoring_func": "sigmoid", "router_bias": True, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "shared_expert_intermediate_size": 10, "shared_expert_gate": True,
}  # fmt: skip


def learned(
    model: LanguageModel, passes: list[tuple[Tensor, Tensor | None]], coefs: tuple[float, float] = (1.0, 1.0)
) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
    """Gradients of the routers' losses alone, what the routers have counted, and its metrics."""
    model.zero_grad(set_to_none=True)
    routers = record_routes(model, torch.device("cpu"), *coefs)
    assert routers is not None
    num_tokens = sum(int(rows.numel() if segments is None else (segments > 0).sum()) for rows, segments in passes)
    routers.scale = 1 / (routers.num_layers * num_tokens)
    for rows, segments in passes:
        (0 * model(rows, segments).sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sums = routers.take()
    return gradients, sums, routers.metrics(sums)


def test_a_shared_expert_sigmoid_scores_and_a_bias_that_only_chooses() -> None:
    """Token by token: the bias decides which experts, and their scores without it are the weights."""
    layer = mixture(**BALANCED).decoder.blocks[0].mlp
    assert isinstance(layer, Mixture)
    assert layer.choice_bias is not None
    assert layer.shared is not None
    assert layer.shared_gate is not None
    layer.choice_bias.copy_(torch.tensor([0.0, -9, 9, 0, 0, 0]))
    x_ND = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    ups, downs = layer.experts.up.weight.chunk(6), layer.experts.down.weight.chunk(6)
    for x_D, y_D in zip(x_ND, layer(x_ND), strict=True):
        scores = [float((layer.router.weight[expert] @ x_D).sigmoid()) for expert in range(6)]
        second = max((expert for expert in range(6) if expert not in (1, 2)), key=scores.__getitem__)
        gate_M, up_M = (layer.shared.up.weight @ x_D).chunk(2)
        expected_D = (layer.shared_gate.weight @ x_D).sigmoid() * (layer.shared.down.weight @ (F.silu(gate_M) * up_M))
        for expert in (2, second):
            gate_M, up_M = (ups[expert] @ x_D).chunk(2)
            weight = 1.5 * scores[expert] / (scores[2] + scores[second])
            expected_D = expected_D + weight * (downs[expert] @ (F.silu(gate_M) * up_M))
        torch.testing.assert_close(y_D, expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("bias", "expected"), [(True, [3, 2]), (False, [1, 0])])
def test_experts_are_chosen_in_the_best_group(bias: bool, expected: list[int]) -> None:
    """The first of three groups has the best expert, the second the two best together; the last expert's 0.6 is left
    out with its group.
    """
    shape = ModelConfig.model_validate({**SHAPE, "n_group": 3, "topk_group": 1, "router_bias": bias})
    scores_NE = torch.tensor([[0.1, 0.9, 0.7, 0.8, 0.0, 0.6]])
    assert Mixture(shape).choose(scores_NE).tolist() == [expected]


@pytest.mark.parametrize("divided", [True, False])
def test_the_losses_of_one_sequence_are_those_of_transformers(divided: bool) -> None:
    model, tokens = mixture(num_hidden_layers=1, norm_topk_prob=divided), torch.randint(0, 32, (1, 20))
    inputs = list[Tensor]()
    router = model.decoder.blocks[0].mlp.router
    hook = router.register_forward_hook(lambda _module, _inputs, logits: inputs.append(logits))
    gradients, _, metrics = learned(model, [(tokens, None)])
    hook.remove()
    logits_NE = inputs[0].detach().requires_grad_()
    balance = load_balancing_loss_func((logits_NE,), num_experts=6, top_k=2)
    z = logits_NE.logsumexp(dim=1).square().mean()
    assert metrics["router_aux_loss"] == pytest.approx(float(balance), abs=1e-5)
    assert metrics["router_z_loss"] == pytest.approx(float(z), abs=1e-4)
    inputs.clear()
    model.zero_grad(set_to_none=True)
    model.decoder.routers = None
    router.register_forward_hook(lambda _module, _inputs, logits: inputs.append(logits))
    model(tokens)
    again = load_balancing_loss_func((inputs[0],), num_experts=6, top_k=2) + inputs[0].logsumexp(1).square().mean()
    again.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_routers_learn_does_not_depend_on_the_split(recomputes: bool) -> None:
    """One pass or several, packed or padded: the same gradients and the same counts, and padding is in none of them."""
    model = mixture(**{**BALANCED, "num_hidden_layers": 3, "mlp_only_layers": [1]})
    rows = [torch.randint(2, 32, (length,)) for length in (5, 17, 9)]
    alone = [(row[None], None) for row in rows]
    packed = torch.zeros(2, 24, dtype=torch.long)
    segments = torch.zeros_like(packed)
    packed[0, :5], packed[0, 5:22], packed[1, :9] = rows
    segments[0, :5], segments[0, 5:22], segments[1, :9] = 1, 2, 1
    gradients, sums, metrics = learned(model, alone)
    if recomputes:
        checkpoint_activations(model)
    found, found_sums, found_metrics = learned(model, [(packed, segments)])
    assert torch.equal(sums[:, :7], found_sums[:, :7])
    assert sums[:, 6].tolist() == [31, 0, 31]
    assert sums[:, :6].sum(dim=1).tolist() == [62, 0, 62]
    assert metrics == pytest.approx(found_metrics, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_metrics_and_biases_by_hand() -> None:
    model = mixture(**BALANCED)
    layer = model.decoder.blocks[0].mlp
    assert isinstance(layer, Mixture)
    routers = Routers(model.config, torch.device("cpu"), 0.1)
    sums = torch.tensor([[8, 0, 2, 2, 0, 0, 6, 3.0, 12, 0]], dtype=torch.float64)
    expected = {"router_max_load": 4.0, "router_dead_experts": 3.0, "router_entropy": 0.5, "router_aux_loss": 2.0}
    assert routers.metrics(sums) == expected
    balance_biases(model, sums, 0.25)
    assert layer.choice_bias is not None
    assert layer.choice_bias.tolist() == [-0.25, 0.25, 0, 0, 0.25, 0.25]
    add_adapters(model, LoRAConfig(targets="attention"))  # the router is frozen, and so is its bias
    balance_biases(model, sums, 0.25)
    assert layer.choice_bias.tolist() == [-0.25, 0.25, 0, 0, 0.25, 0.25]


def test_passes_without_gradients_count_nothing() -> None:
    model = mixture()
    routers = record_routes(model, torch.device("cpu"), 0.0, 0.0)
    assert routers is not None
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    model(torch.zeros(1, 4, dtype=torch.long))  # kept, but not learned from
    assert routers.metrics(routers.take()) == {}
