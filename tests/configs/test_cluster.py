"""The pages about clusters: their commands, files, messages and settings are those that Heed has."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from heed.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = {
    name: (ROOT / "docs" / name).read_text()
    for name in ("jobs.md", "cluster.md", "slurm.md", "kubernetes.md", "skypilot.md")
}
COMMANDS = [
    pytest.param(command, id=command)
    for text in DOCUMENTS.values()
    for command in re.findall(r"^ *(heed (?:run|submit|jobs)\b.*?)(?: *[>&|].*)?$", text, re.MULTILINE)
]


def silence(command: Any) -> None:
    """Make a command do nothing but parse."""
    for inner in getattr(command, "commands", {}).values():
        silence(inner)
    if not hasattr(command, "commands"):
        command.callback = lambda **_: None


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_that_is_shown_parses(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "$@"]
    command = get_command(app)
    silence(command)
    command.main(words[1:], standalone_mode=False)


def test_commands_were_found_in_each_document() -> None:
    assert {name for name, text in DOCUMENTS.items() if re.search(r"^heed submit", text, re.MULTILINE)} == {*DOCUMENTS}
    assert {"submit", "jobs"} <= {str(param.values[0]).split()[1] for param in COMMANDS}


def test_the_pages_name_files_that_exist() -> None:
    named = re.findall(r"configs/[\w./-]+\w", "".join(DOCUMENTS.values()))
    assert {"configs/jobs/demo.toml", "configs/cluster/Dockerfile"} <= {*named}
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_page_quotes_what_is_said() -> None:
    folders = ("cluster", "heed", "files", "preferences")
    said = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    quoted = re.findall(r"^\| `([^`]+)` \|", DOCUMENTS["cluster.md"], re.MULTILINE)
    assert len(quoted) >= 9
    # A pattern for each quote, in which the code writes the numbers and "..." as expressions.
    patterns = {quote: re.sub(r"300|60|\\\.\\\.\\\.", r"\\{[^}]+\\}", re.escape(quote)) for quote in quoted}
    assert [quote for quote, pattern in patterns.items() if not re.search(pattern, said)] == []
