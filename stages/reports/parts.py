"""The typed parts of report pages, which one set of templates turns into HTML.

Each stage has a function from its folder to a `StageReport`; a page is a list of sections. All text is plain text,
which the templates escape. A part's template is named by `part`.

Forest plots are rows of a table: a dot with its interval on a common axis, and the numbers next to it as text. The
page's style sheet draws them, so that their text keeps its size on a phone and every number can be read out.

`Samples` are prompts with their responses side by side, and the verdicts of judges. They can be read without
JavaScript; the page's script (samples.js) searches them, hides what a filter excludes, and shows one page at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import quote

from markupsafe import Markup

from files.conversations import spoken
from lm.tokenizer import Messages
from stages.reports.run_folder import StageFolder
from stages.reports.text import UNKNOWN, PolicyStyle, number, percent, share_ends

Head = PolicyStyle | str  # a policy appears with its mark

# Of forest plots.
MAX_SPACES = 3  # between ticks of an axis
MARGIN = 0.08  # of the data, at either end of an axis
SHARE_TICKS = ((0.0, "0%"), (0.5, "50%"), (1.0, "100%"))


@dataclass(frozen=True)
class Note:
    """A paragraph: what a section is about, an aside, or what is absent."""

    text: str
    kind: Literal["about", "aside", "absent"] = "about"
    link: tuple[str, str] | None = None  # address and text, after the paragraph
    part: ClassVar[str] = "note"


@dataclass(frozen=True)
class Facts:
    """Named values, in a column or in a row."""

    items: tuple[tuple[str, str], ...]
    in_a_row: bool = False
    part: ClassVar[str] = "facts"


@dataclass(frozen=True)
class SampleFilter:
    """Filters the page's samples when a number is clicked: indices of policies and judge, and the outcome."""

    pair: str
    judge: int
    verdict: str
    label: str


@dataclass(frozen=True)
class Cell:
    """A table cell: a value, a second line in small, and a tint from -1 (worse) over 0 to 1 (better)."""

    text: str
    small: str = ""
    tint: float = 0.0
    is_clear: bool = False  # bold
    is_code: bool = False
    filter: SampleFilter | None = None
    links: tuple[tuple[str, str], ...] = ()  # addresses and texts, in place of `text`


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    heads: tuple[Head, ...]
    cells: tuple[Cell, ...]
    is_strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table. `kind` sets how it is laid out: one column per policy, a matrix, a row of tests, or long texts."""

    caption: str
    columns: tuple[Head, ...]  # the first is above the row heads
    rows: tuple[Row, ...]
    kind: Literal["by-policy", "by-policy matrix", "tests", "wide"] = "wide"
    title: str = ""
    part: ClassVar[str] = "table"


@dataclass(frozen=True)
class Key:
    """One entry next to a figure's title: what a colour and shape mean, and where the series ends."""

    tone: str
    shape: Literal["o", "line"]
    text: str


@dataclass(frozen=True)
class Figure:
    """A chart (`stages.reports.plots.draw`) with its caption."""

    title: str
    unit: str
    keys: tuple[Key, ...]
    svg: Markup
    is_wide: bool = False
    part: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Columns:
    """Parts side by side if there is room: two of equal width, or as many as fit."""

    parts: "tuple[Part, ...]"
    kind: Literal["pair", "grid"] = "pair"
    part: ClassVar[str] = "columns"


@dataclass(frozen=True)
class Details:
    """Parts folded under a title. When printed they are open."""

    title: str
    parts: "tuple[Part, ...]"
    is_open: bool = False
    part: ClassVar[str] = "details"


@dataclass(frozen=True)
class Code:
    """Text as it is in a file."""

    text: str
    part: ClassVar[str] = "code"


@dataclass(frozen=True)
class Block:
    """Parts under a smaller heading with a number, such as a stage of a run."""

    anchor: str
    place: int
    title: str
    parts: "tuple[Part, ...]"
    part: ClassVar[str] = "block"


@dataclass(frozen=True)
class Stack:
    """Wins, ties and losses as shares of a bar (0 to 1) with their counts."""

    title: str
    segments: tuple[tuple[str, str, float, int], ...]  # kind, whose, share, count

    @property
    def spoken(self) -> str:
        """Text for a screen reader."""
        return ", ".join(f"{whose} {number(count)}" for _, whose, _, count in self.segments)


@dataclass(frozen=True)
class Dot:
    """A dot with an interval, as fractions of the axis, 0 to 1. The interval's ends are None if they are unknown.

    `open_low` and `open_high` mean that the interval continues beyond the axis.
    """

    mean: float
    low: float | None
    high: float | None
    open_low: bool = False
    open_high: bool = False
    kind: str = ""


@dataclass(frozen=True)
class ForestRow:
    """A row: its head, its dot or bar, the value and interval as text, and further cells."""

    heads: tuple[PolicyStyle | str, ...]
    dots: tuple[Dot, ...]
    value: str
    interval: str
    cells: tuple[str, ...] = ()
    stack: Stack | None = None
    note: str = ""
    level: str = "95%"  # of the interval


