"""One rank with all roles, in this process, against naive forward passes and a naive optimizer step."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from lm.samplers.engine import SentWeights, held_tensors
from lm.tokenizer import Messages, Tokenizer
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.learner import Learner
from ppo.rank import InitialModels
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from ppo.scorer import HeldModel
from reward.scoring import RewardModel
from tests.models import full_weights, load_language_model, load_scalar_model
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig
from training.packing import stream_rows

Prompts = list[list[int]]
Start = Callable[..., OneRank]
Controlled = Callable[[OneRank], PPOController]


@pytest.fixture
def controlled(models: InitialModels, prompts: Prompts) -> Controlled:
    def build(worker: OneRank) -> PPOController:
        rows = stream_rows(models.pretraining.path, models.pretraining.seq_len)
        return PPOController(worker.config, worker.roles, prompts, models.scale, num_pretraining_rows=len(rows), seed=5)

    return build


def weights_of(worker: OneRank) -> dict[str, Tensor]:
    parts = {
        "policy": worker.learner.policy.module,
        "value": worker.learner.value.module,
        "generator": worker.generator.sampler.policy,
    }
    found = {f"{part}.{name}": t.clone() for part, model in parts.items() for name, t in model.state_dict().items()}
    return found | {f"average.{name}": tensor.clone() for name, tensor in worker.learner.average.weights_for_file()}


def sequences(rollout: Rollout) -> Iterator[tuple[int, int, list[int]]]:
    """(row, prompt length, tokens) without padding."""
    for row in range(len(rollout)):
        prompt, response = int(rollout.prompt_tokens_B[row]), int(rollout.response_tokens_B[row])
        yield row, prompt, rollout.tokens_BT[row, : prompt + response].tolist()


def batches(worker: OneRank, prompts: Prompts) -> tuple[PolicyBatch, ValueBatch]:
    """A whole-rollout batch with made-up advantages and old values, a few of its responses masked."""
    rollout = worker.sample(prompts, range(16))
    generator = torch.Generator().manual_seed(9)
    mask = rollout.response_mask_BR.clone()
    mask[[2, 7]] = False
    logprobs = worker.policy_logprobs(rollout)
    old = logprobs + 0.4 * torch.randn(logprobs.shape, generator=generator) * mask
    advantages = torch.randn(logprobs.shape, generator=generator) * mask
    returns = torch.randn(logprobs.shape, generator=generator) * mask
    old_values = worker.values(rollout) + 0.4 * torch.randn(logprobs.shape, generator=generator) * mask
    num_tokens = int(mask.sum())
    policy = PolicyBatch(rollout, old, advantages, mask, num_tokens, torch.tensor([3, 0, 6, 1]), 4)
    return policy, ValueBatch(rollout, old_values, returns, mask, num_tokens)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kl_starts_at_exactly_zero_and_then_moves(start: Start, controlled: Controlled, precision: str) -> None:
    controller = controlled(start(precision, learning_rate=1e-2))
    assert controller.step(0)["kl_nats"] == 0.0
    assert abs(controller.step(1)["kl_nats"]) > 1e-4


def test_frozen_matrices_in_bf16_give_the_bits_that_autocast_gives(start: Start, prompts: Prompts) -> None:
    worker = start("bf16")
    assert isinstance(worker.scorer.judge, RewardModel)
    linear, table = (
        worker.scorer.reference.module.decoder.blocks[0].mlp.up.weight,
        worker.scorer.reference.module.decoder.embedding.weight,
    )
    assert (linear.dtype, table.dtype) == (torch.bfloat16, torch.float32)
    assert worker.scorer.reference.module.head.weight is table  # tied: a product of it is rounded at each use
    assert worker.scorer.judge.network.score.weight.dtype == torch.float32  # its scores are fp32 sums
    rollout = worker.sample(prompts, range(16))
    found = worker.reference_logprobs(rollout), worker.scores(rollout)
    worker.scorer.reference = HeldModel(load_language_model(worker.models.sft).eval())
    worker.scorer.judge = RewardModel.load(worker.models.reward)
    assert worker.scorer.judge.network.score.weight.dtype == torch.float32
    expected = worker.reference_logprobs(rollout), worker.scores(rollout)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_responses_that_fill_the_context_have_the_scores_that_a_judge_gives_them(start: Start) -> None:
    worker = start(max_new_tokens=4)
    assert isinstance(worker.scorer.judge, RewardModel)
    prompts = [[row, *range(20, 79)] for row in range(5, 21)]  # 60 tokens of a context of 64
    rollout = worker.sample(prompts, range(16))
    written, responses = rollout.token_lists()
    assert any(len(response) == 4 and response[-1] != worker.tokenizer.end_id for response in responses)
    scores = worker.scores(rollout)
    assert bool(scores.isfinite().all())
    expected = RewardModel.load(worker.models.reward).score(worker.tokenizer, [], written, responses)
    torch.testing.assert_close(scores[:, 0], torch.tensor(expected), atol=1e-5, rtol=0)


def test_the_average_of_tied_weights_is_held_once(start: Start, tmp_path: Path) -> None:
    worker = start()
    names = [name for name, _ in worker.learner.average.weights_for_file()]
    assert "decoder.embedding.weight" in names
    assert "head.weight" not in names
    held = worker.learner.average.shards["decoder.embedding.weight"].storage
    assert held.data_ptr() != worker.learner.policy.module.head.weight.data_ptr()
    assert "head.weight" not in worker.learner.average.shards
    worker.learner.save(tmp_path, 1, {}, {})
    worker.learner.finish_saving()
    saved = load_file(tmp_path / "step-000001" / "average" / "rank-00000.safetensors")
    assert [name for name in saved if "head" in name] == []


def test_policy_logprobs_match_transformers_at_the_sampling_temperature(
    start: Start, models: InitialModels, prompts: Prompts
) -> None:
    worker = start(temperature=0.6)
    rollout = worker.sample(prompts, range(16))
    found = worker.policy_logprobs(rollout)
    model = transformers.AutoModelForCausalLM.from_pretrained(models.sft)
    for row, prompt, tokens in sequences(rollout):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double() / 0.6
        expected = [float(logits[at - 1].log_softmax(-1)[tokens[at]]) for at in range(prompt, len(tokens))]
        assert found[row].tolist() == pytest.approx(expected + [0.0] * (6 - len(expected)), abs=2e-5)
    assert torch.equal(worker.reference_logprobs(rollout), found)
    # Sampling computes them one token at a time, with a cache.
    torch.testing.assert_close(rollout.behaviour_logprobs_BR, found, atol=2e-5, rtol=0)


def test_rollouts_end_with_the_end_token_where_they_are_finished(start: Start, prompts: Prompts) -> None:
    worker = start()
    rollout = worker.sample(prompts * 4, range(64))
    for row, prompt, tokens in sequences(rollout):
        response = tokens[prompt:]
        assert tokens[:prompt] == (prompts * 4)[row]
        assert worker.tokenizer.end_id not in response[:-1]
        assert bool(rollout.finished_B[row]) == (response[-1] == worker.tokenizer.end_id)
        assert bool(rollout.finished_B[row]) or len(response) == 6
    assert 10 < int(rollout.finished_B.sum()) < 54
    assert len(set(rollout.response_tokens_B.tolist())) > 3


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(start: Start, prompts: Prompts) -> None:
    worker = start()
    together = worker.sample(prompts, range(16))
    alone = Rollout.join([worker.sample([prompts[row]], [row]) for row in range(16)])
    for (_, _, tokens), (_, _, same) in zip(sequences(together), sequences(alone), strict=True):
        assert tokens == same
    reseeded = worker.sample(prompts, range(100, 116))
    assert [t for _, _, t in sequences(reseeded)] != [t for _, _, t in sequences(together)]


def test_scores_and_first_values_are_the_reward_models(start: Start, models: InitialModels, prompts: Prompts) -> None:
    worker = start()
    rollout = worker.sample(prompts, range(16))
    scores, values = worker.scores(rollout), worker.values(rollout)
    model = load_scalar_model(models.reward)
    assert 0 < int(rollout.finished_B.sum()) < 16
    for row, prompt, tokens in sequences(rollout):
        # A truncated response is scored with EOS appended, which every labeled text has.
        closed = tokens if rollout.finished_B[row] else [*tokens, worker.tokenizer.end_id]
        with torch.no_grad():
            every = model(torch.tensor([closed]))[0].tolist()
        assert float(scores[row]) == pytest.approx(every[-1], abs=1e-5)
        # The value before a response token is read at the token before it, in units of (score - mean) / std.
        expected = [(score - 0.5) / 2.0 for score in every[prompt - 1 : len(tokens) - 1]]
        assert values[row, : len(expected)].tolist() == pytest.approx(expected, abs=1e-5)
        assert values[row, len(expected) :].tolist() == [0.0] * (6 - len(expected))


def naive_adamw(model: torch.nn.Module, loss: Tensor, rate: float) -> float:
    """Takes one AdamW step from zero moments, clipped to norm 1, written out. Returns the norm."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        clipped = gradient * min(1.0, 1.0 / norm)
        with torch.no_grad():  # bias-corrected moments of a first step are the gradient and its square
            parameter -= rate * clipped / (clipped.abs() + 1e-3)
    return norm


