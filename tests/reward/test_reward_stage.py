"""Scores, the objective, and the reward stage end to end on one CPU rank."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from preferences.rankings import split_rankings
from reward import metrics
from reward.comparisons import Comparison, Verdict
from reward.config import RankingsConfig, RewardConfig
from reward.objective import AuxiliaryParameters, RankingObjective, RewardLearner, ranking_loss
from reward.prepared import read_rankings
from reward.scoring import head_scores, read_by, scores_of
from tests.models import load_language_model, load_scalar_model
from tests.rows import jsonl
from tests.token_files import train_reward
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import StageContext
from training.metrics import read_metrics

CPU = torch.device("cpu")
SEED = 3


@pytest.fixture(scope="module")
def scalar(tiny_config: ModelConfig) -> ScalarModel:
    model = ScalarModel(tiny_config)
    init_weights(model, 5)
    model.bias.fill_(0.25)
    return model.eval()


@torch.no_grad()
def alone(model: ScalarModel, sequence: tuple[int, ...]) -> float:
    return float(model(torch.tensor([sequence]))[0, -1])


SEQUENCES = [tuple(range(3, 3 + length)) for length in (7, 2, 11, 5, 1, 9, 2)]


def test_scores_are_those_of_each_sequence_alone(scalar: ScalarModel) -> None:
    expected = [alone(scalar, sequence) for sequence in SEQUENCES]
    assert scores_of(scalar, read_by(SEQUENCES, "decoder", torch.device("cpu")))[:, 0].tolist() == pytest.approx(
        expected, abs=1e-5
    )
    for max_tokens in (1, 16, 1000):
        assert head_scores(scalar, SEQUENCES, max_tokens)[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert head_scores(scalar, []).shape == (0, 1)


def test_a_last_token_that_also_pads_still_scores(scalar: ScalarModel) -> None:
    sequences = [(4, 5, 0), (4, 5, 6, 7)]
    expected = [alone(scalar, sequence) for sequence in sequences]
    assert head_scores(scalar, sequences)[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_objective_is_the_sum_over_ragged_comparisons_of_the_mean_over_labelers(scalar: ScalarModel) -> None:
    comparisons = [
        Comparison("a", tuple(SEQUENCES[:3]), (Verdict((2, 1, 3)), Verdict((1, 2, 3)), Verdict((1, 1, 2)))),
        Comparison("b", tuple(SEQUENCES[3:5]), (Verdict((1, 1)),)),
        Comparison("c", tuple(SEQUENCES[2:7]), (Verdict((1, 3, 3, 2, 4)), Verdict((2, 1, 3, 4, 5)))),
    ]
    objective = RankingObjective(comparisons, "decoder")
    chosen = np.array([2, 0, 1])
    loss, extra = objective.loss(RewardLearner(scalar, AuxiliaryParameters()), chosen, CPU)
    expected, right = 0.0, 0.0
    for comparison in comparisons:
        scores = [alone(scalar, sequence) for sequence in comparison.sequences]
        pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if i != j]
        for ranks in (verdict.ranks for verdict in comparison.verdicts):
            share = 1 / len(comparison.verdicts)
            for i, j in pairs:  # each pair twice, once from either side
                chance = 0.5 if ranks[i] == ranks[j] else float(ranks[i] < ranks[j])
                loss_of_pair = -chance * math.log(1 / (1 + math.exp(scores[j] - scores[i])))
                expected += share * loss_of_pair / (len(pairs) / 2)
            untied = [(i, j) for i, j in pairs if ranks[i] < ranks[j]]
            right += share * (sum(scores[i] > scores[j] for i, j in untied) / len(untied) if untied else 0.5)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(extra["accuracy"]) == pytest.approx(right, rel=1e-6)
    assert objective.count(chosen) == 3
    assert objective.num_tokens(chosen) == sum(len(s) for c in comparisons for s in c.sequences)


def test_labelers_weights_make_weighted_means(scalar: ScalarModel) -> None:
    """Σ share · loss / Σ share with share = weight / number of verdicts on the comparison, for any mean weight."""
    right = tuple(1 + sum(alone(scalar, o) > alone(scalar, s) for o in SEQUENCES[:3]) for s in SEQUENCES[:3])
    wrong = tuple(4 - rank for rank in right)
    weights = {right: 1.6, wrong: 0.4}
    verdicts = [((right, 1.6),), ((right, 1.6), (wrong, 0.4)), ((wrong, 0.4),), ((right, 1.6),)]
    comparisons = [
        Comparison(str(row), tuple(SEQUENCES[:3]), tuple(Verdict(ranks, weight=weight) for ranks, weight in judged))
        for row, judged in enumerate(verdicts)
    ]
    objective, learner = RankingObjective(comparisons, "decoder"), RewardLearner(scalar, AuxiliaryParameters())
    scores_BK = torch.tensor([[alone(scalar, sequence) for sequence in SEQUENCES[:3]]])
    loss_of = {ranks: float(ranking_loss(scores_BK, torch.tensor([ranks]))[0]) for ranks in weights}
    for rows in ([0], [2], [0, 1, 2, 3]):
        loss, extra = objective.loss(learner, np.array(rows), CPU)
        shares = [(ranks, weight / len(verdicts[row])) for row in rows for ranks, weight in verdicts[row]]
        total = sum(share for _, share in shares)
        count = objective.count(np.array(rows))
        mean = sum(share * loss_of[ranks] for ranks, share in shares) / total
        assert float(loss.detach()) / count == pytest.approx(mean, rel=1e-5)
        share_right = sum(share for ranks, share in shares if ranks == right) / total
        assert float(extra["accuracy"]) / count == pytest.approx(share_right, rel=1e-5)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> RankingsConfig:
    path.write_text(jsonl(rows))
    return RankingsConfig(source=str(path))


DEMONSTRATIONS = [
    {"prompt": f"Where is fox {i}?", "completion": answer} for i, answer in enumerate(["In.", "Far", "A b"])
]


def config_for(folder: Path, **changes: Any) -> RewardConfig:
    """Responses with more exclamation marks are better; a few are tied. Bo looks at one and ranks every third task."""
    rankings = [
        {
            "task_id": f"t{i}",
            "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
            "responses": ["Far", "Far!!", "Far!", "Far"][: 3 + i % 2],
            "ranks": ranks[: 3 + i % 2],
            "labeler": labeler,
        }
        for labeler, ranks, every in (("ann", [3, 1, 2, 3], 1), ("bo", [2, 1, 1, 2], 3))
        for i in range(0, 40, every)
    ]
    values = {
        "rankings": RankingsConfig(source=write_rows(folder / "rankings.jsonl", rankings).source),
        "demonstrations": (DataConfig(source=write_rows(folder / "demonstrations.jsonl", DEMONSTRATIONS).source),),
        "heldout_share": 0.25,
        "num_epochs": 4.0,
        "batch": BatchConfig(batch_size=8, micro_batch_size=4),
        "optimizer": OptimizerConfig(learning_rate=0.01, schedule="constant"),
        "save_every_steps": 10,
        "evaluate_every_steps": 5,
    }
    return RewardConfig(**(values | changes))


@pytest.fixture(autouse=True, scope="module")
def two_are_calibrated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "NUM_CALIBRATION", 2)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, RewardConfig, dict[str, Any]]:
    """The run directory, the config, results.json."""
    folder = tmp_path_factory.mktemp("reward")
    config = config_for(folder)
    train_reward(
        StageContext(folder / "run", SEED, 1, EngineConfig(precision="fp32", trackers=())), config, model_folder
    )
    return folder / "run", config, json.loads((folder / "run" / "results.json").read_text())


def test_it_learns_the_preference(finished: tuple[Path, RewardConfig, dict[str, Any]]) -> None:
    folder, _, results = finished
    lines = read_metrics(folder / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert lines[-1]["accuracy"] > 0.9
    assert results["heldout_accuracy"]["mean"] > 0.9
    assert results["train_comparisons"] + results["heldout_comparisons"] == 40
    assert results["train_rankings"] > results["train_comparisons"]
    assert len(lines) == round(4 * results["train_comparisons"] / 8)


def test_demonstrations_score_0_on_average(finished: tuple[Path, RewardConfig, dict[str, Any]]) -> None:
    folder, _, results = finished
    model, tokenizer = load_scalar_model(folder / "model").eval(), Tokenizer.load(folder / "model")
    scores = [
        alone(
            model, tuple(tokenizer.encode(f"<|user|> {row['prompt']}<|end|><|assistant|> {row['completion']}<|end|>"))
        )
        for row in DEMONSTRATIONS[:2]  # NUM_CALIBRATION
    ]
    assert sum(scores) / 2 == pytest.approx(0.0, abs=1e-5)
    assert max(abs(score) for score in scores) > 1e-4
    assert float(model.bias) == pytest.approx(results["score_shift"])
    assert results["score_shift"] != 0


def test_figures_of_the_heldout_rankings(finished: tuple[Path, RewardConfig, dict[str, Any]]) -> None:
    folder, config, results = finished
    model, tokenizer = load_scalar_model(folder / "model").eval(), Tokenizer.load(folder / "model")
    _, heldout = split_rankings(read_rankings(config.rankings), 0.25, SEED)
    by_task: dict[str, list[float]] = {}
    right, untied = 0, 0
    for ranking in heldout:
        texts = [
            f"<|user|> {ranking.prompt[0].content}<|end|><|assistant|> {response}<|end|>"
            for response in ranking.responses
        ]
        scores = [alone(model, tuple(tokenizer.encode(text))) for text in texts]
        by_task[ranking.task_id] = scores
        for i, j in itertools.combinations(range(len(scores)), 2):
            if ranking.ranks[i] != ranking.ranks[j] and scores[i] != scores[j]:
                untied += 1
                right += (scores[i] > scores[j]) == (ranking.ranks[i] < ranking.ranks[j])
    everything = [score for scores in by_task.values() for score in scores]
    assert 0 < results["heldout_comparisons"] == len(by_task) < len(heldout)
    assert results["heldout_accuracy"]["num_pairs"] == untied
    assert results["heldout_accuracy"]["mean"] == pytest.approx(right / untied)
    assert results["sample_score_mean"] == pytest.approx(float(np.mean(everything)), abs=1e-4)
    assert results["sample_score_std"] == pytest.approx(float(np.std(everything, ddof=1)), abs=1e-4)


def test_training_starts_from_the_sft_model_and_a_unit_head(
    tmp_path: Path, model_folder: Path, tiny_config: ModelConfig
) -> None:
    """One step at a learning rate near 0 leaves the model as it was."""
    optimizer = OptimizerConfig(learning_rate=1e-12, schedule="constant")
    config = config_for(tmp_path, num_epochs=0.01, optimizer=optimizer)
    context = StageContext(tmp_path / "run", SEED, 1, EngineConfig(precision="fp32", trackers=()))
    train_reward(context, config, model_folder)
    model, source = load_scalar_model(context.model_folder), load_language_model(model_folder)
    for name, weight in source.decoder.state_dict().items():
        torch.testing.assert_close(model.decoder.state_dict()[name], weight, atol=1e-8, rtol=0, msg=name)
    expected = 1 / math.sqrt(tiny_config.hidden_size + 1)
    assert float(model.score.weight.detach().std()) == pytest.approx(expected, rel=0.6)  # of 16 draws


def test_a_share_that_leaves_a_side_empty_is_refused(tmp_path: Path, model_folder: Path) -> None:
    context = StageContext(tmp_path / "run", SEED, 1, EngineConfig(precision="fp32", trackers=()))
    config = config_for(tmp_path, heldout_share=1e-9)
    with pytest.raises(ValueError, match=r"reward.heldout_share 1e-09 splits .* into 54 for training and 0 held out"):
        train_reward(context, config, model_folder)


def test_ratings_that_are_asked_for_and_missing_are_named(tmp_path: Path, model_folder: Path) -> None:
    context = StageContext(tmp_path / "run", SEED, 1, EngineConfig(precision="fp32", trackers=()))
    with pytest.raises(ValueError, match=r"reward.rating_coef is 0.5, but no ranking of .*rankings.jsonl has ratings"):
        train_reward(context, config_for(tmp_path, rating_coef=0.5), model_folder)


def test_ties_with_their_own_probability_and_ratings(
    tmp_path: Path, model_folder: Path, finished: tuple[Path, RewardConfig, dict[str, Any]]
) -> None:
    """Ratings rise by 10 per mark, and Bo adds 3 to each."""
    plain = config_for(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rankings.jsonl").read_text().splitlines()]
    for row in rows:
        offset = 3 if row["labeler"] == "bo" else 0
        row["ratings"] = [offset + 10 * response.count("!") for response in row["responses"]]
    write_rows(tmp_path / "rankings.jsonl", rows)
    config = plain.model_copy(update={"ties": "davidson", "rating_coef": 0.5, "num_epochs": 10.0})
    context = StageContext(tmp_path / "run", SEED, 1, EngineConfig(precision="fp32", trackers=()))
    train_reward(context, config, model_folder)
    results = json.loads((context.folder / "results.json").read_text())
    assert results["heldout_accuracy"]["mean"] > 0.9
    trained_on, _ = split_rankings(read_rankings(config.rankings), 0.25, SEED)
    pairs = [pair for r in trained_on for pair in itertools.combinations(r.ranks, 2)]
    share = (sum(first == second for first, second in pairs) + 0.5) / (len(pairs) + 1)
    start = 2 * share / (1 - share)
    assert results["ties"]["kind"] == "davidson"
    assert results["ties"]["learned_nu"] > 0
    assert abs(math.log(results["ties"]["learned_nu"] / start)) > 0.05  # it moved
    assert results["ties"]["heldout_log_likelihood"] > finished[2]["ties"]["heldout_log_likelihood"]
    assert finished[2]["ties"]["learned_nu"] is None
    assert results["ratings"]["heldout_explained"] > 0.5
    # What was learned in addition to the score is not saved: the directory holds only a scalar model.
    model = load_scalar_model(context.model_folder).eval()
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in ScalarModel(model.config).named_parameters()
    }


def test_a_labeler_who_is_often_wrong_weighs_less(tmp_path: Path, model_folder: Path) -> None:
    """Cy, Di and Ed see every task; Ed reverses every second ranking and is outvoted."""
    config = config_for(tmp_path, labeler_weights="reliability", num_epochs=0.2)
    rows = [json.loads(line) for line in (tmp_path / "rankings.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["labeler"] == "ann"]
    turned = lambda row: {**row, "ranks": [4 - rank for rank in row["ranks"]]}  # noqa: E731
    for name, noise in (("cy", 7), ("di", 5), ("ed", 2)):  # every seventh, fifth, second ranking turned round
        rows += [{**(turned(row) if i % noise == 0 else row), "labeler": name} for i, row in enumerate(rows[:40])]
    write_rows(tmp_path / "rankings.jsonl", rows)
    context = StageContext(tmp_path / "run", SEED, 1, EngineConfig(precision="fp32", trackers=()))
    train_reward(context, config, model_folder)
    labelers = json.loads((context.folder / "results.json").read_text())["labelers"]
    assert sorted(labelers) == ["ann", "cy", "di", "ed"]
    assert min(labelers[name]["weight"] for name in ("ann", "cy", "di")) > 2 * labelers["ed"]["weight"] >= 0
    assert labelers["ed"]["accuracy"] == pytest.approx(0.5, abs=0.15)
    assert sum(figures["weight"] for figures in labelers.values()) == pytest.approx(4)  # equally many rankings each
    assert all(0 <= line["accuracy"] <= 1 for line in read_metrics(context.folder / "metrics.jsonl"))
