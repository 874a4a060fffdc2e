"""What the driver makes of rankings for the ranks: who judged what how, and tokens in a file. No rank reads texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lm.tokenizer import Tokenizer
from preferences.formats.merging import Found
from preferences.records import Message, Ranking
from preferences.splits import split_rankings
from reward.comparisons import Comparison, LabelerWeights, comparison_of, encode_tasks, rankings_by_task
from reward.config import RewardConfig
from training.tokens import Part, Sequences, sequence_arrays


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

    @classmethod
    def of(cls, found: Found, config: RewardConfig, seed: int, folder: Path) -> "PreparedRankings":
        """`folder` holds what `ranking_parts` wrote of these rankings. Raises: as `split_of`."""
        split = split_of(found.rankings, config, seed)
        first_sequence, total = dict[str, int](), 0
        for task in rankings_by_task(found.rankings):
            first_sequence[task[0].task_id] = total
            total += len(task[0].responses)
        numbers: dict[tuple[Message, ...], int] = {}

        def without_texts(ranking: Ranking) -> Ranking:
            number = numbers.setdefault(ranking.prompt, len(numbers))
            no_texts = ("",) * len(ranking.responses)
            return replace(ranking, prompt=(Message("user", str(number)),), responses=no_texts)

        train, heldout = ([without_texts(ranking) for ranking in side] for side in (split.train, split.heldout))
        warnings = [vars(warning) for warning in found.report.warnings]
        return cls(Split(split.objectives, train, heldout), first_sequence, folder, warnings)

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
            tokens = tuple(cast(Sequence[int], sequences[place][0]) for place in places)
            found.append(comparison_of(tokens, task, self.split.objectives, weights or {}))
        return found


def ranking_parts(tokenizer: Tokenizer, found: Found, max_tokens: int, first_task: int) -> Iterator[Part]:
    """The tokens of the tasks' responses, task by task from the given one on. Raises: as `encode_tasks`."""
    tasks = rankings_by_task(found.rankings)[first_task:]
    for judged, encoded in encode_tasks(tokenizer, tasks, max_tokens):
        sequences = (sequence for of_task in encoded for sequence in of_task)
        yield Part(len(judged), sequence_arrays((tokens, [True] * len(tokens)) for tokens in sequences))


def split_of(rankings: Sequence[Ranking], config: RewardConfig, seed: int) -> Split:
    """The rankings of the objectives to learn, split by prompt.

    Raises: ValueError for objectives that have no rankings, for several of which the config names none, and for one
    without rankings on both sides.
    """
    source, found = config.rankings.source, sorted({ranking.objective for ranking in rankings})
    objectives = config.objectives or tuple(found)
    if (not config.objectives and len(found) > 1) or not set(objectives) <= set(found):
        raise ValueError(
            f"reward.objectives is {list(config.objectives)}, and the rankings of {source} are of {', '.join(found)};"
            " those of them that the reward model is to learn were expected"
        )
    chosen = [ranking for ranking in rankings if ranking.objective in objectives]
    split = Split(objectives, *split_rankings(chosen, config.heldout_share, seed))
    for objective in objectives:
        train, heldout = split.of(objective)
        if not train or not heldout:
            of = f" of {objective!r}" if len(objectives) > 1 else ""
            raise ValueError(
                f"reward.heldout_share {config.heldout_share} splits the rankings{of} of {source} into"
                f" {len(train)} for training and {len(heldout)} held out; both need at least one"
            )
    return split
