"""Samples side by side: prompts with their responses, and the verdicts of judges.

All of it is HTML that can be read without JavaScript. The page's script (samples.js) searches it, hides what a filter
excludes, and shows one page at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import quote

from files.conversations import spoken
from lm.tokenizer import Messages
from stages.reports.text import PolicyStyle

UNFOLDED_CHARACTERS = 1_200  # per text; the rest is folded
TEXT_CHARACTERS = 20_000  # per text; the rest is only in the files
UNFOLDED_TURNS = 5  # of a conversation, a system message and the last turns; those in between are folded


Outcome = Literal["won", "tied", "failed"]


@dataclass(frozen=True)
class Folded:
    """A text: what is shown at once, the folded rest, and how many characters are only in the files."""

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
    """One verdict as text, or all verdicts of one labeler on the same two policies."""

    judge: str
    labeler: str
    kind: Outcome
    winner: PolicyStyle | None
    detail: str


@dataclass(frozen=True)
class Chip:
    """One judge's verdict on a pair, or its preferred policy among several, in the sample's summary line."""

    judge: str
    kind: Outcome
    winner: PolicyStyle | None


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with its responses and verdicts. Filters read `outcomes`: "a-b:judge:outcome", with indices."""

    anchor: str
    prompt_id: str
    category: str
    start: str
    messages: tuple[tuple[str, Folded], ...]
    responses: tuple[tuple[PolicyStyle, tuple[ShownResponse, ...]], ...]
    is_open: bool
    note: str = ""  # in the summary line
    verdicts: tuple[ShownVerdict, ...] = ()
    chips: tuple[Chip, ...] = ()
    category_place: int = 0
    outcomes: str = ""
    disagree: bool = False

    @property
    def shown_turns(self) -> tuple[tuple[tuple[str, Folded], ...], ...]:
        """The conversation in three parts: a system message, turns to fold, and the last turns."""
        num_system = int(self.messages[0][0] == "system")
        num_folded = max(0, len(self.messages) - UNFOLDED_TURNS)
        first_unfolded = num_system + num_folded
        return self.messages[:num_system], self.messages[num_system:first_unfolded], self.messages[first_unfolded:]


@dataclass(frozen=True)
class Samples:
    """The prompts on the page, and the choices of its filters."""

    prompts: tuple[ShownPrompt, ...]
    num_prompts: int
    policies: tuple[PolicyStyle, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    judges: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    part: ClassVar[str] = "samples"

    @property
    def is_cut(self) -> bool:
        """Whether the page leaves out any prompts."""
        return len(self.prompts) < self.num_prompts


def anchor_of(prompt_id: str) -> str:
    """Return the fragment that links to a prompt, as in `report.html#prompt-p7`."""
    return f"prompt-{quote(prompt_id, safe='', errors='replace')}"


def turns_of(messages: Messages) -> tuple[tuple[str, str], ...]:
    """Return a conversation as (role, text) pairs."""
    return tuple((turn["role"], spoken(turn)) for turn in messages)


def folded_turns(turns: Sequence[tuple[str, str]]) -> tuple[tuple[str, Folded], ...]:
    """Return a conversation with each long text folded. The page also folds early turns of a long conversation."""
    return tuple((role, folded(text)) for role, text in turns)


def start_of(messages: Sequence[tuple[str, str]]) -> str:
    """Return the beginning of the user's last message, in one line."""
    last_user = next((text for role, text in reversed(messages) if role == "user"), messages[-1][1])
    return " ".join(last_user[:400].split())[:140]


def evenly(sizes: Sequence[int], max_prompts: int, max_characters: int) -> list[int]:
    """Return the indices of as many prompts as fit both bounds, evenly spread over all; at least one."""
    num = min(len(sizes), max_prompts)
    while True:
        places = [place * len(sizes) // num for place in range(num)]
        total = sum(sizes[place] for place in places)
        if total <= max_characters or num == 1:
            return places
        num = max(1, min(num - 1, num * max_characters // total))


def folded(text: str) -> Folded:
    """Split a text into what the page shows, folds and leaves out. Avoids cutting words in two."""
    kept = text[:TEXT_CHARACTERS]
    if len(kept) <= UNFOLDED_CHARACTERS:
        return Folded(kept, "", 0)
    cut = max(kept.rfind(" ", 0, UNFOLDED_CHARACTERS), kept.rfind("\n", 0, UNFOLDED_CHARACTERS))
    cut = cut if cut > UNFOLDED_CHARACTERS // 2 else UNFOLDED_CHARACTERS
    return Folded(kept[:cut], kept[cut:], len(text) - len(kept))
