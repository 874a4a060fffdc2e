"""What a run is doing now: the top of the page that `heed watch` serves."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Now:
    """A run's state in a sentence, how far its stage is (None where that is not known), and what happened to it."""

    tone: Literal["better", "worse", "unclear"]
    text: str
    share: float | None = None
    facts: tuple[tuple[str, str], ...] = ()
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Live:
    """A page that follows its run. `version` changes when the page would be another one."""

    now: Now
    version: str
