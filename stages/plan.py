"""What a stage tells `heed plan`: what it trains, what it samples, and how long the rows are.

A stage's `plan` function describes the stage's work. `heed.jobs.plan` computes memory and time from that, so
training imports neither. Anything that depends on data that does not exist yet is an upper bound or an assumption, and
each of those is reported (stages/sizes.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.config import ModelConfig
from lm.tokenizer import Tokenizer
from stages.data import PromptLimit, prompt_lengths
from stages.run import JobView, StageRun
from stages.sizes import Lengths, Sizes
from training.config import TrainingConfig
from training.data import DataConfig, OnOverlong, SourceConfig


class Work:
    """What a stage does. `heed.jobs.plan` estimates each kind."""


@dataclass(frozen=True)
class Sampling(Work):
    """Responses that all workers sample, `at_once` per prompt at a time.

    `lengths` are those of prompts with responses. The models in `measured_by`, "reference" or "reward model", then
    read the samples.
    """

    model: ModelConfig
    num_prompts: int
    responses_per_prompt: int
    response_tokens: int
    lengths: Lengths
    at_once: int
    measured_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training(Work):
    """The training of one model. A unit of the batch has `rows_per_unit` rows.

    The longest row determines memory, and the mean determines time. With `has_logits`, the response's tokens of each
    row have logits; `num_scores` heads give scores instead. `read_first` tokens are read without gradients before the
    first step, and `read_tokens` again in each step.
    """

    unit: str
    config: TrainingConfig
    model: ModelConfig
    num_steps: int
    lengths: Lengths
    has_logits: bool = True
    rows_per_unit: int = 1
    num_scores: int = 0
    read_first: float = 0.0
    read_tokens: float = 0.0
    samples: Sampling | None = None  # sampled by the same workers before the training


@dataclass(frozen=True)
class Planner:
    """What a stage's plan may read: the policy's shape, other models' shapes, and the sizes of the data.

    `run` is the run as the stage would get it; None if a model of the job is not on this machine.
    """

    name: str
    job: JobView
    model: ModelConfig
    sizes: Sizes
    shape_of: Callable[[str], ModelConfig | None] = lambda _: None
    run: StageRun | None = None

    def shape(self, name: str) -> ModelConfig:
        """Return the shape of the model directory or hub id that a stage starts from; for "", the policy's."""
        named_shape = self.shape_of(name) if name else self.model
        if named_shape is None:
            self.sizes.assume(f"assumes that {name} has the policy's shape")
        return named_shape or self.model

    def measured(
        self,
        sources: Sequence[SourceConfig],
        what: str,
        tokenizer: Callable[[StageRun], Tokenizer],
        measure: Callable[[Tokenizer], Lengths],
    ) -> Lengths | None:
        """Measure and report the row lengths of a stage's sources; None if files or the vocabulary are missing.

        Raises: ValueError as `measure` and `Lengths.line`.
        """
        names = ", ".join(data.source for data in sources)
        if self.run is None or not all(Path(data.source).exists() for data in sources):
            return None
        run, read = self.run, [data.model_dump_json() for data in sources]
        lengths = self.sizes.measures.get(f"{self.name} {what} {read}", lambda: _if_readable(run, tokenizer, measure))
        if lengths is not None:
            self.sizes.assume(lengths.line(names, what))
        return lengths

    def answered(
        self,
        source: DataConfig,
        response_tokens: int,
        on_overlong: OnOverlong,
        tokenizer: Callable[[StageRun], Tokenizer],
    ) -> Lengths:
        """Return the lengths of prompts with responses of `response_tokens` each, or a bound on them; reports which.

        Raises: ValueError as `measured`, and as the run for a prompt that is too long.
        """
        limit = PromptLimit(self.name, self.model.max_position_embeddings, response_tokens, on_overlong)
        measured = self.measured((source,), "prompts", tokenizer, lambda known: prompt_lengths(known, source, limit))
        return self.bound(source, response_tokens) if measured is None else measured.plus(response_tokens)

    def bound(self, source: SourceConfig, response_tokens: int) -> Lengths:
        """Return a length that no prompt with its response exceeds, for data that cannot be read, and report it."""
        tokens = self.sizes.conversation_tokens(response_tokens)
        origin = "as in SFT" if self.sizes.longest else "the model's context"
        if not Path(source.source).exists():
            why = "not on this machine"
        else:
            why = "no vocabulary to count tokens with" if self.run else "not read: a model of the job is not here"
        self.sizes.assume(
            f"assumes at most {tokens:,} tokens per prompt and response ({origin}) for {source.source} ({why})"
        )
        return Lengths.bound(tokens)


def _if_readable(
    run: StageRun, tokenizer: Callable[[StageRun], Tokenizer], measure: Callable[[Tokenizer], Lengths]
) -> Lengths | None:
    try:
        vocabulary = tokenizer(run)
    except ValueError:  # not made yet, or the model's folder holds only a shape, which is enough for a plan
        return None
    return measure(vocabulary)
