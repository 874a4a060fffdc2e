"""Figures in documents are those of the files that commands wrote."""

import json

import pytest

from benchmarks.figures import DEMO, PAGES, demo_text, speed_text
from benchmarks.speed.environments import ROOT

TEXTS = {
    "demo": lambda: demo_text(json.loads(DEMO.read_text())),
    "speed": speed_text,
}


@pytest.mark.parametrize("name", TEXTS)
def test_documents_say_what_was_measured(name: str) -> None:
    for page in PAGES[name]:
        marked = page.read_text().partition(f"<!-- {name} begins -->")[2].partition(f"<!-- {name} ends -->")[0]
        assert marked.strip() == TEXTS[name]()


def test_the_changelog_gives_no_ratio_of_its_own() -> None:
    """A ratio copied by hand is the one that somebody forgets: benchmarks/README.md has the table."""
    assert "times as fast" not in (ROOT / "CHANGELOG.md").read_text()
