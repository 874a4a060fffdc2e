"""Writes a first job for one's own model and data: short, commented and complete, so `heed run` takes it as it is.

A `Starter` reads the data and decides on stages; each section of the job is a function that returns lines of TOML.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from files.atomic import write_text
from files.conversations import AUTO, NAMES
from files.importing import load_function
from files.rows import OnInvalid, is_file_name
from heed.jobs.job_file import load_job
from heed.jobs.models import shape_of
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from preferences.rankings import split_rankings
from preferences.records import Ranking
from reward.comparisons import RankingsConfig, read_judgments
from reward.prepared import ranking_lengths
from sft.demonstrations import Limit, demonstration_lengths
from stages.data import PromptLimit, prompt_lengths
from stages.sizes import Lengths
from training.data import DataConfig
from training.packing import best_fit

if TYPE_CHECKING:
    from preferences.formats.merging import ImportedLabels

HUB_ROWS = 1000  # how many rows of a hub data set are read to recognise its format
COMPARED_SHARE = 4  # one prompt in this many is set aside for the comparison, up to MAX_COMPARED
SEED = 0  # of the job that is written, to split preferences as that job will
HELDOUT_SHARES = tuple(tenths / 10 for tenths in range(1, 10))  # of preferences; the first one that empties no side
SMALL_HIDDEN_SIZE = 512  # narrower models learn at higher rates
LEAST_SEQ_LEN, MAX_SEQ_LEN, MAX_NEW_TOKENS = 256, 1024, 256
MAX_BATCH, MAX_MICRO_BATCH = 64, 8
MICRO_BATCH_TOKENS = 4096  # per pass: with a vocabulary of 50,000, logits and their gradient take 1.6 GB in fp32
MIN_ROLLOUT = 16
MAX_COMPARED = 100  # most prompts in the comparison

# The settings that make each algorithm of docs/algorithms.md. `RATE` stands for the value function's learning rate.
SETTINGS: Mapping[str, Sequence[str]] = {
    "ppo": (
        "# the baseline is a value function, which is trained along with the policy",
        'advantage = { kind = "gae", value_optimizer = { learning_rate = RATE } }',
        "kl = { coef = 0.05 }      # a higher value stays closer to the initial model",
    ),
    "grpo": (
        "# the baseline is the mean reward of the responses to a prompt",
        'advantage = { kind = "group_mean", samples_per_prompt = 4, scale = "group" }',
        'loss = { token_weight = "per_response" }',
        'kl = { kind = "loss", coef = 0.05 }  # a higher value stays closer to the initial model',
    ),
    "rloo": (
        "# the baseline is the mean reward of the other responses to a prompt",
        'advantage = { kind = "leave_one_out", samples_per_prompt = 4, scale = "none" }',
        'loss = { token_weight = "constant" }',
        "kl = { coef = 0.05 }      # a higher value stays closer to the initial model",
    ),
}
POLICY_GRADIENTS = tuple(SETTINGS)
ALGORITHMS = (*POLICY_GRADIENTS, "dpo")
JUDGED_BY_REWARD = "judge_reward = true       # the reward that training raises, on prompts that it has not seen"
JUDGED_BY_REWARD_MODEL = "judge_reward = true       # the reward model, on prompts that no training has seen"


def toml_value(value: str | int) -> str:
    """Returns a value as TOML; JSON would write a character above U+FFFF in a way that TOML does not know."""
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip()


@dataclass(frozen=True)
class Source:
    """The user's data source: its name, how long its rows are, and how they are read."""

    name: str
    lengths: Lengths
    format: str = AUTO
    on_invalid: OnInvalid = "refuse"

    def toml(self, **options: int) -> str:
        """Returns the source as an inline table."""
        fields: dict[str, str | int] = {"source": self.name}
        if self.format != AUTO:
            fields["format"] = self.format
        if self.on_invalid != "refuse":
            fields["on_invalid"] = self.on_invalid
        fields |= {key: value for key, value in options.items() if value}
        return f"{{ {', '.join(f'{key} = {toml_value(value)}' for key, value in fields.items())} }}"


