"""Rankings as the driver prepares them. For the plan, their number and lengths; for the ranks, the verdicts, and the
tokens in a file, so that no rank reads texts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from lm.tokenizer import Tokenizer
from preferences.formats.merging import Found
from preferences.formats.parts import RowWarning
from preferences.rankings import split_rankings
from preferences.records import OVERALL, Message, Ranking
from preferences.statistics.agreement import labeler_reliability, labeler_weights
from reward.comparisons import (
    Answer,
    Comparison,
    Encoded,
    LabelerWeights,
    RankingsConfig,
    comparison_of,
    encode_answers,
    fit_tasks,
    place_of,
    rankings_by_task,
    read_judgments,
)
from reward.config import ComparisonsConfig
from stages.data import token_folder
from stages.planner import Planner
from stages.progress import console
from stages.run import StageRun
from stages.sizes import Lengths, RowSample
from training.data import SourceRows
from training.tokens import (
    CHECKED_SEQUENCES,
    SKIPPED,
    Part,
    Sequences,
    chunks,
    read_array,
    read_overlong,
    sequence_arrays,
)

COLLECTED = "collect:rankings"  # the source name of the rankings that [collect] collected
WARNINGS = "warnings.json"  # unusual rows of the rankings, and what was done about each


@dataclass(frozen=True)
class Split:
    """The rankings that a model learns from and is measured on."""

    objectives: tuple[str, ...]  # in the order of the heads
    train: list[Ranking]
    heldout: list[Ranking]  # on prompts that training does not see

    def of(self, objective: str) -> tuple[list[Ranking], list[Ranking]]:
        """Returns one objective's rankings: those to train on, and those held out."""
        train, heldout = ([r for r in side if r.objective == objective] for side in (self.train, self.heldout))
        return train, heldout


@dataclass(frozen=True)
class PreparedRankings:
    """Rankings without their texts. `folder` has the tokens; `first_sequence` says where each task's begin.

    Each prompt is replaced by a number, since statistics only need to know which rankings have the same prompt.
    """

    split: Split
    first_sequence: Mapping[str, int]  # by task: the number of its first response's sequence
    folder: Path
    warnings: Sequence[Mapping[str, Any]]  # about rows of the rankings
    sources: tuple[SourceRows, ...]  # counts of these warnings; () if no row is unusual

    @classmethod
    def of(cls, judgments: Found, config: ComparisonsConfig, seed: int, folder: Path) -> "PreparedRankings":
        """Prepare rankings whose tokens `ranking_parts` has written to `folder`. Raises: as `split_of`."""
        first_sequence, total = dict[str, int](), 0
        fates = read_array(folder, "overlong")
        for task, fate in zip(rankings_by_task(judgments.rankings), fates.tolist(), strict=True):
            if fate != SKIPPED:
                first_sequence[task[0].task_id] = total
                total += len(task[0].responses)
        kept = [ranking for ranking in judgments.rankings if ranking.task_id in first_sequence]
        split = split_of(kept, config, seed)
        numbers: dict[tuple[Message, ...], int] = {}

        def without_texts(ranking: Ranking) -> Ranking:
            number = numbers.setdefault(ranking.prompt, len(numbers))
            no_texts = ("",) * len(ranking.responses)
            return replace(ranking, prompt=(Message("user", str(number)),), responses=no_texts)

        train, heldout = ([without_texts(ranking) for ranking in side] for side in (split.train, split.heldout))
        warnings = warnings_about(judgments)
        rows = SourceRows.of(judgments.invalid, judgments.report.outcomes())
        sources = (rows,) if rows else ()
        return cls(Split(split.objectives, train, heldout), first_sequence, folder, warnings, sources)

    def comparisons(self, rankings: Sequence[Ranking], weights: LabelerWeights | None = None) -> list[Comparison]:
        """Returns one comparison per task of `rankings`. Its sequences are views of the memory-mapped file. `weights`
        are the weights of labelers' rankings, 1 if absent.
        """
        sequences = Sequences.read(self.folder)
        comparisons = []
        for task in rankings_by_task(rankings):
            first = self.first_sequence[task[0].task_id]
            places = range(first, first + len(task[0].responses))
            # Arrays serve as sequences here, since only their length and entries are used.
            encoded = [
                Encoded(cast(Sequence[int], sequences[place][0]), int(sequences.num_counted[place])) for place in places
            ]
            comparisons.append(comparison_of(encoded, task, self.split.objectives, weights or {}))
        return comparisons


