"""The stage on one CPU rank: losses by hand, each task learned, transformers' logits, resuming, layers, mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from classify.examples import BEGINS, ENDS, Examples
from classify.objective import ClassifyObjective
from classify.predict import TextClassifier, classifier_source
from classify.stage import ClassifyResults, known_labels, report, train
from files.records import as_json
from heed.jobs.job_file import load_job
from heed.jobs.plan import Setting, StagePlan, make_plan
from heed.jobs.times import GPUS
from lm.encoder import MaskedLanguageModel, SequenceClassifier, SpanPredictor, TokenClassifier
from lm.model import init_weights
from lm.source import load
from lm.weights import load_model
from preferences.statistics.estimates import Interval
from stages.reports.report import answer_of
from stages.reports.run_folder import StageFolder
from tests.classify.conftest import SHAPE, config_for, train_here, write_tokens
from training.config import EngineConfig
from training.engine import StageContext

SEQUENCES = [
    {"text": f"{name} {verb} the {thing}.", "label": label}
    for name in ("Mia", "Tom")
    for thing in ("kite", "ball", "cake")
    for verb, label in (("likes", "good"), ("has", "bad"))
]
SENTENCES = [
    {"tokens": [name, "has", "a", color, thing, "."], "tags": ["B-PER", "O", "O", "B-THING", "I-THING", "O"]}
    for name in ("Mia", "Tom")
    for color in ("red", "blue")
    for thing in ("kite", "ball")
] + [{"tokens": ["a", "cake", "is", "at", "Tom", "."], "tags": ["O", "B-THING", "O", "O", "B-PER", "O"]}]
QUESTIONS: list[dict[str, Any]] = []
for first, second in (("Mia", "Tom"), ("Tom", "Mia")):
    for thing in ("red kite", "blue ball", "cake"):
        context = f"{first} has a {thing}."
        for name in (first, second):
            answers = [{"text": thing, "answer_start": context.index(thing)}] if name == first else []
            QUESTIONS.append(
                {"id": str(len(QUESTIONS)), "question": f"What has {name}?", "context": context, "answers": answers}
            )
ROWS = {"sequence": SEQUENCES, "token": SENTENCES, "span": QUESTIONS}
HEADS = {"sequence": SequenceClassifier, "token": TokenClassifier, "span": SpanPredictor}
THEIRS = {
    "sequence": transformers.AutoModelForSequenceClassification, "token": transformers.AutoModelForTokenClassification,
    "span": transformers.AutoModelForQuestionAnswering,
}  # fmt: skip
TASKS = tuple(ROWS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> dict[str, Path]:
    """The stage's folder for each task."""
    folders = {}
    for task, rows in ROWS.items():
        folder = tmp_path_factory.mktemp(task)
        folders[task] = train_here(folder, config_for(folder, task, rows), bert_folder)
    return folders


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize(("task", "metric"), [("sequence", "accuracy"), ("token", "f1"), ("span", "f1")])
def test_each_task_is_learned(finished: dict[str, Path], task: str, metric: str) -> None:
    results = results_of(finished[task])
    assert results["heldout_loss"] < 0.2 < results["heldout_loss_before"]
    assert results["metrics"][metric]["mean"] > 0.9
    assert results["num_heldout"] == len(ROWS[task])


