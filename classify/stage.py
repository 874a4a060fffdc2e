"""Fine-tuning an encoder as BERT is (arXiv 1810.04805, section 4): a linear layer on the states of its tokens labels a
text, marks entities word by word, or finds where the answer to a question begins and ends. All weights are trained.

Examples are packed into rows and do not attend to each other, so packing changes only the speed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from classify.config import OUTSIDE, ClassifyConfig, ClassifyData, entity_type
from classify.examples import ARRAYS, HELDOUT_ARRAYS, Examples, example_lengths, example_parts
from classify.metrics import LabelScore, metrics_of
from classify.objective import ClassifyObjective, logits_on_all_ranks
from classify.predict import SETTINGS, Reading, classifier_source, predictions
from classify.rows import read_labelled
from files.atomic import write_json, write_jsonl
from files.hashes import derive_seed
from files.records import as_json
from lm.adapters import adapted, save_trained
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from preferences.statistics.estimates import Interval
from stages.contract import Parent, Stage
from stages.data import token_folder
from stages.plan import Planner, Training
from stages.reports.parts import Answer, Cell, Part, Row, StageReport, StageReporter, Table
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    TRAINING_PANELS,
    Panel,
    headline_of_share,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, number, percent, share_ends
from stages.run import StageRun
from stages.sizes import Lengths
from training.data import Overlong, SourceRows
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.tokens import TokenFolders, read_array, read_overlong, read_sources

PREDICTIONS = "predictions.jsonl"  # what the model says of each held-out row


def train(
    context: StageContext, config: ClassifyConfig, start: Path, data: TokenFolders, labels: Sequence[str]
) -> None:
    """Train on this rank; rank 0 writes `model/`, `predictions.jsonl` and `results.json`.

    Raises: ValueError as `classifier_source`.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token)
    source = classifier_source(start, config, labels, derive_seed(context.seed, "classify", "head"))
    plain = on_meta(source.build)
    unseen, learned = Examples.read(data.heldout), Examples.read(data.training)
    has_types = plain.config.type_vocab_size > 1
    training, heldout = (ClassifyObjective(part, config.task, has_types=has_types) for part in (learned, unseen))
    num_steps = _num_steps(config, len(training))
    engine = build_engine(context, adapted(source, config.lora, derive_seed(context.seed, "classify", "lora")), config)
    loop_config = LoopConfig.of("classify", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, heldout, context.folder)
    before = loop.evaluate()
    measured = loop.run()
    logits = logits_on_all_ranks(engine, unseen, config.task, has_types=has_types)
    weights = engine.weights_for_file()
    if engine.is_main:
        save_trained(context.folder, plain, engine.module, weights, tokenizer, config.lora, start)
        write_json(context.model_folder / SETTINGS, as_json(Reading.of(config)))
        rows = predictions(config, labels, logits, unseen)
        write_jsonl(context.folder / PREDICTIONS, rows)
        metrics, by_label = metrics_of(config.task, rows, derive_seed(context.seed, "classify", "intervals"))
        context.write_results(
            ClassifyResults(
                task=config.task,
                heldout_loss=measured["loss"],
                heldout_loss_before=before["loss"],
                num_steps=num_steps,
                num_examples=len(training),
                num_heldout=len(rows),
                labels=tuple(labels),
                metrics=metrics,
                by_label=by_label,
                overlong=read_overlong(data.training) or None,
                heldout_overlong=read_overlong(data.heldout) or None,
                sources=read_sources(data.training, data.heldout),
            )
        )
    engine.barrier()
    engine.close()


