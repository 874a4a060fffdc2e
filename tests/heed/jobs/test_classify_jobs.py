"""The shipped classification jobs from start to end, mistakes found before anything is trained, and `heed classify`."""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from heed.cli import main
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.worlds.corpus import DRAWN, draw_rows
from heed.worlds.grammar import TAG_OF, parse_sentence
from lm.weights import purpose_of
from tests.rows import jsonl

JOBS = Path(__file__).parents[3] / "configs" / "jobs"


pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the first job."""
    return run_job(load_job(JOBS / "classify.toml"), tmp_path_factory.mktemp("runs"))


def test_the_job_runs_from_pretraining_to_a_report(pretrained: Path) -> None:
    results = json.loads((pretrained / "classify" / "results.json").read_text())
    assert results["labels"] == ["grammatical", "ungrammatical"]
    assert results["num_heldout"] == 100
    assert 0 <= results["metrics"]["accuracy"]["low"] <= results["metrics"]["accuracy"]["mean"] <= 1
    report = json.loads((pretrained / "report.json").read_text())
    assert "classify" in report
    page = (pretrained / "report.html").read_text()
    assert "Macro F1" in page
    assert "Next sentences told from random ones" in page


@pytest.mark.parametrize(
    ("name", "purpose"),
    [pytest.param("classify-entities", "token", marks=pytest.mark.nightly), ("classify-questions", "span")],
)
def test_the_other_tasks_start_from_its_encoder(pretrained: Path, tmp_path: Path, name: str, purpose: str) -> None:
    start = [f"classify.init_from={pretrained / 'pretrain' / 'model'}", "pretrain=none", "classify.num_epochs=0.5"]
    run = run_job(load_job(JOBS / f"{name}.toml", start), tmp_path)
    assert purpose_of(run / "classify" / "model") == purpose
    assert 0 <= json.loads((run / "classify" / "results.json").read_text())["metrics"]["f1"]["mean"] <= 1


def test_a_job_starts_from_an_encoder_with_any_head_or_none(pretrained: Path, tmp_path: Path) -> None:
    encoder, body = pretrained / "pretrain" / "model", tmp_path / "body"
    transformers.BertModel.from_pretrained(encoder).save_pretrained(body)
    for file in encoder.glob("*token*"):
        shutil.copy(file, body)
    assert purpose_of(body) == "body"
    for start in (body, pretrained / "classify" / "model"):
        job = load_job(JOBS / "classify.toml", [f"classify.init_from={start}", "pretrain=none"])
        assert job.model == load_job(JOBS / "classify.toml").model
    with pytest.raises(ValueError, match=r"pretrain.init_from: .*\['BertModel'\]; \['BertForPreTraining'|MaskedLM"):
        load_job(JOBS / "classify.toml", [f"pretrain.init_from={body}"])


@pytest.mark.parametrize(
    ("task", "row", "settings", "message"),
    [
        ("sequence", {"text": "x"}, [], r"bad.jsonl: line 2: field 'label' is missing"),
        ("sequence", {"text": "x " * 200, "label": "grammatical"}, [], r"bad.jsonl: line 2: the text has \d+ tokens"),
        ("token", {"tokens": ["x"], "tags": ["I-X"]}, [], r"bad.jsonl: line 2: field 'tags\[0\]' is 'I-X' after O"),
        ("span", {"id": "q", "question": "?", "context": "x", "answers": [{"text": "y", "answer_start": 0}]},
         ["classify.seq_len=96", "classify.doc_stride=32", "classify.max_question_tokens=24"],
         r"bad.jsonl: line 2: question 'q': field 'answers\[0\]': answer_start is 0"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_data_ends_the_run_before_training(
    pretrained: Path, tmp_path: Path, task: str, row: dict[str, Any], settings: list[str], message: str
) -> None:
    good: dict[str, dict[str, Any]] = {
        "sequence": {"text": "x", "label": "ungrammatical"},
        "token": {"tokens": ["x"], "tags": ["O"]},
        "span": {"id": "p", "question": "?", "context": "x", "answers": []},
    }
    path = tmp_path / "bad.jsonl"
    path.write_text(jsonl((good[task], row)))
    source = f"[{{ source = '{path}' }}]"
    start = [f"classify.init_from={pretrained / 'pretrain' / 'model'}", "pretrain=none", f"classify.task={task}"]
    job = load_job(JOBS / "classify.toml", [*start, f"classify.data={source}", f"classify.heldout={source}", *settings])
    with pytest.raises(ValueError, match=message) as caught:
        run_job(job, tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs" / "classify" / "classify" / "model").exists()


def test_a_heldout_label_that_training_lacks_is_named(pretrained: Path, tmp_path: Path) -> None:
    for name, labels in (("train", "ab"), ("heldout", "ac")):
        rows = [{"text": "x", "label": label} for label in labels]
        (tmp_path / f"{name}.jsonl").write_text(jsonl(rows))
    start = [f"classify.init_from={pretrained / 'pretrain' / 'model'}", "pretrain=none"]
    sources = [
        f"classify.{field}=[{{ source = '{tmp_path / name}.jsonl' }}]"
        for field, name in (("data", "train"), ("heldout", "heldout"))
    ]
    with pytest.raises(
        ValueError, match=r"heldout.jsonl: line 2: label 'c', which no row of classify.data has; one of a, b"
    ):
        run_job(load_job(JOBS / "classify.toml", [*start, *sources]), tmp_path / "runs")


def test_rows_that_are_all_too_long_end_the_run_before_pretraining(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(jsonl({"text": "x " * 200, "label": label} for label in "ab"))
    source = f"[{{ source = '{path}' }}]"
    settings = [f"classify.data={source}", f"classify.heldout={source}", "classify.on_overlong=skip"]
    with pytest.raises(ValueError, match=r"classify.data: no example is left \(2 of 2 too long: 2 skipped\)"):
        run_job(load_job(JOBS / "classify.toml", settings), tmp_path / "runs")
    assert not (tmp_path / "runs" / "classify" / "pretrain" / "model").exists()


def test_too_many_dropped_blocks_are_refused_with_the_job() -> None:
    message = r"classify.dropped_layers is 9 and added_layers 1; the model has 2 blocks, and at least one was expected"
    with pytest.raises(ValueError, match=message):
        load_job(JOBS / "classify.toml", ["classify.dropped_layers=9", "classify.added_layers=1"])
    with pytest.raises(ValueError, match=r"classify.optimizer.trained_layers is 3; the model has 2"):
        load_job(JOBS / "classify.toml", ["classify.optimizer.trained_layers=3"])
    added = load_job(JOBS / "classify.toml", ["classify.optimizer.trained_layers=3", "classify.added_layers=1"])
    assert added.stage_names[-1] == "classify"


def test_the_command_prints_probabilities(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(pretrained / "classify" / "model")
    monkeypatch.setattr(sys, "argv", ["heed", "classify", model, "Mia has a red kite."])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shares = dict(reversed(line.split()) for line in capsys.readouterr().out.strip().splitlines())
    assert shares.keys() == {"grammatical", "ungrammatical"}
    assert sum(map(float, shares.values())) == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classify/model", "x", "--question", "y"], "is a classifier of sequences; no --question was expected"),
        (["classify", "x"], "is the folder of a stage; its model is"),
        (["pretrain/model", "x"], "a model for the purpose 'masked'; a classifier of texts"),
        (
            ["classify/model", "x " * 400],
            "tokens with its marks; the model reads at most 64 (classify.seq_len",
        ),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    pretrained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["heed", "classify", str(pretrained / arguments[0]), *arguments[1:]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", DRAWN)
def test_the_playgrounds_labels_are_right(kind: str) -> None:
    seen: set[str] = set()
    rows = draw_rows(kind, 300, random.Random(1), seen)
    assert len(seen) == 300
    for row in rows:
        if kind == "grammar":
            assert bool(parse_sentence(row["text"]).groups) == (row["label"] == "grammatical")
        elif kind == "entities":
            named = {
                word: tag for word, tag in zip(row["tokens"], row["tags"], strict=True) if TAG_OF.get(word) == "name"
            }
            assert set(named.values()) <= {"B-PERSON"}
        elif row["answers"]:
            (answer,) = row["answers"]
            assert row["context"][answer["answer_start"] :].startswith(answer["text"])
    if kind == "questions":
        share = sum(not row["answers"] for row in rows) / 300
        assert 0.2 < share < 0.45
