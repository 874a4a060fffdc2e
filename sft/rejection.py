"""Rejection sampling as a stage: sample n responses per prompt, keep the best by a reward model, train on those.

This is one round of RAFT (arXiv 2304.06767), also called best-of-n distillation. The workers sample, and the driver
writes the best responses to `best.jsonl`, a file of demonstrations. Training is that of SFT, from the same policy.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from pydantic import Field

from files.atomic import write_text
from files.hashes import derive_seed
from lm.adapters import adapted, save_trained
from lm.model import LanguageModel
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, purpose_of
from reward.sampling import Sample, SamplingSpec, sample_everywhere
from reward.scoring import labels_of, weights_by_label
from reward.stage import STAGE as REWARD
from sft.demonstrations import Limit, Rows, demonstration_parts
from stages.contract import Parent, Stage
from stages.data import fitting_prompts, token_folder
from stages.plan import Planner, Sampling, Training
from stages.reports.parts import StageReport, StageReporter
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import (
    TRAINING_PANELS,
    Panel,
    headline_of,
    metric_figures,
    stage_block,
    train_and_heldout,
)
from stages.reports.text import count, number
from stages.run import JobView, StageRun
from stages.sizes import Lengths
from training.config import FineTuningConfig
from training.data import DataConfig, OnOverlong, Overlong, Prompt, SourceRows, overlong_field
from training.engine import StageContext, build_engine
from training.loop import LoopConfig, TrainingLoop
from training.objectives import PackedObjective
from training.packing import Packed
from training.tokens import CHECKED_SEQUENCES, Sequences, TokenFolders, read_overlong

BEST = "best.jsonl"  # {"prompt_id", "messages", "score"}: each prompt with its best response


class RejectionConfig(FineTuningConfig):
    """`batch.batch_size` counts packed rows of `seq_len` tokens."""

    prompts: DataConfig = Field(description="Prompts to sample responses to.")
    on_overlong: OnOverlong = overlong_field()
    chat_template: str = Field(
        default="",
        description="Chat template to use, such as for a model without one: `chat`, `plain` or a Jinja template;"
        " empty = the model's own.",
    )
    reward_from: str = Field(
        default="", description="Model directory or hub id of the reward model that chooses; empty = [reward]'s."
    )
    objective_weights: dict[str, float] = Field(
        default={}, description="Weight of each objective of a reward model with several."
    )
    num_samples: int = Field(default=8, ge=2, description="Responses per prompt, of which the best is kept.")
    max_new_tokens: int = Field(
        ge=1, description="Length limit of a response, in tokens; responses that reach it are not kept."
    )
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    heldout_share: float = Field(default=0.05, gt=0, le=0.5, description="Fraction of the kept responses held out.")
    seq_len: int = Field(
        ge=2, description="Tokens per packed row; a response that does not fit with its prompt is left out and counted."
    )
    num_epochs: float = Field(default=1.0, gt=0, description="Passes over the kept responses.")


@dataclass(frozen=True)
class Chosen:
    """What was sampled and kept. Scores are the reward model's, averaged over the samples that have one
    (`sample_score`) and over those that were kept (`kept_score`).

    A sample that cannot be kept is counted once, by the first reason that applies: truncated, empty, failed. Of the
    kept prompts, `num_identical` had no choice, as all their usable samples are the same text; `num_tied` have
    different texts with the best score, and the first sample is kept.
    """

    num_prompts: int
    num_samples: int  # per prompt
    num_kept: int  # prompts with a sample to learn from
    num_truncated: int  # samples that reached max_new_tokens
    num_empty: int  # samples without text
    num_failed: int  # samples without a score
    num_identical: int
    num_tied: int
    sample_score: float
    kept_score: float


@dataclass(frozen=True)
class Trained:
    """Losses on held-out kept responses, in nats per response token."""

    num_steps: int
    heldout_loss_before: float
    heldout_loss: float


@dataclass(frozen=True)
class RejectionResults:
    """What was sampled and kept, and how training on it went."""

    chosen: Chosen
    trained: Trained
    overlong: Overlong | None = None  # of the prompts, for max_new_tokens
    overlong_kept: Overlong | None = None  # of the kept responses with their prompts, for seq_len
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual


def run_rejection(run: StageRun, config: RejectionConfig) -> None:
    """Sample and choose, unless that is already done; train on all workers."""
    start, tokenizer, path = run.start("sft"), load_tokenizer(run, config), run.folder / BEST
    fitting = fitting_prompts(run, tokenizer, config.prompts, config.max_new_tokens, config.on_overlong)
    chosen = _sample(run, config, start, fitting.prompts, path)
    tokens = _tokenize(run, config, tokenizer, path)
    (trained, *_) = run.on_ranks(train, config, start, tokens)
    lost = [read_overlong(folder) for folder in (tokens.training, tokens.heldout)]
    kept = Overlong(sum(reason.num_rows for reason in lost), num_skipped=sum(reason.num_skipped for reason in lost))
    run.write_results(RejectionResults(chosen, trained, fitting.overlong or None, kept or None, fitting.sources))


def _sample(run: StageRun, config: RejectionConfig, start: Path, prompts: Sequence[Prompt], path: Path) -> Chosen:
    """Write the best responses to `path`. Samples from before a kill are reused.

    Raises: ValueError if fewer than two responses can be kept.
    """
    spec = SamplingSpec(
        policy=start,
        num_samples=config.num_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=derive_seed(run.seed, "rejection", "samples"),
        precision=run.engine.resolved_precision(),
        reward=str(run.start(REWARD.name)),
        objective_weights=config.objective_weights,
        chat_template=config.chat_template,
    )
    samples = sample_everywhere(run, "samples", spec, prompts)
    best = best_responses(samples)
    if len(best) < 2:
        raise ValueError(
            f"rejection: {len(best)} of {len(prompts)} prompts have a response that has a score and ends within"
            f" rejection.max_new_tokens = {config.max_new_tokens}; at least two were expected"
        )
    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "messages": [*prompt.messages, {"role": "assistant", "content": best[prompt.prompt_id].response}],
            "score": best[prompt.prompt_id].score,
        }
        for prompt in prompts
        if prompt.prompt_id in best
    ]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return count_chosen(samples, best, len(prompts), config.num_samples)


def is_usable(sample: Sample) -> bool:
    """Returns whether a sample may be kept. One without an end token would teach the policy not to stop."""
    return sample.finished and bool(sample.response) and math.isfinite(sample.score)


def best_responses(samples: Sequence[Sample]) -> dict[str, Sample]:
    """Returns each prompt's usable sample with the highest score, the first if several tie. A prompt without a usable
    sample is left out.
    """
    best: dict[str, Sample] = {}
    for sample in filter(is_usable, samples):
        known = best.get(sample.prompt_id)
        if known is None or sample.score > known.score:
            best[sample.prompt_id] = sample
    return best


def count_chosen(samples: Sequence[Sample], best: Mapping[str, Sample], num_prompts: int, num_samples: int) -> Chosen:
    """Count the samples that were kept, and why the others were not."""
    texts: dict[str, set[str]] = {}
    best_texts: dict[str, set[str]] = {}
    for sample in filter(is_usable, samples):
        texts.setdefault(sample.prompt_id, set()).add(sample.response)
        if sample.score == best[sample.prompt_id].score:
            best_texts.setdefault(sample.prompt_id, set()).add(sample.response)
    ended = [sample for sample in samples if sample.finished]
    return Chosen(
        num_prompts=num_prompts,
        num_samples=num_samples,
        num_kept=len(best),
        num_truncated=len(samples) - len(ended),
        num_empty=sum(not sample.response for sample in ended),
        num_failed=sum(bool(sample.response) and not math.isfinite(sample.score) for sample in ended),
        num_identical=sum(len(distinct) == 1 for distinct in texts.values()),
        num_tied=sum(len(distinct) > 1 for distinct in best_texts.values()),
        sample_score=fmean(sample.score for sample in samples if math.isfinite(sample.score)),
        kept_score=fmean(sample.score for sample in best.values()),
    )


def _tokenize(run: StageRun, config: RejectionConfig, tokenizer: Tokenizer, path: Path) -> TokenFolders:
    """Tokenize the kept conversations.

    Raises: ValueError if too few of them fit in a row to train on some and hold out others.
    """
    data = DataConfig(source=str(path))
    every = round(1 / config.heldout_share)
    limit = Limit(has_source=False, seq_len=config.seq_len, on_overlong="skip")

    def folder(name: str, rows: Rows) -> Path:
        parts = partial(demonstration_parts, tokenizer, (data,), limit, rows=rows)
        settings: dict[str, int | str] = {"seq_len": config.seq_len, "rows": f"{rows}"}
        tokens_folder = token_folder(run, name, tokenizer, (data,), CHECKED_SEQUENCES, parts, **settings)
        if not len(Sequences.read(tokens_folder)):
            raise ValueError(
                f"rejection.seq_len is {config.seq_len}, but no kept response for {name} fits in a row with its prompt;"
                " longer rows, or more prompts, were expected"
            )
        return tokens_folder

    return TokenFolders(folder("trained", Rows(every)), folder("held-out", Rows(every, is_heldout=True)))


def train(context: StageContext, config: RejectionConfig, start: Path, data: TokenFolders) -> Trained:
    """Train on this rank; rank 0 writes `model/`. Returns the losses."""
    tokenizer = Tokenizer.load(start, end=config.end_token).with_template(config.chat_template)
    training, heldout = (
        PackedObjective(Packed(Sequences.read(folder), config.seq_len, tokenizer.pad_id))
        for folder in (data.training, data.heldout)
    )
    policy = ModelFolder(start, LanguageModel, config.dropout)
    network = adapted(policy, config.lora, derive_seed(context.seed, "rejection", "lora"))
    engine = build_engine(context, network, config)
    num_steps = max(1, round(config.num_epochs * len(training) / config.batch.batch_size))
    loop_config = LoopConfig.of("rejection", context.seed, num_steps, config)
    loop = TrainingLoop(engine, loop_config, training, heldout, context.folder)
    before = loop.evaluate()["loss"]
    after = loop.run()["loss"]
    weights = engine.weights_for_file()
    if engine.is_main:
        plain = on_meta(policy.build)
        save_trained(context.folder, plain, engine.module, weights, tokenizer, config.lora, start)
    engine.barrier()
    engine.close()
    return Trained(num_steps, before, after)


def load_tokenizer(run: StageRun, config: RejectionConfig) -> Tokenizer:
    """Returns the policy's tokenizer, whose vocabulary training does not change."""
    return run.tokenizer_of("sft", config.end_token).with_template(config.chat_template)


