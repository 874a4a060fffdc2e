"""Rankings as the driver prepares them. For the plan, their number and lengths; for the ranks, the verdicts, and the
tokens in a file, so that no rank reads texts.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np

from files.hashes import json_hash
from files.rows import InvalidRows
from lm.tokenizer import Tokenizer
from preferences.formats.merging import ImportedLabels, collect_all, report_excluded
from preferences.formats.parts import RowWarning
from preferences.rankings import is_heldout, split_rankings
from preferences.records import MIN_RESPONSES, OVERALL, Message, Ranking
from preferences.statistics.agreement import labeler_reliability, labeler_weights
from reward.comparisons import Comparison, Encoded, Judged, LabelerWeights, comparison_of, fit_tasks, rankings_by_task
from reward.config import ComparisonsConfig, RankingsConfig
from stages.data import token_folder
from stages.plan import Planner
from stages.progress import console
from stages.run import StageRun
from stages.sizes import Lengths, Measured, RowSample
from training.data import OnOverlong, SourceRows, read_rows, report_rows, untold
from training.tokens import (
    CHECKED_SEQUENCES,
    SKIPPED,
    Part,
    Sequences,
    chunks,
    read_array,
    read_overlong,
    read_sources,
    sequence_arrays,
    unusual_rows,
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
    """Rankings in a folder that `tokenize` made, without their texts. Each part is read only when it is used.

    Each prompt is replaced by a hash, since statistics only need to know which rankings have the same prompt.
    """

    folder: Path
    config: ComparisonsConfig

    @cached_property
    def split(self) -> Split:
        """The rankings of the objectives to learn. Raises: as `objectives_of`."""
        objectives = self.objectives()
        sides: tuple[list[Ranking], list[Ranking]] = ([], [])
        for row in self._rows():
            if row.objective in objectives:
                sides[row.is_heldout].extend(row.rankings())
        return Split(objectives, *sides)

    @cached_property
    def first_sequence(self) -> Mapping[str, int]:
        """The index of each task's first response among the sequences, by task id."""
        rows = [(row.task_id, row.num_responses) for row in self._rows()]
        totals = itertools.accumulate((number for _, number in rows), initial=0)
        return {task_id: total for (task_id, _), total in zip(rows, totals, strict=False)}

    @property
    def warnings(self) -> list[Mapping[str, Any]]:
        """The content of WARNINGS: the first rows that were skipped as invalid, and all unusual rows."""
        warnings: list[Mapping[str, Any]] = json.loads(read_array(self.folder, "warnings").tobytes())
        return warnings

    @property
    def sources(self) -> tuple[SourceRows, ...]:
        """Counts of unusual rows by source; () if no row is unusual."""
        return read_sources(self.folder)

    def counts(self) -> Counter[tuple[str, bool]]:
        """Counts rankings by objective and by whether they are held out."""
        counts = Counter[tuple[str, bool]]()
        for row in self._rows():
            counts[row.objective, row.is_heldout] += len(row.verdicts)
        return counts

    def objectives(self) -> tuple[str, ...]:
        """The objectives to learn. Raises: as `objectives_of`."""
        return objectives_of(self.counts(), self.config)

    def _rows(self) -> "Iterator[JudgedRow]":
        texts, start = read_array(self.folder, "texts"), 0
        for end in np.cumsum(read_array(self.folder, "text_bytes"), dtype=np.int64).tolist():
            yield JudgedRow(*json.loads(texts[start:end].tobytes()))
            start = end

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


class JudgedRow(NamedTuple):
    """A task and its rankings, as the folder stores them in JSON."""

    task_id: str
    objective: str
    is_heldout: bool
    prompt: str  # a hash
    num_responses: int
    verdicts: Sequence[tuple[str, Sequence[int], Sequence[float], Sequence[Sequence[str]]]]  # ..., ratings, flags

    @classmethod
    def of(cls, judged: Sequence[Ranking], *, is_heldout: bool) -> Self:
        task = judged[0]
        prompt = json_hash(*(message.fields for message in task.prompt))[:16]
        verdicts = [(ranking.labeler, ranking.ranks, ranking.ratings, ranking.flags) for ranking in judged]
        return cls(task.task_id, task.objective, is_heldout, prompt, len(task.responses), verdicts)

    def rankings(self) -> Iterator[Ranking]:
        prompt, no_texts = (Message("user", self.prompt),), ("",) * self.num_responses
        for labeler, ranks, ratings, flags in self.verdicts:
            yield Ranking(
                self.task_id,
                prompt,
                no_texts,
                tuple(ranks),
                labeler,
                self.objective,
                tuple(ratings),
                tuple(map(tuple, flags)),
            )


