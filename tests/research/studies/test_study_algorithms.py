"""`research.study algorithms`: its arms as jobs, its verdicts on planted curves, and one finding end to end."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from heed.jobs.job_file import load_job
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import read_config, save_model
from preferences.statistics.estimates import Floats
from research.over_optimisation.curves import Curve
from research.studies.arms import BEST_OF, algorithm_arms, arm_job, every_arm, indifferent, lora_arms, write_indifferent
from research.studies.findings import ALARM, ALGORITHMS, CONTROL, LORA_FINDINGS, pooled
from research.studies.measures import Recorded, StoredMeasures
from research.studies.study import QUICK, run_study
from research.studies.verdicts import best_difference
from reward.scoring import RewardModel
from tests.research.studies.test_study import DEBUG, JOBS, TINY
from tests.research.studies.test_study_findings import BY_N, FAR, NUM_PROMPTS, look, planted

ROOT = Path(__file__).parents[3]

# Of the run with an alarm: each iteration has one bet, so an alarm takes about ten of them.
ALARM_FAR = list(np.linspace(0.4, 4.0, 30))


@dataclass(frozen=True)
class Planted:
    """Curves of Gao et al.'s form by algorithm; GRPO's responses are longer."""

    seed: int
    alphas: dict[str, float]

    def best_of_n(self, judge: str) -> Curve:
        assert judge == "reward-full"
        return planted("best_of_n", 0.5, 0.2, BY_N, np.random.default_rng(self.seed))

    def rl(self, arm: str) -> Curve:
        """The three runs of an algorithm lie on one curve, each further out."""
        name, _, number = arm.rpartition("-")
        part = ALARM_FAR if number == "alarm" else FAR[int(number) - 1 :: 3]
        return planted("rl", self.alphas[name], 0.12, part, np.random.default_rng(self.seed))

    def tokens(self, arm: str) -> Floats:
        return np.random.default_rng(self.seed).normal(30 + 5 * arm.startswith("grpo"), 3, NUM_PROMPTS)

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def spot_checks(self, arm: str) -> tuple[Floats, Floats, Floats]:
        """Scores rise by two standard deviations and checks fall with the curve's gold, 128 of each policy."""
        rng = np.random.default_rng(self.seed)
        policy_N = np.repeat(np.arange(len(ALARM_FAR)), [1024, *[128] * (len(ALARM_FAR) - 1)]).astype(float)
        gain_N = np.concatenate([[0.0], self.rl(arm).gold_KP.mean(axis=1) - self.rl(arm).start_gold_P.mean()])
        noise_N = rng.normal(size=len(policy_N))
        check_N = (0.5 + gain_N[policy_N.astype(int)] + 0.15 * noise_N).clip(0, 1)
        score_N = 0.5 * noise_N + rng.normal(size=len(policy_N)) * 0.75**0.5 + 2 * policy_N / len(ALARM_FAR)
        return check_N, score_N, policy_N


def where_dpo_leads(seed: int) -> Planted:
    wobble = 0.002 * (seed - 1)
    alphas = {"ppo": 0.2, "rloo": 0.26, "grpo": 0.2, "dr-grpo": 0.2, "dpo": 0.3, "ipo": 0.1, "rejection": 0.2}
    return Planted(seed, {name: alpha + wobble for name, alpha in alphas.items()})


def test_verdicts_follow_the_planted_curves() -> None:
    verdicts = {finding.name: look(finding, where_dpo_leads).verdict for finding in ALGORITHMS}
    assert verdicts == {
        "dpo-frontier": "replicates",
        "ppo-over-dpo": "does not replicate",
        "rloo": "replicates",
        "dr-grpo": "replicates",
        "dpo-over-optimisation": "replicates in part",  # IPO's curve has its maximum before its end, DPO's not
        "online": "replicates",
        "raft": "does not replicate",
        "best-of-n": "replicates in part",  # it is ahead of all but DPO
    }


