"""What the driver makes of rankings for the ranks: who judged what how, and tokens in a file. No rank reads texts."""

from collections.abc import Iterator, Mapping, Sequence
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
from preferences.statistics.reliability import labeler_reliability, labeler_weights
from reward.comparisons import Comparison, Encoded, LabelerWeights, comparison_of, fit_tasks, rankings_by_task
from reward.config import ComparisonsConfig
from stages.data import token_folder
from stages.progress import console
from stages.run import StageRun
from training.data import OnOverlong, SourceRows
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

COLLECTED = "collect:rankings"  # the source that names what labelers gave
WARNINGS = "warnings.json"  # what was odd about rows of the rankings, and what was done


@dataclass(frozen=True)
class Split:
    """The rankings that a model learns from and is measured on."""

    objectives: tuple[str, ...]  # in the order of the heads
    train: list[Ranking]
    heldout: list[Ranking]  # on prompts that training does not see

    def of(self, objective: str) -> tuple[list[Ranking], list[Ranking]]:
        """One objective's rankings: to train on, and held out."""
        train, heldout = ([r for r in side if r.objective == objective] for side in (self.train, self.heldout))
        return train, heldout


@dataclass(frozen=True)
class PreparedRankings:
    """The rankings without their texts; `folder` has the tokens, `first_sequence` where each task's begin.

    In place of a prompt, which the statistics compare with others, its rankings have a number.
    """

    split: Split
    first_sequence: Mapping[str, int]  # number of the sequence of a task's first response
    folder: Path
    warnings: Sequence[Mapping[str, Any]]  # about rows of the rankings
    sources: tuple[SourceRows, ...]  # the same in numbers; () if no row is unusual

    @classmethod
    def of(cls, found: Found, config: ComparisonsConfig, seed: int, folder: Path) -> "PreparedRankings":
        """`folder` holds what `ranking_parts` wrote of these rankings. Raises: as `split_of`."""
        first_sequence, total = dict[str, int](), 0
        fates = read_array(folder, "overlong")
        for task, fate in zip(rankings_by_task(found.rankings), fates.tolist(), strict=True):
            if fate != SKIPPED:
                first_sequence[task[0].task_id] = total
                total += len(task[0].responses)
        kept = [ranking for ranking in found.rankings if ranking.task_id in first_sequence]
        split = split_of(kept, config, seed)
        numbers: dict[tuple[Message, ...], int] = {}

        def without_texts(ranking: Ranking) -> Ranking:
            number = numbers.setdefault(ranking.prompt, len(numbers))
            no_texts = ("",) * len(ranking.responses)
            return replace(ranking, prompt=(Message("user", str(number)),), responses=no_texts)

        train, heldout = ([without_texts(ranking) for ranking in side] for side in (split.train, split.heldout))
        warnings = warnings_about(found)
        rows = SourceRows.of(found.invalid, found.report.outcomes())
        sources = (rows,) if rows else ()
        return cls(Split(split.objectives, train, heldout), first_sequence, folder, warnings, sources)

    def comparisons(self, rankings: Sequence[Ranking], weights: LabelerWeights | None = None) -> list[Comparison]:
        """One comparison per task of `rankings`; its sequences are views of the mapped file. `weights` are those of the
        labelers' rankings, 1 where absent.
        """
        sequences = Sequences.read(self.folder)
        found = []
        for task in rankings_by_task(rankings):
            first = self.first_sequence[task[0].task_id]
            places = range(first, first + len(task[0].responses))
            # An array has all that is asked of these sequences: a length, and entries.
            encoded = [
                Encoded(cast(Sequence[int], sequences[place][0]), int(sequences.num_counted[place])) for place in places
            ]
            found.append(comparison_of(encoded, task, self.split.objectives, weights or {}))
        return found


