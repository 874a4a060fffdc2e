"""Router replay: learner and reference use the experts that the sampler recorded, and each iteration counts what that
changes.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.experts import Mixture, has_route
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import read_config, save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.rollout import Rollout, Share
from ppo.rollout_log import response_digests
from ppo.rounds import Unfinished
from ppo.routes import require_routes
from reward.external import NoReward
from tests.models import full_weights, load_language_model
from tests.ppo.environments.test_continuous import ASKED, CLASS
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

Prompts = list[list[int]]
GRPO = {"advantage": {"kind": "group_mean", "samples_per_prompt": 4}}
L, K = 3, 2
EXPERTS = {
    "num_hidden_layers": L, "num_experts": 6, "num_experts_per_tok": K, "moe_intermediate_size": 8,
    "norm_topk_prob": True, "mlp_only_layers": [0],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(one_objective: InitialModels, tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    shape = read_config(one_objective.sft, "language")[0]
    model = LanguageModel(ModelConfig.model_validate({**shape.model_dump(), **EXPERTS}))
    init_weights(model, 3)
    folder = tmp_path_factory.mktemp("mixture")
    save_model(folder, model, model.state_dict(), Tokenizer.load(one_objective.sft))
    return replace(one_objective, sft=folder)


@pytest.fixture
def start(models: InitialModels, ppo_config: Callable[..., PPOConfig]) -> Iterator[Callable[..., OneRank]]:
    workers: list[OneRank] = []

    def build(precision: str = "fp32", init: InitialModels = models, **changes: object) -> OneRank:
        engine = EngineConfig.model_validate({"precision": precision, "trackers": ()})
        workers.append(OneRank(ppo_config(ptx=None, **changes), engine, init))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


@contextmanager
def turned() -> Iterator[None]:
    """The routers choose the experts that they like least."""
    chosen = Mixture.choose
    try:
        Mixture.choose = lambda self, p_NE: chosen(self, -p_NE)  # type: ignore[method-assign]
        yield
    finally:
        Mixture.choose = chosen  # type: ignore[method-assign]


def test_a_rollout_has_the_routes_of_all_tokens_but_the_last(start: Callable[..., OneRank], prompts: Prompts) -> None:
    rollout = start().sample(prompts, range(16))
    recorded_BTL = has_route(rollout.routes_BTLK)
    assert rollout.routes_BTLK.shape == (*rollout.tokens_BT.shape, L, K)
    is_read_BT = torch.arange(rollout.tokens_BT.shape[1]) < rollout.num_tokens_B[:, None] - 1
    assert not recorded_BTL[:, :, 0].any()  # this layer has no experts
    assert torch.equal(recorded_BTL[:, :, 1], is_read_BT)
    assert torch.equal(recorded_BTL[:, :, 2], is_read_BT)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=["full", "adapters"])
def test_policy_reference_and_updates_replay(
    start: Callable[..., OneRank], prompts: Prompts, changes: dict[str, Any]
) -> None:
    """Routers that would choose quite other experts change no log-prob and no update's ratio; without the recorded
    routes they do.
    """
    worker = start(**changes, micro=2)
    rollout = worker.sample(prompts, range(16))
    expected = worker.policy_logprobs(rollout), worker.reference_logprobs(rollout)
    torch.testing.assert_close(expected[0], rollout.behaviour_logprobs_BR, atol=1e-4, rtol=0)
    with turned():
        found = worker.policy_logprobs(rollout), worker.reference_logprobs(rollout)
        free = worker.policy_logprobs(rollout.without_routes)
    for logprobs_BR, expected_BR in zip(found, expected, strict=True):
        torch.testing.assert_close(logprobs_BR, expected_BR, atol=1e-5, rtol=0)
    assert (free - expected[0]).abs().max() > 0.05


@pytest.mark.parametrize("changes", [{}, GRPO, {**GRPO, "lora": {"rank": 2}}], ids=["PPO", "GRPO", "GRPO, adapters"])
def test_an_iteration_counts_what_replay_changes(
    start: Callable[..., OneRank], models: InitialModels, prompts: Prompts, changes: dict[str, Any]
) -> None:
    worker = start(**changes)
    controller = PPOController(worker.config, worker.roles, prompts, models.scale, num_pretraining_rows=7, seed=5)
    controller.start_sampling(0)
    before = copy.deepcopy(full_weights(worker.learner.policy))
    rollout = controller.in_flight[0]()
    controller.in_flight[0] = lambda: rollout
    with turned():  # not while sampling
        metrics = controller.step(0)
    assert metrics["routes_changed"] > 0.7
    assert metrics["routes_changed"] <= metrics["routes_changed_worst_layer"] <= 1
    assert metrics["sampler_difference"] < 1e-4
    assert metrics["sampler_difference_unreplayed"] > 0.01
    moved = {
        name for name, tensor in full_weights(worker.learner.policy).items() if not torch.equal(tensor, before[name])
    }
    routers = {f"decoder.blocks.{layer}.mlp.router.weight" for layer in (1, 2)}
    assert ("lora" in changes) or routers <= moved


def test_honest_routers_change_no_route(start: Callable[..., OneRank], models: InitialModels, prompts: Prompts) -> None:
    worker = start()
    controller = PPOController(worker.config, worker.roles, prompts, models.scale, num_pretraining_rows=7, seed=5)
    metrics = controller.step(0)
    assert (metrics["routes_changed"], metrics["routes_changed_worst_layer"]) == (0, 0)
    assert metrics["sampler_difference_unreplayed"] < 1e-4
    worker = start(router_replay=False)
    controller = PPOController(worker.config, worker.roles, prompts, models.scale, num_pretraining_rows=7, seed=5)
    assert not [name for name in controller.step(0) if "routes_" in name or "replay" in name]


def test_responses_that_newer_weights_continue_are_replayed(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], prompts: Prompts, tmp_path: Path
) -> None:
    """Through an environment's replies, the queue, the next batch, and a checkpoint."""
    policy, tokenizer = load_language_model(models.sft), Tokenizer.load(models.sft)
    with torch.no_grad():  # some responses end early
        policy.decoder.embedding.weight[:, 0] = 0.5
        policy.decoder.embedding.weight[tokenizer.end_id, 0] = 4.0
    save_model(tmp_path, policy, policy.state_dict(), tokenizer)
    (tmp_path / "counter.py").write_text(CLASS)
    table = {"kind": "class", "class_name": f"{tmp_path}/counter.py:Counter", "max_turns": 3}
    placement = {"kind": "continuous", "num_rows": 10, "round_tokens": 3}
    config = ppo_config(
        environment=table, reward={"kind": "none"}, max_failed_share=0.9, max_new_tokens=30, placement=placement,
        num_iterations=4, num_epochs=1, ptx=None,
    )  # fmt: skip
    own = replace(models, sft=tmp_path, reward=NoReward(), scale=ScoreScale(0.0, 1.0, config.score_coef))
    worker = OneRank(config, EngineConfig.model_validate({"precision": "fp32", "trackers": ()}), own, ASKED)
    controller = PPOController(config, worker.roles, prompts, own.scale, num_pretraining_rows=7, seed=5)
    metrics = [controller.step(iteration) for iteration in range(4)]
    assert metrics[-1]["continued_share"] > 0
    assert metrics[-1]["turns"] > 1.5
    assert all(0 <= line["routes_changed"] < 0.5 for line in metrics)
    assert controller.batch is not None
    rollout = controller.batch.rollout
    is_read_BT = torch.arange(rollout.tokens_BT.shape[1]) < rollout.num_tokens_B[:, None] - 1
    assert torch.equal(has_route(rollout.routes_BTLK)[:, :, 1], is_read_BT)
    data = worker.roles.generators.unfinished()
    found = Unfinished.from_bytes(data)
    assert all(len(one.routes) == one.num_routed for one in found.responses)
    assert any(len(one.routes) < len(one.prompt) + len(one.tokens) - 1 for one in found.responses)  # a reply is unread
    assert found.as_bytes(worker.config.max_new_tokens) == data
    worker.close()


