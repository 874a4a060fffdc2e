"""Fine-tuning an encoder as BERT is (arXiv 1810.04805, section 4): a linear layer on the states of its tokens labels a
text, marks entities word by word, or finds where the answer to a question begins and ends. All weights are trained.

Examples are packed into rows and do not attend to each other, so packing changes only the speed.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from classify.config import ClassifyConfig, ClassifyData
from classify.examples import ARRAYS, HELDOUT_ARRAYS, Examples, example_parts
from classify.metrics import metrics_of
from classify.objective import ClassifyObjective, logits_on_all_ranks
from classify.predict import classifier_source, predictions
from classify.report import REPORTER, ClassifyResults
from classify.rows import read_labelled
from files.atomic import write_jsonl
from files.hashes import derive_seed
from lm.adapters import save_trained
from lm.lora import adapted
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from stages.contract import Parent, Stage
from stages.data import token_folder
from stages.planner import Planner, StagePlan
from stages.run import StageRun
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.tokens import TokenFolders, read_overlong, read_sources

PREDICTIONS = "predictions.jsonl"  # what the model says of each held-out row


def train(
    context: StageContext, config: ClassifyConfig, start: Path, data: TokenFolders, labels: Sequence[str]
) -> None:
    """Train on this rank; rank 0 writes `model/`, `predictions.jsonl` and `results.json`.

    Raises: ValueError if there is no example, or none is held out.
    """
    tokenizer = Tokenizer.load(start, end=config.end_token)
    source = classifier_source(start, config, labels, derive_seed(context.seed, "classify", "head"))
    plain = on_meta(source.build)
    if config.seq_len > plain.config.max_position_embeddings:
        raise ValueError(
            f"classify.seq_len is {config.seq_len}; {start} reads at most {plain.config.max_position_embeddings}"
        )
    unseen, learned = Examples.read(data.heldout), Examples.read(data.training)
    for name, examples in (("data", learned), ("heldout", unseen)):
        if not len(examples):
            raise ValueError(f"classify.{name}: no example is left; at least one was expected")
    has_types = plain.config.type_vocab_size > 1
    training, heldout = (ClassifyObjective(part, config.task, has_types=has_types) for part in (learned, unseen))
    num_steps = max(1, round(config.num_epochs * len(training) / config.batch.batch_size))
    engine = build_engine(context, adapted(source, config.lora, derive_seed(context.seed, "classify", "lora")), config)
    loop_config = LoopConfig.of("classify", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, heldout, context.folder)
    before = loop.evaluate()
    measured = loop.run()
    logits = logits_on_all_ranks(engine, unseen, config.task, has_types=has_types)
    weights = engine.weights_for_file()
    if engine.is_main:
        save_trained(context.folder, plain, engine.module, weights, tokenizer, config.lora, start)
        found = predictions(config, labels, logits, unseen)
        write_jsonl(context.folder / PREDICTIONS, found)
        metrics, by_label = metrics_of(config.task, found, derive_seed(context.seed, "classify", "intervals"))
        context.write_results(
            ClassifyResults(
                task=config.task,
                heldout_loss=measured["loss"],
                heldout_loss_before=before["loss"],
                num_steps=num_steps,
                num_examples=len(training),
                num_heldout=len(found),
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
    found = set[str]()
    for _, row in read_labelled(config.task, (), config.data, [], []):
        found |= set(row.tags) if config.task == "token" else {row.label}
    if config.task == "token":
        kinds = {tag.partition("-")[2] for tag in found} - {""}
        return ("O", *(f"{mark}-{kind}" for kind in sorted(kinds) for mark in "BI"))
    if len(found) < 2:
        raise ValueError(
            f"classify.data: all rows have the label {', '.join(found)}; at least two labels were expected"
        )
    are_numbers = all(label.isascii() and label.isdigit() for label in found)
    return tuple(sorted(found, key=int) if are_numbers else sorted(found))


def tokenize(run: StageRun, config: ClassifyConfig, tokenizer: Tokenizer, labels: Sequence[str]) -> TokenFolders:
    """Tokenize the examples, unless that is already done. Raises: ValueError naming file, line and field."""
    settings = config.model_dump_json(
        include={"task", "seq_len", "on_overlong", "doc_stride", "max_question_tokens", "labels"}
    )

    def folder(name: str, sources: Sequence[ClassifyData], arrays: Sequence[str]) -> Path:
        with_gold = arrays is HELDOUT_ARRAYS
        parts = partial(example_parts, tokenizer, config, sources, labels, with_gold=with_gold, tell=run.tell)
        return token_folder(
            run, name, tokenizer, sources, arrays, parts, settings=settings, known_labels=json.dumps(labels)
        )

    return TokenFolders(folder("data", config.data, ARRAYS), folder("heldout", config.heldout, HELDOUT_ARRAYS))


def run_classify(run: StageRun, config: ClassifyConfig) -> None:
    """Train on all workers."""
    start, labels = run.start("pretrain"), known_labels(config)
    tokenizer = Tokenizer.load(start, end=config.end_token)
    run.on_ranks(train, config, start, tokenize(run, config, tokenizer, labels), labels)


def preflight(run: StageRun, config: ClassifyConfig) -> None:
    """Read and tokenize every row. Raises: ValueError naming file, line and field."""
    if config.init_from:
        classifier_source(run.start("pretrain"), config, (), seed=0)  # refuses what is no encoder
    folders = tokenize(run, config, run.tokenizer_of("pretrain", config.end_token), known_labels(config))
    for name, folder in (("data", folders.training), ("heldout", folders.heldout)):
        if overlong := read_overlong(folder):
            run.tell(f"classify, {name}: {overlong} (classify.seq_len is {config.seq_len})")


def plan(planner: Planner, config: ClassifyConfig) -> StagePlan:
    rows = sum(planner.sizes.num_rows(data) for data in config.data)
    planner.sizes.assume("assumes that every example fills seq_len; packing puts shorter ones into one row")
    steps = max(1, round(config.num_epochs * rows / config.batch.batch_size))
    return planner.training("examples", config, steps, config.seq_len, 0, init_from=config.init_from)


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