ARRAYS = (*CHECKED_SEQUENCES, "texts", "text_bytes", "warnings")  # in a folder of rankings


def ranking_parts(
    tokenizer: Tokenizer,
    config: ComparisonsConfig,
    seed: int,
    max_tokens: int,
    first_task: int,
    *,
    tell: Callable[[str], None] = untold,
) -> Iterator[Part]:
    """Reads the rankings, and yields the tokens of the tasks' responses, starting at task number `first_task`. Only
    response tokens are counted. `tell` receives lines about the rows.

    Raises: as `read_judgments` and `fit_tasks`.
    """
    judgments = read_judgments(config.rankings, tell, least_responses=config.least_responses)
    warnings = np.frombuffer(json.dumps(warnings_about(judgments)).encode(), np.uint8)
    written_once = {} if first_task else {"warnings": warnings}  # goes with the first tasks
    tasks = itertools.islice(judgments.ranked_tasks(), first_task, None)
    fitting = fit_tasks(tokenizer, tasks, max_tokens, config.on_overlong, config.section, keeps_end=config.keeps_end)
    for fitted in chunks(fitting):
        arrays = sequence_arrays(
            (of.tokens, [False] * (len(of.tokens) - of.response_tokens) + [True] * of.response_tokens)
            for _, of_task, _ in fitted
            for of in of_task
        )
        texts = [
            json.dumps(JudgedRow.of(task, is_heldout=is_heldout(task[0].prompt, config.heldout_share, seed))).encode()
            for task, _, fate in fitted
            if fate != SKIPPED
        ]
        yield Part(
            len(fitted),
            {
                **arrays,
                "overlong": np.array([fate for *_, fate in fitted]),
                "texts": np.frombuffer(b"".join(texts), np.uint8),
                "text_bytes": np.array([len(text) for text in texts]),
                **written_once,
            },
        )
        written_once = {}
    yield from unusual_rows([SourceRows.of(judgments.invalid, judgments.report.outcomes())])


def tokenize(
    run: StageRun,
    config: ComparisonsConfig,
    tokenizer: Tokenizer,
    max_tokens: int,
    tell: Callable[[str], None] = untold,
) -> PreparedRankings:
    """Returns the rankings and their tokens, after reading and writing them if necessary. `tell` receives lines about
    what is read. Raises: as `ranking_parts`.
    """
    templated = tokenizer.with_template(config.chat_template)
    parts = partial(ranking_parts, templated, config, run.seed, max_tokens, tell=tell)
    settings = {
        "max_tokens": max_tokens,
        "on_overlong": config.on_overlong,
        "keeps_end": config.keeps_end,
        "least_responses": config.least_responses,
        "heldout_share": str(config.heldout_share),
        "split": "by opening",
        "seed": run.seed,
    }
    folder = token_folder(run, "rankings", templated, (config.rankings,), ARRAYS, parts, **settings)
    return PreparedRankings(folder, config)


def check_objectives(config: ComparisonsConfig) -> None:
    """Check that labelers of a world can judge the named objectives: they give only one overall judgment.

    Raises: ValueError if they cannot.
    """
    if config.rankings.source == COLLECTED and not set(config.named_objectives) <= {OVERALL}:
        raise ValueError(
            f"{config.objectives_key} is {list(config.named_objectives)}, but the labelers of [collect] judge only"
            f" {OVERALL!r}; no other objective was expected"
        )


