"""`research.study freshness` and `router-replay`: arms that are trained in this process, and their verdicts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from heed.jobs.job_file import load_job
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.samplers.engine import SentWeights, digests_of, held_tensors
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.learner import Learner
from research.over_optimisation.curves import Curve
from research.studies import policy_arms
from research.studies.policy_arms import SETTINGS, TUNING_SEEDS, RoundedSampler, moments
from research.studies.policy_runs import FRESHNESS, METRICS, ROUTER_REPLAY, PolicyMeasures, gold_after
from research.studies.study import GROUPS, own_job, run_study
from tests.research.studies.test_study import JOBS

NUMBERS = ["two", "three", "four", "five"]
SMALLER = (
    "ppo.num_iterations=5", "ppo.rollout_batch_size=8", "ppo.minibatch.batch_size=4",
    "ppo.minibatch.micro_batch_size=4",
    "ppo.max_new_tokens=6", "compare.max_new_tokens=6", "ppo.policy_optimizer.learning_rate=0.02",
)  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What seeds share: prompts, and mixtures with random weights."""
    folder = tmp_path_factory.mktemp("policy")
    shape = ModelConfig(
        vocab_size=280, max_position_embeddings=128, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8,
    )  # fmt: skip
    tokenizer = Tokenizer.train([" ".join(NUMBERS[i % 4 :]) for i in range(20)], shape.vocab_size, "chat")
    model = LanguageModel(shape)
    init_weights(model, 1)
    with torch.no_grad():
        for block in model.decoder.blocks:  # far from even, so that roundings change few routes
            block.mlp.router.weight.mul_(20)
    (folder / "base" / "sft").mkdir(parents=True)
    save_model(folder / "base" / "sft" / "model", model, model.state_dict(), tokenizer)
    (folder / "base" / "sft" / "lineage.json").write_text(json.dumps({"fingerprint": "planted"}))
    data = folder / "base" / "world" / "data"
    data.mkdir(parents=True)
    for name in ("ppo_prompts", "collect_prompts"):
        texts = [f"List {number} {what}, but not Kate or green." for number in NUMBERS for what in ("colors", "names")]
        rows = [{"prompt": text, "kind": "list"} for text in texts] + [{"prompt": "Say nothing.", "kind": "other"}]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def measures(policy: Path, name: str, *overrides: str) -> PolicyMeasures:
    score = policy / "vowels.py"
    score.write_text(
        "def score(prompts, responses):\n    return [sum(c in 'aeiou' for c in r) / 9 for r in responses]\n"
    )
    smaller = [*SMALLER, f"ppo.reward.function={score}:score", "seed=3", *overrides]
    return PolicyMeasures.of(policy, load_job(JOBS / name, smaller, opens_models=False))


def metric(of_arm: np.ndarray, name: str) -> np.ndarray:
    return of_arm[METRICS.index(name)]


def test_stale_arms_differ_in_what_they_are_named_for(policy: Path) -> None:
    found = measures(policy, "study-freshness.toml")
    fresh, stale, plain, within = (found.metrics(name) for name in ("fresh", "truncated-4", "none-4", "within-4"))
    scores = [metric(metrics_MI, "score") for metrics_MI in (fresh, stale, plain)]
    assert scores[0][0] == scores[1][0] == scores[2][0]  # the same samples of the same policy
    assert scores[0][1] != scores[1][1]  # staleness 0 samples with the updated policy, staleness 4 with the first one
    assert scores[1][1] == scores[2][1]
    assert (metric(fresh, "effective_share") > 0.999).all()
    assert metric(stale, "effective_share")[1] < 0.99
    assert metric(stale, "effective_share")[1] == metric(plain, "effective_share")[1]  # one update has been the same
    assert metric(stale, "kl_nats")[4] != metric(plain, "kl_nats")[4]  # the weights count only in one of them
    assert np.isnan(metric(stale, "token_age")).all()
    assert metric(within, "token_age")[4] > 1
    curve = found.rl("fresh")
    assert curve.names == ("iteration 5",)
    assert curve.kl_KP.mean() > 0
    assert curve.gold_KP.shape == (1, 8)


