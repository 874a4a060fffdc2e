"""Every `heed` command in README and docs can be typed as it stands: its command, options and values are known."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from heed.cli import app

USAGE_ERROR = typer.BadParameter.__mro__[1]  # Typer has its own copy of Click, and exports only this class below it
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each line of a code block that starts with `heed`, its continuation lines joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            match = re.match(r"(?:\$ )?heed( \S.*|$)", line)
            if match:
                yield shlex.split(match[1], comments=True)


def parse(words: list[str]) -> None:
    """Parse without running. Raises: USAGE_ERROR as the command line would."""
    command = typer.main.get_command(app)
    context = command.make_context("heed", list(words))
    while group := getattr(command, "resolve_command", None):
        name, command, rest = group(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


WRITTEN = [(str(page.relative_to(ROOT)), words) for page in PAGES for words in commands_in(page.read_text())]


def test_there_are_commands_to_try() -> None:
    assert len(WRITTEN) > 40
    assert {page for page, _ in WRITTEN} >= {"README.md", "docs/jobs.md", "docs/labels.md", "docs/comparing.md"}


@pytest.mark.parametrize(("page", "words"), WRITTEN, ids=[f"{page}: {' '.join(words)}" for page, words in WRITTEN])
def test_a_documented_command_is_one(page: str, words: list[str]) -> None:
    try:
        parse(words)
    except USAGE_ERROR as error:
        pytest.fail(f"{page}: heed {shlex.join(words)}: {error}")


def test_a_wrong_option_would_be_found() -> None:
    with pytest.raises(USAGE_ERROR):
        parse(["run", "job.toml", "--wrokers", "2"])
