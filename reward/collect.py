"""Samples for labelers. As a stage: K samples of the SFT policy per prompt, which labelers rank through the label
store's client interface. As a command: samples of several policies, some of which become tasks.
"""

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch
from pydantic import Field

from files.hashes import derive_seed
from lm.source import inference_dtype
from preferences.database import require_locks
from preferences.formats.native import ranking_row
from preferences.records import MAX_RESPONSES, Message, Progress, Ranking, Task
from preferences.statistics.agreement import accuracy_against, pairwise_agreement
from preferences.statistics.estimates import Share
from preferences.task_selection import UNIFORM_SHARE, Candidate, PromptCandidates, Rule, choose_tasks
from reward.comparisons import encode_response
from reward.sampling import Sample, SamplingSpec, sample_everywhere, sample_policy
from reward.scoring import RewardModel, labels_of, weights_by_label
from stages.contract import Parent, Source, Stage
from stages.data import fitting_prompts
from stages.plan import Planner, Sampling
from stages.reports.parts import StageReport, StageReporter
from stages.reports.plots import Measured, interval_figure
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import headline_of_share, stage_block
from stages.reports.text import count, count_of, label, percent
from stages.run import StageRun
from stages.sizes import SourceSize
from stages.world import Labels, World, label_truth
from training.config import Config
from training.data import DataConfig, OnOverlong, Overlong, Prompt, SourceRows, overlong_field


class CollectConfig(Config):
    """Samples of the SFT policy that labelers rank."""

    prompts: DataConfig = Field(description="Prompts to sample responses to.")
    on_overlong: OnOverlong = overlong_field()
    responses_per_prompt: int = Field(default=4, ge=2, le=MAX_RESPONSES, description="Responses per task.")
    max_new_tokens: int = Field(ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    overlap_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of the tasks that `overlap_labelers` labelers rank, to measure agreement.",
    )
    overlap_labelers: int = Field(default=2, ge=2, description="Labelers per overlapping task; the others have one.")


@dataclass(frozen=True)
class CollectResults:
    """Results of collecting. `agreement` is between pairs of labelers; `gold_accuracy` is between labelers and their
    noiseless judgments.

    `num_identical` prompts were left out because all responses to them were the same text.
    """

    num_prompts: int
    num_identical: int
    responses_per_prompt: int
    num_judgments: int
    tie_share: float
    agreement: Share
    gold_accuracy: Share
    labelers: tuple[str, ...]
    overlong: Overlong | None = None  # of the prompts
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual


def make_tasks(
    batch: str, prompts: Sequence[Prompt], samples: Sequence[Sample], source: str, *, taken: Container[str] = ()
) -> list[Task]:
    """Make one task per prompt. A prompt whose samples are all the same text has nothing to rank and is left out.

    A task's id is a hash of its prompt and responses. The order of the responses and the scripted labelers' noise are
    seeded by it, so policies that differ only by rounding, and sample the same texts, get the same labels. `taken` are
    the ids of other batches' tasks: if the same texts come again, the new id also names the batch.
    """
    by_prompt: dict[str, list[str]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, []).append(sample.response)
    tasks = []
    for prompt in prompts:
        responses = by_prompt[prompt.prompt_id]
        if len(set(responses)) == 1:
            continue
        task_id = f"{prompt.prompt_id}/{_digest(prompt.messages, responses)}"
        tasks.append(
            Task(
                task_id=f"{task_id}/{batch}" if task_id in taken else task_id,
                prompt=tuple(Message.of(message) for message in prompt.messages),
                responses=tuple(responses),
                sources=(source,) * len(responses),
            )
        )
    return tasks


