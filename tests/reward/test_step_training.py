"""Training from step labels: the objective, the metrics against values by hand, and a model that finds first errors."""

import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from files.records import read_record
from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from reward.comparisons import encode_answered
from reward.config import RewardConfig
from reward.report import StepResults
from reward.scoring import RewardModel, step_separator, steps_for
from reward.step_labels import ARRAYS, NEUTRAL, RIGHT, UNLABELLED, WRONG, StepLabels, StepLabelsConfig, step_parts
from reward.step_training import StepObjective, area_under_curve, step_metrics, step_network_source, train_steps
from reward.steps import StepsConfig
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import StageContext
from training.tokens import write_arrays

SEED = 3
RIGHT_STEPS, WRONG_STEPS = ("The cat sat!", "A dog ran!"), ("The cat sat.", "A dog ran.")


def drawn_rows(number: int) -> list[dict[str, Any]]:
    """A step is right if it ends with an exclamation mark; after the first wrong step, all are wrong."""
    rng, rows = random.Random(7), []
    for row in range(number):
        num_steps, first_wrong = rng.randint(2, 4), rng.choice([0, 1, 2, 3, 9])
        labels = [place < first_wrong for place in range(num_steps)]
        steps = [rng.choice(RIGHT_STEPS if label else WRONG_STEPS) for label in labels]
        rows.append({"prompt": f"Where is fox {row // 2}?", "completions": steps, "labels": labels})
    return rows


def config_of(folder: Path, **changes: Any) -> RewardConfig:
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in drawn_rows(160)))
    values = {
        "step_labels": StepLabelsConfig(source=str(path)),
        "heldout_share": 0.25,
        "num_epochs": 4,
        "batch": BatchConfig(batch_size=16, micro_batch_size=4),
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "save_every_steps": 100,
        "evaluate_every_steps": 20,
    }
    return RewardConfig.model_validate({**values, **changes})


def labelled(config: RewardConfig, start: Path, folder: Path) -> StepLabels:
    tokenizer, data = Tokenizer.load(start), config.step_labels
    assert data is not None
    write_arrays(
        folder, ARRAYS, lambda first: step_parts(tokenizer, data, 96, "refuse", config.heldout_share, SEED, first)
    )
    return StepLabels(folder)


