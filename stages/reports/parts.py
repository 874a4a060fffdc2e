"""What report pages are made of: typed parts, which one set of templates turns into HTML.

A stage shows itself with a function from its folder to a `StageReport`; a page is a list of sections. All text is
plain text: the templates escape it. A part names its template by `part`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from markupsafe import Markup

from stages.reports.forest import Forest
from stages.reports.samples import Samples
from stages.reports.stage_folder import StageFolder
from stages.reports.styles import PolicyStyle

Head = PolicyStyle | str  # a policy is shown with its mark


@dataclass(frozen=True)
class Note:
    """A paragraph: what a section is about, an aside, or what is absent."""

    text: str
    kind: Literal["about", "aside", "absent"] = "about"
    link: tuple[str, str] | None = None  # address and text, behind the paragraph
    part: ClassVar[str] = "note"


@dataclass(frozen=True)
class Facts:
    """Named values, in a column or in a row."""

    items: tuple[tuple[str, str], ...]
    in_a_row: bool = False
    part: ClassVar[str] = "facts"


@dataclass(frozen=True)
class SampleFilter:
    """Filters the samples of the page when its number is clicked: places of policies and judge, and the outcome."""

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
    tooltip: str = ""


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
    columns: tuple[Head, ...]  # the first heads the rows
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
    """A drawing (`stages.reports.svg.draw`) with its caption."""

    title: str
    unit: str
    keys: tuple[Key, ...]
    svg: Markup
    is_wide: bool = False
    part: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Columns:
    """Parts side by side where there is room: two of equal width, or as many as fit."""

    parts: "tuple[Part, ...]"
    kind: Literal["pair", "grid"] = "pair"
    part: ClassVar[str] = "columns"


@dataclass(frozen=True)
class Details:
    """Parts folded behind a title. On paper they are open, unless `is_printed` is false."""

    title: str
    parts: "tuple[Part, ...]"
    is_open: bool = False
    is_printed: bool = True
    part: ClassVar[str] = "details"


@dataclass(frozen=True)
class Code:
    """Text as it stands in a file."""

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


Part = Note | Facts | Table | Figure | Columns | Details | Code | Block | Forest | Samples


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; the link `#anchor` leads there."""

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
    """What a stage shows of its folder.

    `parts` are the stage's block among the stages; `sections` stand on their own above them. `sentence` says what the
    stage reached, for a run whose stages give no `answer`. `styles` are those of the policies that it shows.
    """

    parts: tuple[Part, ...] = ()
    sections: tuple[Section, ...] = ()
    headlines: tuple[Headline, ...] = ()
    sentence: str = ""
    answer: Answer | None = None
    styles: tuple[PolicyStyle, ...] = ()


@dataclass(frozen=True)
class StageReporter:
    """How the report of a run shows a stage: its name in words, what it does in a sentence, and what it left.

    `report` is called once the stage has left metrics or results; `StageFolder.results` is None until it is finished.
    """

    title: str
    about: str
    report: Callable[[StageFolder], StageReport]