def naive_policy_loss(worker: OneRank, model: torch.nn.Module, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
    """Policy loss and pretraining loss, token by token, one sequence at a time."""
    loss = torch.zeros(())
    for row, prompt, tokens in sequences(batch.rollout):
        logits = model(torch.tensor([tokens]))[0] / worker.config.temperature
        for t in range(len(tokens) - prompt):
            if batch.weight_BR[row, t]:
                logprob = logits[prompt + t - 1].log_softmax(-1)[tokens[prompt + t]]
                ratio, advantage = (logprob - batch.logprobs_BR[row, t]).exp(), batch.advantages_BR[row, t]
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / batch.num_tokens
    stream = np.fromfile(worker.models.pretraining.path, dtype=np.int32)
    ptx = torch.zeros(())
    for number in batch.ptx_rows.tolist():
        row_tokens = torch.from_numpy(stream[number * 9 : (number + 1) * 9].astype(np.int64))
        logprobs = model(row_tokens[None])[0].log_softmax(-1)
        ptx = ptx - sum(logprobs[t, row_tokens[t + 1]] for t in range(8)) / (len(batch.ptx_rows) * 8)
    return loss, ptx


def naive_value_loss(model: torch.nn.Module, batch: ValueBatch) -> Tensor:
    """Clipped value loss, token by token, one sequence at a time."""
    loss = torch.zeros(())
    for row, prompt, tokens in sequences(batch.rollout):
        values = model(torch.tensor([tokens]))[0]
        for t in range(len(tokens) - prompt):
            if batch.mask_BR[row, t]:
                value, old, target = values[prompt + t - 1], batch.values_BR[row, t], batch.returns_BR[row, t]
                clipped = old + (value - old).clamp(-0.2, 0.2)
                loss = loss + 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2) / batch.num_tokens
    return loss


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_a_policy_update_equals_the_naive_one_for_every_micro_batch_size(
    start: Start, models: InitialModels, prompts: Prompts, micro: int
) -> None:
    worker = start(minibatch=16, micro=micro, rollout_batch_size=16)
    batch, _ = batches(worker, prompts)
    naive = load_language_model(models.sft)
    loss, ptx = naive_policy_loss(worker, naive, batch)
    metrics = worker.roles.learners.update(Learner.update_policy, batch, 1e-2, 0)
    norm = naive_adamw(naive, loss + 0.3 * ptx, 1e-2)
    assert metrics["policy_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["ptx_loss"] == pytest.approx(ptx.item(), rel=1e-5)
    assert metrics["policy_gradient_norm"] == pytest.approx(norm, rel=1e-4)
    expected = naive.state_dict()
    for name, weight in worker.learner.policy.module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)
    before = load_language_model(models.sft).state_dict()
    assert any(float((before[name] - expected[name]).abs().max()) > 1e-4 for name in before)