def report_rankings(run: StageRun, config: ComparisonsConfig, prepared: PreparedRankings, max_tokens: int) -> None:
    """Report which rankings are not learned, where the warnings about rows will be written, and how many rows are too
    long for a model that reads `max_tokens`. Raises: as `objectives_of`.
    """
    counts = prepared.counts()
    objectives = objectives_of(counts, config)
    left_out = sum(count for (objective, _), count in counts.items() if objective not in objectives)
    if left_out:
        console.print(f"{config.rankings.source}: {left_out:,} rankings have objectives that are not learned")
    if prepared.warnings:
        console.print(f"{config.rankings.source}: these rows are listed in {config.section}/{WARNINGS}", markup=False)
    if overlong := read_overlong(prepared.folder):
        run.tell(f"{config.rankings.source}: {overlong} (the model reads {max_tokens} tokens)")


def warnings_about(judgments: ImportedLabels) -> list[dict[str, Any]]:
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
    """Select the rankings of the objectives to learn, and split them by conversation. Raises: as `objectives_of`."""
    train, heldout = split_rankings(rankings, config.heldout_share, seed)
    counts = Counter((ranking.objective, side is heldout) for side in (train, heldout) for ranking in side)
    objectives = objectives_of(counts, config)
    return Split(objectives, *([r for r in side if r.objective in objectives] for side in (train, heldout)))


def objectives_of(counts: Counter[tuple[str, bool]], config: ComparisonsConfig) -> tuple[str, ...]:
    """Returns the objectives to learn, in the order of the heads. `counts` has the number of rankings by objective and
    by whether they are held out.

    Raises: ValueError if a named objective has no rankings, if the rankings have several objectives and the config
    names none, or if one side of an objective's split is empty.
    """
    source, available = config.rankings.source, sorted({objective for objective, _ in counts})
    named = config.named_objectives
    objectives = named or tuple(available)
    if (not named and len(available) > 1) or not set(objectives) <= set(available):
        raise ValueError(
            f"{config.objectives_key} is {list(named)}, but the rankings of {source} have the objectives"
            f" {', '.join(available)}; a choice of these was expected"
        )
    for objective in objectives:
        train, heldout = counts[objective, False], counts[objective, True]
        if not train or not heldout:
            of = f" of {objective!r}" if len(objectives) > 1 else ""
            raise ValueError(
                f"{config.section}.heldout_share {config.heldout_share} splits the rankings{of} of {source} into"
                f" {train} for training and {heldout} held out; both need at least one: give more rankings or a"
                f" {'larger' if train else 'smaller'} share (prompts with the same first user turn are always on the"
                " same side, so put text that all prompts share in a system turn)"
            )
    return objectives


def read_judgments(
    data: RankingsConfig, tell: Callable[[str], None] = untold, *, least_responses: int = MIN_RESPONSES
) -> ImportedLabels:
    """Read tasks, judgments, warnings about rows, and what is excluded from training.

    `tell` gets lines about the number of comparisons, their format, and unusual rows. A task with fewer than
    `least_responses` is refused.

    Raises: ValueError naming file, line, field.
    """
    from preferences.formats.registry import read_as  # needs SQLAlchemy, which a bare GPU machine lacks

    invalid = InvalidRows(data.source, data.on_invalid)
    rows = read_rows(data, invalid)
    first = next(rows, None)
    if first is None:
        invalid.finish()
        raise ValueError(f"{data.source}: no rankings; at least one was expected")
    form, rows = read_as(data.format, itertools.chain([first], rows), data.source, option="`format`")
    judgments = collect_all(form, rows, invalid)
    if not any(found.judgments for found in judgments.found_tasks):
        unusual = SourceRows.of(invalid, judgments.report.outcomes())
        if judgments.found_tasks and not unusual:
            tasks = f"{len(judgments.found_tasks):,} tasks"
            raise ValueError(f"{data.source}: {tasks}, but none has a judgment; at least one ranking was expected")
        reasons = f" ({unusual})" if judgments.report.num_rows else ""
        raise ValueError(f"{data.source}: no rankings{reasons}; at least one was expected")
    for found in judgments.found_tasks:
        if len(found.task.responses) < least_responses:
            raise ValueError(
                f"{found.where}: a single response, which ranks nothing; 'chosen' and 'rejected' or several responses"
                ' were expected ([dpo] with loss = "kto" learns from labels of single responses)'
            )
    sizes = {len(found.task.responses) for found in judgments.found_tasks}
    things = {1: "labeled responses", 2: "pairs"}.get(max(sizes), "comparisons")
    tell(f"{data.source}: {len(judgments.found_tasks):,} {things}, {form.description}")
    report_excluded(judgments)
    report_rows(invalid, judgments.report.outcomes(), tell)
    if next(judgments.ranked_tasks(), None) is None:
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in judgments.report.counts().items())
        raise ValueError(f"{data.source}: no ranking to train on ({counts}); at least one was expected")
    return judgments


