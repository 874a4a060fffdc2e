"""Writes a first job for one's own model and data: short, commented and complete, so `heed run` takes it as it is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from files.atomic import write_text
from files.conversations import AUTO, NAMES
from files.invalid import OnInvalid
from files.python_names import load_function
from files.rows import is_file_name
from heed.jobs.job_file import load_job
from heed.jobs.model_shape import shape_of
from heed.jobs.starter_sections import (
    ALGORITHMS,
    MAX_COMPARED,
    POLICY_GRADIENTS,
    SMALL_HIDDEN_SIZE,
    Preferences,
    Shape,
    Source,
    compare_section,
    dpo_section,
    ppo_section,
    reward_section,
    sft_section,
    toml_value,
)
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from preferences.records import Ranking
from preferences.splits import split_rankings
from reward.comparisons import RankingsConfig, read_judgments
from reward.prepared import ranking_lengths
from sft.demonstrations import demonstration_lengths
from stages.prompts import prompt_lengths
from training.data import DataConfig

if TYPE_CHECKING:
    from preferences.formats.merging import Found

HUB_ROWS = 1000  # how many rows of a hub data set are read to recognise its format
COMPARED_SHARE = 4  # one prompt in this many is set aside for the comparison, up to MAX_COMPARED
SEED = 0  # of the job that is written, to split preferences as it will
HELDOUT_SHARES = tuple(tenths / 10 for tenths in range(1, 10))  # of preferences; the first that leaves both sides some


@dataclass
class Starter:
    """What a job is made from; "" = the user gave nothing. `missing` says what the job leaves out, and why.

    If `algorithm` is "", the job uses PPO if there are prompts with preferences or a reward, and DPO if there are only
    preferences. `format` and `on_invalid` are written into the sources that the job names.
    """

    model: str
    demonstrations: str = ""
    preferences: str = ""
    prompts: str = ""
    reward: str = ""
    algorithm: str = ""
    format: str = AUTO  # of demonstrations and prompts
    on_invalid: OnInvalid = "refuse"
    missing: list[str] = field(default_factory=list)

    def write(self, path: Path) -> list[str]:
        """Write the job, and check it. Returns lines about what was found in the data.

        Raises: ValueError if the file already exists, the data cannot be read, the algorithm needs other data, or no
            stage is left.
        """
        self._check(path)
        found: list[str] = []
        written = [path]
        try:
            write_text(path, "\n".join(self._lines(path, found, written)) + "\n")
            load_job(path)
        except ValueError:
            for file in written:
                file.unlink(missing_ok=True)
            raise
        return found

    def _check(self, path: Path) -> None:
        if path.exists():
            raise ValueError(f"{path} is there already; another name was expected")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
        if self.format not in NAMES:
            raise ValueError(f"--format is {self.format!r}; one of {', '.join(NAMES)} was expected")
        if self.algorithm and self.algorithm not in ALGORITHMS:
            raise ValueError(f"--algorithm {self.algorithm!r}: one of {', '.join(ALGORITHMS)} was expected")
        if self.algorithm == "dpo" and not self.preferences:
            raise ValueError("--algorithm dpo learns from preferences: --preferences was expected")
        if self.algorithm in POLICY_GRADIENTS and not self.prompts:
            raise ValueError(f"--algorithm {self.algorithm} samples responses to prompts: --prompts was expected")
        if self.algorithm in POLICY_GRADIENTS and not (self.preferences or self.reward):
            raise ValueError(
                f"--algorithm {self.algorithm} needs a reward: --reward, or --preferences for a reward model, was"
                " expected"
            )
        if self.reward and self.preferences and self._chosen != "dpo":
            raise ValueError(
                "--reward and --preferences each give a reward; one of them was expected (--algorithm dpo takes both:"
                " it learns from the preferences, and the reward judges)"
            )

    @property
    def _chosen(self) -> str:
        """The algorithm; "" if there is nothing but demonstrations that a policy could learn from."""
        if self.algorithm:
            return self.algorithm
        if self.prompts and (self.preferences or self.reward):
            return "ppo"
        return "dpo" if self.preferences else ""

    def _lines(self, path: Path, found: list[str], written: list[Path]) -> Iterator[str]:
        shape = self._shape
        stages = list(self._stages(path, found, written))
        if not stages:
            raise ValueError("there is nothing to learn from; --demonstrations or --preferences was expected, or both")
        context = f"{self.model}: a context of {shape.context:,} tokens"
        found.insert(0, context)
        yield f"# Written by `heed init`. See what it will take with `heed plan {path}`, run it with `heed run {path}`."
        yield "# Every other key has a default: docs/reference/configuration.md. Formats of data: docs/data.md."
        yield f"# {context}, in which prompt and response have to fit."
        yield f"name = {toml_value(path.stem)}"
        for line in self.missing:
            yield f"# missing: {line}"
        for stage in stages:
            yield ""
            yield from stage

    def _stages(self, path: Path, found: list[str], written: list[Path]) -> Iterator[Sequence[str]]:
        shape, start = self._shape, [] if self.demonstrations else [f"init_from = {toml_value(self.model)}"]
        demos = self._demonstrations(found)
        if demos is None:
            self.missing.append("SFT, which needs --demonstrations")
        else:
            yield sft_section(shape, demos)
        judgments = self._judgments(found) if self.preferences else None
        pairs = None if judgments is None else self._pairs(judgments, found)
        if judgments is not None and pairs is not None and not self.reward:
            yield reward_section(shape, start, pairs)
        if self.reward:
            load_function(self.reward, "--reward")
        elif judgments is None:
            self.missing.append("a reward, which needs --preferences or --reward")
        if not self.prompts and self._chosen != "dpo":
            self.missing.append("PPO, GRPO or RLOO, which need --prompts")
        prompts = self._prompts(found) if self.prompts and self._chosen else None
        length = shape.max_new_tokens(max((of.lengths.longest_response for of in (demos, pairs) if of), default=0))
        if self._chosen == "dpo" and judgments is not None and pairs is not None:
            yield dpo_section(shape, start, pairs)
            judge = f"judge_function = {toml_value(self.reward)}" if self.reward else JUDGED_BY_REWARD_MODEL
            _, heldout = split_rankings(judgments.rankings, pairs.heldout_share, SEED)
            source, origin = self._compared_by_dpo(heldout, prompts, path, written)
            yield compare_section(source, origin, judge, length)
        elif prompts is not None:
            num_compared = min(prompts.lengths.num_rows // COMPARED_SHARE, MAX_COMPARED)
            yield ppo_section(shape, start, self._chosen, prompts, num_compared, self._reward_lines(pairs), length)
            origin = f"the first of {Path(self.prompts).name}, which training leaves out"
            if not num_compared:
                origin = "too few to leave any out: training sees them too"
            yield compare_section(prompts.toml(max_rows=num_compared), origin, JUDGED_BY_REWARD, length)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(model_directory(self.model))

    @cached_property
    def _shape(self) -> Shape:
        """Raises: ValueError for a folder or hub id without a model, or without tokens that a job needs."""
        shape = shape_of(self.model, opens_models=True)
        is_small = int(shape["hidden_size"]) < SMALL_HIDDEN_SIZE
        _ = self._tokenizer
        return Shape(self.model, int(shape["max_position_embeddings"]), is_small)

    def _demonstrations(self, found: list[str]) -> Source | None:
        if not self.demonstrations:
            return None
        data = self._conversations(self.demonstrations)
        lengths = demonstration_lengths(self._tokenizer, [data], self._shape.context, found.append)
        found.append(lengths.line(self.demonstrations, "conversations"))
        return Source(self.demonstrations, lengths, self.format, self.on_invalid)

    def _judgments(self, found: list[str]) -> "Found":
        num_rows = _rows_to_read(self.preferences)
        data = RankingsConfig(source=self.preferences, max_rows=num_rows, on_invalid=self.on_invalid)
        return read_judgments(data, found.append)

    def _pairs(self, judgments: "Found", found: list[str]) -> Preferences:
        """Raises: ValueError for several objectives, if DPO is to learn, and for too few prompts to hold any out."""
        objectives = sorted({ranking.objective for ranking in judgments.rankings})
        if len(objectives) > 1 and self._chosen == "dpo":
            raise ValueError(
                f"{self.preferences}: the rankings are of {', '.join(objectives)}; DPO learns one objective, so a file"
                " with the rankings of one, or --prompts for PPO, GRPO or RLOO, was expected"
            )
        share = self._heldout_share(judgments.rankings, objectives)
        lengths = ranking_lengths(self._tokenizer, judgments, self._shape.context)
        found.append(lengths.line(self.preferences, "prompts with a response"))
        return Preferences(
            self.preferences,
            lengths,
            on_invalid=self.on_invalid,
            num_tasks=len(judgments.tasks),
            heldout_share=share,
            objectives=objectives if len(objectives) > 1 else (),
        )

    def _heldout_share(self, rankings: Sequence[Ranking], objectives: Sequence[str]) -> float:
        """Returns the smallest share that leaves rankings of every objective on both sides."""
        for share in HELDOUT_SHARES:
            sides = split_rankings(rankings, share, SEED)
            if all({ranking.objective for ranking in side} == set(objectives) for side in sides):
                return share
        num_prompts = len({ranking.prompt for ranking in rankings})
        of = f" of each of {', '.join(objectives)}" if len(objectives) > 1 else ""
        raise ValueError(
            f"{self.preferences}: {num_prompts:,} different prompt{' is' if num_prompts == 1 else 's are'} too few to"
            f" train on some and hold out others; rankings{of} for more prompts were expected"
        )

    def _reward_lines(self, pairs: Preferences | None) -> Sequence[str]:
        """Returns what PPO's section says about its reward, nothing if it is the score of the reward model."""
        if self.reward:
            return [f"reward_function = {toml_value(self.reward)}"]
        if pairs is None or not pairs.objectives:
            return []
        weights = ", ".join(f"{toml_value(name)} = 1.0" for name in pairs.objectives)
        return [f"objective_weights = {{ {weights} }}  # of each score in the reward"]

    def _prompts(self, found: list[str]) -> Source:
        data = self._conversations(self.prompts)
        lengths = prompt_lengths(self._tokenizer, data, self._shape.context, found.append)
        found.append(lengths.line(self.prompts, "prompts"))
        return Source(self.prompts, lengths, self.format, self.on_invalid)

    def _conversations(self, source: str) -> DataConfig:
        num_rows = _rows_to_read(source)
        return DataConfig(source=source, max_rows=num_rows, format=self.format, on_invalid=self.on_invalid)

    def _compared_by_dpo(
        self, heldout: Sequence[Ranking], prompts: Source | None, path: Path, written: list[Path]
    ) -> tuple[str, str]:
        """Returns the prompts of the comparison, and where they come from: the user's prompts, or those that DPO holds
        out, which are written next to the job.
        """
        if prompts is not None:
            return prompts.toml(max_rows=MAX_COMPARED), "DPO does not read them"
        asked = list(dict.fromkeys(ranking.prompt for ranking in heldout))[:MAX_COMPARED]
        file = path.with_name(f"{path.stem}-heldout-prompts.jsonl")
        if file.exists():
            raise ValueError(f"{file} is there already; another name of the job was expected")
        rows = [{"prompt": [vars(message) for message in prompt]} for prompt in asked]
        written.append(file)
        write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
        return f"{{ source = {toml_value(str(file))} }}", f"those of {Path(self.preferences).name} that DPO holds out"


JUDGED_BY_REWARD = "judge_reward = true       # what training climbs, on prompts that it has not seen"
JUDGED_BY_REWARD_MODEL = "judge_reward = true       # the reward model, on prompts that no training has seen"


def _rows_to_read(source: str) -> int:
    return 0 if is_file_name(source) else HUB_ROWS
