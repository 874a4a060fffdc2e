"""A page of typed parts, as HTML. It stands alone: nothing is loaded, and its one script only filters samples."""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from reports.parts import Answer, Block, Columns, Details, Headline, Part, Section
from reports.samples import Samples
from reports.styles import PolicyStyle
from reports.text import clean_text

HERE = Path(__file__).parent
SCRIPT = HERE / "samples.js"


@dataclass(frozen=True)
class Step:
    """A stage in the line that leads through a run."""

    name: str
    anchor: str
    status: str
    text: str


@dataclass(frozen=True)
class Page:
    """A report. Without `steps` its contents are listed by section. `styles` are those of all policies on it."""

    kicker: str
    title: str
    meta: tuple[str, ...]
    answer: Answer
    sections: tuple[Section, ...]
    skip_to: tuple[str, str]  # anchor, and what is there
    styles: tuple[PolicyStyle, ...] = ()
    caution: str = ""
    warnings: tuple[str, ...] = ()
    headlines: tuple[Headline, ...] = ()
    steps: tuple[Step, ...] = ()


def render(page: Page) -> str:
    """The page as HTML: the same page gives the same bytes."""
    is_filtered = any(isinstance(part, Samples) and part.is_filtered for part in _parts(page))
    script = SCRIPT.read_text(encoding="utf-8") if is_filtered else ""
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template("page.html.jinja")
    return clean_text(template.render(page=page, script=Markup(script), script_hash=script_hash))


def _parts(page: Page) -> Iterable[Part]:
    waiting = [part for section in page.sections for part in section.parts]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Columns | Details | Block):
            waiting += part.parts


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