def check(config: RejectionConfig, job: JobView) -> None:
    """Check that `objective_weights` names the objectives that the reward model learns."""
    reward = job.section(REWARD)
    if reward is not None and not config.reward_from:
        weights_by_label("[reward]", reward.labels, config.objective_weights)


def preflight(run: StageRun, config: RejectionConfig) -> None:
    """Check the models that the section names, and that every prompt leaves room for a response."""
    if config.init_from and (purpose := purpose_of(run.start("sft"))) != "language":
        raise ValueError(f"rejection.init_from {config.init_from}: a {purpose} model; a language model was expected")
    if config.reward_from:
        judge = run.start(REWARD.name)
        weights_by_label(str(judge), labels_of(judge), config.objective_weights)
    fitting_prompts(
        run, load_tokenizer(run, config), config.prompts, config.max_new_tokens, config.on_overlong, run.tell
    )


def plan(planner: Planner, config: RejectionConfig) -> Training:
    """Describe both halves, sampling and training, which run one after the other."""
    num_prompts = planner.sizes.num_rows(config.prompts)
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: load_tokenizer(run, config)
    )
    sampling = Sampling(
        planner.model,
        num_prompts,
        config.num_samples,
        config.max_new_tokens,
        lengths,
        at_once=config.num_samples,
        measured_by=("reward model",),
    )
    rows = num_prompts * (1 - config.heldout_share)
    if lengths.num_rows:  # lengths were measured, so packing can be estimated
        rows *= min(1.0, lengths.mean / config.seq_len)
    steps = max(1, round(config.num_epochs * rows / config.batch.batch_size))
    planner.sizes.assume("upper bound: every prompt has a sample to keep, one per row; packing puts several in a row")
    return Training("rows", config, planner.model, steps, Lengths.bound(config.seq_len - 1), samples=sampling)


