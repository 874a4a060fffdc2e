"""A page of typed parts, as HTML. It stands alone: nothing is loaded, and its script only searches samples. A live page
(`heed watch`) also fetches what has changed.
"""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from stages.reports.glossary import Glossary
from stages.reports.live import Live, Now
from stages.reports.parts import Answer, Block, Columns, Details, Headline, Part, Section
from stages.reports.samples import Samples
from stages.reports.styles import PolicyStyle
from stages.reports.text import clean_text

HERE = Path(__file__).parent
SCRIPT, LIVE_SCRIPT = HERE / "samples.js", HERE / "live.js"


@dataclass(frozen=True)
class Step:
    """A stage in the line that leads through a run."""

    name: str
    anchor: str
    status: str
    text: str


@dataclass(frozen=True)
class Page:
    """A report. `steps` lead through a run. `styles` are those of all policies on it."""

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
    live: Live | None = None

    @property
    def contents(self) -> tuple[tuple[str, str], ...]:
        """Anchor and title of every section."""
        return tuple((section.anchor, section.title) for section in self.sections)


def render(page: Page) -> str:
    """The page as HTML: the same page gives the same bytes."""
    has_samples = page.live is not None or any(isinstance(part, Samples) for part in _parts(page))
    paths = (*((SCRIPT,) if has_samples else ()), *((LIVE_SCRIPT,) if page.live is not None else ()))
    scripts = [path.read_text(encoding="utf-8") for path in paths]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    template = environment().get_template("page.html.jinja")
    return clean_text(
        template.render(page=page, glossary=Glossary(), scripts=[Markup(script) for script in scripts], hashes=hashes)
    )


def _parts(page: Page) -> Iterable[Part]:
    waiting = [part for section in page.sections for part in section.parts]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Columns | Details | Block):
            waiting += part.parts


def render_now(now: Now) -> str:
    """What a run is doing now, as HTML."""
    return clean_text(environment().get_template("now.html.jinja").render(now=now))


@cache
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
