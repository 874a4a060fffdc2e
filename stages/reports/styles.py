"""The colour, shape and title of each policy, kept through a whole page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.reports.text import label

# Name: title, colour (a CSS variable, see svg.py), shape of the mark.
KNOWN_POLICIES = {
    "pretrained": ("Pretrained", "pretrained", "o"),
    "sft": ("SFT", "sft", "s"),
    "rejection": ("Rejection sampling", "other-2", "P"),
    "dpo": ("DPO", "other-1", "v"),
    "ppo": ("PPO", "ppo", "^"),
}
# For policies of other names, after those that the known ones leave free.
FREE_STYLES = (
    ("sft", "s"), ("best-of-n", "D"), ("ppo", "^"), ("other-1", "v"), ("other-2", "P"), ("other-3", "X"),
    ("pretrained", "o"),
)  # fmt: skip


@dataclass(frozen=True)
class PolicyStyle:
    """A policy as the page shows it."""

    name: str
    title: str
    tone: str
    marker: str


def styles_of(names: Sequence[str]) -> dict[str, PolicyStyle]:
    """A style for each policy, in their order; of more than seven some share theirs."""
    known: dict[str, PolicyStyle] = {}
    for name in names:
        best_of = re.fullmatch(r"best_of_(\d{1,9})", name)
        if name in KNOWN_POLICIES:
            known[name] = PolicyStyle(name, *KNOWN_POLICIES[name])
        elif best_of and not any(style.tone == "best-of-n" for style in known.values()):
            known[name] = PolicyStyle(name, f"Best of {best_of[1]}", "best-of-n", "D")
    taken = {style.tone for style in known.values()}
    free = [style for style in FREE_STYLES if style[0] not in taken] or FREE_STYLES
    others = [name for name in names if name not in known]
    for place, name in enumerate(others):
        known[name] = PolicyStyle(name, label(name), *free[place % len(free)])
    titles = [style.title for style in known.values()]
    return {
        name: known[name] if titles.count(known[name].title) == 1 else replace(known[name], title=name)
        for name in names
    }