def read_rankings(data: RankingsConfig) -> list[Ranking]:
    """Read the current rankings. Raises as for `read_judgments`."""
    return read_judgments(data).rankings


def comparison_steps(planner: Planner, config: ComparisonsConfig) -> tuple[int, int]:
    """Returns the number of training steps, and the largest number of responses of a comparison."""
    num_tasks, num_responses = _num_tasks(planner, config)
    planner.sizes.assume("assumes one ranking per task (several rankings of a task are one comparison)")
    steps = config.num_epochs * num_tasks * (1 - config.heldout_share) / config.batch.batch_size
    return max(1, round(steps)), num_responses


def _num_tasks(planner: Planner, config: ComparisonsConfig) -> tuple[int, int]:
    """Returns the number of tasks, and the largest number of responses of one. If the file exists, tasks are counted,
    since a row may hold several tasks, and several rows one.
    """

    rankings = config.rankings

    def count() -> tuple[int, int]:
        found = read_judgments(rankings, least_responses=config.least_responses).found_tasks
        return len(found), max(len(own.task.responses) for own in found)

    if Path(rankings.source).exists():
        return planner.sizes.measures.get(f"tasks {rankings.model_dump_json()}", count)
    written = planner.sizes.stage_size(rankings.source)
    if written is None:
        planner.sizes.assume("assumes two responses per task")
    return planner.sizes.num_rows(rankings), 2 if written is None else written.responses_per_row


def comparison_lengths(
    planner: Planner, config: ComparisonsConfig, tokenizer: Callable[[StageRun], Tokenizer], context: int
) -> Lengths:
    """Returns the lengths of prompts with responses, or a bound on them. The plan reports which of the two it is.

    Raises: ValueError as `ranking_lengths`.
    """

    def measure(known: Tokenizer) -> Lengths:
        templated = known.with_template(config.chat_template)
        judgments = read_judgments(config.rankings, least_responses=config.least_responses)
        return ranking_lengths(
            templated, judgments, context, config.on_overlong, config.section, keeps_end=config.keeps_end
        )

    measured = planner.measured((config.rankings,), "prompts with a response", tokenizer, measure)
    return planner.bound(config.rankings, 0) if measured is None else measured


def ranking_lengths(
    tokenizer: Tokenizer,
    judgments: ImportedLabels,
    most_tokens: int,
    on_overlong: OnOverlong,
    section: str = "reward",
    *,
    keeps_end: bool = False,
) -> Lengths:
    """Returns the length of each prompt with its response. Whether it is too long is decided one response at a time,
    while a run skips all responses of a task together.

    Raises: ValueError as `fit_tasks`.
    """
    sample = RowSample[Judged]()
    for where, task in judgments.ranked_tasks():
        prompt_bytes = sum(len(message.content.encode()) for message in task[0].prompt)
        for response in task[0].responses:
            alone = [replace(task[0], responses=(response,))]
            sample.add((where, alone), prompt_bytes + len(response.encode()))

    def count(responses: Sequence[Judged]) -> Iterator[list[Measured]]:
        for _, sequences, fate in fit_tasks(
            tokenizer, responses, most_tokens, on_overlong, section, keeps_end=keeps_end
        ):
            of = sequences[0] if sequences else Encoded((), 0)
            yield [(len(of.tokens), of.response_tokens, fate)]

    return sample.lengths(count, most_tokens)