def _digest(*content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()


def label_tasks(
    store: Labels,
    world: World,
    tasks: Sequence[Task],
    config: CollectConfig,
    *,
    batch: str,
    seed: int,
    on_progress: Callable[[Progress], None],
) -> list[Ranking]:
    """Give the tasks to the world's labelers, and return all rankings. Safe to call again after a kill.

    Raises: ValueError if there are too few labelers, so that tasks stay open.
    """
    num_overlapping = round(config.overlap_share * len(tasks))
    quotas = [config.overlap_labelers if index < num_overlapping else 1 for index in range(len(tasks))]
    store.add_tasks(tasks, batch=batch, num_labelers=quotas)
    let_world_label(store, world, batch=batch, seed=seed, on_progress=on_progress)
    return store.rankings(batch)


def let_world_label(
    store: Labels, world: World, *, batch: str, seed: int, on_progress: Callable[[Progress], None]
) -> None:
    """Let the world's labelers answer a batch. Raises: ValueError if there are too few, so that tasks stay open."""
    progress = store.answer_all(
        world.labelers(seed), batch=batch, client="scripted", instructions_version="1", on_progress=on_progress
    )
    if progress.num_open:
        raise ValueError(
            f"{progress.num_open} of {progress.num_tasks} tasks are still open: there are too few labelers"
        )


def write_rankings(path: Path, rankings: Sequence[Ranking]) -> None:
    """Write the JSONL file that the reward stage reads."""
    with path.open("w", encoding="utf-8") as file:
        for ranking in rankings:
            file.write(json.dumps(ranking_row(ranking)) + "\n")


def collect_results(
    rankings: Sequence[Ranking], num_prompts: int, num_identical: int, world: World, responses_per_prompt: int
) -> CollectResults:
    """Summarise what was collected, how often labelers agree, and how often they are right."""
    truth = label_truth(rankings, world)
    pairs = [
        (first, second)
        for ranking in rankings
        for index, first in enumerate(ranking.ranks)
        for second in ranking.ranks[index + 1 :]
    ]
    return CollectResults(
        num_prompts=num_prompts,
        num_identical=num_identical,
        responses_per_prompt=responses_per_prompt,
        num_judgments=len(rankings),
        tie_share=sum(first == second for first, second in pairs) / len(pairs),
        agreement=pairwise_agreement(rankings),
        gold_accuracy=accuracy_against(rankings, truth),
        labelers=tuple(sorted({ranking.labeler for ranking in rankings})),
    )


def run_collect(run: StageRun, config: CollectConfig) -> None:
    """Sample responses, have them labeled, and export the rankings. Labels stay in the job's store for good; a new SFT
    policy starts a new batch.
    """
    tokenizer = run.tokenizer_of("sft")
    fitting = fitting_prompts(run, tokenizer, config.prompts, config.max_new_tokens, config.on_overlong)
    prompts = fitting.prompts
    spec = SamplingSpec(
        policy=run.start("sft"),
        num_samples=config.responses_per_prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=derive_seed(run.seed, "collect"),
        precision=run.engine.resolved_precision(),
    )
    samples = sample_everywhere(run, "sft", spec, prompts)
    batch = json.loads((run.folder / "inputs.json").read_text(encoding="utf-8"))["fingerprint"][:12]
    with run.open_labels(run.run_folder / "labels.sqlite") as store:
        others = [other for other in store.batches() if other != batch]
        taken = {stored.task.task_id for other in others for stored in store.tasks(other)}
        tasks = make_tasks(batch, prompts, samples, run.own("sft"), taken=taken)
        rankings = label_tasks(
            store, run.world, tasks, config, batch=batch, seed=run.job.seed,  # the same labelers in each round
            on_progress=lambda state: run.show(state.num_tasks - state.num_open, state.num_tasks, "labeled"),
        )  # fmt: skip
    write_rankings(run.folder / "rankings.jsonl", rankings)
    num_identical = len(prompts) - len(tasks)
    results = collect_results(rankings, len(prompts), num_identical, run.world, config.responses_per_prompt)
    run.write_results(replace(results, overlong=fitting.overlong or None, sources=fitting.sources))


def report(stage: StageFolder) -> StageReport:
    results = stage.results(CollectResults)
    if results is None:
        return StageReport((stage_block(stage, (), ()),))
    facts = (
        ("Prompts", count(results.num_prompts)),
        ("Responses per prompt", count(results.responses_per_prompt)),
        ("Judgments", count(results.num_judgments)),
        ("Ties", percent(results.tie_share)),
        ("Labelers", ", ".join(label(name) for name in results.labelers)),
        *((("Prompts read", str(results.overlong)),) if results.overlong else ()),
        *(rows.fact for rows in results.sources),
    )
    rows = [
        Measured(name, "muted", marker, share)
        for name, marker, share in (
            ("Labelers, each other", "o", results.agreement),
            ("Labelers, gold", "s", results.gold_accuracy),
        )
        if isfinite(share.mean)
    ]
    unit = "pairs of responses ordered alike; chance is 50%"
    figures = [interval_figure(rows, title="Agreement", unit=unit, name="agreement", is_share=True)] if rows else []
    agreement = results.agreement
    span = (agreement.mean, agreement.low, agreement.high)
    headlines = (
        [headline_of_share(stage, "agreement", "Labelers agree", span, count_of(agreement.num_pairs, "pair"))]
        if isfinite(agreement.mean)
        else []
    )
    return StageReport((stage_block(stage, facts, figures),), headlines=tuple(headlines))


REPORTER = StageReporter(
    "Collecting preferences", "Labelers rank several responses of the policy to each prompt.", report
)


def preflight(run: StageRun, config: CollectConfig) -> None:
    """Check that every prompt leaves room for its responses, and that labels can be stored in the run's folder."""
    require_locks(run.run_folder)
    fitting_prompts(run, run.tokenizer_of("sft"), config.prompts, config.max_new_tokens, config.on_overlong, run.tell)


def plan(planner: Planner, config: CollectConfig) -> Sampling:
    num_prompts, num_responses = planner.sizes.num_rows(config.prompts), config.responses_per_prompt
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: run.tokenizer_of("sft")
    )
    return Sampling(planner.model, num_prompts, num_responses, config.max_new_tokens, lengths, num_responses)