def test_the_control_of_rejection_sampling_needs_better_gold_than_random_samples() -> None:
    def chosen_is_better(seed: int) -> Planted:
        return Planted(seed, {"rejection": 0.2 + 0.002 * seed, "random": 0.0})

    def choosing_does_nothing(seed: int) -> Planted:
        return Planted(seed, {"rejection": 0.2, "random": 0.2 + 0.002 * seed})

    verdicts = [claim.verdict for claim in look(CONTROL, chosen_is_better).claims]
    assert verdicts == ["replicates"] * 3 + ["does not replicate"]  # random samples cost gold here
    verdicts = [claim.verdict for claim in look(CONTROL, choosing_does_nothing).claims]
    assert verdicts[:3] == ["does not replicate"] * 3


def test_the_control_draws_the_same_samples_and_keeps_a_random_one(tmp_path: Path, model_folder: Path) -> None:
    """Equal scores are ties, of which rejection sampling keeps the first (tests/sft/test_rejection.py)."""
    for stage in ("base/sft", "reward-full/reward"):
        shutil.copytree(model_folder, tmp_path / stage / "model")
    tokenizer = Tokenizer.load(model_folder)
    judge = ScalarModel(read_config(model_folder, "language")[0])
    init_weights(judge, 0)
    save_model(tmp_path / "reward-full" / "reward" / "model", judge, judge.state_dict(), tokenizer)
    write_indifferent(tmp_path)
    sequences = [tokenizer.encode(text) for text in ("one", "another text", "and a third")]
    assert len(set(RewardModel.load(tmp_path / "reward-full/reward/model").score_sequences(sequences))) == 3
    assert len(set(RewardModel.load(indifferent(tmp_path)).score_sequences(sequences))) == 1
    job = load_job(JOBS / "study.toml", ["pretrain.seq_len=65", "sft.seq_len=65", "ppo.max_new_tokens=30"])
    arms = every_arm(job, tmp_path)
    for number in (1, 2, 3):
        chosen, random = (arm_job(job, arms[f"{name}-{number}"], tmp_path) for name in ("rejection", "random"))
        assert random.seed == chosen.seed
        assert random.rejection.reward_from == str(indifferent(tmp_path))
        assert random.rejection.model_copy(update={"reward_from": chosen.rejection.reward_from}) == chosen.rejection


def test_an_alarm_saves_gold_where_it_falls_and_none_where_it_does_not() -> None:
    def hacked(seed: int) -> Planted:
        return Planted(seed, {"ppo": 0.1 + 0.002 * seed})

    def sound(seed: int) -> Planted:
        return Planted(seed, {"ppo": 1.0 + 0.002 * seed})

    saved, nothing = (
        [claim.verdict for claim in look(ALARM, world).claims if claim.text.endswith("minus the last policy")]
        for world in (hacked, sound)
    )
    assert saved[:2] == ["replicates"] * 2  # a quarter of the checks may take longer
    assert nothing == ["does not replicate"] * 4
    assert [claim.over_seeds.mean for claim in look(ALARM, sound).claims][2::3] == [0.0] * 4  # no alarm rang


def test_a_pooled_curve_has_the_policies_of_all_runs() -> None:
    of = where_dpo_leads(0)
    curve = pooled(of, "dpo")
    assert len(curve.names) == len(FAR) == len(set(curve.names))
    assert np.allclose(np.sort(curve.d_K), FAR)
    assert np.array_equal(curve.start_gold_P, of.rl("dpo-3").start_gold_P)


def test_the_difference_of_the_best_policies_is_paired_and_not_biased_by_the_choice() -> None:
    """Both have 40 equal policies, with noise: the best of the noisy means is above 0, the estimate is not."""
    rng = np.random.default_rng(4)
    start_P = rng.uniform(0, 1, NUM_PROMPTS)
    far_K1 = np.linspace(1, 4, 40)[:, None]

    def noisy(num: int, gain: float) -> Curve:
        kl_KP = np.tile(far_K1[:num] ** 2, (1, NUM_PROMPTS))
        gold_KP = start_P + gain + rng.normal(0, 1.0, kl_KP.shape)
        return Curve("rl", tuple(map(str, range(num))), kl_KP, gold_KP, gold_KP, start_P, start_P)

    many, few = noisy(40, 0.3), noisy(3, 0.3)
    naive = (many.gold_KP.mean(axis=1)).max() - (few.gold_KP.mean(axis=1)).max()
    found = best_difference(many, few, seed=0)
    assert naive > 0.05
    assert found.low < 0 < found.high
    assert best_difference(noisy(40, 0.8), few, seed=0).low > 0.2
    same = best_difference(many, many, seed=0)
    assert (same.mean, same.low, same.high) == (0, 0, 0)