def known_labels(config: ClassifyConfig) -> tuple[str, ...]:
    """Returns the labels in order: the config's, or those of the training data, sorted (numbers by value). A tag comes
    with its other form, B- or I-, so that an entity of any length can be marked.

    Raises: ValueError naming file, line and field for a row that has none, and for fewer than two labels.
    """
    if config.task == "span" or config.labels:
        return config.labels
    labels = set[str]()
    for _, row in read_labelled(config.task, (), config.data, [], []):
        labels |= set(row.tags) if config.task == "token" else {row.label}
    if not labels:
        raise ValueError("classify.data: no rows; at least one was expected")
    if config.task == "token":
        kinds = {*map(entity_type, labels)} - {""}
        if not kinds:
            raise ValueError(f"classify.data: all words have the tag {OUTSIDE}; at least one entity was expected")
        return (OUTSIDE, *(f"{mark}-{kind}" for kind in sorted(kinds) for mark in "BI"))
    if len(labels) < 2:
        raise ValueError(
            f"classify.data: all rows have the label {', '.join(labels)}; at least two labels were expected"
        )
    are_numbers = all(label.isascii() and label.isdigit() for label in labels)
    return tuple(sorted(labels, key=int) if are_numbers else sorted(labels))


def tokenize(run: StageRun, config: ClassifyConfig, tokenizer: Tokenizer, labels: Sequence[str]) -> TokenFolders:
    """Tokenize the examples, unless that is already done.

    Raises: ValueError naming file, line and field; or the field with no example left.
    """
    settings = config.model_dump_json(
        include={"task", "seq_len", "on_overlong", "doc_stride", "max_question_tokens", "labels"}
    )

    def folder(name: str, sources: Sequence[ClassifyData], arrays: Sequence[str]) -> Path:
        with_gold = arrays is HELDOUT_ARRAYS
        parts = partial(example_parts, tokenizer, config, sources, labels, with_gold=with_gold, tell=run.tell)
        made = token_folder(
            run, name, tokenizer, sources, arrays, parts, settings=settings, known_labels=json.dumps(labels)
        )
        if not len(read_array(made, "lengths")):
            why = f" ({overlong})" if (overlong := read_overlong(made)) else ""
            raise ValueError(f"classify.{name}: no example is left{why}; at least one was expected")
        return made

    return TokenFolders(folder("data", config.data, ARRAYS), folder("heldout", config.heldout, HELDOUT_ARRAYS))


def run_classify(run: StageRun, config: ClassifyConfig) -> None:
    """Train on all workers."""
    start, labels = run.start("pretrain"), known_labels(config)
    data = tokenize(run, config, Tokenizer.load(start, end=config.end_token), labels)
    run.on_ranks(train, config, start, data, labels)


def preflight(run: StageRun, config: ClassifyConfig) -> None:
    """Read and tokenize every row. Raises: ValueError naming file, line and field."""
    if config.init_from:
        classifier_source(run.start("pretrain"), config, (), seed=0)  # refuses what it cannot start from
    folders = tokenize(run, config, run.tokenizer_of("pretrain", config.end_token), known_labels(config))
    for name, folder in (("data", folders.training), ("heldout", folders.heldout)):
        if overlong := read_overlong(folder):
            run.tell(f"classify, {name}: {overlong} (classify.seq_len is {config.seq_len})")


def plan(planner: Planner, config: ClassifyConfig) -> Training:
    lengths = planner.measured(
        config.data,
        "examples",
        lambda run: run.tokenizer_of("pretrain", config.end_token),
        lambda tokenizer: example_lengths(tokenizer, config, known_labels(config)),
    )
    if lengths is None:
        rows = sum(_num_rows(planner, config, data) for data in config.data)
        windows = ", and that every question has one window" if config.task == "span" else ""
        planner.sizes.assume(f"assumes that every example fills seq_len{windows}")
        lengths = replace(Lengths.bound(config.seq_len), num_rows=rows)
    shape = config.reshaped(planner.shape(config.init_from))
    return Training("examples", config, shape, _num_steps(config, lengths.num_rows), lengths, has_logits=False)


def _num_steps(config: ClassifyConfig, num_examples: int) -> int:
    return max(1, round(config.num_epochs * num_examples / config.batch.batch_size))


def _num_rows(planner: Planner, config: ClassifyConfig, data: ClassifyData) -> int:
    """Returns the rows of a source; those of a local file are counted as the task reads them."""
    if not Path(data.source).exists():
        return planner.sizes.num_rows(data)
    key = f"rows of {config.task} {data.model_dump_json()}"
    read = read_labelled(config.task, config.labels, (data,), [], [])
    return planner.sizes.measures.get(key, lambda: sum(1 for _ in read))


