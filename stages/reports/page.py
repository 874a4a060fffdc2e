"""A page of typed parts, as HTML. It is self-contained: it loads nothing, and its script only searches samples. A live
page (`heed watch`) also fetches what has changed, and starts with what its run is doing now.

Technical terms are linked where a page uses them and explained at its end.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import jinja2
from markupsafe import Markup, escape

from stages.reports.parts import Answer, Block, Columns, Details, Headline, Part, Samples, Section
from stages.reports.text import PolicyStyle, clean_text

HERE = Path(__file__).parent
SCRIPT, LIVE_SCRIPT = HERE / "samples.js", HERE / "live.js"


@dataclass(frozen=True)
class Now:
    """A run's state in a sentence, its stage's progress (None if unknown), and the events so far."""

    tone: Literal["better", "worse", "unclear"]
    text: str
    share: float | None = None
    facts: tuple[tuple[str, str], ...] = ()
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Live:
    """A page that follows its run. `version` changes whenever the page does."""

    now: Now
    version: str


@dataclass(frozen=True)
class Step:
    """A stage in the row of stages that shows the course of a run."""

    name: str
    anchor: str
    status: str
    text: str


@dataclass(frozen=True)
class Page:
    """A report. `steps` are the stages of a run in a row. `styles` are those of all policies on the page."""

    kicker: str
    title: str
    meta: tuple[str, ...]
    answer: Answer
    sections: tuple[Section, ...]
    skip_to: tuple[str, str]  # anchor, and the name of what is there
    picture: tuple[Part, ...] = ()  # below the answer's first sentence
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
    """Render the page as HTML. The same page gives the same bytes."""
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
    """Render what a run is doing now, as HTML."""
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


@dataclass(frozen=True)
class Term:
    """A term of the glossary. Text that `pattern` matches links to it at `#glossary-ANCHOR`."""

    anchor: str
    title: str
    pattern: re.Pattern[str]
    meaning: str


def _term(anchor: str, title: str, pattern: str, meaning: str) -> Term:
    return Term(anchor, title, re.compile(pattern, re.IGNORECASE), meaning)


# A term comes before the terms that its pattern contains. Patterns match escaped text, so they have no quotes.
TERMS = (
    _term(
        "kl-from-sft", "KL from the initial policy",
        r"KL from (SFT|the reference|the initial policy)|KL to the reference|nats of KL|against KL",
        "How far a policy has moved from the one that it started from: the mean, over its responses, of log(its"
        " probability of the response / the other's). 0 means that the two are the same.",
    ),
    _term(
        "nats", "nats", r"\bnats?\b",
        "The unit of a natural logarithm. 1 nat is 1.44 bits; a policy at 1 nat writes its responses about 2.7 times as"
        " often as the one that it is compared with would.",
    ),
    _term(
        "win-rate", "Win rate", r"\bwin rates?\b|\bbeats\b|\bover (SFT|the initial policy)\b",
        "How often one policy's response is preferred to another's, with ties counting half. Every prompt weighs the"
        " same; 50% means that neither is ahead.",
    ),
    _term(
        "gold-score", "Gold score", r"\bgold score\b",
        "The score of the judge that belongs to a world of prompts and knows what a good response is. No stage is"
        " trained on it.",
    ),
    _term(
        "proxy-score", "Proxy score", r"\bproxy score\b",
        "The score that a policy is trained on, which stands in for what counts.",
    ),
    _term(
        "pass-share", "Pass mark", r"\bpass mark\b",
        "The score from which the judge calls a response good. The share above it counts responses, however far above"
        " it they are.",
    ),
    _term(
        "distinct-2", "Distinct-2", r"\bdistinct-2\b",
        "The share of different word pairs among all word pairs of a policy's responses, measured on equally many words"
        " of each policy. Lower means that the responses repeat themselves more.",
    ),
    _term(
        "best-of-n", "Best of n", r"\bbest[ -]of[ -](n|\d+)\b",
        "Of n responses that the initial policy samples to a prompt, the one with the highest reward. It needs no"
        " training, but n times the sampling.",
    ),
    _term(
        "reward-hacking", "Reward hacking", r"\breward hacking\b",
        "The score that a policy is trained on rises, while its responses do not get better.",
    ),
    _term(
        "interval", "95% interval", r"\b95% intervals?\b",
        "A range made so that it contains the true value in 95 of 100 such studies, each with other prompts.",
    ),
    _term(
        "cluster", "Cluster of prompts", r"\bclusters?( of prompts)?\b",
        "Prompts that depend on each other, such as those made from one template. An interval over clusters treats each"
        " as one observation.",
    ),
)  # fmt: skip


@dataclass
class Glossary:
    """The terms that one page uses. `link` collects them."""

    used: set[str] = field(default_factory=set)

    def link(self, text: str) -> Markup:
        """Returns the text, escaped, with a link at the first use of each term."""
        html = str(escape(text))
        spans: list[tuple[int, int, str]] = []
        for term in TERMS:
            match = term.pattern.search(html)
            if match and not any(match.start() < end and start < match.end() for start, end, _ in spans):
                spans.append((*match.span(), term.anchor))
        for start, end, anchor in sorted(spans, reverse=True):
            link = f'<a class="term" href="#glossary-{anchor}">{html[start:end]}</a>'
            html = html[:start] + link + html[end:]
        self.used.update(anchor for *_, anchor in spans)
        return Markup(html)  # every part is escaped or is a link made here

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms used, by title."""
        return tuple(sorted((term for term in TERMS if term.anchor in self.used), key=lambda term: term.title.lower()))