def test_an_arm_that_has_ended_is_not_run_again(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measures(policy, "study-freshness.toml").metrics("none-2")

    def again(*_: object) -> None:
        raise AssertionError("the arm was trained again")

    monkeypatch.setattr(PolicyMeasures, "_trained", again)
    assert np.array_equal(measures(policy, "study-freshness.toml").metrics("none-2"), first, equal_nan=True)


def test_a_tuned_arm_is_the_one_whose_rate_has_the_most_gold_on_other_seeds(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {"third-none-4": (0.1, 0.6, 0.7), "none-4": (0.4, 0.4, 0.8), "thrice-none-4": (0.5, 0.1, 0.9)}

    def of_arm(self: PolicyMeasures, arm: str) -> dict[str, np.ndarray]:
        gold = planted[arm][TUNING_SEEDS.index(self.seed) if self.seed in TUNING_SEEDS else 2]
        return {"iterations_K": np.array([5.0]), **dict.fromkeys(("gold_KP", "kl_KP"), np.full((1, 8), gold))}

    monkeypatch.setattr(PolicyMeasures, "_of_arm", of_arm)
    found = measures(policy, "study-freshness.toml")
    assert found.metrics("tuned-none-4") == pytest.approx(np.array([[0.1, 0.6], [0.4, 0.4], [0.5, 0.1]]))
    assert found.rl("tuned-none-4").gold_KP.mean() == pytest.approx(0.8)
    assert found.rl("thrice-none-4").gold_KP.mean() == pytest.approx(0.9)


def test_gradients_are_those_of_updates_and_change_none(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ("fresh", "truncated-1", "none-1", "truncated-4", "none-4")
    for name, value in {"TIMES": (5,), "NUM_ROLLOUTS": 1, "AGES": (1, 4), "GRADIENT_ARMS": arms}.items():
        monkeypatch.setattr(policy_arms, name, value)
    found, folder = measures(policy, "study-freshness.toml"), policy / "base" / "sft" / "model"
    plain, measured = (found._controller(SETTINGS["fresh"], folder) for _ in range(2))
    moments_A3 = measured.gradient_moments(found.job)[:, 0]
    for number in range(5):
        plain.step(number)
    for name, weight in plain._learner.policy.weights(torch.float32):
        assert torch.equal(weight, dict(measured._learner.policy.weights(torch.float32))[name])
    assert moments_A3[0, 1] == moments_A3[0, 2]
    assert (moments_A3[:, 0] > 0).all()
    assert len(set(moments_A3[:, 0])) == 5  # samples of each age, with weights and without
    assert plain.batch is not None
    minibatch = plain._policy_batch(plain.batch.rows(torch.arange(4)), 0)
    gradient_D = plain._gradient_D(minibatch)
    logged = plain.roles.learners.update(Learner.update_policy, minibatch, 0.0, 0)
    assert float(gradient_D.norm()) == pytest.approx(logged["policy_gradient_norm"])


def test_moments_of_gradients_are_unbiased() -> None:
    """Four gradients whose numbers have mean 1 or 0 and variance 4: of two numbers, and 1 is the squared mean."""
    chance = torch.Generator().manual_seed(0)
    drawn = [torch.tensor([1.0, 0.0]) + 2 * torch.randn(4, 2, generator=chance) for _ in range(4_000)]
    found = np.mean([moments(gradients_ND, torch.tensor([3.0, 5.0]), is_fresh=False) for gradients_ND in drawn], axis=0)
    assert found == pytest.approx([8, 1, 3], abs=0.2)


def test_gold_between_kept_policies_lies_on_a_line() -> None:
    gold_KP = np.array([[2.0, 4.0], [4.0, 4.0]])
    curve = Curve("rl", ("iteration 10", "iteration 20"), gold_KP, gold_KP, gold_KP, np.zeros(2), np.zeros(2))
    for iterations, expected in ((5, [1, 2]), (10, [2, 4]), (15, [3, 4]), (20, [4, 4])):
        assert gold_after(curve, iterations) == pytest.approx(expected)


def test_replay_keeps_the_routes_of_a_rounded_sampler(policy: Path) -> None:
    found = measures(policy, "study-router-replay.toml")
    same, replay, plain = (found.metrics(name) for name in ("same-precision", "replay", "no-replay"))
    assert (metric(same, "sampler_difference") < 1e-4).all()
    assert (metric(replay, "sampler_difference") > 1e-3).all()
    assert (metric(replay, "routes_changed") > 0).any()
    assert np.isnan(metric(plain, "routes_changed")).all()
    assert not np.array_equal(metric(plain, "sampler_difference"), metric(replay, "sampler_difference"))


def test_rounded_weights_have_the_digests_of_those_that_were_sent(policy: Path) -> None:
    folder = policy / "base" / "sft" / "model"
    sampler = RoundedSampler.load(folder, "fp32")
    sent = {name: tensor.clone() for name, tensor in held_tensors(sampler.policy).items()}
    sampler.receive([SentWeights.of(sent)])
    assert sampler.digests == digests_of(sent)
    held = held_tensors(sampler.policy)
    changed = {name for name in sent if not torch.equal(sent[name], held[name])}
    assert changed == {name for name in sent if ".attention." in name or ".experts." in name}
    for name in changed:
        steps = held[name] / (sent[name].abs().amax(dim=-1, keepdim=True) / 127)
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert (held[name] - sent[name]).abs().max() <= sent[name].abs().max() / 254 + 1e-6


def test_arms_of_findings_exist_and_their_settings_are_valid() -> None:
    for finding in (*FRESHNESS, *ROUTER_REPLAY):
        job = load_job(JOBS / own_job(finding.name), opens_models=False)
        for arm in finding.arms:
            config = SETTINGS[arm].config(job)
            assert config.placement.max_staleness == (int(arm.rpartition("-")[2]) if arm[-1].isdigit() else 0)


PUBLISHED = [
    (page, finding.name) for page, group in GROUPS.items() if group in (FRESHNESS, ROUTER_REPLAY) for finding in group
]


@pytest.mark.parametrize(("page", "name"), PUBLISHED)
def test_the_documented_results_come_from_the_stored_measures(page: str, name: str, tmp_path: Path) -> None:
    findings = JOBS.parent / "findings"
    rows = (findings / f"{page}.md").read_text(encoding="utf-8").splitlines()
    (found,) = run_study(name, JOBS / own_job(name), tmp_path, num_seeds=5, stored=findings / f"measures-{page}")
    for claim in found.claims:
        seeds = ", ".join(f"{value.mean:.3f}".replace("0.", ".", 1).replace("nan", "–") for value in claim.by_seed)
        verdict = claim.verdict if claim.verdict == "undecided" else f"**{claim.verdict}**"
        (row,) = [line for line in rows if line.startswith(f"| {claim.text} | {seeds} |")]
        assert row.endswith(f" | {verdict} |")
    assert not (tmp_path / "policy").exists()