EVALUATION_SHARE = 0.1  # of the prompts, whose tasks are always selected uniformly, for evaluation


@dataclass(frozen=True)
class TaskSelection:
    """How samples become tasks. `preferences.task_selection.choose_tasks` explains each field."""

    batch: str
    rule: Rule
    responses_per_task: int
    tasks_per_prompt: int
    seed: int
    num_tasks: int


def sample_tasks(
    policies: Sequence[Path],
    judges: Sequence[Path],
    prompts: Sequence[Prompt],
    selection: TaskSelection,
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    weights: Mapping[str, float],
) -> list[Task]:
    """Sample `num_samples` responses from every policy to every prompt, and make tasks of some of them.

    A response's source is its policy's folder. `weights` are those of the judges' objectives, if there are several.
    Raises: ValueError for a directory without the expected kind of model, weights that do not fit a judge, a prompt
    that leaves no room for the response, and a conversation that does not fit a judge.
    """
    for judge in judges:
        weights_by_label(str(judge), labels_of(judge), weights)
    sampled: dict[str, list[tuple[str, str]]] = {prompt.prompt_id: [] for prompt in prompts}
    for number, policy in enumerate(policies):
        spec = SamplingSpec(
            policy=policy,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=derive_seed(selection.seed, "label sample", number),
            precision="bf16" if inference_dtype() == torch.bfloat16 else "fp32",
        )
        for sample in sample_policy(spec, prompts):
            sampled[sample.prompt_id].append((sample.response, str(policy)))
    texts = {name: [text for text, _ in samples] for name, samples in sampled.items()}
    scores = scores_of(judges, weights, prompts, texts)
    return choose_tasks(
        candidates_of(prompts, sampled, scores),
        batch=selection.batch,
        rule=selection.rule,
        responses_per_task=selection.responses_per_task,
        tasks_per_prompt=selection.tasks_per_prompt,
        evaluation_share=EVALUATION_SHARE,
        seed=selection.seed,
        num_tasks=selection.num_tasks,
        uniform_share=UNIFORM_SHARE,
    )


def candidates_of(
    prompts: Sequence[Prompt],
    sampled: Mapping[str, Sequence[tuple[str, str]]],
    scores: Mapping[str, Sequence[tuple[float, ...]]],
) -> list[PromptCandidates]:
    """Returns what tasks are chosen from. `sampled` has the responses to each prompt, and where each is from."""
    return [
        PromptCandidates(
            prompt.prompt_id,
            tuple(Message.of(message) for message in prompt.messages),
            tuple(
                Candidate(text, source, score)
                for (text, source), score in zip(sampled[prompt.prompt_id], scores[prompt.prompt_id], strict=True)
            ),
        )
        for prompt in prompts
    ]


def scores_of(
    judges: Sequence[Path], weights: Mapping[str, float], prompts: Sequence[Prompt], responses: dict[str, list[str]]
) -> dict[str, list[tuple[float, ...]]]:
    """Returns each judge's scores by prompt: one tuple per response, with one score per judge; higher is better."""
    columns: list[list[float]] = []
    for folder in judges:
        judge = RewardModel.load(folder, weights)
        sequences = []
        for prompt in prompts:
            messages = [Message.of(message) for message in prompt.messages]
            for response in responses[prompt.prompt_id]:
                tokens = encode_response(judge.tokenizer, messages, response)
                if not judge.fits(tokens):
                    raise ValueError(
                        f"prompt {prompt.prompt_id!r}: with a response it has {len(tokens)} tokens; {folder} reads at"
                        f" most {judge.network.config.max_position_embeddings}"
                    )
                sequences.append(tokens)
        columns.append(judge.score_sequences(sequences))
    rows = iter(zip(*columns, strict=True)) if columns else iter([])
    return {
        prompt.prompt_id: [next(rows) if columns else () for _ in responses[prompt.prompt_id]] for prompt in prompts
    }


STAGE = Stage(
    name="collect",
    config=CollectConfig,
    run=run_collect,
    parents=(Parent("sft"),),
    sections=("world",),
    model_fields=(),
    output="rankings.jsonl",
    sources={
        "rankings": Source(
            "rankings.jsonl",
            lambda config, sizes: SourceSize(sizes.num_rows(config.prompts), config.responses_per_prompt),
        )
    },
    context_tokens=lambda config: {"max_new_tokens": config.max_new_tokens + 1},
    preflight=preflight,
    plan=plan,
    report=REPORTER,
)