def ranking_parts(
    tokenizer: Tokenizer, judgments: Found, max_tokens: int, config: ComparisonsConfig, first_task: int
) -> Iterator[Part]:
    """Yields the tokens of the tasks' responses, from task number `first_task` on; only response tokens are counted.

    Raises: as `fit_tasks`.
    """
    tasks = rankings_by_task(judgments.rankings)[first_task:]
    fitting = fit_tasks(
        tokenizer, tasks, max_tokens, config.on_overlong, config.section, judgments.places, keeps_end=config.keeps_end
    )
    for fitted in chunks(fitting):
        arrays = sequence_arrays(
            (of.tokens, [False] * (len(of.tokens) - of.response_tokens) + [True] * of.response_tokens)
            for of_task, _ in fitted
            for of in of_task
        )
        yield Part(len(fitted), {**arrays, "overlong": np.array([fate for _, fate in fitted])})


def tokenize(run: StageRun, config: ComparisonsConfig, tokenizer: Tokenizer, judgments: Found, max_tokens: int) -> Path:
    """Returns the folder with the rankings' tokens, after writing them if necessary. Raises: as `fit_tasks`."""
    templated = tokenizer.with_template(config.chat_template)
    parts = partial(ranking_parts, templated, judgments, max_tokens, config)
    settings = {"max_tokens": max_tokens, "on_overlong": config.on_overlong, "keeps_end": config.keeps_end}
    return token_folder(run, "rankings", templated, (config.rankings,), CHECKED_SEQUENCES, parts, **settings)


def report_overlong(run: StageRun, config: ComparisonsConfig, folder: Path, max_tokens: int) -> None:
    """Report how many rows were too long for a model that reads `max_tokens`."""
    if overlong := read_overlong(folder):
        run.tell(f"{config.rankings.source}: {overlong} (the model reads {max_tokens} tokens)")


def check_objectives(config: ComparisonsConfig) -> None:
    """Check that labelers of a world can judge the named objectives: they give only one overall judgment.

    Raises: ValueError if they cannot.
    """
    if config.rankings.source == COLLECTED and not set(config.named_objectives) <= {OVERALL}:
        raise ValueError(
            f"{config.objectives_key} is {list(config.named_objectives)}, but the labelers of [collect] judge only"
            f" {OVERALL!r}; no other objective was expected"
        )


def report_rankings(config: ComparisonsConfig, judgments: Found, seed: int) -> None:
    """Report which rankings are not learned, and where warnings about rows will be. Raises: as `split_of`."""
    objectives = split_of(judgments.rankings, config, seed).objectives
    left_out = sum(ranking.objective not in objectives for ranking in judgments.rankings)
    if left_out:
        console.print(f"{config.rankings.source}: {left_out:,} rankings have objectives that are not learned")
    if warnings_about(judgments):
        console.print(f"{config.rankings.source}: these rows are listed in {config.section}/{WARNINGS}", markup=False)


def warnings_about(judgments: Found) -> list[dict[str, Any]]:
    """Returns the content of WARNINGS: the first rows that were skipped as invalid, and all unusual rows."""
    skipped = [
        RowWarning("invalid", judgments.invalid.source, message, "skipped") for message in judgments.invalid.messages
    ]
    return [vars(warning) for warning in (*skipped, *judgments.report.warnings)]


def weights_of_labelers(split: Split, config: ComparisonsConfig) -> LabelerWeights:
    """Returns the weight of each labeler's rankings by objective; a labeler who is not listed has weight 1."""
    if config.labeler_weights == "equal":
        return {}
    weight_of: dict[tuple[str, str], float] = {}
    for objective in split.objectives:
        train, _ = split.of(objective)
        weights = labeler_weights(train, labeler_reliability(train))
        weight_of |= {(objective, name): weight for name, weight in weights.items()}
    return weight_of


