"""PPO by adapters, and one body with four roles, on one rank in this process: against separate models, each with
weights of its own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from files.hashes import derive_seed
from lm.adapters import FromAdapter
from lm.lora import LoRAConfig, WithAdapters, adapted_maps, is_adapter
from lm.model import LanguageModel, ScalarModel
from lm.samplers.engine import whole_digest
from lm.source import load, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, WithNewHead, save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.learner import Learner
from ppo.rank import InitialModels, joined_heads
from ppo.rollout import Rollout
from ppo.shared_body import require_same_body
from tests.models import full_weights, load_language_model, load_scalar_model
from tests.ppo.one_rank import OneRank
from tests.ppo.test_workers import batches, naive_adamw, naive_policy_loss, naive_value_loss, sequences
from training.config import EngineConfig
from training.packing import stream_rows

Prompts = list[list[int]]
Start = Callable[..., OneRank]
LORA = {"rank": 3, "alpha": 6.0}
MUON = {"learning_rate": 1, "kind": "muon"}
LAST_LAYER = {"learning_rate": 1, "trained_layers": 1}
SHARED = {"lora": {**LORA, "shared_body": True}}
ADAPTER_SENT = {"lora": {**LORA, "sends": "adapter"}}


@pytest.fixture
def start(adapted: InitialModels, ppo_config: Callable[..., PPOConfig]) -> Iterator[Start]:
    workers: list[OneRank] = []

    def build(precision: str = "fp32", **changes: object) -> OneRank:
        engine = EngineConfig.model_validate({"precision": precision, "trackers": ()})
        workers.append(OneRank(ppo_config(**{"lora": LORA, **changes}), engine, adapted))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


def controller_of(worker: OneRank, prompts: Prompts) -> PPOController:
    rows = stream_rows(worker.models.pretraining.path, worker.models.pretraining.seq_len)
    return PPOController(
        worker.config, worker.roles, prompts, worker.models.scale, num_pretraining_rows=len(rows), seed=5
    )


def separate_policy(models: InitialModels) -> LanguageModel:
    """The policy as it starts, with weights of its own."""
    source = ModelFolder(models.sft, LanguageModel)
    return load(WithAdapters(source, LoRAConfig.model_validate(LORA), derive_seed(models.adapter_seed, "policy")))


def separate_value(models: InitialModels) -> ScalarModel:
    """The value function of a shared body as it starts, with weights of its own."""
    body = WithNewHead(models.sft, LanguageModel, ScalarModel, seed=4)
    heads = ModelFolder(models.reward, ScalarModel)
    own = joined_heads(FromAdapter(body, models.reward.parent / "adapter"), models.reward, {}, models.scale)
    model = load(own)
    with torch.no_grad():  # the bias is in the model's folder
        model.bias.copy_((load(heads).bias - models.scale.mean) / models.scale.std)
    return model


def logprobs_of(model: nn.Module, worker: OneRank, rollout: Rollout) -> Tensor:
    """log π of each response token [B, R], one sequence at a time."""
    found = torch.zeros(len(rollout), rollout.max_new_tokens)
    for row, prompt, tokens in sequences(rollout):
        with torch.no_grad():
            logprobs = (model(torch.tensor([tokens]))[0] / worker.config.temperature).log_softmax(-1)
        for place, token in enumerate(tokens[prompt:]):
            found[row, place] = logprobs[prompt + place - 1, token]
    return found


def learned(worker: OneRank) -> dict[str, Tensor]:
    return {name: weight for name, weight in full_weights(worker.learner.policy).items() if is_adapter(name)}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("changes", [{}, SHARED], ids=["own models", "shared body"])
def test_the_reference_is_the_policy_without_adapters(
    start: Start, prompts: Prompts, precision: str, changes: dict[str, object]
) -> None:
    worker = start(precision, learning_rate=1e-2, **changes)
    controller = controller_of(worker, prompts)
    first, second = controller.step(0), controller.step(1)
    assert abs(first["kl_nats"]) < (1e-4 if changes else 1e-9)  # next to other rows, a row may round otherwise
    assert abs(second["kl_nats"]) > 1e-3
    if precision == "bf16":
        return
    rollout = worker.sample(prompts, range(16))
    reference = logprobs_of(load_language_model(worker.models.sft), worker, rollout)
    torch.testing.assert_close(worker.reference_logprobs(rollout), reference, atol=2e-5, rtol=0)
    assert not torch.allclose(worker.policy_logprobs(rollout), reference, atol=1e-3)


def test_no_role_holds_a_second_copy_of_the_policys_body(start: Start) -> None:
    worker = start(**SHARED)
    learner = worker.learner
    assert worker.roles.scorers.ranks.kept is learner
    reward = learner.scorer.network.module
    models = [learner.policy.module, learner.value.module, reward]
    tensors = {p.data_ptr(): p.numel() for model in models for p in model.parameters()}
    body = sum(p.numel() for p in load_language_model(worker.models.sft).parameters())
    trained = [p for model in models for name, p in model.named_parameters() if is_adapter(name) or "score" in name]
    assert sum(tensors.values()) == body + sum(p.numel() for p in trained)
    assert not any(p.requires_grad for p in reward.parameters())


def test_with_adapters_no_reference_is_held(start: Start) -> None:
    assert start().scorer.reference is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_roles_on_one_body_say_what_four_models_say(start: Start, prompts: Prompts, precision: str) -> None:
    worker = start(precision, **SHARED)
    rollout, models, atol = worker.sample(prompts, range(16)), worker.models, 2e-5 if precision == "fp32" else 0.1
    found = worker.roles.start_forward_passes(rollout, [torch.arange(16)])()
    policy, value, reward = separate_policy(models), separate_value(models), load_scalar_model(models.reward)
    torch.testing.assert_close(found.logprobs_BR, logprobs_of(policy, worker, rollout), atol=atol, rtol=0)
    reference = logprobs_of(load_language_model(models.sft), worker, rollout)
    torch.testing.assert_close(found.ref_logprobs_BR, reference, atol=atol, rtol=0)
    scores = worker.scores(rollout)
    for row, prompt, tokens in sequences(rollout):
        closed = tokens if rollout.finished_B[row] else [*tokens, worker.tokenizer.end_id]
        with torch.no_grad():
            score, values = reward(torch.tensor([closed]))[0, -1], value(torch.tensor([tokens]))[0]
        assert float(scores[row]) == pytest.approx(float(score), abs=atol)
        expected = torch.zeros(6)
        expected[: len(tokens) - prompt] = values[prompt - 1 : len(tokens) - 1]
        torch.testing.assert_close(found.values_BR[row], expected, atol=atol, rtol=0)
    assert found.values_BR.abs().max() > 0.1


def test_updates_on_one_body_are_those_of_separate_models(start: Start, prompts: Prompts) -> None:
    worker = start(minibatch=16, rollout_batch_size=16, **SHARED)
    policy_batch, value_batch = batches(worker, prompts)
    policy, value = separate_policy(worker.models), separate_value(worker.models)
    loss, ptx = naive_policy_loss(worker, policy, policy_batch)
    metrics = worker.roles.learners.update(Learner.update_policy, policy_batch, 1e-2, 0)
    norm = naive_adamw(policy, loss + 0.3 * ptx, 1e-2)
    assert metrics["policy_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["policy_gradient_norm"] == pytest.approx(norm, rel=1e-4)
    loss = naive_value_loss(value, value_batch)
    metrics = worker.roles.learners.update(Learner.update_value, value_batch, 1e-2, 0)
    norm = naive_adamw(value, loss, 1e-2)
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["value_gradient_norm"] == pytest.approx(norm, rel=1e-4)
    for naive, engine in ((policy, worker.learner.policy), (value, worker.learner.value)):
        expected = naive.state_dict()
        for name, weight in engine.module.state_dict().items():
            torch.testing.assert_close(
                weight, expected[name], atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
    before = load_scalar_model(worker.models.reward)  # the reward model has not moved with the value function
    rollout = policy_batch.rollout
    for row, _, tokens in [*sequences(rollout)][:3]:
        closed = tokens if rollout.finished_B[row] else [*tokens, worker.tokenizer.end_id]
        with torch.no_grad():
            assert float(worker.scores(rollout)[row]) == pytest.approx(
                float(before(torch.tensor([closed]))[0, -1]), abs=2e-5
            )


@pytest.mark.parametrize(
    "changes",
    [{}, SHARED, ADAPTER_SENT, {"lora": {**SHARED["lora"], "sends": "adapter"}}],
    ids=["own models", "shared body", "adapter sent", "both"],
)
def test_a_sync_merges_in_fp32_and_rounds_once(start: Start, prompts: Prompts, changes: dict[str, object]) -> None:
    worker = start("bf16", learning_rate=1e-2, **changes)
    controller_of(worker, prompts).step(0)
    folder = load_language_model(worker.models.sft).state_dict()
    held = worker.generator.sampler.policy.state_dict()
    maps = adapted_maps(worker.learner.policy.module)
    moved = 0.0
    for name, module in maps.items():
        whole = folder[f"{name}.weight"].bfloat16().float() + module.addition(module.lora_a, module.lora_b).detach()
        assert torch.equal(held[f"{name}.weight"], whole.bfloat16())
        moved += float((held[f"{name}.weight"] - folder[f"{name}.weight"].bfloat16()).abs().sum())
    assert moved > 0
    assert torch.equal(held["decoder.embedding.weight"], folder["decoder.embedding.weight"].bfloat16())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generators_that_merge_hold_and_sample_the_same(start: Start, prompts: Prompts, precision: str) -> None:
    whole, alone = start(precision, learning_rate=1e-2), start(precision, learning_rate=1e-2, **ADAPTER_SENT)
    for iteration in range(2):
        metrics = [controller_of(worker, prompts).step(iteration) for worker in (whole, alone)]
        assert metrics[0] == metrics[1]
    assert whole.generator.sampler.digests == alone.generator.sampler.digests
    sent = {name: tensor for chunk in alone.learner.send() for name, tensor in chunk.weights.items()}
    assert sent
    assert all(map(is_adapter, sent))
    assert alone.sample(prompts, range(16)).sampled_by_BR[0, 0] == whole_digest(alone.learner.sent_digests())


def test_an_adapter_that_changed_on_its_way_is_named(start: Start) -> None:
    worker = start(**ADAPTER_SENT)
    chunks = [*worker.learner.send()]
    name = next(name for name in chunks[0].weights if name.endswith("lora_a"))
    chunks[0].weights[name][0, 0] += 1
    with pytest.raises(AssertionError, match=f"the generator's {name} has digest"):
        worker.generator.receive(chunks)
    with pytest.raises(AssertionError, match="the adapter has not arrived whole"):
        worker.generator.receive(chunks[1:])


@pytest.mark.parametrize("changes", [{}, SHARED], ids=["own models", "shared body"])
def test_a_checkpoint_has_adapters_alone_and_restores_them(
    start: Start, prompts: Prompts, tmp_path: Path, changes: dict[str, object]
) -> None:
    worker = start(learning_rate=1e-2, **changes)
    controller = controller_of(worker, prompts)
    controller.step(0)
    worker.learner.save(tmp_path, 1, {}, {})
    worker.learner.finish_saving()
    saved = {name: tensor.clone() for name, tensor in learned(worker).items()}
    for role in ("policy", "value", "average"):
        (path,) = (tmp_path / "step-000001" / role).glob("*.safetensors")
        names = {key.split("/", 1)[1] for key in load_file(path)}
        assert names
        assert all(is_adapter(name) or name in ("score.weight", "bias") for name in names), role
    evidence, metrics = controller.evidence, controller.step(1)
    worker.roles.load(tmp_path / "step-000001")
    assert all(torch.equal(tensor, learned(worker)[name]) for name, tensor in saved.items())
    again = controller_of(worker, prompts)
    again.evidence = evidence
    assert again.step(1) == metrics


def test_an_exported_policy_is_merged_and_its_adapter_gives_the_same(
    start: Start, prompts: Prompts, tmp_path: Path
) -> None:
    worker = start(learning_rate=1e-2)
    controller_of(worker, prompts).step(0)
    rollout = worker.sample(prompts, range(16))
    expected = worker.policy_logprobs(rollout)
    worker.learner.export_policy(tmp_path)
    whole = load_language_model(tmp_path / "model")
    apart = load(FromAdapter(ModelFolder(worker.models.sft, LanguageModel), tmp_path / "adapter"))
    for model in (whole, apart):
        torch.testing.assert_close(logprobs_of(model, worker, rollout), expected, atol=2e-5, rtol=0)
    average = load_language_model(tmp_path / "model_ema")
    assert not torch.allclose(logprobs_of(average, worker, rollout), expected, atol=1e-4)


def test_a_reward_model_of_another_body_is_refused(
    adapted: InitialModels, one_objective: InitialModels, tmp_path: Path
) -> None:
    require_same_body(adapted.sft, adapted.reward)
    with pytest.raises(ValueError, match=r"reward has no adapter next to it .*, trained with \[reward\] lora"):
        require_same_body(adapted.sft, one_objective.reward)
    other = load_language_model(adapted.sft)
    with torch.no_grad():
        other.decoder.blocks[1].mlp.down.weight[0, 0] += 0.5
    save_model(tmp_path / "other", other, other.state_dict(), Tokenizer.load(adapted.sft))
    with pytest.raises(
        ValueError, match=r"decoder.blocks.1.mlp.down.weight of .* differs from that of .*other with the adapter"
    ):
        require_same_body(tmp_path / "other", adapted.reward)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 50.0}, r"rope_theta \(10000.0, 50.0\) of .* differs from that of"),
        ({"vocab_size": 301}, r"vocab_size \(300, 301\) of .* differs from that of"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers \(2, 3\) of .* differs from that of"),
    ],
)
def test_a_reward_model_of_another_shape_is_refused(
    adapted: InitialModels, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    shape = on_meta(ModelFolder(adapted.sft, LanguageModel).build).config.model_copy(update=changes)
    other = LanguageModel(shape)
    save_model(tmp_path / "other", other, other.state_dict(), Tokenizer.load(adapted.sft))
    with pytest.raises(ValueError, match=message):
        require_same_body(tmp_path / "other", adapted.reward)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_body": True}, r"shared_body\n.*not permitted"),
        (
            {**SHARED, "reward": {"kind": "function", "function": "rewards.py:length"}},
            r"lora.shared_body needs a reward model trained by Heed with \[reward\] lora",
        ),
        (
            {**SHARED, "placement": {"kind": "disaggregated"}},
            "lora.shared_body needs all roles on the same ranks, but placement.kind 'disaggregated' separates them",
        ),
        (
            {"lora": LORA, "policy_optimizer": {"learning_rate": 1, "kind": "muon"}},
            'lora with policy_optimizer.kind "muon"',
        ),
        (
            {"lora": LORA, "advantage": {"value_optimizer": {"learning_rate": 1, "trained_layers": 1}}},
            "lora with advantage.value_optimizer.trained_la",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    ppo_config: Callable[..., PPOConfig], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ppo_config(**changes)