def trained(folder: Path, start: Path, num_ranks: int = 1, **engine: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"data-{os.environ.get('RANK', '0')}"
    own.mkdir()
    config = config_of(own)
    settings = EngineConfig.model_validate({"precision": "fp32", "trackers": (), **engine})
    train_steps(
        StageContext(folder / "run", SEED, num_ranks, settings), config, start, labelled(config, start, own / "tokens")
    )
    return folder / "run"


def rank_program(folder: Path) -> None:
    trained(folder / "both", folder / "start", 2, zero_stage=3)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return trained(tmp_path_factory.mktemp("steps"), model_folder)


def test_the_model_finds_the_first_error(run: Path) -> None:
    results = read_record(run / "results.json", StepResults)
    assert results.num_with_error > 10
    assert results.first_error.low > results.first_error_by_chance, "no better than chance"
    assert results.step_accuracy.low > results.right_share
    assert results.auc.low > 0.8
    assert results.step_accuracy.low < results.step_accuracy.mean <= results.step_accuracy.high
    assert results.heldout_steps == sum(one.num_steps for one in results.bins)
    assert results.train_responses + results.heldout_responses == 160


def test_the_saved_model_reads_its_steps(run: Path) -> None:
    folder = run / "model"
    assert step_separator(folder) == "\n"
    judge = RewardModel.load(folder, steps=StepsConfig(form="product"))
    asked = {"role": "user", "content": "Where is fox 1?"}
    texts = ["The cat sat!\nA dog ran!", "The cat sat!\nA dog ran.\nThe cat sat!"]
    encoded = [encode_answered(judge.tokenizer, [asked, {"role": "assistant", "content": text}]) for text in texts]
    right, wrong = judge.score_encoded(encoded)
    assert right > 2 * wrong
    assert RewardModel.load(folder).score_encoded(encoded)[0] > right  # the worst step by default
    assert [len(judge.steps_of(of).ends) for of in encoded] == [2, 3]
    with pytest.raises(ValueError, match=r"learned steps that end with '\\n', but steps.separator is '\\n\\n'"):
        steps_for(folder, StepsConfig(separator="\n\n"))


def test_a_model_of_whole_responses_has_no_steps(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="scores whole responses; one trained on step labels was expected"):
        steps_for(model_folder, StepsConfig())


def test_two_ranks_find_what_one_finds(
    run: Path, model_folder: Path, tmp_path: Path, start_two_ranks: Callable[..., None]
) -> None:
    shutil.copytree(model_folder, tmp_path / "start")
    start_two_ranks(__file__, tmp_path)
    both, one = (read_record(of / "results.json", StepResults) for of in (tmp_path / "both" / "run", run))
    assert both.log_loss.mean == pytest.approx(one.log_loss.mean, abs=2e-3)
    assert both.auc.mean == pytest.approx(one.auc.mean, abs=2e-3)


def test_the_objective_is_the_cross_entropy_of_labelled_steps(
    tiny_config: ModelConfig, model_folder: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    assert config.step_labels is not None
    rows = drawn_rows(4)
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = labelled(config, model_folder, tmp_path / "tokens")
    model = ScalarModel(tiny_config)
    init_weights(model, 5)
    objective, chosen = StepObjective(data, [3, 0, 1]), np.array([2, 0])  # responses 1 and 3
    loss, metrics = objective.loss(model.eval(), chosen, torch.device("cpu"))
    expected, right = 0.0, 0
    for row in (1, 3):
        steps = data.steps(row)
        scores = model(torch.tensor([steps.tokens]))[0, steps.ends].tolist()
        for score, label in zip(scores, rows[row]["labels"], strict=True):
            chance = 1 / (1 + math.exp(-score))
            expected -= math.log(chance if label else 1 - chance)
            right += (chance >= 0.5) == label
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["accuracy"]) == right
    assert objective.count(chosen) == sum(len(rows[row]["labels"]) for row in (1, 3))


def test_metrics_are_those_computed_by_hand() -> None:
    chances = [[0.9, 0.2, 0.6], [0.8, 0.7], [0.6, 0.4], [0.9, 0.3], [0.1, 0.3]]
    labels = [
        (RIGHT, WRONG, WRONG),  # the first error is found; the last step is taken for right
        (RIGHT, RIGHT),  # no error, none found
        (RIGHT, RIGHT),  # no error, one found
        (NEUTRAL, WRONG),  # found
        (UNLABELLED, WRONG),  # where the first error is, is unknown
    ]
    found = step_metrics(chances, labels, np.array([0, 1, 2, 3, 4]), seed=0)
    assert (found["first_error"].mean, found["num_with_error"]) == (1.0, 2)
    assert found["first_error_by_chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert (found["no_error"].mean, found["num_without_error"]) == (0.5, 2)
    assert found["heldout_steps"] == 9
    assert found["right_share"] == pytest.approx(5 / 9)
    assert found["step_accuracy"].mean == pytest.approx(7 / 9)
    # Right steps: .9 .8 .7 .6 .4. Wrong steps: .2 .6 .3 .3. 17 of 20 pairs are in order, and one is a tie.
    assert found["auc"].mean == pytest.approx((18 + 0.5) / 20)
    likelihoods = [0.9, 0.8, 0.4, 0.8, 0.7, 0.6, 0.4, 0.7, 0.7]
    assert found["log_loss"].mean == pytest.approx(-sum(map(math.log, likelihoods)) / 9)
    assert found["overconfidence"].mean == pytest.approx(4.8 / 9 - 5 / 9)


def test_an_area_under_the_curve_needs_both_kinds_of_steps() -> None:
    alike = area_under_curve(np.array([0.2, 0.3]), np.ones(2), np.array([0, 1]), 0)
    assert math.isnan(alike.mean)
    tied = area_under_curve(np.full(4, 0.5), np.array([1.0, 0, 1, 0]), np.array([0, 0, 1, 1]), 0)
    assert tied.mean == tied.low == tied.high == 0.5


def test_an_encoder_scores_no_steps(encoder_folder: Path) -> None:
    with pytest.raises(ValueError, match="is neither a decoder nor a reward model with one objective"):
        step_network_source(encoder_folder, 0.0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_labels": None}, "rankings and step_labels: neither given; one of them was expected"),
        ({"rankings": {"source": "r.jsonl"}}, "rankings and step_labels: both given"),
        ({"ties": "davidson"}, "ties belongs to rankings, but the model learns from step_labels"),
    ],
)
def test_a_config_that_says_two_things_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path, **changes)


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
