"""Several objectives on one trunk: each head learns from its own rankings, and is shifted and measured separately."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.pairs import encode_rankings
from lm.config import ModelConfig
from lm.encoder import SequenceClassifier
from lm.model import ScalarModel, init_weights
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from preferences.records import Message, Ranking
from reward.comparisons import Comparison, Verdict
from reward.config import RankingsConfig, RewardConfig
from reward.objective import AuxiliaryParameters, RankingObjective, RewardLearner
from reward.scoring import RewardModel, head_scores, weights_by_label
from reward.stage import network_source
from tests.models import load_scalar_model
from tests.rows import jsonl
from tests.token_files import train_reward
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import StageContext
from training.metrics import read_metrics

CPU = torch.device("cpu")
SEED = 3
LOUD, CALM = "loud", "calm"  # more exclamation marks are better; fewer are
RESPONSES = ["Far", "Far!!", "Far!", "Far!!!"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(jsonl(rows))
    return str(path)


def ranking_rows() -> list[dict[str, Any]]:
    """Forty tasks judged by loudness and ten by calmness. The calm ones have ratings, and Bo judges them in reverse."""
    rows = []
    for objective, labelers, every in ((LOUD, ("ann", "bo", "cy"), 1), (CALM, ("ann", "bo", "cy"), 4)):
        for i, labeler in itertools.product(range(0, 40, every), labelers):
            marks = [response.count("!") for response in RESPONSES]
            best = marks if objective == LOUD or labeler == "bo" else [3 - num for num in marks]
            row = {
                "task_id": f"{objective}{i}",
                "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
                "responses": RESPONSES,
                "ranks": [1 + sum(other > one for other in best) for one in best],
                "labeler": labeler,
                "objective": objective,
            }
            rows.append(row | ({"ratings": [10.0 * b for b in best]} if objective == CALM else {}))
    return rows


def config_for(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> RewardConfig:
    demonstrations = [{"prompt": f"Where is fox {i}?", "completion": text} for i, text in enumerate(["In.", "Far!"])]
    values = {
        "rankings": RankingsConfig(source=write_rows(folder / "rankings.jsonl", rows)),
        "demonstrations": (DataConfig(source=write_rows(folder / "demonstrations.jsonl", demonstrations)),),
        "objectives": (CALM, LOUD),
        "heldout_share": 0.25,
        "num_epochs": 6.0,
        "batch": BatchConfig(batch_size=8, micro_batch_size=4),
        "optimizer": OptimizerConfig(learning_rate=0.01, schedule="constant"),
        "save_every_steps": 100,
        "evaluate_every_steps": 5,
    }
    return RewardConfig(**(values | changes))


def context_of(folder: Path) -> StageContext:
    return StageContext(folder, SEED, 1, EngineConfig(precision="fp32", trackers=()))


Finished = tuple[Path, RewardConfig, dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Finished:
    """The run directory, the config, results.json."""
    folder = tmp_path_factory.mktemp("objectives")
    config = config_for(folder, ranking_rows(), rating_coef=0.5, ties="davidson", labeler_weights="reliability")
    train_reward(context_of(folder / "run"), config, model_folder)
    return folder / "run", config, json.loads((folder / "run" / "results.json").read_text())


# --- the objective ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_heads(tiny_config: ModelConfig) -> RewardLearner:
    model = ScalarModel(tiny_config, labels=("a", "b"))
    init_weights(model, 5)
    return RewardLearner(model, AuxiliaryParameters((0.1, -0.3), (1.0, 2.0)))


COMPARISONS = [
    Comparison("t0", ((4, 5, 6), (7, 8)), (Verdict((1, 2), (2.0, 1.0)),), 0),
    Comparison("t1", ((9, 4), (5, 5, 7), (8,)), (Verdict((2, 1, 3), (3.0, 9.0, 1.0)), Verdict((1, 1, 2))), 1),
    Comparison("t2", ((6, 8, 9), (7,)), (Verdict((2, 1)),), 0),
]


@pytest.mark.parametrize(("row", "own"), [(0, 0), (1, 1)])
def test_a_comparison_trains_the_head_of_its_objective_alone(two_heads: RewardLearner, row: int, own: int) -> None:
    objective = RankingObjective(COMPARISONS, "decoder", objectives=("a", "b"), rating_coef=0.5, rating_std=(1.0, 2.0))
    loss, figures = objective.loss(two_heads, np.array([row]), CPU)
    loss.backward()  # type: ignore[no-untyped-call]
    other = 1 - own
    for parameter in (two_heads.network.score.weight, two_heads.nu, two_heads.rating):
        assert parameter is not None
        assert parameter.grad is not None
        assert not parameter.grad[other].any()
        assert parameter.grad[own].all()
    assert two_heads.network.decoder.embedding.weight.grad is not None  # the body is everybody's
    assert two_heads.network.decoder.embedding.weight.grad.any()
    assert figures[f"accuracy/{'ab'[other]}"].tolist() == [0.0, 0.0]  # none of it seen, and so divided by
    assert float(figures[f"accuracy/{'ab'[own]}"][1]) == 1.0


def test_each_objective_is_learned_as_if_it_were_alone(two_heads: RewardLearner, tiny_config: ModelConfig) -> None:
    """The loss of a mixed batch is the sum of the losses of two plain reward models, one per objective."""
    plain = RankingObjective(COMPARISONS, "decoder", rating_coef=0.5, rating_std=(1.0, 2.0))
    mixed, _ = plain.loss(two_heads, np.arange(3), CPU)
    state, total = two_heads.network.state_dict(), 0.0
    for head, rows in ((0, [0, 2]), (1, [1])):
        alone = ScalarModel(tiny_config)
        alone.load_state_dict(
            {**state, "score.weight": state["score.weight"][head : head + 1], "bias": state["bias"][head]}
        )
        learner = RewardLearner(
            alone, AuxiliaryParameters((two_heads.auxiliary.log_nu[head],), (two_heads.auxiliary.rating_std[head],))
        )
        comparisons = [Comparison(c.task_id, c.sequences, c.verdicts) for c in COMPARISONS]
        own = RankingObjective(
            comparisons, "decoder", rating_coef=0.5, rating_std=(two_heads.auxiliary.rating_std[head],)
        )
        total += float(own.loss(learner, np.array(rows), CPU)[0].detach())
    assert float(mixed.detach()) == pytest.approx(total, rel=1e-5)


def test_margins_are_the_gaps_of_the_ratings(tiny_config: ModelConfig) -> None:
    """-log σ(s_w - s_l - m), by hand: a pair, a tie, a pair without ratings, ratings that contradict the ranks."""
    model = ScalarModel(tiny_config)
    init_weights(model, 5)
    learner = RewardLearner(model, AuxiliaryParameters())
    comparisons = [
        Comparison("pair", ((4, 5, 6), (7, 8)), (Verdict((2, 1), (1.0, 4.0)),)),
        Comparison("tie", ((9, 4), (5, 5, 7)), (Verdict((1, 1), (2.0, 2.0)),)),
        Comparison("no ratings", ((6, 8, 9), (7,)), (Verdict((1, 2)),)),
        Comparison("contradiction", ((6, 8), (7, 4)), (Verdict((1, 2), (1.0, 3.0)),)),
    ]
    scores = [
        [float(model(torch.tensor([tokens]))[0, -1].detach()) for tokens in comparison.sequences]
        for comparison in comparisons
    ]
    objective = RankingObjective(comparisons, "decoder", margin_coef=0.5, rating_std=(2.0,))
    leads = [scores[0][1] - scores[0][0] - 0.5 * 3 / 2, None, *(first - second for first, second in scores[2:])]
    for row, lead in enumerate(leads):
        loss, _ = objective.loss(learner, np.array([row]), CPU)
        gap = scores[1][0] - scores[1][1]
        expected = math.log1p(math.exp(-lead)) if lead is not None else math.log(2 * math.cosh(gap / 2))
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5), comparisons[row].task_id


def test_margins_need_ratings_that_differ(tmp_path: Path, model_folder: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "ratings"} for row in ranking_rows()]
    config = config_for(tmp_path, rows, margin_coef=1.0)
    with pytest.raises(ValueError, match=r"reward.margin_coef is 1.0, but no ranking of .* has ratings"):
        train_reward(context_of(tmp_path / "run"), config, model_folder)
    with pytest.raises(ValueError, match=r'margin_coef with ties "davidson", which has no margins'):
        config_for(tmp_path, rows, margin_coef=1.0, ties="davidson")


def test_rankings_of_one_task_by_two_objectives_are_refused(tokenizer: Tokenizer) -> None:
    prompt = (Message("user", "Where?"),)
    judged = [Ranking("t", prompt, ("a", "b"), (1, 2), name, of) for name, of in (("ann", LOUD), ("bo", CALM))]
    with pytest.raises(ValueError, match=r"task 't': field 'objective' differs between the rankings of 'ann' and 'bo'"):
        encode_rankings(tokenizer, judged, 96, objectives=(LOUD, CALM))


# --- the stage --------------------------------------------------------------------------------------------------------


def test_conflicting_objectives_are_both_learned(finished: Finished) -> None:
    folder, _, results = finished
    calm, loud = results["objectives"][CALM], results["objectives"][LOUD]
    assert loud["heldout_accuracy"]["mean"] > 0.9
    # One labeler of three judges upside down: whoever is right agrees with two.
    assert calm["heldout_accuracy"]["mean"] == pytest.approx(2 / 3, abs=0.02)
    assert calm["train_comparisons"] + calm["heldout_comparisons"] == 10
    assert loud["train_comparisons"] + loud["heldout_comparisons"] == 40
    pairs = calm["heldout_accuracy"]["num_pairs"] + loud["heldout_accuracy"]["num_pairs"]
    right = sum(found["heldout_accuracy"]["mean"] * found["heldout_accuracy"]["num_pairs"] for found in (calm, loud))
    assert results["heldout_accuracy"]["mean"] == pytest.approx(right / pairs)
    assert results["train_rankings"] == calm["train_rankings"] + loud["train_rankings"]
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert {"heldout_accuracy/calm", "heldout_accuracy/loud"} <= last.keys()
    assert last["heldout_accuracy/loud"] > 0.9
    judged = json.loads((folder / "heldout_scores.json").read_text())
    for task, scores in judged.items():  # each by its own head: Far, Far!!, Far!, Far!!!
        assert (scores[3] > scores[0]) == task.startswith(LOUD), task


def test_auxiliary_parameters_are_each_objectives_own(finished: Finished) -> None:
    calm, loud = (finished[2]["objectives"][name] for name in (CALM, LOUD))
    assert calm["labelers"]["bo"]["weight"] < 0.5 < 0.9 < loud["labelers"]["bo"]["weight"]
    assert calm["ties"]["learned_nu"] != loud["ties"]["learned_nu"]
    assert calm["ratings"]["ratings_per_score"] > 0
    assert loud["ratings"] is None  # it has none


def test_demonstrations_score_0_on_average_under_every_head(finished: Finished) -> None:
    folder, _, results = finished
    model, tokenizer = load_scalar_model(folder / "model").eval(), Tokenizer.load(folder / "model")
    texts = [f"<|user|> Where is fox {i}?<|end|><|assistant|> {text}<|end|>" for i, text in enumerate(["In.", "Far!"])]
    with torch.no_grad():
        scores = torch.stack([model(torch.tensor([tokenizer.encode(text)]))[0, -1] for text in texts])
    assert model.labels == (CALM, LOUD)
    assert scores.mean(dim=0).tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    assert scores.abs().min() > 1e-4
    assert model.bias.tolist() == pytest.approx([results["objectives"][name]["score_shift"] for name in (CALM, LOUD)])


def test_one_named_objective_is_a_plain_reward_model_bit_for_bit(tmp_path: Path, model_folder: Path) -> None:
    """As if the file had no others, and no word of objectives."""
    both = ranking_rows()
    rows = [{key: row[key] for key in row if key != "objective"} for row in both if row["objective"] == LOUD]
    weights = []
    for name, found, objectives in (("named", both, (LOUD,)), ("plain", rows, ())):
        (tmp_path / name).mkdir()
        config = config_for(tmp_path / name, found, objectives=objectives, num_epochs=1.0)
        train_reward(context_of(tmp_path / name / "run"), config, model_folder)
        written = tmp_path / name / "run"
        files = [written / "model" / file for file in ("model.safetensors", "config.json")]
        weights.append([path.read_bytes() for path in (*files, written / "results.json")])
    assert weights[0] == weights[1]
    assert json.loads(weights[0][1])["id2label"] == {"0": "score"}


def test_a_reward_model_of_several_objectives_is_trained_further(finished: Finished, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-12, schedule="constant")
    config = config_for(tmp_path, ranking_rows(), num_epochs=0.01, optimizer=optimizer)
    train_reward(context_of(tmp_path / "run"), config, finished[0] / "model")
    first, again = (load_scalar_model(folder / "model") for folder in (finished[0], tmp_path / "run"))
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-5, rtol=0, msg=name)
    for labels in ((LOUD, CALM), ("score",), (CALM, LOUD, "terse")):
        says = rf"config.json: id2label names calm, loud; {', '.join(labels)} was expected"
        with pytest.raises(ValueError, match=says):
            network_source(finished[0] / "model", 0.0, 0, labels)


def test_an_encoder_has_heads_too(encoder_folder: Path, tmp_path: Path) -> None:
    network = load(network_source(encoder_folder, 0.0, 4, ("a", "b")))
    assert isinstance(network, SequenceClassifier)
    save_model(tmp_path, network, network.state_dict(), Tokenizer.load(encoder_folder))
    judge = RewardModel.load(tmp_path, {"b": 3.0, "a": -1.0})
    sequences = [[4, 5, 6], [7, 8]]
    with torch.no_grad():
        by_head = torch.cat([network.eval()(torch.tensor([tokens])) for tokens in sequences])
    torch.testing.assert_close(head_scores(judge.network, sequences), by_head, atol=1e-5, rtol=1e-5)
    expected = [-float(a) + 3 * float(b) for a, b in by_head]
    assert judge.score_sequences(sequences) == pytest.approx(expected, abs=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objectives", "words"),
    [
        (
            (),
            r"reward.objectives is \[\], but the rankings of .*rankings.jsonl have the objectives calm, loud; a choice",
        ),
        (
            ("loud", "terse"),
            r"reward.objectives is \['loud', 'terse'\], but the rankings of .* have the objectives calm, loud",
        ),
    ],
)
def test_objectives_that_are_not_there_are_refused(
    tmp_path: Path, model_folder: Path, objectives: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        train_reward(
            context_of(tmp_path / "run"), config_for(tmp_path, ranking_rows(), objectives=objectives), model_folder
        )


def test_an_objective_without_a_heldout_ranking_is_named(tmp_path: Path, model_folder: Path) -> None:
    rows = [row for row in ranking_rows() if row["objective"] == LOUD or row["task_id"] == "calm0"]
    with pytest.raises(ValueError, match=r"splits the rankings of 'calm' of .* into [03] for training and [03] held"):
        train_reward(context_of(tmp_path / "run"), config_for(tmp_path, rows), model_folder)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "")])
def test_objectives_differ_and_have_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"objectives is .*; distinct names that are not empty were expected"):
        config_for(tmp_path, ranking_rows(), objectives=names)


@pytest.mark.parametrize(
    ("labels", "weights", "words"),
    [
        (("a", "b"), {}, r"R: this reward model has the objectives a, b, but weights are set for none; a weight for"),
        (
            ("a", "b"),
            {"a": 1.0},
            r"weights are set for a; a weight for each of a, b was expected \(objective_weights of",
        ),
        (("a", "b"), {"a": 1.0, "b": 1.0, "c": 1.0}, r"weights are set for a, b, c; a weight for each of a, b"),
        (("a", "b"), {"a": 1.0, "b": float("nan")}, r"the weight of 'b' is nan; a finite number was expected"),
        (("a", "b"), {"a": 0.0, "b": 0.0}, r"the weights of a, b are all 0"),
        (
            ("score",),
            {"score": 1.0},
            r"R: this reward model has one objective, but weights are set for score; no weights",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(labels: tuple[str, ...], weights: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weights_by_label("R", labels, weights)


def test_weights_go_by_name() -> None:
    assert list(weights_by_label("R", ("a", "b"), {"b": 2.0, "a": 0.5}).items()) == [("a", 0.5), ("b", 2.0)]
    assert list(weights_by_label("R", ("score",), {}).values()) == [1.0]