def split_of(rankings: Sequence[Ranking], config: ComparisonsConfig, seed: int) -> Split:
    """Select the rankings of the objectives to learn, and split them by prompt.

    Raises: ValueError if a named objective has no rankings, if the rankings have several objectives and the config
    names none, and if one side of an objective's split is empty.
    """
    source, available = config.rankings.source, sorted({ranking.objective for ranking in rankings})
    named = config.named_objectives
    objectives = named or tuple(available)
    if (not named and len(available) > 1) or not set(objectives) <= set(available):
        raise ValueError(
            f"{config.objectives_key} is {list(named)}, but the rankings of {source} have the objectives"
            f" {', '.join(available)}; a choice of these was expected"
        )
    chosen = [ranking for ranking in rankings if ranking.objective in objectives]
    split = Split(objectives, *split_rankings(chosen, config.heldout_share, seed))
    for objective in objectives:
        train, heldout = split.of(objective)
        if not train or not heldout:
            of = f" of {objective!r}" if len(objectives) > 1 else ""
            raise ValueError(
                f"{config.section}.heldout_share {config.heldout_share} splits the rankings{of} of {source} into"
                f" {len(train)} for training and {len(heldout)} held out; both need at least one: give more rankings"
                f" or a {'larger' if train else 'smaller'} share"
            )
    return split


def comparison_steps(planner: Planner, config: ComparisonsConfig) -> tuple[int, int]:
    """Returns the number of training steps, and the largest number of responses of a comparison."""
    num_tasks, num_responses = _num_tasks(planner, config.rankings)
    planner.sizes.assume("assumes one ranking per task (several rankings of a task are one comparison)")
    steps = config.num_epochs * num_tasks * (1 - config.heldout_share) / config.batch.batch_size
    return max(1, round(steps)), num_responses


def _num_tasks(planner: Planner, rankings: RankingsConfig) -> tuple[int, int]:
    """Returns the number of tasks, and the largest number of responses of one. If the file exists, tasks are counted,
    since a row may hold several tasks, and several rows one.
    """

    def count() -> tuple[int, int]:
        tasks = read_judgments(rankings).tasks
        return len(tasks), max(len(task.responses) for task in tasks.values())

    if Path(rankings.source).exists():
        return planner.sizes.measures.get(f"tasks {rankings.model_dump_json()}", count)
    written = planner.sizes.stage_size(rankings.source)
    if written is None:
        planner.sizes.assume("assumes two responses per task")
    return planner.sizes.num_rows(rankings), 2 if written is None else written.responses_per_row


def comparison_lengths(
    planner: Planner, config: ComparisonsConfig, tokenizer: Callable[[StageRun], Tokenizer], context: int
) -> Lengths:
    """Returns the lengths of prompts with responses, cut to the model's context, or a bound on them. The plan reports
    which of the two it is.
    """

    def measure(known: Tokenizer) -> Lengths:
        templated = known.with_template(config.chat_template)
        return ranking_lengths(templated, read_judgments(config.rankings), context)

    measured = planner.measured((config.rankings,), "prompts with a response", tokenizer, measure)
    return planner.bound(config.rankings, 0) if measured is None else measured


def ranking_lengths(tokenizer: Tokenizer, judgments: Found, most_tokens: int) -> Lengths:
    """Returns the length of each prompt with its response, counting at most `most_tokens`.

    Raises: ValueError naming file and line of a conversation that the chat template refuses.
    """
    sample, places = RowSample[Answer](), judgments.places
    for task in rankings_by_task(judgments.rankings):
        where, prompt = place_of(task, places), task[0].prompt
        prompt_bytes = sum(len(message.content.encode()) for message in prompt)
        for response in task[0].responses:
            sample.add((where, prompt, response), prompt_bytes + len(response.encode()))

    def count(answers: Sequence[Answer]) -> Iterator[tuple[int, int]]:
        return ((len(of.tokens), of.response_tokens) for of in encode_answers(tokenizer, answers))

    return sample.lengths(count, most_tokens)