@pytest.mark.parametrize("micro", [2, 16])
def test_a_value_update_equals_the_naive_one_for_every_micro_batch_size(
    start: Start, models: InitialModels, prompts: Prompts, micro: int
) -> None:
    worker = start(minibatch=16, micro=micro, rollout_batch_size=16)
    _, batch = batches(worker, prompts)
    naive = load_scalar_model(models.reward)
    with torch.no_grad():
        naive.score.weight /= 2.0
        naive.bias.copy_((naive.bias - 0.5) / 2.0)
    loss = naive_value_loss(naive, batch)
    metrics = worker.roles.learners.update(Learner.update_value, batch, 1e-2, 0)
    norm = naive_adamw(naive, loss, 1e-2)
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["value_gradient_norm"] == pytest.approx(norm, rel=1e-4)
    expected = naive.state_dict()
    for name, weight in worker.learner.value.module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)


def test_an_update_without_pretraining_rows(start: Start, controlled: Controlled) -> None:
    metrics = controlled(start(ptx=None)).step(0)
    assert "ptx_loss" not in metrics
    assert math.isfinite(metrics["policy_loss"])


def test_a_minibatch_whose_scores_all_failed(start: Start, prompts: Prompts) -> None:
    worker = start(minibatch=1, micro=1, rollout_batch_size=16, num_epochs=1, max_failed_share=0.07, ptx=None)
    scores = worker.scorer.scores

    def one_fails(rollout: Rollout, conversations: Sequence[Messages]) -> Tensor:
        found = scores(rollout, conversations)
        found[0] = math.nan
        return found

    worker.scorer.scores = one_fails  # type: ignore[method-assign]
    controller = PPOController(
        worker.config, worker.roles, prompts, worker.models.scale, num_pretraining_rows=1, seed=5
    )
    metrics = controller.step(0)
    assert metrics["failed_scores"] == 1
    assert math.isfinite(metrics["policy_loss"])
    assert all(bool(torch.isfinite(weight).all()) for weight in weights_of(worker).values())