def test_the_gradient_of_a_replayed_pass_is_that_of_the_recorded_experts(
    start: Callable[..., OneRank], prompts: Prompts
) -> None:
    """Packed rows, row by row, against passes over single rows whose routers choose by themselves."""
    worker = start()
    rollout = worker.sample(prompts, range(16))
    model = worker.learner.policy.module
    plain = copy.deepcopy(model)
    with turned():
        worker.learner._logprobs(model, rollout).sum().backward()
    prompts_read, responses = rollout.token_lists()
    for prompt, response in zip(prompts_read, responses, strict=True):
        logits = plain(torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1] / worker.config.temperature
        logits.log_softmax(dim=-1).gather(1, torch.tensor(response)[:, None]).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-3, rtol=1e-3, msg=name)
        assert "router" not in name or parameter.grad.abs().max() > 0


def test_routes_travel_with_their_rows(start: Callable[..., OneRank], prompts: Prompts, tmp_path: Path) -> None:
    """Through selections, joins, pickles, and the file that a checkpoint has of a rollout in flight."""
    rollout = start().sample(prompts, range(16))

    def of_row(found: Rollout, row: int) -> Tensor:
        return found.routes_BTLK[row, : int(found.num_tokens_B[row])]

    order = torch.tensor([5, 0, 9, 15])
    part = rollout.rows(order)
    other = rollout.rows(slice(0, 3))
    (tmp_path / "rollout").write_bytes(rollout.as_bytes())
    shared = rollout.shares([Share(order, (2, 2)), Share(torch.tensor([3]), (1,))])[0]
    for found, rows in (
        (part, order.tolist()),
        (Rollout.join([other, part]), [0, 1, 2, *order.tolist()]),
        (cloudpickle.loads(cloudpickle.dumps(part)), order.tolist()),
        (Rollout.load(tmp_path / "rollout"), range(16)),
        (shared, order.tolist()),
    ):
        for place, row in enumerate(rows):
            assert torch.equal(of_row(found, place), of_row(rollout, row))
    digests, routes = response_digests(rollout), rollout.routes_BTLK.clone()
    routes[4, 0, 1] = routes[4, 0, 1].flip(0)
    differs = [a != b for a, b in zip(digests, response_digests(replace(rollout, routes_BTLK=routes)), strict=True)]
    assert differs == [row == 4 for row in range(16)]


def test_a_dense_policy_has_no_routes_and_cannot_replay_any(
    one_objective: InitialModels, ppo_config: Callable[..., PPOConfig], prompts: Prompts, tmp_path: Path
) -> None:
    worker = OneRank(ppo_config(), EngineConfig.model_validate({"precision": "fp32", "trackers": ()}), one_objective)
    rollout = worker.sample(prompts, range(16))
    worker.close()
    assert rollout.routes_BTLK.numel() == 0
    (tmp_path / "rollout").write_bytes(rollout.as_bytes())
    assert Rollout.load(tmp_path / "rollout").routes_BTLK.shape == rollout.routes_BTLK.shape
    dense = read_config(one_objective.sft, "language")[0]
    require_routes(ppo_config(), dense)
    with pytest.raises(ValueError, match=r"ppo\.router_replay is true, but the policy is not a mixture of experts"):
        require_routes(ppo_config(router_replay=True), dense)
    with pytest.raises(ValueError, match=r"router_replay is true, but sampler\.kind 'vllm' records no routes"):
        ppo_config(router_replay=True, sampler={"kind": "vllm"})
