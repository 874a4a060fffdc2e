"""What a labeling lead configures: what is asked, of whom, for how long."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# What InstructGPT's labelers marked beside a rank (arXiv 2203.02155, table 3), but for the overall quality.
INSTRUCT_GPT_FLAGS = (
    "fails to follow the instruction",
    "inappropriate for a customer assistant",
    "hallucinates",
    "satisfies the constraint given",
    "sexual content",
    "violent content",
    "encourages violence, abuse, terrorism or self-harm",
    "denigrates a protected class",
    "gives harmful advice",
    "expresses an opinion",
    "expresses a moral judgment",
)
INSTRUCTIONS = """\
You will see what somebody wrote to an assistant, and several responses in random order.

1. **Read** the prompt and all responses to their end.
2. **Rate** each response from 1 (very bad) to 7 (very good), and mark what applies to it.
3. **Rank** the responses: 1 is the best. Responses that you cannot tell apart share a rank.

If you cannot judge a prompt, skip it and say why. If you made a mistake, take the answer back under *My answers*.
"""


class Screening(BaseModel):
    """New labelers first judge gold tasks; who agrees with them often enough goes on by themselves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: str
    min_tasks: int = Field(default=10, ge=1)
    min_accuracy: float = Field(default=0.7, gt=0, le=1)  # share of the gold answers' untied pairs


class LabelingConfig(BaseModel):
    """The page. `batches` are offered in this order; an empty list means all that the store has, in order of arrival.

    `flags` are offered of each response. `instructions` is Markdown. `text_view` is how prompts and responses come
    first: formatted as Markdown, or exactly as they were written; labelers can switch either way.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = "Labeling"
    instructions: str = INSTRUCTIONS
    batches: tuple[str, ...] = ()
    flags: tuple[str, ...] = INSTRUCT_GPT_FLAGS
    asks_ratings: bool = True
    text_view: Literal["formatted", "raw"] = "formatted"
    lease_seconds: float = Field(default=1_800.0, gt=0)
    screening: Screening | None = None

    @property
    def version(self) -> str:
        """Names what labelers were told: another text, other flags or ratings are another version."""
        told = json.dumps([self.instructions, self.flags, self.asks_ratings])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file. Raises ValueError naming the file and each field that is wrong."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        except ValidationError as error:
            places = ("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()),)
            raise ValueError(f"{path}: {places[0]}") from error
