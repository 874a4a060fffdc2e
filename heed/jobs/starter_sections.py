"""The sections of the jobs that `heed init` writes: each is a function that returns commented lines of TOML."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tomli_w

from evaluation.inputs import can_show
from files.conversations import AUTO
from files.rows import OnInvalid
from preferences.records import Message
from stages.sizes import Lengths
from training.packing import best_fit

COMPARED_SHARE = 4  # one prompt in this many is set aside for the comparison, up to MAX_COMPARED
SMALL_HIDDEN_SIZE = 512  # narrower models learn at higher rates
LEAST_SEQ_LEN, MAX_SEQ_LEN, MAX_NEW_TOKENS = 256, 1024, 256
MAX_BATCH, MAX_MICRO_BATCH = 64, 8
MICRO_BATCH_TOKENS = 4096  # per pass: with a vocabulary of 50,000, logits and their gradient take 1.6 GB in fp32
MIN_ROLLOUT = 16
MAX_COMPARED = 100  # most prompts in the comparison
LOOP_ROUNDS = 3

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
OTHER_JUDGES = (
    '# judge_function = "FILE.py:NAME", judge_from = "MODEL" or judge_people = "labels.sqlite" (docs/comparing.md)'
)
JUDGED_BY_REWARD = (
    "judge_reward = true       # the reward that training raises, on prompts that it has not seen",
    "# Only a judge that training has not seen shows whether the reward was gamed: replace that line by one of",
    OTHER_JUDGES,
)
JUDGED_BY_REWARD_MODEL = (
    "judge_reward = true       # the reward model, on prompts that no training has seen",
    "# It learned from the preferences that DPO learns from. For a judge of other origin, replace that line by one of",
    OTHER_JUDGES,
)
ALARM = 'alarm = { source = { kind = "function", function = "FILE.py:NAME" } }'


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

    @property
    def num_compared(self) -> int:
        """How many of the prompts a comparison takes from those to train on."""
        return min(self.lengths.num_rows // COMPARED_SHARE, MAX_COMPARED)

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
    heldout_prompts: Sequence[Sequence[Message]] = ()
    objectives: Sequence[str] = ()

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
    objectives = ", ".join(map(toml_value, data.objectives))
    return (
        "[reward]  # learn which responses people prefer",
        *start,
        f"rankings = {data.toml()}",
        *([f"objectives = [{objectives}]  # one score each"] if objectives else []),
        data.heldout_line,
        'on_overlong = "skip"',
        f"batch = {batch_toml(batch_for(data.num_tasks), 2 * data.lengths.longest)}",
        f"optimizer = {{ learning_rate = {shape.rate('1e-5', '1e-3')} }}",
    )


def dpo_section(shape: Shape, start: Sequence[str], algorithm: str, data: Preferences) -> Sequence[str]:
    """DPO on preferences, or KTO on labels of single responses."""
    is_kto = algorithm == "kto"
    what = "labels of single responses" if is_kto else "the preferences directly"
    size = max(2, batch_for(data.num_tasks)) if is_kto else batch_for(data.num_tasks)  # KTO's baseline needs another
    return (
        f"[dpo]  # {algorithm.upper()}: learn from {what} (docs/dpo.md)",
        *start,
        f"rankings = {data.toml()}",
        *(['loss = "kto"'] if is_kto else []),
        data.heldout_line,
        'on_overlong = "skip"',
        "beta = 0.1                # a higher value stays closer to the initial model",
        f"batch = {batch_toml(size, 2 * data.lengths.longest)}",
        f"optimizer = {{ learning_rate = {shape.rate('1e-6', '1e-4')}, warmup_steps = 20 }}",
    )


def ppo_section(
    shape: Shape,
    start: Sequence[str],
    algorithm: str,
    prompts: Source,
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
        f"prompts = {prompts.toml(skip_rows=prompts.num_compared)}",
        'on_overlong = "skip"',
        "num_iterations = 50",
        f"rollout_batch_size = {rollout}   # responses per iteration",
        f"minibatch = {minibatch}",
        f"max_new_tokens = {length}      # the longest response",
        f"policy_optimizer = {{ learning_rate = {shape.rate('1e-6', '1e-4')} }}",
        *(line.replace("RATE", value_rate) for line in SETTINGS[algorithm]),
        f"# {ALARM}  # an independent scorer watches the reward (docs/alarm.md)",
    )


def loop_sections(shape: Shape, prompts: Source, store: str, length: int) -> Iterator[Sequence[str]]:
    """Rounds in which people compare the policy's responses, and DPO learns from their labels."""
    labels = max(LOOP_ROUNDS, prompts.lengths.num_rows - prompts.num_compared)  # one label per prompt
    yield (
        "[loop]  # people label samples of the newest policy, round after round (docs/loop.md)",
        f"labels = {labels}             # in all rounds together",
        f"rounds = {LOOP_ROUNDS}",
        f"store = {toml_value(store)}  # where people label: `heed label serve --store {store} --new`",
    )
    yield (
        "[collect]  # what people label",
        f"prompts = {prompts.toml(skip_rows=prompts.num_compared)}",
        'on_overlong = "skip"',
        "responses_per_prompt = 2",
        f"max_new_tokens = {length}",
    )
    yield (
        "[dpo]  # learn from the labels (docs/dpo.md)",
        'rankings = { source = "collect:rankings" }',
        f"batch = {batch_toml(batch_for(labels / LOOP_ROUNDS), prompts.lengths.longest + length)}",
        f"optimizer = {{ learning_rate = {shape.rate('1e-6', '1e-4')} }}",
    )


def classify_section(shape: Shape, data: Source, num_heldout: int) -> Sequence[str]:
    """A classifier of texts; the first `num_heldout` rows are held out."""
    seq_len = shape.seq_len(data.lengths)
    return (
        "[classify]  # learn the labels of texts (docs/classify.md)",
        f"init_from = {toml_value(shape.model)}",
        'task = "sequence"',
        f"data = [{data.toml(skip_rows=num_heldout)}]",
        f"heldout = [{data.toml(max_rows=num_heldout)}]",
        f"seq_len = {seq_len}             # tokens of a text",
        'on_overlong = "truncate"',
        f"batch = {batch_toml(min(32, batch_for(data.lengths.num_rows)), seq_len)}",
    )


@dataclass(frozen=True)
class Compared:
    """The prompts of a comparison, as TOML, where they come from, and how many there are."""

    prompts: str
    origin: str
    num_prompts: int


def compare_section(
    of: Compared, judge: Sequence[str], length: int, num_samples: int, *, has_pool: bool
) -> Sequence[str]:
    """A comparison of the policy with the model it started from. `has_pool`: the job has a reward for best-of-n."""
    pool = "best_of = 4               # responses per prompt of the first model; the reward picks the best"
    return (
        "[compare]  # the new policy with the model that it started from",
        f"prompts = {of.prompts}  # {of.origin}",
        f"# {can_show(of.num_prompts, num_samples)}",
        f"num_samples = {num_samples}           # responses per prompt and policy",
        *judge,
        'on_overlong = "skip"',
        f"max_new_tokens = {length}",
        *([pool] if has_pool else []),
    )