@dataclass(frozen=True)
class Forest:
    """A forest plot. `ticks` are (fraction of the axis, text); `mark` is the position of its line of no difference."""

    name: str
    title: str
    caption: str
    corner: str
    value: str  # what the dots show
    columns: tuple[str, ...]
    rows: tuple[ForestRow, ...]
    rows_from: str  # the rows that the numbers are computed from
    ticks: tuple[tuple[float, str], ...] = SHARE_TICKS
    mark: float | None = 0.5
    part: ClassVar[str] = "forest"

    @property
    def is_shares(self) -> bool:
        """Whether the axis goes from 0 to 100%. The style sheet draws the lines of such an axis."""
        return self.ticks is SHARE_TICKS

    @property
    def is_mixed(self) -> bool:
        """Whether intervals have several levels; each row then names its own."""
        return len({row.level for row in self.rows}) > 1


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

    prompt_id: str
    category: str
    messages: Messages
    responses: tuple[tuple[PolicyStyle, tuple[ShownResponse, ...]], ...]
    is_open: bool
    name: str = ""  # in the link to it; "" = its id
    note: str = ""  # in the summary line
    verdicts: tuple[ShownVerdict, ...] = ()
    chips: tuple[Chip, ...] = ()
    category_place: int = 0
    outcomes: str = ""
    disagree: bool = False

    @property
    def anchor(self) -> str:
        """The fragment that links to the prompt, as in `report.html#prompt-p7`."""
        return f"prompt-{quote(self.name or self.prompt_id, safe='', errors='replace')}"

    @property
    def start(self) -> str:
        """The beginning of the user's last message, in one line."""
        last_user = next((turn for turn in reversed(self.messages) if turn["role"] == "user"), self.messages[-1])
        return " ".join(spoken(last_user)[:400].split())[:140]

    @property
    def shown_turns(self) -> tuple[tuple[tuple[str, Folded], ...], ...]:
        """The conversation in three parts, with each long text folded: a system message, turns to fold, and the last
        turns.
        """
        turns = tuple((turn["role"], folded(spoken(turn))) for turn in self.messages)
        num_system = int(turns[0][0] == "system")
        first_unfolded = num_system + max(0, len(turns) - UNFOLDED_TURNS)
        return turns[:num_system], turns[num_system:first_unfolded], turns[first_unfolded:]


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


Part = Note | Facts | Table | Figure | Columns | Details | Code | Block | Forest | Samples


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading, at the link `#anchor`."""

    anchor: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Headline:
    """A figure on a card at the top of the run's page, with its source.

    `field` is its place in report.json; `value` was copied from `source_field` of `file`, relative to the run's folder.
    """

    field: str
    file: str
    source_field: str
    value: float
    title: str
    text: str
    detail: str
    bar: tuple[float, float, float] | None = None  # low, mean, high of a share


@dataclass(frozen=True)
class Answer:
    """What a page shows, in plain words. `more` qualifies it, a sentence or two each."""

    tone: Literal["better", "worse", "unclear"]
    text: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageReport:
    """What a stage shows from its folder.

    `parts` are the stage's block in the list of stages; `sections` appear on their own above that list. `sentence` says
    what the stage achieved, for a run whose stages give no `answer`; `warning` follows any answer. `styles` are those
    of the policies that it shows.
    """

    parts: tuple[Part, ...] = ()
    sections: tuple[Section, ...] = ()
    headlines: tuple[Headline, ...] = ()
    sentence: str = ""
    warning: str = ""
    answer: Answer | None = None
    styles: tuple[PolicyStyle, ...] = ()


@dataclass(frozen=True)
class StageReporter:
    """How the report of a run shows a stage: its title, a sentence about it, and its results.

    `report` is called once the stage has left metrics or results; `StageFolder.results` is None until it is finished.
    With `is_always_shown`, it is called before that too. `named` returns title and sentence where they depend on the
    job.
    """

    title: str
    about: str
    report: Callable[[StageFolder], StageReport]
    named: Callable[[StageFolder], tuple[str, str]] | None = None
    is_always_shown: bool = False

    def head_of(self, stage: StageFolder) -> tuple[str, str]:
        """Return the title and the sentence of a stage."""
        return (self.title, self.about) if self.named is None else self.named(stage)


def share_dot(mean: float, low: float, high: float, kind: str = "") -> Dot:
    """Return the dot of a share on an axis from 0 to 1."""
    return Dot(mean, None if math.isnan(low) else low, None if math.isnan(high) else high, kind=kind)


def axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return the ends of an axis that holds low to high with a margin, and round ticks within it."""
    width = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(width / MAX_SPACES))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if width / (power * factor) <= MAX_SPACES)
    start, end = low - MARGIN * width, high + MARGIN * width
    return start, end, [place * step for place in range(math.ceil(start / step), math.floor(end / step) + 1)]


def share_row(
    heads: tuple[PolicyStyle | str, ...],
    share: tuple[float, float, float],
    cells: tuple[str, ...] = (),
    *,
    stack: Stack | None = None,
    note: str = "",
    unknown: str = "unknown",
    level: str = "95%",
) -> ForestRow:
    """Return the row of a share, as (mean, low, high). If it is NaN, the row has no dot and says `unknown`."""
    mean, low, high = share
    if math.isnan(mean):
        return ForestRow(heads, (), UNKNOWN, unknown, cells, note=note)
    return ForestRow(heads, (share_dot(*share),), percent(mean), share_ends(low, high), cells, stack, note, level)