@torch.no_grad()
@pytest.mark.parametrize("task", TASKS)
def test_the_loss_by_hand(tmp_path: Path, bert_folder: Path, task: str) -> None:
    """Each example alone, without padding or packing, and the softmaxes written out."""
    config = config_for(tmp_path, task, ROWS[task])
    labels = known_labels(config)
    examples = Examples.read(write_tokens(tmp_path, config, bert_folder, labels).training)
    model = load(classifier_source(bert_folder, config, labels, seed=8)).eval()
    total, counted, right = 0.0, 0, 0
    for row in range(len(examples)):
        part = slice(int(examples.ends[row - 1]) if row else 0, int(examples.ends[row]))
        tokens, types = (
            torch.tensor(of[part].astype(np.int64))[None] for of in (examples.tokens, examples.token_types)
        )
        targets = examples.targets[part].tolist()
        found = model(tokens, None, types)
        if task == "span":
            ends = [next(p for p, target in enumerate(targets) if target & bit) for bit in (BEGINS, ENDS)]
            chances = [
                float(logits[0].exp()[end] / logits[0].exp().sum()) for logits, end in zip(found, ends, strict=True)
            ]
            total, counted = total - sum(map(np.log, chances)) / 2, counted + 1
            right += all(int(logits[0].argmax()) == end for logits, end in zip(found, ends, strict=True))
            continue
        logits_by_place = {0: found[0]} if task == "sequence" else dict(enumerate(found[0]))
        for place, target in enumerate(targets):
            if target >= 0:
                logits = logits_by_place[place]
                total, counted = total - float((logits.exp()[target] / logits.exp().sum()).log()), counted + 1
                right += int(logits.argmax()) == target
    objective, rows = ClassifyObjective(examples, config.task, has_types=True), np.arange(len(examples))
    loss, metrics = objective.loss(model, rows, torch.device("cpu"))
    assert objective.count(rows) == counted
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert int(metrics["accuracy"]) == right
    mixed = rows[::-1].copy()
    assert float(objective.loss(model, mixed, torch.device("cpu"))[0]) == pytest.approx(total, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("task", TASKS)
def test_transformers_gives_the_same_logits(finished: dict[str, Path], task: str) -> None:
    folder = finished[task] / "model"
    theirs, ours = THEIRS[task].from_pretrained(folder).eval(), load_model(folder, HEADS[task]).eval()
    tokens = torch.tensor([[1, 270, 280, 290, 1, 300, 310, 1]])
    types = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    found, expected = ours(tokens, None, types), theirs(tokens, token_type_ids=types)
    if task == "span":
        torch.testing.assert_close(found[0], expected.start_logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[1], expected.end_logits, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(found, expected.logits, atol=1e-4, rtol=1e-4)
        assert theirs.config.id2label == dict(enumerate(ours.labels))


def test_a_trained_classifier_reads_texts(finished: dict[str, Path]) -> None:
    likes = TextClassifier.load(finished["sequence"] / "model").probabilities("Tom likes the ball.")
    assert list(likes) == ["good", "bad"]
    assert sum(likes.values()) == pytest.approx(1)
    found = TextClassifier.load(finished["token"] / "model").entities("Mia has a blue ball.")
    assert found == [("PER", "Mia"), ("THING", "blue ball")]
    reader = TextClassifier.load(finished["span"] / "model")
    text, margin = reader.answer("What has Tom?", "Tom has a red kite.")
    assert (text, margin > 0) == ("red kite", True)
    assert reader.answer("What has Tom?", "Mia has a red kite.")[1] < 0


def test_predictions_are_what_the_metrics_count(finished: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (finished["span"] / "predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in QUESTIONS]
    exact = sum(row["predicted"] == (row["answers"] or [""])[0] for row in rows) / len(rows)
    assert results_of(finished["span"])["metrics"]["exact_match"]["mean"] == pytest.approx(exact)


@pytest.mark.parametrize("task", TASKS)
def test_a_stopped_stage_continues_with_the_same_bits(bert_folder: Path, tmp_path: Path, task: str) -> None:
    """Started again from a checkpoint in the middle, it ends with the same weights, metrics and predictions."""
    config = config_for(tmp_path, task, ROWS[task])
    whole = train_here(tmp_path, config, bert_folder)
    steps = sorted((whole / "checkpoints").iterdir())
    assert len(steps) >= 2  # the last two are kept
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(whole / "checkpoints" / steps[0].name, again / "checkpoints" / steps[0].name)
    train_here(tmp_path, config, bert_folder, name="again")
    for name in ("model/model.safetensors", "results.json", "predictions.jsonl"):
        assert (again / name).read_bytes() == (whole / name).read_bytes(), name


def test_blocks_are_dropped_and_added(bert_folder: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, "sequence", SEQUENCES, dropped_layers=1, added_layers=2)
    source = classifier_source(bert_folder, config, ("a", "b"), seed=5)
    weights, held = dict(source.tensors()), load_file(bert_folder / "model.safetensors")
    assert source.build().config.num_hidden_layers == 3
    name, theirs = "encoder.blocks.{}.mlp.up.weight", "bert.encoder.layer.{}.intermediate.dense.weight"
    assert torch.equal(weights[name.format(0)], held[theirs.format(0)])
    assert not torch.equal(weights[name.format(1)], held[theirs.format(1)])
    assert float(weights[name.format(1)].std()) > 0
    assert not torch.equal(weights[name.format(1)], weights[name.format(2)])
    none_left = config_for(tmp_path, "sequence", SEQUENCES, dropped_layers=2)
    with pytest.raises(ValueError, match=r"dropped_layers is 2 and added_layers 0; .* has 2 blocks"):
        classifier_source(bert_folder, none_left, ("a", "b"), seed=5)


def test_a_head_is_kept_for_the_same_labels_only(finished: dict[str, Path], tmp_path: Path) -> None:
    folder, config = finished["sequence"] / "model", config_for(tmp_path, "sequence", SEQUENCES)
    held = load_file(folder / "model.safetensors")
    same = dict(classifier_source(folder, config, ("bad", "good"), seed=5).tensors())
    assert torch.equal(same["classifier.weight"], held["classifier.weight"])
    other = dict(classifier_source(folder, config, ("bad", "good", "neither"), seed=5).tensors())
    assert other["classifier.weight"].shape == (3, 24)
    assert torch.equal(other["pooler.weight"], held["bert.pooler.dense.weight"])
    as_span = dict(classifier_source(folder, config_for(tmp_path, "span", QUESTIONS), (), seed=5).tensors())
    assert as_span["ends.weight"].shape == (2, 24)


def test_only_the_last_blocks_are_trained(bert_folder: Path, tmp_path: Path) -> None:
    optimizer = {"learning_rate": 4e-3, "schedule": "constant", "trained_layers": 1}
    folder = train_here(
        tmp_path, config_for(tmp_path, "token", SENTENCES, optimizer=optimizer, num_epochs=2.0), bert_folder
    )
    before, after = (load_file(path / "model.safetensors") for path in (bert_folder, folder / "model"))
    moved = {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}
    assert moved
    assert all("layer.1." in name for name in moved)
    assert {name for name in before if "layer.1." in name} >= moved


@pytest.mark.parametrize("task", TASKS)
def test_adapters_are_trained_and_merged(bert_folder: Path, tmp_path: Path, task: str) -> None:
    """The head is trained whole next to them; the base's own weights in the adapter's model stay."""
    config = config_for(tmp_path, task, ROWS[task], lora={"rank": 4}, num_epochs=30.0)
    folder = train_here(tmp_path, config, bert_folder)
    results = results_of(folder)
    assert results["heldout_loss"] < 0.8 * results["heldout_loss_before"]
    assert (folder / "adapter" / "adapter_config.json").is_file()
    base, merged = (load_file(path / "model.safetensors") for path in (bert_folder, folder / "model"))
    moved = {name for name in base.keys() & merged.keys() if not torch.equal(base[name], merged[name])}
    assert "bert.encoder.layer.0.attention.self.query.weight" in moved
    assert "bert.embeddings.word_embeddings.weight" not in moved
    assert isinstance(load_model(folder / "model", HEADS[task]), HEADS[task])


@pytest.mark.parametrize("task", TASKS)
def test_a_published_folder_is_fine_tuned(tmp_path: Path, task: str) -> None:
    """A WordPiece vocabulary and a model as transformers writes them, of BertForPreTraining and without a head."""
    words = "a b c . ? Mia Tom likes has the red blue kite ##s ball cake is at What"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split(" ")]
    tokenizer = transformers.BertTokenizerFast(
        vocab={word: n for n, word in enumerate(vocabulary)}, do_lower_case=False
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=48,
    )  # fmt: skip
    for kind in (transformers.BertForPreTraining, transformers.BertModel):
        torch.manual_seed(1)
        start, folder = tmp_path / kind.__name__, tmp_path / f"{kind.__name__}-run"
        theirs = kind(config)
        theirs.save_pretrained(start)
        tokenizer.save_pretrained(start)
        body = theirs.bert if kind is transformers.BertForPreTraining else theirs
        fine = config_for(tmp_path, task, ROWS[task], num_epochs=20.0)
        source = dict(classifier_source(start, fine, known_labels(fine), seed=5).tensors())
        assert torch.equal(source["encoder.blocks.1.mlp.up.weight"], body.encoder.layer[1].intermediate.dense.weight)
        if task == "sequence":
            assert torch.equal(source["pooler.weight"], body.pooler.dense.weight)
        folder.mkdir()
        results = results_of(train_here(folder, fine, start))
        assert results["heldout_loss"] < 0.9 * results["heldout_loss_before"]
        examples = Examples.read(folder / "heldout-tokens")
        firsts, lasts = examples.tokens[[0, *examples.ends[:-1]]], examples.tokens[examples.ends - 1]
        assert set(firsts.tolist()) == {vocabulary.index("[CLS]")}
        assert set(lasts.tolist()) == {vocabulary.index("[SEP]")}


def test_a_decoder_and_a_model_without_room_are_refused(model_folder: Path, bert_folder: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path, "sequence", SEQUENCES)
    with pytest.raises(ValueError, match=r"config.json: a model for the purpose 'language'; an encoder was expected"):
        classifier_source(model_folder, config, ("a", "b"), seed=5)
    with pytest.raises(ValueError, match=r"config.json: a model for the purpose 'masked'; a classifier"):
        TextClassifier.load(bert_folder)
    long = config_for(tmp_path, "sequence", SEQUENCES, seq_len=49)
    labels = known_labels(long)
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    with pytest.raises(ValueError, match=r"classify.seq_len is 49; .* reads at most 48"):
        train(context, long, bert_folder, write_tokens(tmp_path, long, bert_folder, labels), labels)


def test_labels_of_training(tmp_path: Path) -> None:
    assert known_labels(config_for(tmp_path, "sequence", SEQUENCES)) == ("bad", "good")
    numbers = [{"text": "x", "label": n} for n in (10, 2, 1)]
    assert known_labels(config_for(tmp_path, "sequence", numbers)) == ("1", "2", "10")
    one = [{"tokens": ["x", "y"], "tags": ["B-LOC", "O"]}]
    assert known_labels(config_for(tmp_path, "token", one)) == ("O", "B-LOC", "I-LOC")
    with pytest.raises(
        ValueError, match=r"classify.data: all rows have the label 1; at least two labels were expected"
    ):
        known_labels(config_for(tmp_path, "sequence", numbers[2:]))
    with pytest.raises(ValueError, match=r"classify.data: all words have the tag O; at least one entity was expected"):
        known_labels(config_for(tmp_path, "token", [{"tokens": ["x", "y"], "tags": ["O", "O"]}]))
    with pytest.raises(ValueError, match=r"classify.data: no rows; at least one was expected"):
        known_labels(config_for(tmp_path, "token", []))


def test_a_classifier_reads_as_its_job_did(bert_folder: Path, tmp_path: Path) -> None:
    """The windows, the longest answer and the margin are those of the job, which its model's folder names."""
    changes = {"max_answer_tokens": 1, "no_answer_margin": 99.0, "max_question_tokens": 8, "seq_len": 20}
    changes |= {"doc_stride": 4}
    folder = train_here(tmp_path, config_for(tmp_path, "span", QUESTIONS, num_epochs=1.0, **changes), bert_folder)
    reader = TextClassifier.load(folder / "model")
    assert vars(reader.reading) == changes
    context = "Mia has a red kite at the park, and Tom has a blue ball."
    text, margin = reader.answer("What has Mia?", context)
    assert margin < reader.reading.no_answer_margin
    assert text in {context[start:end] for start, end in reader.tokenizer.encode_with_places([context])[0][1]}
    with pytest.raises(ValueError, match=r"the question has \d+ tokens; the model reads at most 8"):
        reader.answer("What has Mia at the park and the lake?", "Mia has a kite.")
    (folder / "model" / "classify.json").unlink()
    assert TextClassifier.load(folder / "model").reading.seq_len == 48  # the model's positions


def plan_of(folder: Path, start: Path, task: str, source: Path, *settings: str) -> StagePlan:
    data = f"[{{ source = '{source}' }}]"
    job = folder / "job.toml"
    job.write_text(
        f"name = 'planned'\n[classify]\ninit_from = '{start}'\ntask = '{task}'\ndata = {data}\nheldout = {data}\n"
        "seq_len = 40\ndoc_stride = 8\nmax_question_tokens = 16\nnum_epochs = 1.0\n"
        "batch = { batch_size = 1, micro_batch_size = 1 }\n"
    )
    (stage,) = make_plan(load_job(job, settings), Setting(GPUS["h100"], 0.5, 1000)).stages
    return stage


def test_the_plan_reads_conll_and_squad(bert_folder: Path, tmp_path: Path) -> None:
    columns, squad = tmp_path / "a.conll", tmp_path / "dev.json"
    columns.write_text("Mia B-PER\n\nTom B-PER\nran O\n\nTom B-PER\n")
    qas = [{"id": str(n), "question": "Where?", "answers": []} for n in range(5)]
    paragraphs = [{"context": text, "qas": qas} for text in ("Mia has a kite.", "Mia has a kite. " * 10)]
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert plan_of(tmp_path, bert_folder, "token", columns).num_steps == 3
    assert plan_of(tmp_path, bert_folder, "span", squad).num_steps > 5 + 2 * 5  # the long text has several windows


def test_the_plan_counts_dropped_and_added_blocks(bert_folder: Path, tmp_path: Path) -> None:
    columns = tmp_path / "a.conll"
    columns.write_text("Mia B-PER\n")
    peaks = [
        plan_of(tmp_path, bert_folder, "token", columns, *settings).peak
        for settings in (["classify.dropped_layers=1"], [], ["classify.added_layers=1"])
    ]
    assert peaks == sorted(set(peaks))
    with pytest.raises(ValueError, match=r"classify.dropped_layers is 3 and added_layers 0; the model has 2 blocks"):
        plan_of(tmp_path, bert_folder, "token", columns, "classify.dropped_layers=3")


def test_a_model_without_token_types_reads_pairs(tmp_path: Path, words_tokenizer: Any) -> None:
    from lm.weights import save_model

    model = MaskedLanguageModel(SHAPE.model_copy(update={"type_vocab_size": 0}))
    init_weights(model, 3)
    save_model(tmp_path / "plain", model, model.state_dict(), words_tokenizer)
    rows = [{"text": "Mia has", "text_pair": thing, "label": thing == "a cake"} for thing in ("a cake", "a kite")] * 4
    folder = train_here(tmp_path, config_for(tmp_path, "sequence", rows), tmp_path / "plain")
    assert results_of(folder)["metrics"]["accuracy"]["mean"] == 1
    read = TextClassifier.load(folder / "model")
    assert next(iter(read.probabilities("Mia has", "a cake"))) == "true"


def test_a_run_that_only_classifies_says_what_the_classifier_reaches(tmp_path: Path) -> None:
    accuracy = Interval(0.91, 0.88, 0.94)
    metrics = {"accuracy": accuracy, "macro_f1": accuracy}
    found = ClassifyResults("sequence", 0.3, 0.7, 10, 400, 500, ("no", "yes"), metrics)
    stage = StageFolder("classify", tmp_path, as_json(found), [], {}, [], {})
    answer = answer_of({"classify": report(stage)})
    assert answer.text == "The classifier reaches an accuracy of 91% (88 to 94%) on 500 held-out rows."