def test_every_arm_is_a_job_with_the_same_labels_reward_and_samples(tmp_path: Path, model_folder: Path) -> None:
    for stage in ("base/sft", "reward-full/reward"):
        shutil.copytree(model_folder, tmp_path / stage / "model")
    job = load_job(JOBS / "study.toml", ["pretrain.seq_len=65", "sft.seq_len=65", "ppo.max_new_tokens=30"])
    arms = algorithm_arms(job, tmp_path)
    assert len(arms) == 21
    assert set(every_arm(job, tmp_path)) > {arm.name for arm in arms}
    assert {name for finding in ALGORITHMS for name in finding.arms} == {arm.name for arm in arms}
    jobs = {arm.name: arm_job(job, arm, tmp_path) for arm in arms}
    for name, made in jobs.items():
        assert made.stage_names == ({"dpo": "dpo", "ipo": "dpo", "rejection": "rejection"}.get(name[:-2], "ppo"),)
    num_samples = job.ppo.num_iterations * job.ppo.rollout_batch_size
    for number, best_of in enumerate(BEST_OF, 1):
        made = jobs[f"rejection-{number}"].rejection
        assert made.prompts.max_rows * made.num_samples == num_samples == 30 * 128
        assert made.num_samples == best_of
        assert jobs[f"dpo-{number}"].dpo.rankings == jobs[f"ipo-{number}"].dpo.rankings
        assert jobs[f"dpo-{number}"].dpo.beta == jobs[f"ipo-{number}"].dpo.beta
        assert jobs[f"ppo-{number}"].ppo.reward.model == made.reward_from
        for name in ("rloo", "grpo", "dr-grpo"):
            ppo = jobs[f"{name}-{number}"].ppo
            assert ppo.value_optimizer is None
            assert ppo.num_iterations * ppo.rollout_batch_size == num_samples
            assert ppo.policy_optimizer == jobs[f"ppo-{number}"].ppo.policy_optimizer
    assert jobs["dr-grpo-2"].ppo.loss.token_weight == "constant"
    assert jobs["ipo-1"].dpo.loss == "ipo"


def test_arms_by_adapters_differ_from_ppo_in_what_is_trained_and_how_fast(tmp_path: Path, model_folder: Path) -> None:
    for stage in ("base/sft", "reward-full/reward", "reward-lora/reward"):
        shutil.copytree(model_folder, tmp_path / stage / "model")
    job = load_job(JOBS / "study.toml", ["pretrain.seq_len=65", "sft.seq_len=65", "ppo.max_new_tokens=30"])
    arms = every_arm(job, tmp_path)
    wanted = {name for finding in LORA_FINDINGS for name in finding.arms}
    assert wanted - {arm.name for arm in algorithm_arms(job, tmp_path)} - {"reward-full"} == {
        arm.name for arm in lora_arms(job, tmp_path)
    }
    jobs = {name: arm_job(job, arms[name], tmp_path) for name in wanted}
    full, by_adapters = jobs["reward-full"].reward, jobs["reward-lora"].reward
    assert by_adapters.lora is not None
    assert (full.lora, full.rankings, full.init_from) == (None, by_adapters.rankings, by_adapters.init_from)
    assert by_adapters.optimizer.learning_rate == pytest.approx(3 * full.optimizer.learning_rate)
    for number in (1, 2, 3):
        ppo, lora, shared = (jobs[f"{name}-{number}"].ppo for name in ("ppo", "lora", "shared"))
        assert lora.policy_optimizer.learning_rate == pytest.approx(10 * ppo.policy_optimizer.learning_rate)
        assert lora.value_optimizer == shared.value_optimizer
        assert (ppo.lora, ppo.shared_body, lora.shared_body, shared.shared_body) == (None, False, False, True)
        assert lora.reward.model == ppo.reward.model == str(tmp_path / "reward-full" / "reward" / "model")
        assert shared.reward.model == str(tmp_path / "reward-lora" / "reward" / "model")


