"""What the classify stage configures. Defaults are BERT's (arXiv 1810.04805, appendix A.3; `run_squad.py`)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from training.config import BatchConfig, LayersConfig, OptimizerConfig
from training.data import OnOverlong, SourceConfig, overlong_field

Task = Literal["sequence", "token", "span"]
PAIR_MARKS, QUESTION_MARKS = 3, 3  # tokens that open, separate and close two texts
SPAN_TOKENS = 384  # seq_len of `span`, by default
OUTSIDE = "O"  # the tag of a word in no entity


def entity_type(tag: str) -> str:
    """Returns the type of entity that a tag marks, "" for OUTSIDE. Raises: ValueError for anything but a tag."""
    mark, _, kind = tag.partition("-")
    if tag != OUTSIDE and (mark not in ("B", "I") or not kind):
        raise ValueError(f"{tag!r}; {OUTSIDE}, B-TYPE or I-TYPE was expected")
    return kind


class ClassifyData(SourceConfig):
    """Where examples come from; docs/classify.md shows the formats."""

    text_field: str = Field(
        default="", description='Field of the text or, for `token`, of the list of words; empty = "text" or "tokens".'
    )
    label_field: str = Field(
        default="", description='Field of the label or, for `token`, of the list of tags; empty = "label" or "tags".'
    )
    tags: Literal["iob2", "iob1"] = Field(
        default="iob2",
        description="How tags mark entities: `iob2` opens each with B-, `iob1` (CoNLL-2003's own files) only one that"
        " follows another of its type.",
    )


class ClassifyConfig(LayersConfig):
    """`batch.batch_size` counts texts (`sequence`), sentences (`token`) or windows of a text (`span`)."""

    packs_sequences: ClassVar[bool] = True

    task: Task = Field(
        description="`sequence` gives each text, or pair of texts, a label; `token` marks entities, word by word;"
        " `span` finds the answer to a question in a text, or says that there is none."
    )
    data: tuple[ClassifyData, ...] = Field(min_length=1, description="Examples to learn from.")
    heldout: tuple[ClassifyData, ...] = Field(min_length=1, description="Examples to evaluate on.")
    labels: tuple[str, ...] = Field(
        default=(),
        description="Names of the labels or tags, in order. Rows may then have numbers, which count from 0. Empty ="
        " those of the training data, sorted.",
    )
    seq_len: int = Field(
        default=128,
        ge=8,
        description="Most tokens of an example, or of a window of a text. The default is BERT's: 128, and"
        f" {SPAN_TOKENS} for `span`.",
    )
    on_overlong: OnOverlong = overlong_field()
    doc_stride: int = Field(
        default=128, ge=1, description="`span`: tokens from one window of a text to the next (BERT: 128)."
    )
    max_question_tokens: int = Field(
        default=64,
        ge=1,
        description="`span`: most tokens of a question; `on_overlong` says what happens to longer ones.",
    )
    max_answer_tokens: int = Field(default=30, ge=1, description="`span`: most tokens of an answer that is predicted.")
    no_answer_margin: float = Field(
        default=0.0,
        description="`span`: the best answer's score must exceed that of no answer by more than this (BERT's -τ, which"
        " it chooses on held-out questions; nats).",
    )
    num_epochs: float = Field(default=3.0, gt=0, description="Passes over the examples (BERT: 2, 3 or 4).")
    batch: BatchConfig = Field(
        default=BatchConfig(batch_size=32, micro_batch_size=8), description="Batch sizes (BERT: 16 or 32)."
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(learning_rate=3e-5, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-6),
        description="Optimizer and learning rate (BERT: 2e-5, 3e-5 or 5e-5, with Adam, linear decay and a weight decay"
        " of 0.01; it warms up over the first tenth of the steps).",
    )
    dropout: float = Field(default=0.1, ge=0, lt=1, description="Dropout probability during training (BERT: 0.1).")

    @model_validator(mode="before")
    @classmethod
    def _room_for_questions(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("task") == "span":
            return {"seq_len": SPAN_TOKENS, **values}
        return values

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        room = self.seq_len - self.max_question_tokens - QUESTION_MARKS
        if self.task == "span" and self.doc_stride > room:
            raise ValueError(
                f"doc_stride is {self.doc_stride}, but a window of seq_len = {self.seq_len} tokens with a question of"
                f" max_question_tokens = {self.max_question_tokens} has room for {room} of the text; at most that was"
                " expected, or tokens between windows would never be read"
            )
        if self.task == "span" and self.labels:
            raise ValueError('labels are set with task "span", which has none; "sequence" or "token" was expected')
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if not self.labels:
            return self
        if len(set(self.labels)) < len(self.labels) or not all(self.labels) or len(self.labels) < 2:
            raise ValueError(f"labels is {list(self.labels)}; at least two distinct names were expected")
        if self.task == "token":
            try:
                kinds = {entity_type(tag) for tag in self.labels}
            except ValueError as error:
                raise ValueError(f"labels has {error}") from None
            if "" not in kinds:
                raise ValueError(f"labels is {list(self.labels)}; {OUTSIDE}, for words in no entity, is missing")
        return self
