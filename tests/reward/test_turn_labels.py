"""Labelers rate each turn; the export trains a reward model that scores turns."""

import random
from pathlib import Path

import pytest

from files.records import read_record
from files.rows import read_source
from preferences.annotations import Annotations, CriterionRatings, TurnRating
from preferences.formats.exchange import export
from preferences.formats.registry import format_to_write
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore
from reward.comparisons import encode_answered
from reward.report import StepResults
from reward.scoring import RewardModel, step_separator, steps_for
from reward.step_labels import StepLabelsConfig
from reward.step_training import train_steps
from reward.steps import StepsConfig
from tests.reward.test_step_training import SEED, config_of, labelled
from training.config import BatchConfig, EngineConfig
from training.engine import StageContext

RIGHT, WRONG = ("The cat sat!", "A dog ran!"), ("The cat sat.", "A dog ran.")


def labelled_store(path: Path, num_tasks: int) -> None:
    """A turn is right if it ends with an exclamation mark. Each task has an earlier turn and two responses."""
    rng = random.Random(3)
    with LabelStore(path) as store:
        for number in range(num_tasks):
            is_right = [rng.random() < 0.5 for _ in range(3)]
            turn, *responses = (rng.choice(RIGHT if own else WRONG) for own in is_right)
            prompt = (Message("user", f"Where is fox {number}?"), Message("assistant", turn), Message("user", "And?"))
            store.add_tasks([Task(f"t{number}", prompt, tuple(responses), ("x", "y"))], batch="b", num_labelers=1)
            lease = store.lease("ann", seconds=60, batch="b")
            assert lease is not None
            said = Annotations(
                (CriterionRatings("right", tuple(float(own) for own in is_right[1:])),),
                turns=(TurnRating(1, "right", float(is_right[0])),),
            ).as_shown(lease.order)
            how = {"client": "test", "instructions_version": "1"}
            store.submit(lease, Answer((1, 1), 10, annotations=said), **how)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    labelled_store(folder / "labels.sqlite", 60)
    with LabelStore(folder / "labels.sqlite") as store:
        report, num_rows = export(store, format_to_write("turns"), folder / "turns.jsonl", batch="b")
    assert (num_rows, report.counts()) == (120, {})
    return folder / "turns.jsonl"


def test_an_export_of_ratings_of_turns_trains_a_model_that_scores_turns(
    exported: Path, model_folder: Path, tmp_path: Path
) -> None:
    data = StepLabelsConfig(source=str(exported), separator="")
    batch = BatchConfig(batch_size=16, micro_batch_size=8)
    config = config_of(tmp_path, step_labels=data, batch=batch, num_epochs=14)
    context = StageContext(
        tmp_path / "run", SEED, 1, EngineConfig.model_validate({"precision": "fp32", "trackers": ()})
    )
    train_steps(context, config, model_folder, labelled(config, model_folder, tmp_path / "tokens"))
    results = read_record(tmp_path / "run" / "results.json", StepResults)
    assert results.train_responses + results.heldout_responses == 120
    # An earlier turn counts once for both of a task's responses.
    assert results.train_steps + results.heldout_steps == 180
    assert results.step_accuracy.low > 0.6
    assert results.auc.low > 0.8

    folder = tmp_path / "run" / "model"
    assert step_separator(folder) == ""
    judge = RewardModel.load(folder)
    asked = [{"role": "user", "content": "Where is fox 1?"}]
    texts = ["The cat sat!", "The cat sat.", "The cat sat.\nA dog ran!"]
    encoded = [encode_answered(judge.tokenizer, [*asked, {"role": "assistant", "content": text}]) for text in texts]
    assert [judge.steps_of(of).ends for of in encoded] == [[len(of.tokens) - 1] for of in encoded]  # a turn is one step
    right, wrong, _ = judge.score_encoded(encoded)
    assert right > wrong
    with pytest.raises(ValueError, match=r"learned steps that end with '', but steps.separator is '\\n'"):
        steps_for(folder, StepsConfig(separator="\n"))


def test_rows_say_which_turns_are_right(exported: Path) -> None:
    rows = [row for _, row in read_source(str(exported))]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        for row in (first, second):
            texts = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
            pairs = zip(texts, row["labels"], strict=True)
            assert all(label is None or label == text.endswith("!") for text, label in pairs)
        assert first["labels"][0] is not None
        assert second["labels"][0] is None
        assert first["task_id"] == second["task_id"]