def test_after_a_sync_generator_and_learner_hold_the_same_weights(start: Start, prompts: Prompts) -> None:
    worker = start(learning_rate=1e-2)
    batch, _ = batches(worker, prompts)
    worker.roles.learners.update(Learner.update_policy, batch, 1e-2, 0)
    found = weights_of(worker)
    assert not torch.equal(found["policy.head.weight"], found["generator.head.weight"])
    worker.roles.sync_weights()
    found = weights_of(worker)
    names = [name.removeprefix("policy.") for name in found if name.startswith("policy.")]
    assert names
    assert all(torch.equal(found[f"policy.{name}"], found[f"generator.{name}"]) for name in names)


def test_a_sync_that_does_not_arrive_is_found_out(start: Start, prompts: Prompts) -> None:
    worker = start()
    batch, _ = batches(worker, prompts)
    worker.roles.learners.update(Learner.update_policy, batch, 1e-2, 0)
    old, send = held_tensors(load_language_model(worker.models.sft)), worker.learner.advance_and_send
    worker.learner.advance_and_send = lambda: (  # type: ignore[method-assign]
        SentWeights({name: old[name] for name in chunk.weights}, chunk.digests) for chunk in send()
    )
    with pytest.raises(AssertionError, match="tensors differ"):
        worker.roles.sync_weights()


def test_without_decay_no_average_is_held_and_the_last_weights_are_exported(
    start: Start, prompts: Prompts, tmp_path: Path
) -> None:
    worker = start(ema={"decay": 0.0})
    batch, _ = batches(worker, prompts)
    worker.roles.learners.update(Learner.update_policy, batch, 1e-2, 0)
    worker.roles.sync_weights()
    assert worker.learner.average.shards == {}
    worker.learner.save(tmp_path / "checkpoints", 1, {}, {})
    worker.learner.finish_saving()
    assert not (tmp_path / "checkpoints" / "step-000001" / "average").exists()
    worker.roles.load(tmp_path / "checkpoints" / "step-000001")
    worker.learner.export_policy(tmp_path)
    last, average = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "model_ema"))
    assert all(torch.equal(tensor, average[name]) for name, tensor in last.items())


def test_the_moving_average_by_hand(start: Start, models: InitialModels, prompts: Prompts, tmp_path: Path) -> None:
    worker = start(ema={"decay": 0.75})
    batch, _ = batches(worker, prompts)
    expected = {name: tensor.clone() for name, tensor in load_language_model(models.sft).state_dict().items()}
    for update in range(3):
        worker.roles.learners.update(Learner.update_policy, batch, 1e-2, update)
        worker.roles.sync_weights()
        for name, weight in worker.learner.policy.module.state_dict().items():
            expected[name] = 0.75 * expected[name] + 0.25 * weight
    averages = dict(worker.learner.average.weights_for_file())
    assert averages.keys() == expected.keys() - {"head.weight"}  # tied to the embedding
    for name, average in averages.items():
        torch.testing.assert_close(average, expected[name], atol=1e-6, rtol=0)
    assert not torch.equal(averages["decoder.embedding.weight"], worker.learner.policy.module.head.weight)
    worker.learner.export_policy(tmp_path)
    last, average = (
        load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"] for name in ("model", "model_ema")
    )
    torch.testing.assert_close(average, expected["head.weight"], atol=1e-6, rtol=0)
    assert torch.equal(last, worker.learner.policy.module.head.weight)


