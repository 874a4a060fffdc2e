"""Tensor parallelism: teams of two and four ranks, which are threads here, against the whole model."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lm.config import ModelConfig
from lm.decoding import decoding_steps
from lm.generation import Generated, generate
from lm.model import LanguageModel, init_weights
from lm.samplers.engine import SentWeights, chunks, digests_of, held_tensors, whole_digest
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import verify_sampler
from lm.sampling import Choice
from lm.tensor_parallel import LanguageModelPart, Team, cut, largest_team, parameters_of_part, require_divisible
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.tiers import in_ci

Result = TypeVar("Result")
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]
SHAPE: dict[str, object] = {
    "vocab_size": 301, "max_position_embeddings": 48, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip
SHAPES: dict[str, dict[str, object]] = {
    "grouped": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "one key-value head": {"num_key_value_heads": 1, "qk_norm": True},
    "GPT-2": {
        "attention_bias": "all", "mlp_bias": True, "mlp": "gelu_tanh", "positions": "learned", "norm": "layer",
    },
    "Gemma 3": {
        "num_key_value_heads": 2, "norm_place": "sandwich", "mlp": "geglu", "qk_norm": True, "sliding_window": (4, 0),
        "rope_local_base_freq": 70.0, "query_pre_attn_scalar": 5, "partial_rotary_factor": 0.5,
    },
    "Gemma 2": {
        "num_key_value_heads": 2, "norm_place": "sandwich", "mlp": "geglu", "sliding_window": (4, 0),
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5,
    },
    "multipliers": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 0.7, "rope_interleave": True,
        "layers_without_positions": (1,), "tie_word_embeddings": False,
    },
    "after the sum": {"norm_place": "post", "attention_bias": "qkv", "mlp": "relu2", "sliding_window": (4, 0)},
    "mixture": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "num_hidden_layers": 3, "mlp_only_layers": (1,),
    },
    "DeepSeek-V3": {
        "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "attention_bias": "all", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
        "topk_group": 2, "scoring_func": "sigmoid", "router_bias": True, "shared_expert_intermediate_size": 16,
    },
    "shared expert": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "shared_expert_gate": True, "scoring_func": "sigmoid", "router_bias": True, "routed_scaling_factor": 1.5,
        "attn_logit_softcapping": 0.5, "residual_multiplier": 0.6, "num_key_value_heads": 2,
    },
    "gpt-oss": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "mlp": "clamped_swiglu", "mlp_bias": True, "attention_bias": "all", "attention_sinks": True,
        "num_key_value_heads": 2, "sliding_window": (4, 0), "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_norms_over_all_heads_are_not_split(size: int) -> None:
    config = ModelConfig.model_validate({**SHAPE, "qk_norm": True, "qk_norm_over": "projection"})
    with pytest.raises(
        ValueError, match=rf"size is {size}, but the model norms the queries of all heads together; 1 was"
    ):
        require_divisible(config, size)
    assert largest_team(config, size, size) == 1
    require_divisible(config, 1)


def together(size: int, work: Callable[[Team], Result]) -> list[Result]:
    """Returns what `work` returns on each rank of a team."""
    store, limit = dist.HashStore(), timedelta(seconds=60)  # type: ignore[attr-defined]

    def run(rank: int) -> Result:
        return work(Team(dist.ProcessGroupGloo(store, rank, size, limit), rank, size))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def model_of(shape: str) -> LanguageModel:
    model = LanguageModel(ModelConfig.model_validate(SHAPE | SHAPES[shape])).eval()
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", ".sinks")):  # otherwise 0
            parameter.data.normal_(generator=generator)
    return model.requires_grad_(False)


def part_of(model: LanguageModel, team: Team) -> LanguageModelPart:
    part = LanguageModelPart(model.config, team).eval().requires_grad_(False)
    part.load_state_dict({name: part.cut(name, tensor) for name, tensor in held_tensors(model).items()}, strict=False)
    part.tie()
    return part


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_team_computes_the_whole_models_logits(shape: str, size: int) -> None:
    model = model_of(shape)
    tokens_BT = torch.randint(301, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model(tokens_BT)
    found = together(size, lambda team: part_of(model, team)(tokens_BT))
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(logits, found[0])


def samples_of(
    model: LanguageModel, prompts: Sequence[Sequence[int]], steps: Literal["auto", "fixed"] = "auto"
) -> Generated:
    seeds, choice = range(len(prompts)), Choice(0.8)
    return generate(model, prompts, max_new_tokens=12, end_ids=[2], choice=choice, seeds=seeds, max_rows=2, steps=steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_a_team_draws_the_whole_models_samples_and_all_ranks_the_same(
    prompts: list[list[int]], dtype: torch.dtype
) -> None:
    model = model_of("grouped").to(dtype)
    expected = samples_of(model, prompts)
    first, second = together(2, lambda team: samples_of(part_of(model, team), prompts))
    assert first == second
    if dtype == torch.float32:
        assert first.responses == expected.responses
        for logprobs, others in zip(first.logprobs, expected.logprobs, strict=True):
            assert logprobs == pytest.approx(others, abs=1e-4)


def test_recorded_steps_and_the_rows_that_fit_are_the_same_on_all_ranks() -> None:
    """On GPUs with different free memory, as many rows run as fit on all of them."""
    model = model_of("grouped")
    expected = samples_of(model, PROMPTS).responses
    assert together(2, lambda team: samples_of(part_of(model, team), PROMPTS, "fixed").responses) == [expected] * 2
    assert together(4, lambda team: team.least(7 - team.rank, torch.device("cpu"))) == [4] * 4


def test_native_steps_are_for_a_whole_model() -> None:
    part = LanguageModelPart(model_of("grouped").config, Team(None, 0, 2))
    with pytest.raises(ValueError, match='steps is "native", which needs a decoder that a single rank computes'):
        decoding_steps(part, "native")


def test_cuts_by_hand() -> None:
    """Rows 0 to 15 are queries, 16 to 19 keys, 20 to 23 values, of heads of two columns."""
    config = ModelConfig.model_validate(
        SHAPE | {"hidden_size": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 9}
        | {"intermediate_size": 4}
    )  # fmt: skip

    def rows(name: str, num_rows: int, rank: int, size: int) -> list[int]:
        found = cut(config, Team(None, rank, size), name, torch.arange(num_rows)[:, None].expand(-1, 3))
        return [int(row) for row in found[:, 0]]

    qkv = "decoder.blocks.1.attention.qkv.weight"
    assert rows(qkv, 24, 1, 2) == [*range(8, 16), 18, 19, 22, 23]
    assert rows(qkv, 24, 1, 4) == [4, 5, 6, 7, 16, 17, 20, 21]  # as rank 0, with the first key-value head
    assert rows(qkv, 24, 2, 4) == [8, 9, 10, 11, 18, 19, 22, 23]
    assert rows("decoder.blocks.0.mlp.up.weight", 8, 1, 2) == [2, 3, 6, 7]  # the gate's rows, and the others
    assert [rows("head.weight", 9, rank, 4) for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]
    assert rows("decoder.blocks.0.mlp_norm.weight", 3, 1, 2) == [0, 1, 2]
    out, bias = "decoder.blocks.0.attention.out.weight", "decoder.blocks.0.mlp.down.bias"
    columns = torch.arange(16).expand(3, -1)
    assert cut(config, Team(None, 3, 4), out, columns)[0].tolist() == [12, 13, 14, 15]
    assert [cut(config, Team(None, r, 2), bias, torch.ones(3)).tolist() for r in (0, 1)] == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_parameters_of_a_part_are_counted(shape: str) -> None:
    model = model_of(shape)
    (part, _) = together(2, lambda team: sum(p.numel() for p in part_of(model, team).parameters()))
    assert parameters_of_part(model.config, 2) == part
    assert part < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "size is 3; a divisor of the model's num_attention_heads = 4 was expected"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads = 6 was expected"),
        (2, {"intermediate_size": 95}, "intermediate_size = 95 was expected"),
    ],
)
def test_a_model_that_a_team_cannot_share_is_refused(size: int, changes: dict[str, int], message: str) -> None:
    config = ModelConfig.model_validate(SHAPE | {"head_dim": 8} | changes)
    with pytest.raises(ValueError, match=message):
        require_divisible(config, size, "size")
    with pytest.raises(ValueError, match="tensor_parallel_size is"):
        LanguageModelPart(config, Team(None, 0, size))


@pytest.fixture(scope="module", params=["grouped", "one key-value head"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), Tokenizer.train(["the cat sat on a mat"] * 20, 301, "chat")
    config = ModelConfig.model_validate(SHAPE | SHAPES[request.param] | {"vocab_size": tokenizer.vocab_size})
    model = LanguageModel(config)
    init_weights(model, 1)
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


def sent_of(model: LanguageModel) -> Iterator[SentWeights]:
    return map(SentWeights.of, chunks(held_tensors(model).items(), 5000))


def sampled(sampler: HeedSampler) -> Generated:
    return sampler.sample(PROMPTS, [1, 2, 3], max_new_tokens=8, temperature=0.7)


def test_a_part_is_sent_whole_weights_and_has_their_digests(saved: Path) -> None:
    """Loading, receiving chunks, receiving into slots as from a broadcast, and sleeping in between."""
    whole = HeedSampler.load(saved, "fp32")
    before, changed = sampled(whole), LanguageModel(whole.policy.config)
    init_weights(changed, 9)
    whole.receive(sent_of(changed))
    after = sampled(whole)

    def work(team: Team) -> list[object]:
        sampler = HeedSampler.load(saved, "fp32", team=team)
        assert whole_digest(sampler.digests) == whole_digest(HeedSampler.load(saved, "fp32").digests)
        found: list[object] = [sampled(sampler).responses]
        sampler.sleep()
        sampler.wake()
        sampler.receive(sent_of(changed))
        assert sampler.digests == whole.digests
        found.append(sampled(sampler).responses)
        sampler.receive(sent_of(HeedSampler.load(saved, "fp32").policy))
        (slots,) = sampler.slots()
        parts = {name: cut(changed.config, team, name, tensor) for name, tensor in held_tensors(changed).items()}
        assert {name: slot.shape for name, slot in slots.items()} == {name: part.shape for name, part in parts.items()}
        for name, part in parts.items():
            slots[name].copy_(part)
        sampler.receive([SentWeights(slots, digests_of(held_tensors(changed)), digests_of(parts))])
        assert sampler.digests == whole.digests
        with pytest.raises(AssertionError, match=r"the generator's .* has digest"):
            sampler.receive([SentWeights(slots, whole.digests, digests_of(parts) | {"decoder.norm.weight": 1})])
        return [*found, sampled(sampler).responses]

    for found in together(2, work):
        assert found == [before.responses, after.responses, after.responses]


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_released_at_once(saved: Path, size: int) -> None:
    """Not only by Python's garbage collection, which runs late, and never for what `gc.freeze` has seen."""
    sampler = HeedSampler.load(saved, "fp32", team=Team(None, 0, 2) if size == 2 else None)
    gc.collect()
    gc.disable()
    try:
        weights = weakref.ref(sampler.policy)
        sampler.sleep()
        assert weights() is None
        sampler.wake()
        weights = weakref.ref(sampler.policy)
        del sampler
        assert weights() is None
    finally:
        gc.enable()


