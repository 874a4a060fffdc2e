"""The suite truthfulqa: reading, MC1 and MC2, and equality with lm-evaluation-harness."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evaluation.compare.judges import Asking
from evaluation.evaluate.models import Answering, LocalModel
from evaluation.suites.suite import Continuation, Item, Tools, Unable
from evaluation.suites.truthfulqa import PRIMER, SUITE, Choices, mc1, mc2
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from reward.endpoint import Budget

REAL = Path(__file__).parents[4] / "shared" / "data" / "benchmarks" / "TruthfulQA.csv.gz"
HEADER = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
ROW = "Adversarial,Birds,Do birds fly? ,Most do,Most do; Some do;,All do; None does,http://a\n"
HUB_ROW: dict[str, Any] = {
    "question": "Do birds fly?",
    "mc1_targets": {"choices": ["Most do", "All do", "None does"], "labels": [1, 0, 0]},
    "mc2_targets": {"choices": ["Most do", "Some do", "All do", "None does"], "labels": [1, 1, 0, 0]},
}
needs_real = pytest.mark.skipif(not REAL.is_file(), reason=f"{REAL}: no real data")


class Planted(Unable):
    """Gives the log-probability that a table has for an answer, and notes what it was asked."""

    name, has_chat_template = "planted", False

    def __init__(self, logprobs: dict[str, float]) -> None:
        self.table, self.continuations = logprobs, list[Continuation]()

    def logprobs(self, continuations: Any) -> list[float]:
        self.continuations += continuations
        return [self.table[one.continuation.strip()] for one in continuations]


def written(folder: Path, text: str) -> str:
    path = folder / "truth.csv"
    path.write_text(HEADER + text)
    return str(path)


def test_values_are_those_computed_by_hand(tmp_path: Path) -> None:
    (item,) = SUITE.read(written(tmp_path, ROW))
    assert (item.messages[-1]["content"], item.group) == ("Do birds fly?", "Birds")
    probabilities = {"Most do": 0.2, "Some do": 0.1, "All do": 0.15, "None does": 0.05}
    model = Planted({answer: math.log(probability) for answer, probability in probabilities.items()})
    (scored,) = SUITE.score(model, [item], Tools())
    assert scored.values == pytest.approx({"mc1": 1, "mc2": 0.6, "mc1_adversarial": 1, "mc2_adversarial": 0.6})
    assert scored.answer == "Most do"
    assert {one.text for one in model.continuations} == {f"{PRIMER}\n\nQ: Do birds fly?\nA:"}
    assert [one.continuation for one in model.continuations] == [" Most do", " All do", " None does", " Some do"]
    # "Some do" is right, but MC1 asks for the best answer, and MC2 for all right ones.
    model = Planted({"Most do": -3.0, "Some do": -1.0, "All do": -2.0, "None does": -9.0})
    (scored,) = SUITE.score(model, [item], Tools())
    assert scored.values["mc1"] == 0
    right, wrong = math.exp(-3) + math.exp(-1), math.exp(-2) + math.exp(-9)
    assert scored.values["mc2"] == pytest.approx(right / (right + wrong))


def test_probabilities_beyond_floats_and_ties() -> None:
    choices = Choices(("a", "b"), (True, False))
    assert mc2(choices, {"a": -5000.0, "b": -5000.0 - math.log(3)}) == pytest.approx(0.75)
    assert mc1(choices, {"a": -2.0, "b": -2.0}) == 0
    twice = Choices(("a", "b", "b"), (True, False, False))
    assert mc2(twice, {"a": -1.0, "b": -1.0}) == pytest.approx(1 / 3)


def test_rows_of_the_hub_have_no_categories(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(HUB_ROW) + "\n")
    (item,) = SUITE.read(str(path))
    (same,) = SUITE.read(written(tmp_path, ROW))
    assert (item.data["mc1"], item.data["mc2"]) == (same.data["mc1"], same.data["mc2"])
    model = Planted({"Most do": -3.0, "Some do": -1.0, "All do": -2.0, "None does": -9.0})
    assert set(SUITE.score(model, [item], Tools())[0].values) == {"mc1", "mc2"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            ROW.replace("Adversarial", "Easy"),
            "field 'Type' is 'Easy'; one of Adversarial, Non-Adversarial was expected",
        ),
        (ROW.replace("All do; None does", "; ;"), "field 'Incorrect Answers' has no answer"),
        (ROW.replace("Most do,Most", ",Most"), "field 'Best Answer' is empty"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"truth\.csv: line 3: {message}"):
        SUITE.read(written(tmp_path, ROW + row))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"choices": ["a", "b"], "labels": [1]}, r"labels are \[1\]; a 1 or 0 per choice, and both, were expected"),
        ({"choices": ["a", "b"], "labels": [1, 1]}, r"labels are \[1, 1\]"),
        ({"choices": ["a", "b", "c"], "labels": [1, 1, 0]}, "2 labels are 1; one was expected"),
        ({"choices": ["a", ""], "labels": [1, 0]}, "a choice is str or empty; texts were expected"),
    ],
)
def test_malformed_targets_are_named(tmp_path: Path, targets: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**HUB_ROW, "mc1_targets": targets}) + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl: line 1: field 'mc1_targets': {message}"):
        SUITE.read(str(path))


@needs_real
def test_all_published_rows_are_read() -> None:
    items = SUITE.read(str(REAL))
    assert len(items) == 817
    assert Counter(item.data["kind"] for item in items) == {"adversarial": 437, "other": 380}
    assert len({item.group for item in items}) == 38


@pytest.fixture(scope="module")
def long_model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, tiny_config: ModelConfig) -> Path:
    """The tiny model with positions enough for the primer, whose tokens are mostly bytes."""
    model = LanguageModel(tiny_config.model_copy(update={"max_position_embeddings": 2048}))
    init_weights(model, seed=7)
    folder = tmp_path_factory.mktemp("long") / "model"
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


@needs_real
def test_values_are_those_of_the_harness_on_the_same_documents(long_model_folder: Path, tmp_path: Path) -> None:
    """The harness' own tasks, with the CSV's questions in the place of the hub's data set."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[harness]'")
    from evaluation.harness import HarnessTask, open_tasks

    items = [item for item in SUITE.read(str(REAL)) if "Unknown" not in item.data["mc2"].answers][::40]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(hub_row(item)) + "\n" for item in items))
    for name in ("truthfulqa_mc1", "truthfulqa_mc2"):
        theirs = Path(lm_eval.__file__).parent / "tasks" / "truthfulqa" / f"{name}.yaml"
        (tmp_path / f"{name}.yaml").write_text(
            f"include: {theirs}\ntask: own_{name}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs: {{data_files: {{validation: {tmp_path / 'rows.jsonl'}}}}}\n"
        )
    asking = Asking(tmp_path / "cache" / "answers.sqlite", 1, 1.0, 0, 1.0, Budget())
    how = Answering(asking, 0, "fp32", 0, lambda _step: lambda _done, _total: None, print)
    scored = SUITE.score(LocalModel.open("long", str(long_model_folder), how), items, Tools())
    tasks = [HarnessTask.of(f"harness:own_truthfulqa_{name}", str(tmp_path)) for name in ("mc1", "mc2")]
    ((log,), _) = open_tasks([str(long_model_folder)], tasks, 0, how)
    expected = {
        name.removeprefix("own_truthfulqa_"): sum(one.values["acc"] for (one,) in rows.values()) / len(rows)
        for name, rows in log.samples.items()
    }
    means = {name: sum(one.values[name] for one in scored) / len(scored) for name in ("mc1", "mc2")}
    assert means == pytest.approx(expected, rel=1e-5)
    assert 0 < means["mc1"] < 1
    assert {len(rows) for rows in log.samples.values()} == {len(items)}


def hub_row(item: Item) -> dict[str, Any]:
    return {"question": item.messages[-1]["content"]} | {
        f"{name}_targets": {
            "choices": list(item.data[name].answers),
            "labels": [int(is_right) for is_right in item.data[name].are_right],
        }
        for name in ("mc1", "mc2")
    }