REJECTION_PANELS = (Panel("Loss", "nats per token of the best samples", train_and_heldout("loss")), *TRAINING_PANELS)


def rejection_report(stage: StageFolder) -> StageReport:
    figures, results = metric_figures(stage, REJECTION_PANELS), stage.results(RejectionResults)
    if results is None:
        return StageReport((stage_block(stage, (), figures),))
    chosen = results.chosen
    kept, before = number(chosen.kept_score), number(chosen.sample_score)
    detail = f"by the reward model, {before} over all samples"
    return StageReport(
        (stage_block(stage, _rejection_facts(results), figures),),
        headlines=(headline_of(stage, "chosen.kept_score", "Kept samples' score", chosen.kept_score, kept, detail),),
        sentence=f"Rejection sampling learns from the best of {chosen.num_samples} samples of each of"
        f" {count(chosen.num_kept)} prompts.",
    )


def _rejection_facts(results: RejectionResults) -> list[tuple[str, str]]:
    chosen, trained = results.chosen, results.trained
    facts = [
        ("Prompts", count(chosen.num_prompts)),
        ("Samples per prompt", count(chosen.num_samples)),
        ("Prompts with a sample to learn from", count(chosen.num_kept)),
        *_not_kept(chosen),
        ("Reward model's score, all samples", number(chosen.sample_score)),
        ("Reward model's score, kept samples", number(chosen.kept_score)),
        ("Steps", count(trained.num_steps)),
        ("Held-out loss", f"{number(trained.heldout_loss_before)} → {number(trained.heldout_loss)}"),
    ]
    if results.overlong:
        facts.append(("Prompts read", str(results.overlong)))
    facts += [rows.fact for rows in results.sources]
    if results.overlong_kept:
        facts.append(("Kept samples with their prompts", str(results.overlong_kept)))
    return facts


