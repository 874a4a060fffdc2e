"""Numbers, names and texts as a page shows them, and the colour, shape and title of each policy on it."""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from preferences.statistics.estimates import Interval, Share

LABEL_CHARACTERS = 26
UNKNOWN = "–"

# Control characters but tab and line feed, surrogates, and the last two code points of every plane.
_LAST_TWO = "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
UNSHOWN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff{_LAST_TWO}]")

# Name: colour (a CSS variable, see plots.py), shape of the mark.
KNOWN_POLICIES = {
    "pretrained": ("pretrained", "o"),
    "sft": ("sft", "s"),
    "rejection": ("other-2", "P"),
    "dpo": ("other-1", "v"),
    "ppo": ("ppo", "^"),
}
# For policies with other names, after the styles that known policies leave free.
FREE_STYLES = (
    ("sft", "s"), ("best-of-n", "D"), ("ppo", "^"), ("other-1", "v"), ("other-2", "P"), ("other-3", "X"),
    ("pretrained", "o"),
)  # fmt: skip


@dataclass(frozen=True)
class Names:
    """What the report of a run calls the policy that training starts from, the algorithm that raises a score, and what
    gives that score. The defaults are those of the whole loop.
    """

    initial: str = "SFT"
    algorithm: str = "PPO"
    scorer: str = "reward model"

    @property
    def the_initial(self) -> str:
        """The initial policy within a sentence."""
        return self.initial if self.initial.isupper() else f"the {self.initial}"

    @property
    def kl(self) -> str:
        return f"KL from {self.the_initial}"

    @property
    def score(self) -> str:
        """The score within a sentence, without an article."""
        return "reward model's score" if self.scorer == "reward model" else f"score of {self.scorer}"


DEFAULT_NAMES = Names()
INITIAL_POLICY = "initial policy"  # `Names.initial` in a run without SFT


def in_capital(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def clean_text(text: str) -> str:
    """Replace control characters, lone surrogates and noncharacters by U+FFFD; tabs and line ends stay."""
    return UNSHOWN.sub("\ufffd", text.replace("\r\n", "\n"))


def clean_json(value: Any) -> Any:
    """Keep only what strict JSON and a page can hold: finite numbers, clean text, None, lists and dicts of them."""
    if isinstance(value, dict):
        return {clean_text(str(key)): clean_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return clean_text(value) if isinstance(value, str) else value


def label(text: str) -> str:
    """Shorten a name from a file so that it fits a chart or a table's head."""
    text = " ".join(text.split())
    return text if len(text) <= LABEL_CHARACTERS else text[: LABEL_CHARACTERS - 1] + "…"


def number(value: Any, digits: int = 2) -> str:
    """Format a number with a true minus sign and thousands separators; a dash if there is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return UNKNOWN
    text = f"{value:,}" if isinstance(value, int) else f"{value:z,.{digits}f}"  # z: a rounded zero has no minus
    return text.replace("-", "\u2212")


def kl_number(nats: float, digits: int = 0) -> str:
    """Format an estimate of a KL; by default with the digits that its size needs. No KL is below 0, but an estimate of
    a small one may be.
    """
    digits = digits or _kl_digits(nats)
    return "about 0" if 0 != nats < 0.5 * 10**-digits else number(nats, digits)


def kl_with_ends(kl: Interval) -> tuple[str, str]:
    """Format an estimate of a KL, and the ends of its interval with the same number of digits."""
    digits = _kl_digits(max(map(abs, (kl.mean, kl.low, kl.high))))  # max ignores a NaN after the first
    return kl_number(float(kl.mean), digits), ends_of(kl, digits)


def _kl_digits(nats: float) -> int:
    size = abs(nats)
    return 4 if 0 < size < 0.01 else 2 if size < 1 else 1


def count(value: Any) -> str:
    """Format a count, large ones in thousands or millions."""
    if isinstance(value, int | float) and value >= 10_000_000:
        return f"{value / 1e6:,.0f} M"
    if isinstance(value, int | float) and value >= 1_000_000:
        return f"{value / 1e6:.1f} M"
    return number(value, 0)


def count_of(num: int, what: str) -> str:
    """Format a count with its noun: "1 prompt", "1,200 prompts", "2 policies"."""
    return f"{number(num)} {what if num == 1 else what[:-1] + 'ies' if what.endswith('y') else what + 's'}"


def percent(value: Any, digits: int = 0) -> str:
    """Format a share as a percentage with this many digits. Only an exact 0, ½ or 1 shows as 0%, 50% or 100%.

    Shares that would round to one of these get up to two more digits.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        return UNKNOWN
    texts = [f"{100 * value:.{digits + more}f}" for more in range(3)]
    is_true = [float(text) not in (0, 50, 100) or math.isclose(float(text), 100 * value) for text in texts]
    return f"{texts[is_true.index(True) if True in is_true else 2]}%"


def points(share: float) -> str:
    """Format a difference of shares in percentage points."""
    value = 100 * share
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Format wall-clock time in the units a person would use."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def ends_of(mean: Interval | Share, digits: int = 2) -> str:
    """Format the ends of a mean's interval; "" if they are unknown (a single prompt)."""
    if not (math.isfinite(mean.low) and math.isfinite(mean.high)):
        return ""
    return f"{number(float(mean.low), digits)} to {number(float(mean.high), digits)}"


def share_ends(low: float, high: float, digits: int = 0) -> str:
    """Format the ends of a share's interval, as in "68 to 76%"."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    return f"{percent(low, digits).removesuffix('%')} to {percent(high, digits)}"


def p_value(p: float) -> str:
    """Format a p-value with its sign: "p < .001", "p = .032", "p = .41"; "p unknown" for NaN."""
    if math.isnan(p):
        return "p unknown"
    if p < 0.001:
        return "p < .001"
    digits = 3 if p < 0.1 else 2
    return f"p = {p:.{digits}f}".replace("0.", ".", 1)


def listed(names: Sequence[str], word: str = "and") -> str:
    """Join names in a sentence: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


@dataclass(frozen=True)
class PolicyStyle:
    """How the page shows a policy."""

    name: str
    title: str
    tone: str
    marker: str


def styles_of(names: Sequence[str], titles: Mapping[str, str] | None = None) -> dict[str, PolicyStyle]:
    """Return a style for each policy, in order: its title from `titles`, otherwise its name. With more than seven
    policies, some share a style.
    """
    shown = {name: label((titles or {}).get(name, name)) for name in names}
    known: dict[str, PolicyStyle] = {}
    for name in names:
        if name in KNOWN_POLICIES:
            known[name] = PolicyStyle(name, shown[name], *KNOWN_POLICIES[name])
        elif re.fullmatch(r"best_of_\d+", name) and not any(style.tone == "best-of-n" for style in known.values()):
            known[name] = PolicyStyle(name, shown[name], "best-of-n", "D")
    taken = {style.tone for style in known.values()}
    free = [style for style in FREE_STYLES if style[0] not in taken] or FREE_STYLES
    others = [name for name in names if name not in known]
    for place, name in enumerate(others):
        known[name] = PolicyStyle(name, shown[name], *free[place % len(free)])
    used_titles = [style.title for style in known.values()]
    return {
        name: known[name] if used_titles.count(known[name].title) == 1 else replace(known[name], title=name)
        for name in names
    }
