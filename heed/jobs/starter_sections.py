"""The sections of a first job, as TOML with comments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tomli_w

from files.conversations import AUTO
from files.rows import OnInvalid
from stages.lengths import Lengths
from training.packing import best_fit

SMALL_HIDDEN_SIZE = 512  # narrower models learn at higher rates
LEAST_SEQ_LEN, MAX_SEQ_LEN, MAX_NEW_TOKENS = 256, 1024, 256
MAX_BATCH, MAX_MICRO_BATCH = 64, 8
MICRO_BATCH_TOKENS = 4096  # per pass: with a vocabulary of 50,000, logits and their gradient take 1.6 GB in fp32
MIN_ROLLOUT = 16
MAX_COMPARED = 100  # most prompts in the comparison

# The settings that make each algorithm of docs/algorithms.md, in addition to the defaults, which are PPO's.
SETTINGS: Mapping[str, Sequence[str]] = {
    "ppo": (),
    "grpo": (
        'advantage = "group_mean"     # the mean reward of the responses to a prompt is the baseline',
        'advantage_scale = "group"',
        'token_weight = "per_response"',
        'kl_in = "loss"',
        "samples_per_prompt = 4",
    ),
    "rloo": (
        'advantage = "leave_one_out"  # the mean reward of the other responses to a prompt is the baseline',
        'advantage_scale = "none"',
        'token_weight = "constant"',
        "samples_per_prompt = 4",
    ),
}
POLICY_GRADIENTS = tuple(SETTINGS)
ALGORITHMS = (*POLICY_GRADIENTS, "dpo")


def toml_value(value: str | int) -> str:
    """Returns a value as TOML; JSON would write a character above U+FFFF in a way that TOML does not know."""
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip()


@dataclass(frozen=True)
class Source:
    """A data source of the user's: its name, how long its rows are, and how they are read."""

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
    """Preferences of the user's, and how they are split. `objectives` names those of the rankings, if several."""

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
        "beta = 0.1                # higher stays closer to the model that DPO starts from",
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
    least = MIN_ROLLOUT if algorithm == "ppo" else 2 * MIN_ROLLOUT  # a whole group of responses counts like one
    rollout = max(least, min(4 * batch_for(prompts.lengths.num_rows), MAX_BATCH))
    minibatch = batch_toml(rollout // 2, prompts.lengths.longest + length)
    value = (f"value_optimizer = {{ learning_rate = {shape.rate('9e-6', '3e-4')} }}",) if algorithm == "ppo" else ()
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
        *value,
        *SETTINGS[algorithm],
        "kl_coef = 0.05            # higher stays closer to the model that training starts from",
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
        "best_of = 4               # responses per prompt of the first model, of which the reward takes the best",
    )
