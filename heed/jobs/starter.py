"""Writes a first job for one's own model and data: short, commented and complete, so `heed run` takes it as it is.

A `Starter` reads the data, refuses what a run would refuse, and decides on stages; `heed.jobs.starter_sections` writes
their sections.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classify.config import ClassifyConfig, ClassifyData
from classify.examples import example_lengths
from classify.rows import read_labelled
from classify.stage import known_labels
from dpo.config import DPOConfig
from evaluation.inputs import can_show, samples_per_prompt
from files.atomic import write_text
from files.conversations import AUTO, NAMES
from files.importing import load_function
from files.rows import OnInvalid, is_file_name
from heed.jobs.job_file import load_job
from heed.jobs.models import shape_of
from heed.jobs.registry import kind_in_words
from heed.jobs.starter_sections import (
    JUDGED_BY_REWARD,
    JUDGED_BY_REWARD_MODEL,
    MAX_COMPARED,
    POLICY_GRADIENTS,
    SMALL_HIDDEN_SIZE,
    Compared,
    Preferences,
    Shape,
    Source,
    classify_section,
    compare_section,
    dpo_section,
    loop_sections,
    ppo_section,
    reward_section,
    sft_section,
    toml_value,
)
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from preferences.rankings import split_rankings
from preferences.records import Ranking
from reward.config import RankingsConfig
from reward.prepared import ranking_lengths, read_judgments, split_of
from sft.demonstrations import Limit, demonstration_lengths
from stages.data import PromptLimit, prompt_lengths
from training.data import DataConfig

if TYPE_CHECKING:
    from preferences.formats.merging import ImportedLabels

HUB_ROWS = 1000  # how many rows of a hub data set are read to recognise its format
SEED = 0  # of the job that is written, to split preferences as that job will
HELDOUT_SHARES = tuple(tenths / 10 for tenths in range(1, 10))  # of preferences; the first one that empties no side
# If the comparison uses the held-out prompts, FEW_SHARE are held out to have FEW_PROMPTS, up to half to have FEWEST.
FEW_PROMPTS, FEWEST_PROMPTS, FEW_SHARE = 20, 6, 0.2
LOSSES = ("dpo", "kto")  # of [dpo]
ALGORITHMS = (*POLICY_GRADIENTS, *LOSSES, "loop", "classify")
# What an algorithm learns from, as options of `heed init`.
NEEDS: Mapping[str, tuple[str, Sequence[str]]] = {
    **dict.fromkeys(POLICY_GRADIENTS, ("samples responses to prompts", ["prompts"])),
    "dpo": ("learns from preferences", ["preferences"]),
    "kto": ("learns from labels of single responses", ["preferences"]),
    "loop": ("trains a policy that people then label", ["demonstrations", "prompts"]),
    "classify": ("learns from texts with labels", ["demonstrations"]),
}
NOT_READ = {"loop": ["preferences"], "classify": ["preferences", "prompts", "reward"]}


@dataclass
class Starter:
    """What a job is made from; "" = not given by the user. `missing` says what the job leaves out, and why.

    If `algorithm` is "", an encoder classifies, labels of single responses are for KTO, prompts with preferences or a
    reward for PPO, and preferences alone for DPO. `format` and `on_invalid` are written into the sources that the job
    names.
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
    _told: list[str] = field(default_factory=list)  # about the preferences

    def write(self, path: Path) -> list[str]:
        """Write the job, and check it. Returns lines about what was found in the data.

        Raises: ValueError if the file already exists, the data cannot be read, the algorithm needs other data, or no
            stage is left.
        """
        self._check(path)
        lines: list[str] = []
        written = [path]
        try:
            write_text(path, "\n".join(self._lines(path, lines, written)) + "\n")
            load_job(path)
        except ValueError:
            for file in written:
                file.unlink(missing_ok=True)
            raise
        return lines

    def _check(self, path: Path) -> None:
        if path.exists():
            raise ValueError(f"{path} already exists; another name was expected")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
        if self.format not in NAMES:
            raise ValueError(f"--format is {self.format!r}; one of {', '.join(NAMES)} was expected")
        if self.algorithm and self.algorithm not in ALGORITHMS:
            raise ValueError(f"--algorithm {self.algorithm!r}: one of {', '.join(ALGORITHMS)} was expected")
        does, needed = NEEDS.get(self.algorithm, ("", ()))
        for option in needed:
            if not getattr(self, option):
                raise ValueError(f"--algorithm {self.algorithm} {does}: --{option} was expected")
        if self.algorithm in POLICY_GRADIENTS and not (self.preferences or self.reward):
            raise ValueError(
                f"--algorithm {self.algorithm} needs a reward: --reward, or --preferences for a reward model, was"
                " expected"
            )
        if given := [f"--{option}" for option in NOT_READ.get(self._chosen, ()) if getattr(self, option)]:
            raise ValueError(
                f"{' and '.join(given)}: nothing in a job of {self._chosen} reads this; it was not expected"
            )
        if self.reward and self.preferences and self._chosen not in LOSSES:
            raise ValueError(
                "--reward and --preferences each define a reward; one of them was expected (--algorithm dpo takes both:"
                " it learns from the preferences, and the reward judges)"
            )

    @cached_property
    def _chosen(self) -> str:
        """The algorithm; "" if demonstrations are all that a policy could learn from."""
        if self.algorithm:
            return self.algorithm
        if self._kind == "encoder":
            return "classify"
        if self.preferences and all(len(found.task.responses) == 1 for found in self._judgments.found_tasks):
            return "kto"
        if self.prompts and (self.preferences or self.reward):
            return "ppo"
        return "dpo" if self.preferences else ""

    @property
    def command(self) -> str:
        """The command that runs the job."""
        return "heed loop" if self._chosen == "loop" else "heed run"

    def _lines(self, path: Path, lines: list[str], written: list[Path]) -> Iterator[str]:
        shape = self._shape
        stages = list(self._stages(path, lines, written))
        if not stages:
            raise ValueError(
                "there is nothing to learn from; --demonstrations, --preferences, or --prompts with --reward was"
                " expected"
            )
        context = f"{self.model}: a context of {shape.context:,} tokens"
        lines.insert(0, context)
        yield f"# Written by `heed init`. `heed plan {path}` says what it will take, `{self.command} {path}` runs it."
        yield "# Every other key has a default: docs/reference/configuration.md. Formats of data: docs/data.md."
        yield f"# {context}, in which prompt and response have to fit."
        yield f"name = {toml_value(path.stem)}"
        for line in self.missing:
            yield f"# missing: {line}"
        for stage in stages:
            yield ""
            yield from stage

    def _stages(self, path: Path, lines: list[str], written: list[Path]) -> Iterator[Sequence[str]]:
        if self._chosen == "classify":
            yield self._classifier(lines)
            return
        shape, start = self._shape, self._start
        demos = self._demonstrations(lines)
        if demos is None:
            self.missing.append("SFT, which needs --demonstrations")
        else:
            yield sft_section(shape, demos)
        pairs = self._pairs(lines) if self.preferences else None
        is_rewarded = pairs is not None and not self.reward and self._chosen != "kto"
        if pairs is not None and is_rewarded:
            yield reward_section(shape, start, pairs)
        if self.reward:
            load_function(self.reward, "--reward")
        elif pairs is None and self._chosen != "loop":
            self.missing.append("a reward, which needs --preferences or --reward")
        if not self.prompts and self._chosen not in LOSSES:
            self.missing.append("PPO, GRPO or RLOO, which need --prompts")
        prompts = self._prompts(lines) if self.prompts and self._chosen else None
        length = shape.max_new_tokens(max((of.lengths.longest_response for of in (demos, pairs) if of), default=0))
        if pairs is not None and self._chosen in LOSSES:
            yield dpo_section(shape, start, self._chosen, pairs)
            if self.reward or is_rewarded:
                compared = self._compared_by_dpo(pairs, prompts, path, written)
                yield self._comparison(compared, lines, length, has_pool=is_rewarded)
            else:
                self.missing.append("a comparison, which needs a judge: --reward")
        elif prompts is not None:
            yield from self._sampled(path, lines, prompts, pairs, length)

    def _sampled(
        self, path: Path, lines: list[str], prompts: Source, pairs: Preferences | None, length: int
    ) -> Iterator[Sequence[str]]:
        """Policy gradients or a loop, on the prompts that the comparison leaves."""
        origin = f"the first of {Path(self.prompts).name}, which training leaves out"
        if not prompts.num_compared:
            origin = "too few to leave any out: training sees them too"
        num_prompts = prompts.num_compared or prompts.lengths.num_rows
        compared = Compared(prompts.toml(max_rows=prompts.num_compared), origin, num_prompts)
        store = f"{path.stem}-labels.sqlite" if self._chosen == "loop" else ""
        if store:
            yield from loop_sections(self._shape, prompts, store, length)
        else:
            yield ppo_section(self._shape, self._start, self._chosen, prompts, self._reward_lines(pairs), length)
        yield self._comparison(compared, lines, length, has_pool=not store, store=store)

    def _comparison(
        self, compared: Compared, lines: list[str], length: int, *, has_pool: bool = False, store: str = ""
    ) -> Sequence[str]:
        """Returns [compare], and says what it can show and, if the reward only judges, that it does."""
        judge: Sequence[str] = JUDGED_BY_REWARD if self._chosen in POLICY_GRADIENTS else JUDGED_BY_REWARD_MODEL
        if self.reward and self._chosen not in POLICY_GRADIENTS:
            judge = [f"judge_function = {toml_value(self.reward)}  # no training has seen it"]
            lines.append(f"{self.reward}: only judges the comparison; {self._chosen.upper()} does not learn from it")
        elif store:
            judge = [f"judge_people = {toml_value(store)}"]
        num_samples = 1 if store and not self.reward else samples_per_prompt(compared.num_prompts)  # people judge one
        lines.append(f"comparison: {can_show(compared.num_prompts, num_samples)}")
        return compare_section(compared, judge, length, num_samples, has_pool=has_pool)

    def _classifier(self, lines: list[str]) -> Sequence[str]:
        """Returns [classify]; it holds out the first tenth of the rows.

        Raises: ValueError if those have a single label, or one that no other row has.
        """
        name = self.demonstrations
        source = ClassifyData(source=name, max_rows=_rows_to_read(name), on_invalid=self.on_invalid)
        labels = [row.label for _, row in read_labelled("sequence", (), [source], [], lines)]
        num_heldout = max(1, len(labels) // 10)
        heldout, learned = set(labels[:num_heldout]), set(labels[num_heldout:])
        if len(heldout) < 2 or not heldout <= learned:
            raise ValueError(
                f"{name}: the first {num_heldout:,} of {len(labels):,} rows, which are held out, have the labels"
                f" {', '.join(sorted(heldout)) or 'none'}, the others {', '.join(sorted(learned)) or 'none'}; at"
                " least two that the others have too were expected: put the rows in random order, or give more"
            )
        config = ClassifyConfig(
            task="sequence", data=(source,), heldout=(source,), seq_len=self._shape.context, on_overlong="truncate"
        )
        lengths = example_lengths(self._tokenizer, config, known_labels(config))
        lines.append(
            f"{name}: {len(labels):,} texts, text and label; for [classify], with {num_heldout:,} held out;"
            f" {lengths.tokens(name, 'texts')}"
        )
        return classify_section(self._shape, Source(name, lengths, on_invalid=self.on_invalid), num_heldout)

    @property
    def _start(self) -> Sequence[str]:
        """The line about the model that a stage after SFT starts from, if there is no SFT."""
        return [] if self.demonstrations else [f"init_from = {toml_value(self.model)}"]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(model_directory(self.model))

    @cached_property
    def _model_shape(self) -> Mapping[str, Any]:
        return shape_of(self.model, opens_models=True, takes_any_head=self._chosen == "classify")

    @cached_property
    def _kind(self) -> str:
        return str(shape_of(self.model, opens_models=True, takes_any_head=True)["kind"])

    @cached_property
    def _shape(self) -> Shape:
        """Reads the model's shape. Raises: ValueError if there is no model, it lacks tokens that a job needs, or the
        algorithm trains other kinds of model.
        """
        shape, needed = self._model_shape, "encoder" if self._chosen == "classify" else "decoder"
        if self._kind != needed:
            raise ValueError(
                f"--model {self.model} is {kind_in_words(self._kind)}; {kind_in_words(needed)} was expected"
            )
        _ = self._tokenizer
        return Shape(self.model, int(shape["max_position_embeddings"]), int(shape["hidden_size"]) < SMALL_HIDDEN_SIZE)

    def _demonstrations(self, lines: list[str]) -> Source | None:
        if not self.demonstrations:
            return None
        said = list[str]()
        limit = Limit(has_source=False, seq_len=self._shape.context, on_overlong="truncate")
        lengths = demonstration_lengths(self._tokenizer, [self._conversations(self.demonstrations)], limit, said.append)
        if lengths.num_rows < 2:
            raise ValueError(
                f"{self.demonstrations}: {lengths.num_rows} conversations; at least two were expected, one to learn"
                " from and one to hold out"
            )
        lines += [f"{said[0]}; for SFT; {lengths.tokens(self.demonstrations, 'conversations')}", *said[1:]]
        return Source(self.demonstrations, lengths, self.format, self.on_invalid)

    @cached_property
    def _judgments(self) -> "ImportedLabels":
        num_rows = _rows_to_read(self.preferences)
        data = RankingsConfig(source=self.preferences, max_rows=num_rows, on_invalid=self.on_invalid)
        return read_judgments(data, self._told.append, least_responses=1 if self.algorithm in ("", "kto") else 2)

    def _pairs(self, lines: list[str]) -> Preferences:
        """Splits the preferences. Raises: ValueError for DPO on several objectives, for too few prompts, and for KTO on
        data that label nothing.
        """
        rankings = self._judgments.rankings
        objectives = sorted({ranking.objective for ranking in rankings})
        if len(objectives) > 1 and self._chosen in LOSSES:
            raise ValueError(
                f"{self.preferences}: the rankings have the objectives {', '.join(objectives)}, and"
                f" {self._chosen.upper()} learns one; a file with one objective, or --prompts for PPO, GRPO or RLOO,"
                " was expected"
            )
        share, heldout = self._split(rankings, objectives)
        found = Preferences(
            self.preferences,
            ranking_lengths(self._tokenizer, self._judgments, self._shape.context, "skip"),
            on_invalid=self.on_invalid,
            num_tasks=len(self._judgments.found_tasks),
            heldout_share=share,
            heldout_prompts=list(dict.fromkeys(ranking.prompt for ranking in heldout)),
            objectives=objectives if len(objectives) > 1 else (),
        )
        if self._chosen == "kto":
            config = DPOConfig(rankings=RankingsConfig(source=self.preferences), loss="kto", heldout_share=share)
            config.preference_loss.check_data(split_of(rankings, config, SEED), config)
        what = f"for {self._chosen.upper()}" if self._chosen in LOSSES else "for a reward model"
        if self._chosen == "dpo" and not self.reward:
            what += " and a reward model that judges it"
        lines.append(
            f"{self._told[0]}; {what}, with {len(found.heldout_prompts):,} prompts held out; a response with its prompt"
            f" has {found.lengths.tokens(self.preferences, 'responses')}"
        )
        lines += self._told[1:]
        return found

    def _split(self, rankings: Sequence[Ranking], objectives: Sequence[str]) -> tuple[float, Sequence[Ranking]]:
        """Returns the smallest share that leaves rankings of every objective on both sides, and those it holds out. If
        the comparison uses their prompts, the share is larger where these are few.
        """
        few = FEW_PROMPTS if self._chosen in LOSSES and not self.prompts else 0
        for share in HELDOUT_SHARES:
            train, heldout = split_rankings(rankings, share, SEED)
            needed = min(few, FEW_PROMPTS if share < FEW_SHARE else FEWEST_PROMPTS if share < 0.5 else 0)
            is_enough = len({ranking.prompt for ranking in heldout}) >= needed
            if is_enough and all(
                {ranking.objective for ranking in side} == set(objectives) for side in (train, heldout)
            ):
                return share, heldout
        num_prompts = len({ranking.prompt for ranking in rankings})
        of = f" of each of {', '.join(objectives)}" if len(objectives) > 1 else ""
        raise ValueError(
            f"{self.preferences}: {num_prompts:,} different prompt{' is' if num_prompts == 1 else 's are'} too few to"
            f" train on some and hold out others; rankings{of} for more prompts were expected"
        )

    def _reward_lines(self, pairs: Preferences | None) -> Sequence[str]:
        """Returns the lines about the reward for PPO's section; none if the reward is the reward model's score."""
        if self.reward:
            return [f'reward = {{ kind = "function", function = {toml_value(self.reward)} }}']
        if pairs is None or not pairs.objectives:
            return []
        weights = ", ".join(f"{toml_value(name)} = 1.0" for name in pairs.objectives)
        return [f'reward = {{ kind = "model", objective_weights = {{ {weights} }} }}  # of each score in the reward']

    def _prompts(self, lines: list[str]) -> Source:
        said, limit = list[str](), PromptLimit("ppo", self._shape.context, 0, "skip")
        lengths = prompt_lengths(self._tokenizer, self._conversations(self.prompts), limit, said.append)
        found = Source(self.prompts, lengths, self.format, self.on_invalid)
        by = "the loop" if self._chosen == "loop" else self._chosen.upper()
        others = f"the first {found.num_compared:,} for the comparison, the others for {by}"
        use = "for the comparison" if self._chosen in LOSSES else others
        lines += [f"{said[0]}; {use}; {lengths.tokens(self.prompts, 'prompts')}", *said[1:]]
        return found

    def _conversations(self, source: str) -> DataConfig:
        num_rows = _rows_to_read(source)
        return DataConfig(source=source, max_rows=num_rows, format=self.format, on_invalid=self.on_invalid)

    def _compared_by_dpo(self, pairs: Preferences, prompts: Source | None, path: Path, written: list[Path]) -> Compared:
        """Returns the user's prompts, or those that DPO holds out, which are written next to the job."""
        if prompts is not None:
            num_compared = min(prompts.lengths.num_rows, MAX_COMPARED)
            return Compared(prompts.toml(max_rows=MAX_COMPARED), "training does not read them", num_compared)
        held_out_prompts = pairs.heldout_prompts[:MAX_COMPARED]
        file = path.with_name(f"{path.stem}-heldout-prompts.jsonl")
        if file.exists():
            raise ValueError(f"{file} already exists; another name for the job was expected")
        rows = [{"prompt": [vars(message) for message in prompt]} for prompt in held_out_prompts]
        written.append(file)
        write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
        origin = f"those of {Path(self.preferences).name} that training holds out"
        return Compared(f"{{ source = {toml_value(str(file))} }}", origin, len(held_out_prompts))


def _rows_to_read(source: str) -> int:
    return 0 if is_file_name(source) else HUB_ROWS