def test_the_last_weights_are_exported_with_the_sft_template(start: Start, prompts: Prompts, tmp_path: Path) -> None:
    worker = start()
    batch, _ = batches(worker, prompts)
    worker.roles.learners.update(Learner.update_policy, batch, 1e-2, 0)
    worker.roles.sync_weights()
    worker.learner.export_policy(tmp_path)
    exported = load_language_model(tmp_path / "model").state_dict()
    assert all(
        torch.equal(exported[name], weight) for name, weight in worker.learner.policy.module.state_dict().items()
    )
    tokenizer, parent = Tokenizer.load(tmp_path / "model"), worker.tokenizer
    assert tokenizer.chat_template == parent.chat_template


def test_a_response_ends_with_the_token_that_closes_turns_in_ppos_template(
    one_objective: InitialModels, prompts: Prompts, ppo_config: Callable[..., PPOConfig]
) -> None:
    """The model's own template closes turns with its end token, this one with "<|user|>"."""
    template = "{% for m in messages %}{{ m.content }}{{ '<|user|>' if m.role == 'assistant' }}{% endfor %}"
    models = replace(one_objective, chat_template=template, pretraining=None)
    worker = OneRank(ppo_config(ptx=None, temperature=100.0), EngineConfig(precision="fp32", trackers=()), models)
    closing = worker.tokenizer.turn_end_id
    assert closing not in Tokenizer.load(models.sft).end_ids
    many = [prompt for prompt in prompts for _ in range(40)]
    responses = worker.sample(many, range(len(many))).token_lists()[1]
    places = [response.index(closing) - len(response) for response in responses if closing in response]
    assert len(places) > 5
    assert set(places) == {-1}
    worker.close()


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_save_and_load_continue_bit_for_bit(
    start: Start, controlled: Controlled, tmp_path: Path, precision: str
) -> None:
    whole = start(precision, learning_rate=1e-2)
    controller = controlled(whole)
    controller.step(0)
    whole.learner.save(tmp_path, 1, {"kl_coef": 0.25}, {"rollout.bin": b"in flight"})
    saved, evidence = weights_of(whole), controller.evidence
    metrics = controller.step(1)  # while what was saved is written
    whole.learner.finish_saving()
    assert json.loads((tmp_path / "step-000001" / "progress.json").read_text()) == {"step": 1, "kl_coef": 0.25}
    assert (tmp_path / "step-000001" / "rollout.bin").read_bytes() == b"in flight"
    resumed = start(precision, learning_rate=1e-2)
    resumed.roles.load(tmp_path / "step-000001")
    loaded = weights_of(resumed)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    again = controlled(resumed)
    again.evidence = evidence
    assert again.step(1) == metrics
    ours, theirs = weights_of(resumed), weights_of(whole)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert not torch.equal(saved["policy.head.weight"], ours["policy.head.weight"])


def test_an_update_without_a_finite_gradient_is_skipped(
    start: Start, prompts: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start()
    rollout = worker.sample(prompts, range(16))
    old_BR, mask_BR = worker.policy_logprobs(rollout), rollout.response_mask_BR
    advantages_BR = torch.ones_like(old_BR)
    advantages_BR[3] = torch.nan
    before = {name: weight.clone() for name, weight in full_weights(worker.learner.policy).items()}
    num_tokens = int(mask_BR.sum())
    for rows in (slice(0, 8), slice(8, 16)):
        batch = PolicyBatch(
            rollout.rows(rows), old_BR[rows], advantages_BR[rows], mask_BR[rows], num_tokens, torch.arange(0), 0
        )
        worker.roles.learners.update(Learner.update_policy, batch, 1e-3, 4)
        is_same = all(torch.equal(weight, before[name]) for name, weight in full_weights(worker.learner.policy).items())
        assert is_same == (rows.start == 0)
    assert caplog.text.count("ppo: update 5 of the policy is skipped: its gradient is not finite") == 1