def _not_kept(chosen: Chosen) -> list[tuple[str, str]]:
    """Returns why samples were not kept, and for how many prompts there was no choice."""
    counts = (
        ("Samples that reached max_new_tokens", chosen.num_truncated),
        ("Samples without text", chosen.num_empty),
        ("Samples without a score", chosen.num_failed),
        ("Prompts whose usable samples are all one text", chosen.num_identical),
        ("Prompts with several best samples", chosen.num_tied),
    )
    return [(what, count(num)) for what, num in counts if num]


REJECTION_REPORTER = StageReporter(
    "Rejection sampling",
    "The policy samples several responses per prompt and learns, as in SFT, from the one that the reward model scores"
    " highest.",
    rejection_report,
)


STAGE = Stage(
    name="rejection",
    config=RejectionConfig,
    run=run_rejection,
    parents=(Parent("sft", substitutes=("init_from",)), Parent("reward", substitutes=("reward_from",))),
    policy_from="sft",
    tokenizer=load_tokenizer,
    model_fields=("init_from", "reward_from"),
    context_tokens=lambda config: {"seq_len": config.seq_len, "max_new_tokens": config.max_new_tokens + 1},
    preflight=preflight,
    check=check,
    plan=plan,
    title=lambda _: "Rejection sampling",
    trained_prompts=lambda config: (config.prompts,),
    report=REJECTION_REPORTER,
)