def ranking_parts(
    tokenizer: Tokenizer, found: Found, max_tokens: int, on_overlong: OnOverlong, section: str, first_task: int
) -> Iterator[Part]:
    """The tokens of the tasks' responses, task by task from the given one on; those of the response itself count.

    Raises: as `fit_tasks`.
    """
    tasks = rankings_by_task(found.rankings)[first_task:]
    for fitted in chunks(fit_tasks(tokenizer, tasks, max_tokens, on_overlong, section, found.places)):
        arrays = sequence_arrays(
            (of.tokens, [False] * (len(of.tokens) - of.response_tokens) + [True] * of.response_tokens)
            for of_task, _ in fitted
            for of in of_task
        )
        yield Part(len(fitted), {**arrays, "overlong": np.array([fate for _, fate in fitted])})


def tokenize(run: StageRun, config: ComparisonsConfig, tokenizer: Tokenizer, found: Found, max_tokens: int) -> Path:
    """The folder with the rankings' tokens, which are written unless they are there. Raises: as `fit_tasks`."""
    templated = tokenizer.with_template(config.chat_template)
    parts = partial(ranking_parts, templated, found, max_tokens, config.on_overlong, config.section)
    settings = {"max_tokens": max_tokens, "on_overlong": config.on_overlong}
    return token_folder(run, "rankings", templated, (config.rankings,), CHECKED_SEQUENCES, parts, **settings)


def report_overlong(run: StageRun, config: ComparisonsConfig, folder: Path, max_tokens: int) -> None:
    """Say how many rows were too long for a model that reads so many tokens."""
    if overlong := read_overlong(folder):
        run.tell(f"{config.rankings.source}: {overlong} (the model reads {max_tokens} tokens)")


def check_objectives(config: ComparisonsConfig) -> None:
    """Raises: ValueError for objectives that the labelers of a world, who judge by everything at once, do not know."""
    if config.rankings.source == COLLECTED and not set(config.named_objectives) <= {OVERALL}:
        raise ValueError(
            f"{config.objectives_key} is {list(config.named_objectives)}, and the labelers of [collect] judge by"
            f" {OVERALL!r} alone; rankings of those objectives were expected"
        )


def report_rankings(config: ComparisonsConfig, found: Found, seed: int) -> None:
    """Say which rankings are not learned, and where warnings about rows will be. Raises: as `split_of`."""
    objectives = split_of(found.rankings, config, seed).objectives
    left_out = sum(ranking.objective not in objectives for ranking in found.rankings)
    if left_out:
        console.print(f"{config.rankings.source}: {left_out:,} rankings are of objectives that are not learned")
    if warnings_about(found):
        console.print(f"{config.rankings.source}: these rows are listed in {config.section}/{WARNINGS}", markup=False)


def warnings_about(found: Found) -> list[dict[str, Any]]:
    """What WARNINGS lists: the first rows that were skipped because they are invalid, and every row that is odd."""
    skipped = [RowWarning("invalid", found.invalid.source, message, "skipped") for message in found.invalid.messages]
    return [vars(warning) for warning in (*skipped, *found.report.warnings)]


def weights_of_labelers(split: Split, config: ComparisonsConfig) -> LabelerWeights:
    """The weight of each labeler's rankings by objective; a labeler who is not listed has weight 1."""
    if config.labeler_weights == "equal":
        return {}
    found: dict[tuple[str, str], float] = {}
    for objective in split.objectives:
        train, _ = split.of(objective)
        weights = labeler_weights(train, labeler_reliability(train))
        found |= {(objective, name): weight for name, weight in weights.items()}
    return found


def split_of(rankings: Sequence[Ranking], config: ComparisonsConfig, seed: int) -> Split:
    """The rankings of the objectives to learn, split by prompt.

    Raises: ValueError for objectives that have no rankings, for several of which the config names none, and for one
    without rankings on both sides.
    """
    source, found = config.rankings.source, sorted({ranking.objective for ranking in rankings})
    named = config.named_objectives
    objectives = named or tuple(found)
    if (not named and len(found) > 1) or not set(objectives) <= set(found):
        raise ValueError(
            f"{config.objectives_key} is {list(named)}, and the rankings of {source} are of {', '.join(found)};"
            f" those of them that [{config.section}] is to learn were expected"
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