def test_teams_that_share_a_model_and_the_ranks_are_as_large_as_possible() -> None:
    config = ModelConfig.model_validate(
        SHAPE | {"head_dim": 8, "num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96}
    )
    found = [largest_team(config, 6, num_ranks) for num_ranks in (1, 2, 3, 4, 6, 12)]
    assert found == [1, 1, 3, 1, 6, 6]  # teams of 2 cannot share 3 key-value heads


def test_a_tensor_that_arrives_with_other_bits_is_named(saved: Path) -> None:
    name = "decoder.blocks.1.mlp.down.weight"

    def spoiled(chunk: SentWeights) -> SentWeights:
        if name not in chunk.weights:
            return chunk
        other: Tensor = chunk.weights[name].clone()
        other[-1, -1] += 1e-3  # of which rank 0 keeps nothing
        return replace(chunk, weights={**chunk.weights, name: other})

    def work(team: Team) -> str:
        sampler = HeedSampler.load(saved, "fp32", team=team)
        policy = HeedSampler.load(saved, "fp32").policy
        with pytest.raises(AssertionError) as error:
            sampler.receive(map(spoiled, sent_of(policy)))
        return str(error.value)

    for message in together(2, work):
        assert message.startswith(f"the generator's {name} has digest")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("saved", in_ci(["grouped", "one key-value head"], ["grouped"]), indirect=True)
def test_a_team_passes_the_test_of_samplers(saved: Path, precision: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved)
    config = HeedSampler.load(saved, "fp32").policy.config.model_copy(update={"max_position_embeddings": 128})
    model = LanguageModel(config)
    init_weights(model, 1)
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    for found in together(
        2,
        lambda team: [*verify_sampler(partial(HeedSampler.load, team=team), tmp_path, precision=precision)],  # type: ignore[arg-type]
    ):
        assert all(check.passed for check in found), found