@pytest.mark.nightly
@pytest.mark.usefixtures("_shared_workers")
def test_a_finding_runs_its_arms_and_measures_them(tmp_path: Path) -> None:
    tiny = [line for line in TINY if not line.startswith("world.num_ppo")]

    def study(runs: Path, name: str = "dpo-over-optimisation", *changes: str, stored: Path | None = None) -> str:
        overrides = (*QUICK, *tiny, *changes)
        run_study(name, DEBUG, runs, num_seeds=1, overrides=overrides, stored=stored)
        return (runs / "findings.json").read_text()

    found = study(tmp_path)
    (finding,) = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert len(finding["claims"]) == 2
    curves = finding["curves"][0]
    assert [len(points) for points in curves.values()] == [3, 3]
    assert all(point["kl_nats"]["mean"] > 0 for points in curves.values() for point in points)
    lineages = [json.loads((tmp_path / f"seed-0/{arm}/dpo/lineage.json").read_text()) for arm in ("dpo-1", "ipo-3")]
    assert len({name for lineage in lineages for name in lineage["data"]}) == 2  # one policy and one file of rankings

    # Elsewhere, the same findings come from the stored measures alone; those of another study are refused.
    shutil.copytree(tmp_path / "measures", tmp_path / "stored")
    elsewhere, stored = tmp_path / "elsewhere", tmp_path / "stored"
    assert study(elsewhere, stored=stored) == found
    assert not (elsewhere / "seed-0").exists()
    with pytest.raises(ValueError, match=r"seed-0.npz: has measures of another job, or of a different arm"):
        study(elsewhere, "dpo-over-optimisation", "reward.num_epochs=3", stored=stored)
    with pytest.raises(ValueError, match=r"seed-0.npz: has no rl of ppo-1, since it was written for other findings"):
        study(elsewhere, "dpo-frontier", stored=stored)
    with pytest.raises(ValueError, match=r"no measures of these seeds; .*seed-0.npz were expected"):
        study(elsewhere, stored=tmp_path / "nowhere")
    whole = (stored / "seed-0.npz").read_bytes()
    (stored / "seed-0.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"seed-0.npz: .* a file that `python -m research.study` wrote was expected"):
        study(elsewhere, stored=stored)


def test_a_file_from_before_arms_had_stamps_gives_way(tmp_path: Path) -> None:
    """It had one stamp for the whole study, so nobody knows which arms' definitions it is of."""
    stamps = {"ppo-1": "of ppo-1"}
    recorded = Recorded(where_dpo_leads(0))
    recorded.tokens("ppo-1")
    np.savez_compressed(tmp_path / "old.npz", **{"stamp": np.array("of ppo-1"), "tokens/ppo-1/0": np.zeros(3)})
    with pytest.raises(ValueError, match="measures of another job"):
        StoredMeasures(tmp_path / "old.npz", 0, stamps)
    recorded.write(tmp_path / "old.npz", stamps)
    read = StoredMeasures(tmp_path / "old.npz", 0, stamps)
    assert set(read.arrays) == {"tokens/ppo-1/0"}
    assert np.array_equal(read.tokens("ppo-1"), recorded.tokens("ppo-1"))


STORED = [("measures", 5, name) for name in ("dpo-frontier", "ppo-over-dpo", "dr-grpo", "online")] + [
    ("measures-lora", 3, name) for name in ("lora-reward", "lora-ppo", "shared-body")
]


@pytest.mark.long
def test_the_documented_results_come_from_the_stored_measures(tmp_path: Path) -> None:
    findings = ROOT / "research" / "findings"
    page = "".join((findings / f"{name}.md").read_text(encoding="utf-8") for name in ("algorithms", "adapters"))
    for folder, num_seeds, name in STORED:
        stored = findings / folder
        (found,) = run_study(name, JOBS / "study.toml", tmp_path, num_seeds=num_seeds, stored=stored)
        for claim in found.claims:
            digits = 1 if "tokens" in claim.text else 3
            seeds = ", ".join(f"{value.mean:.{digits}f}".replace("0.", ".", 1) for value in claim.by_seed)
            verdict = claim.verdict if claim.verdict == "undecided" else f"**{claim.verdict}**"
            (row,) = [line for line in page.splitlines() if line.startswith(f"| {claim.text} | {seeds} |")]
            assert row.endswith(f" | {verdict} |")
    assert not (tmp_path / "seed-0").exists()