@dataclass(frozen=True)
class Preferences(Source):
    """The user's preferences and how they are split. `objectives` names the rankings' objectives, if several."""

    num_tasks: int = 0
    heldout_share: float = 0.1
    objectives: Sequence[str] = ()

    @property
    def objectives_lines(self) -> Sequence[str]:
        names = ", ".join(toml_value(name) for name in self.objectives)
        return [f"objectives = [{names}]  # one score each"] if names else []

    @property
    def heldout_line(self) -> str:
        return f"heldout_share = {self.heldout_share}       # of the prompts, to measure the accuracy on"


@dataclass(frozen=True)
class Shape:
    """Suggests sizes and rates from the model's shape and the lengths of the data."""

    model: str
    context: int  # tokens
    is_small: bool

    def seq_len(self, demonstrations: Lengths) -> int:
        """Returns the tokens of a packed row: a power of two, enough for the longest conversation, within limits."""
        length = LEAST_SEQ_LEN
        while length < min(demonstrations.longest, MAX_SEQ_LEN):
            length *= 2
        return min(self.context, length)

    def max_new_tokens(self, longest_response: int) -> int:
        """Returns the longest response in the data, rounded up, within limits; a guess if the data has none (0)."""
        if not longest_response:
            return max(1, min(self.context // 4, MAX_NEW_TOKENS))
        return max(1, min(16 * -(-longest_response // 16), self.context // 2, MAX_NEW_TOKENS))

    def rate(self, large: str, small: str) -> str:
        """Returns `large` for models of several hundred million parameters or more, `small` for tiny ones."""
        return small if self.is_small else large


def batch_for(num_rows: float) -> int:
    """Returns the largest power of two, up to MAX_BATCH, that gives an epoch at least ten batches."""
    size = MAX_BATCH
    while size > 1 and size * 10 > num_rows:
        size //= 2
    return size


def batch_toml(size: int, tokens: int) -> str:
    """Returns the TOML of a batch of `size` rows of `tokens` tokens each."""
    micro = min(size, MAX_MICRO_BATCH)
    while micro > 1 and micro * tokens > MICRO_BATCH_TOKENS:
        micro //= 2
    return f"{{ batch_size = {size}, micro_batch_size = {micro} }}"


def sft_section(shape: Shape, data: Source) -> Sequence[str]:
    """SFT on demonstrations."""
    seq_len, spread = shape.seq_len(data.lengths), data.lengths.spread
    num_rows = data.lengths.num_rows * len(best_fit([min(n, seq_len) for n in spread], seq_len)) / max(1, len(spread))
    return (
        "[sft]  # learn from the demonstrations",
        f"init_from = {toml_value(shape.model)}",
        f"demonstrations = [{data.toml()}]",
        "heldout_share = 0.05      # of the demonstrations, to measure the loss on",
        f"seq_len = {seq_len}             # tokens per row, into which conversations are packed",
        'on_overlong = "truncate"  # conversations that do not fit; "refuse" stops, "skip" leaves them out',
        "num_epochs = 2",
        f"batch = {batch_toml(batch_for(num_rows), seq_len)}",
        f'optimizer = {{ learning_rate = {shape.rate("2e-5", "2e-3")}, schedule = "cosine" }}',
        "# lora = {}               # adapters in place of all weights, at ten times the rate (docs/lora.md)",
    )


def reward_section(shape: Shape, start: Sequence[str], data: Preferences) -> Sequence[str]:
    """A reward model trained on preferences."""
    return (
        "[reward]  # learn which responses people prefer",
        *start,
        f"rankings = {data.toml()}",
        *data.objectives_lines,
        data.heldout_line,
        'on_overlong = "skip"',
        f"batch = {batch_toml(batch_for(data.num_tasks), 2 * data.lengths.longest)}",
        f"optimizer = {{ learning_rate = {shape.rate('1e-5', '1e-3')} }}",
    )


def dpo_section(shape: Shape, start: Sequence[str], data: Preferences) -> Sequence[str]:
    """DPO on preferences."""
    return (
        "[dpo]  # learn from the preferences directly (docs/dpo.md)",
        *start,
        f"rankings = {data.toml()}",
        data.heldout_line,
        'on_overlong = "skip"',
        "beta = 0.1                # a higher value stays closer to the initial model",
        f"batch = {batch_toml(batch_for(data.num_tasks), 2 * data.lengths.longest)}",
        f"optimizer = {{ learning_rate = {shape.rate('1e-6', '1e-4')}, warmup_steps = 20 }}",
    )


def ppo_section(
    shape: Shape,
    start: Sequence[str],
    algorithm: str,
    prompts: Source,
    num_compared: int,
    reward: Sequence[str],
    length: int,
) -> Sequence[str]:
    """PPO, GRPO or RLOO on the prompts that the comparison leaves; `reward` has the lines about the reward, if any."""
    least = MIN_ROLLOUT if algorithm == "ppo" else 2 * MIN_ROLLOUT  # there, a group of responses counts like one
    rollout = max(least, min(4 * batch_for(prompts.lengths.num_rows), MAX_BATCH))
    minibatch = batch_toml(rollout // 2, prompts.lengths.longest + length)
    value_rate = shape.rate("9e-6", "3e-4")
    return (
        f"[ppo]  # {algorithm.upper()}: sample responses, and learn from their scores (docs/algorithms.md)",
        *start,
        *reward,
        f"prompts = {prompts.toml(skip_rows=num_compared)}",
        'on_overlong = "skip"',
        "num_iterations = 50",
        f"rollout_batch_size = {rollout}   # responses per iteration",
        f"minibatch = {minibatch}",
        f"max_new_tokens = {length}      # the longest response",
        f"policy_optimizer = {{ learning_rate = {shape.rate('1e-6', '1e-4')} }}",
        *(line.replace("RATE", value_rate) for line in SETTINGS[algorithm]),
    )


def compare_section(prompts: str, origin: str, judge: str, num_tokens: int) -> Sequence[str]:
    """A comparison of the policy with the model it started from; `origin` says where the prompts come from."""
    return (
        "[compare]  # the new policy with the model that it started from",
        f"prompts = {prompts}  # {origin}",
        judge,
        "# Only a judge that training has not seen shows whether the reward was gamed: replace that line by one of",
        '# judge_function = "FILE.py:NAME", judge_from = "MODEL" or judge_people = "labels.sqlite" (docs/comparing.md)',
        'on_overlong = "skip"',
        f"max_new_tokens = {num_tokens}",
        "best_of = 4               # responses per prompt of the first model; the reward picks the best",
    )


@dataclass
class Starter:
    """What a job is made from; "" = not given by the user. `missing` says what the job leaves out, and why.

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
                "--reward and --preferences each define a reward; one of them was expected (--algorithm dpo takes both:"
                " it learns from the preferences, and the reward judges)"
            )

    @property
    def _chosen(self) -> str:
        """The algorithm; "" if demonstrations are all that a policy could learn from."""
        if self.algorithm:
            return self.algorithm
        if self.prompts and (self.preferences or self.reward):
            return "ppo"
        return "dpo" if self.preferences else ""

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
        yield f"# Written by `heed init`. See what it will take with `heed plan {path}`, run it with `heed run {path}`."
        yield "# Every other key has a default: docs/reference/configuration.md. Formats of data: docs/data.md."
        yield f"# {context}, in which prompt and response have to fit."
        yield f"name = {toml_value(path.stem)}"
        for line in self.missing:
            yield f"# missing: {line}"
        for stage in stages:
            yield ""
            yield from stage

    def _stages(self, path: Path, lines: list[str], written: list[Path]) -> Iterator[Sequence[str]]:
        shape, start = self._shape, [] if self.demonstrations else [f"init_from = {toml_value(self.model)}"]
        demos = self._demonstrations(lines)
        if demos is None:
            self.missing.append("SFT, which needs --demonstrations")
        else:
            yield sft_section(shape, demos)
        judgments = self._judgments(lines) if self.preferences else None
        pairs = None if judgments is None else self._pairs(judgments, lines)
        if judgments is not None and pairs is not None and not self.reward:
            yield reward_section(shape, start, pairs)
        if self.reward:
            load_function(self.reward, "--reward")
        elif judgments is None:
            self.missing.append("a reward, which needs --preferences or --reward")
        if not self.prompts and self._chosen != "dpo":
            self.missing.append("PPO, GRPO or RLOO, which need --prompts")
        prompts = self._prompts(lines) if self.prompts and self._chosen else None
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
        """Reads the model's shape. Raises: ValueError if there is no model, or it lacks tokens that a job needs."""
        shape = shape_of(self.model, opens_models=True)
        is_small = int(shape["hidden_size"]) < SMALL_HIDDEN_SIZE
        _ = self._tokenizer
        return Shape(self.model, int(shape["max_position_embeddings"]), is_small)

    def _demonstrations(self, lines: list[str]) -> Source | None:
        if not self.demonstrations:
            return None
        data = self._conversations(self.demonstrations)
        lengths = demonstration_lengths(
            self._tokenizer,
            [data],
            Limit(has_source=False, seq_len=self._shape.context, on_overlong="truncate"),
            lines.append,
        )
        lines.append(lengths.line(self.demonstrations, "conversations"))
        return Source(self.demonstrations, lengths, self.format, self.on_invalid)

    def _judgments(self, lines: list[str]) -> "ImportedLabels":
        num_rows = _rows_to_read(self.preferences)
        data = RankingsConfig(source=self.preferences, max_rows=num_rows, on_invalid=self.on_invalid)
        return read_judgments(data, lines.append)

    def _pairs(self, judgments: "ImportedLabels", lines: list[str]) -> Preferences:
        """Splits the preferences. Raises: ValueError for DPO on several objectives, and for too few prompts."""
        objectives = sorted({ranking.objective for ranking in judgments.rankings})
        if len(objectives) > 1 and self._chosen == "dpo":
            raise ValueError(
                f"{self.preferences}: the rankings have the objectives {', '.join(objectives)}, and DPO learns one; a"
                " file with one objective, or --prompts for PPO, GRPO or RLOO, was expected"
            )
        share = self._heldout_share(judgments.rankings, objectives)
        lengths = ranking_lengths(self._tokenizer, judgments, self._shape.context, "skip")
        lines.append(lengths.line(self.preferences, "prompts with a response"))
        return Preferences(
            self.preferences,
            lengths,
            on_invalid=self.on_invalid,
            num_tasks=len(judgments.found_tasks),
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
        """Returns the lines about the reward for PPO's section; none if the reward is the reward model's score."""
        if self.reward:
            return [f'reward = {{ kind = "function", function = {toml_value(self.reward)} }}']
        if pairs is None or not pairs.objectives:
            return []
        weights = ", ".join(f"{toml_value(name)} = 1.0" for name in pairs.objectives)
        return [f'reward = {{ kind = "model", objective_weights = {{ {weights} }} }}  # of each score in the reward']

    def _prompts(self, lines: list[str]) -> Source:
        data = self._conversations(self.prompts)
        lengths = prompt_lengths(
            self._tokenizer, data, PromptLimit("ppo", self._shape.context, 0, "skip"), lines.append
        )
        lines.append(lengths.line(self.prompts, "prompts"))
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
        held_out_prompts = list(dict.fromkeys(ranking.prompt for ranking in heldout))[:MAX_COMPARED]
        file = path.with_name(f"{path.stem}-heldout-prompts.jsonl")
        if file.exists():
            raise ValueError(f"{file} already exists; another name for the job was expected")
        rows = [{"prompt": [vars(message) for message in prompt]} for prompt in held_out_prompts]
        written.append(file)
        write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
        return f"{{ source = {toml_value(str(file))} }}", f"those of {Path(self.preferences).name} that DPO holds out"


def _rows_to_read(source: str) -> int:
    return 0 if is_file_name(source) else HUB_ROWS