PANELS = (
    Panel("Loss", "nats", train_and_heldout("loss")),
    Panel("Accuracy", "of texts, words or windows", train_and_heldout("accuracy"), is_share=True),
    *TRAINING_PANELS,
)
TITLES = {
    "accuracy": "Accuracy",
    "macro_f1": "Macro F1",
    "f1": "F1",
    "precision": "Precision",
    "recall": "Recall",
    "exact_match": "Exact match",
    "answerable_exact_match": "Exact match, with an answer",
    "answerable_f1": "F1, with an answer",
    "unanswerable_f1": "Right that there is none",
}


@dataclass(frozen=True)
class ClassifyResults:
    """Loss in nats per text (`sequence`), tagged word (`token`) or window (`span`); `metrics` are on held-out rows,
    from 0 to 1, with 95% intervals (`classify.metrics`).
    """

    task: str
    heldout_loss: float
    heldout_loss_before: float
    num_steps: int
    num_examples: int
    num_heldout: int  # texts, sentences or questions
    labels: tuple[str, ...]
    metrics: Mapping[str, Interval]
    by_label: Mapping[str, LabelScore] = field(default_factory=dict)
    overlong: Overlong | None = None  # of the training data
    heldout_overlong: Overlong | None = None
    sources: tuple[SourceRows, ...] = ()  # of both, if rows are unusual


def report(stage: StageFolder) -> StageReport:
    figures = metric_figures(stage, PANELS)
    results = stage.results(ClassifyResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    facts = [
        ("Task", results.task),
        ("Examples", count(results.num_examples)),
        ("Held-out rows", count(results.num_heldout)),
        ("Steps", count(results.num_steps)),
        ("Held-out loss before", number(results.heldout_loss_before)),
        ("Held-out loss after", number(results.heldout_loss)),
    ]
    facts += [
        (TITLES[name], f"{percent(share.mean)} ({percent(share.low)} to {percent(share.high)})")
        for name, share in results.metrics.items()
    ]
    for title, overlong in (("Training rows", results.overlong), ("Held-out rows too long", results.heldout_overlong)):
        if overlong:
            facts.append((title, str(overlong)))
    facts += [rows.fact for rows in results.sources]
    parts: list[Part] = [stage_block(stage, facts, figures)]
    if results.by_label:
        rows = tuple(
            Row((label,), tuple(map(Cell, (*map(percent, (s.precision, s.recall, s.f1)), count(s.num_gold)))))
            for label, s in results.by_label.items()
        )
        what = "type of entity" if results.task == "token" else "label"
        parts.append(Table(f"Held-out rows, by {what}", (what, "precision", "recall", "F1", "gold"), rows))
    name = "accuracy" if results.task == "sequence" else "f1"
    share = results.metrics[name]
    headline = headline_of_share(
        stage, f"metrics.{name}", f"Classifier: {TITLES[name]}", (share.mean, share.low, share.high), "held-out rows"
    )
    what = "an accuracy" if name == "accuracy" else "an F1"
    reached = f"{percent(share.mean)} ({share_ends(share.low, share.high)})"
    text = f"The classifier reaches {what} of {reached} on {count(results.num_heldout)} held-out rows."
    return StageReport(tuple(parts), headlines=(headline,), answer=Answer("unclear", text))


REPORTER = StageReporter(
    "Classification", "An encoder is fine-tuned to label texts, to mark entities or to find answers.", report
)


STAGE = Stage(
    name="classify",
    config=ClassifyConfig,
    run=run_classify,
    parents=(Parent("pretrain", substitutes=("init_from",)),),
    also_required=(PREDICTIONS,),
    model_kinds=("encoder",),
    context_tokens=lambda config: {"seq_len": config.seq_len},
    preflight=preflight,
    plan=plan,
    report=REPORTER,
)
