"""A first job for one's own model and data: short, commented, and complete, so that `heed run` takes it as it is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from files.atomic import write_text
from files.python_names import load_function
from jobs.job_file import load_job
from jobs.model_shape import shape_of
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from reading.conversations import AUTO, NAMES
from reading.invalid import OnInvalid
from reading.rows import is_file_name
from reward.comparisons import RankingsConfig, read_judgments
from training.data import DataConfig, read_conversations, read_prompts

HUB_ROWS = 1000  # of a hub data set, which are read to recognise its format
SMALL_HIDDEN_SIZE = 512  # narrower models learn at higher rates
MAX_SEQ_LEN, MAX_NEW_TOKENS = 1024, 256
MAX_BATCH = 64
MIN_ROLLOUT = 16
CONVERSATIONS_PER_ROW = 4  # of packed ones, a guess


@dataclass
class Starter:
    """What a job is to be made of; "" and () are what the user has not. `missing` says what is left out, and why.

    `format` and `on_invalid` are those of the sources that the job names.
    """

    model: str
    demonstrations: str = ""
    preferences: str = ""
    prompts: str = ""
    reward_function: str = ""
    format: str = AUTO  # of demonstrations and prompts
    on_invalid: OnInvalid = "refuse"
    missing: list[str] = field(default_factory=list)

    def write(self, path: Path) -> list[str]:
        """Write the job, and check it. Returns lines about what was found in the data.

        Raises: ValueError for a file that is there, for data that cannot be read, and if no stage is left.
        """
        if path.exists():
            raise ValueError(f"{path} is there already; another name was expected")
        if self.format not in NAMES:
            raise ValueError(f"--format is {self.format!r}; one of {', '.join(NAMES)} was expected")
        found: list[str] = []
        text = "\n".join(self._lines(path, found))
        write_text(path, text + "\n")
        try:
            load_job(path)
        except ValueError:
            path.unlink()
            raise
        return found

    def _lines(self, path: Path, found: list[str]) -> Iterator[str]:
        sizes = Sizes.of(self.model)
        stages = list(self._stages(sizes, found))
        if not stages:
            raise ValueError("there is nothing to learn from; --demonstrations or --preferences was expected, or both")
        yield f"# Written by `heed init`. See what it will take with `heed plan {path}`, run it with `heed run {path}`."
        yield "# Every other key has a default: docs/reference/configuration.md. Formats of data: docs/data.md."
        yield f'name = "{path.stem}"'
        for line in self.missing:
            yield f"# missing: {line}"
        for stage in stages:
            yield ""
            yield from stage

    def _stages(self, sizes: "Sizes", found: list[str]) -> Iterator[Sequence[str]]:
        if self.demonstrations:
            data = self._conversations(self.demonstrations)
            yield _sft(self, sizes, sum(1 for _ in read_conversations([data], found.append, takes_texts=True)))
        else:
            self.missing.append("SFT, which needs --demonstrations")
        has_reward = bool(self.preferences) and not self.reward_function
        if has_reward:
            num_rows = _rows_to_read(self.preferences)
            rankings = RankingsConfig(source=self.preferences, max_rows=num_rows, on_invalid=self.on_invalid)
            section = _reward if self.prompts else _dpo  # without prompts, PPO has nothing to answer
            yield section(self, sizes, len(read_judgments(rankings, found.append).tasks))
        if self.reward_function:
            load_function(self.reward_function, "--reward-function")
        elif not has_reward:
            self.missing.append("a reward, which needs --preferences or --reward-function")
        if not self.prompts:
            self.missing.append("PPO, which needs --prompts")
        elif has_reward or self.reward_function:
            data = self._conversations(self.prompts)
            yield _ppo(self, sizes, len(read_prompts(data, found.append)))
            yield _compare(sizes)

    def _conversations(self, source: str) -> DataConfig:
        num_rows = _rows_to_read(source)
        return DataConfig(source=source, max_rows=num_rows, format=self.format, on_invalid=self.on_invalid)

    def source(self, name: str, form: str = AUTO) -> str:
        """A source as the job file has it."""
        keys = {"source": name} | ({} if form == AUTO else {"format": form})
        keys |= {} if self.on_invalid == "refuse" else {"on_invalid": self.on_invalid}
        return f"{{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in keys.items())} }}"


@dataclass(frozen=True)
class Sizes:
    """What the model's shape suggests."""

    context: int
    is_small: bool

    @classmethod
    def of(cls, model: str) -> "Sizes":
        """Raises: ValueError for a folder or hub id without a model, or without tokens that a job needs."""
        shape = shape_of(model, opens_models=True)
        Tokenizer.load(model_directory(model))
        return cls(int(shape["max_position_embeddings"]), int(shape["hidden_size"]) < SMALL_HIDDEN_SIZE)

    @property
    def seq_len(self) -> int:
        return min(self.context, MAX_SEQ_LEN)

    @property
    def max_new_tokens(self) -> int:
        return max(1, min(self.context // 4, MAX_NEW_TOKENS))

    def rate(self, large: str, small: str) -> str:
        """A usual learning rate for models of several hundred million parameters, or for tiny ones."""
        return small if self.is_small else large


def _rows_to_read(source: str) -> int:
    return 0 if is_file_name(source) else HUB_ROWS


def batch_for(num_rows: int) -> int:
    """The largest power of two up to MAX_BATCH of which an epoch has at least ten."""
    size = MAX_BATCH
    while size > 1 and size * 10 > num_rows:
        size //= 2
    return size


def _batch(size: int) -> str:
    return f"{{ batch_size = {size}, micro_batch_size = {min(size, 8)} }}"


def _start(job: Starter) -> list[str]:
    return [] if job.demonstrations else [f"init_from = {json.dumps(job.model)}"]


def _sft(job: Starter, sizes: Sizes, num_rows: int) -> Sequence[str]:
    size = batch_for(num_rows // CONVERSATIONS_PER_ROW)
    return (
        "[sft]  # learn from the demonstrations",
        f"init_from = {json.dumps(job.model)}",
        f"demonstrations = [{job.source(job.demonstrations, job.format)}]",
        "heldout_share = 0.05      # of the demonstrations, to measure the loss on",
        f"seq_len = {sizes.seq_len}             # tokens per row, into which conversations are packed",
        'on_overlong = "truncate"  # conversations that do not fit; "refuse" stops, "skip" leaves them out',
        "num_epochs = 2",
        f"batch = {_batch(size)}",
        f'optimizer = {{ learning_rate = {sizes.rate("2e-5", "2e-3")}, schedule = "cosine" }}',
        "# lora = {}               # adapters in place of all weights, at ten times the rate (docs/lora.md)",
    )


def _reward(job: Starter, sizes: Sizes, num_rows: int) -> Sequence[str]:
    return (
        "[reward]  # learn which responses people prefer",
        *_start(job),
        f"rankings = {job.source(job.preferences)}",
        "heldout_share = 0.1       # of the prompts, to measure the accuracy on",
        'on_overlong = "skip"',
        f"batch = {_batch(batch_for(num_rows))}",
        f"optimizer = {{ learning_rate = {sizes.rate('1e-5', '1e-3')} }}",
    )


def _dpo(job: Starter, sizes: Sizes, num_rows: int) -> Sequence[str]:
    return (
        "[dpo]  # learn from the preferences directly (docs/dpo.md); [reward] would learn a reward model from them",
        *_start(job),
        f"rankings = {job.source(job.preferences)}",
        "heldout_share = 0.1       # of the prompts, to measure the accuracy on",
        'on_overlong = "skip"',
        "beta = 0.1                # higher stays closer to the model that DPO starts from",
        f"batch = {_batch(batch_for(num_rows))}",
        f"optimizer = {{ learning_rate = {sizes.rate('1e-6', '1e-4')}, warmup_steps = 20 }}",
    )


def _ppo(job: Starter, sizes: Sizes, num_prompts: int) -> Sequence[str]:
    rollout = max(MIN_ROLLOUT, min(4 * batch_for(num_prompts), MAX_BATCH))
    reward = [f"reward_function = {json.dumps(job.reward_function)}"] if job.reward_function else []
    return (
        "[ppo]  # sample responses, and learn from their scores",
        *_start(job),
        *reward,
        f"prompts = {job.source(job.prompts, job.format)}",
        'on_overlong = "skip"',
        "num_iterations = 50",
        f"rollout_batch_size = {rollout}   # responses per iteration",
        f"minibatch = {_batch(rollout // 2)}",
        f"max_new_tokens = {sizes.max_new_tokens}      # the longest response",
        f"policy_optimizer = {{ learning_rate = {sizes.rate('1e-6', '1e-4')} }}",
        f"value_optimizer = {{ learning_rate = {sizes.rate('9e-6', '3e-4')} }}",
        "kl_coef = 0.05            # higher stays closer to the model that PPO starts from",
    )


def _compare(sizes: Sizes) -> Sequence[str]:
    return (
        "# To compare the policies in the same run, name a judge that training has not seen and uncomment this.",
        '# With judge_people = "labels.sqlite" people judge, and the run waits for them (docs/comparing.md).',
        "# [compare]",
        '# judge_function = "my_judge.py:score"   # or judge_from = "MODEL", a reward model\'s folder or hub id',
        '# prompts = { source = "heldout_prompts.jsonl" }',
        f"# max_new_tokens = {sizes.max_new_tokens}",
    )
