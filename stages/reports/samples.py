"""Samples side by side: prompts with the responses to them, and what judges say of them.

All of it is HTML that reads without JavaScript; the page's script (samples.js) searches it, hides what a filter leaves
out, and shows a page at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import quote

from stages.reports.text import PolicyStyle

UNFOLDED_CHARACTERS = 1_200  # of one text; the rest is folded away
TEXT_CHARACTERS = 20_000  # of one text; the rest is in the files


Outcome = Literal["won", "tied", "failed"]


@dataclass(frozen=True)
class Folded:
    """A text: what is shown at once, what is folded behind it, and how many characters are only in the files."""

    text: str
    rest: str
    num_left: int


@dataclass(frozen=True)
class ShownResponse:
    """One response of a policy."""

    index: int
    text: Folded
    about: str


@dataclass(frozen=True)
class ShownVerdict:
    """One verdict in words, or those of one labeler on the same two policies."""

    judge: str
    labeler: str
    kind: Outcome
    winner: PolicyStyle | None
    detail: str


@dataclass(frozen=True)
class Chip:
    """What one judge says of a pair, or which policy it prefers among several, in the sample's summary line."""

    judge: str
    kind: Outcome
    winner: PolicyStyle | None


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with everything said of it. `outcomes` is what the filters read: "a-b:judge:outcome" by place."""

    anchor: str
    prompt_id: str
    category: str
    start: str
    messages: tuple[tuple[str, Folded], ...]
    responses: tuple[tuple[PolicyStyle, tuple[ShownResponse, ...]], ...]
    is_open: bool
    note: str = ""  # stands in the summary line
    verdicts: tuple[ShownVerdict, ...] = ()
    chips: tuple[Chip, ...] = ()
    category_place: int = 0
    outcomes: str = ""
    disagree: bool = False


@dataclass(frozen=True)
class Samples:
    """The prompts that the page holds, and the choices of its filters."""

    prompts: tuple[ShownPrompt, ...]
    num_prompts: int
    policies: tuple[PolicyStyle, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    judges: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    part: ClassVar[str] = "samples"

    @property
    def is_cut(self) -> bool:
        """Whether there are prompts that the page leaves out."""
        return len(self.prompts) < self.num_prompts


def anchor_of(prompt_id: str) -> str:
    """The fragment that leads to a prompt, as in `report.html#prompt-p7`."""
    return f"prompt-{quote(prompt_id, safe='', errors='replace')}"


def start_of(messages: Sequence[tuple[str, str]]) -> str:
    """The beginning of what the user said last, in one line."""
    last_user = next((text for role, text in reversed(messages) if role == "user"), messages[-1][1])
    return " ".join(last_user[:400].split())[:140]


def evenly(sizes: Sequence[int], max_prompts: int, max_characters: int) -> list[int]:
    """Places of as many prompts as fit both bounds, evenly spread over all; at least one."""
    num = min(len(sizes), max_prompts)
    while True:
        places = [place * len(sizes) // num for place in range(num)]
        total = sum(sizes[place] for place in places)
        if total <= max_characters or num == 1:
            return places
        num = max(1, min(num - 1, num * max_characters // total))


def folded(text: str) -> Folded:
    """A text as the page holds it; words are not cut in two where that can be helped."""
    kept = text[:TEXT_CHARACTERS]
    if len(kept) <= UNFOLDED_CHARACTERS:
        return Folded(kept, "", 0)
    cut = max(kept.rfind(" ", 0, UNFOLDED_CHARACTERS), kept.rfind("\n", 0, UNFOLDED_CHARACTERS))
    cut = cut if cut > UNFOLDED_CHARACTERS // 2 else UNFOLDED_CHARACTERS
    return Folded(kept[:cut], kept[cut:], len(text) - len(kept))
