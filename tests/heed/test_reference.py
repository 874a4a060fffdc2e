"""docs/reference says what the code says, and docs/troubleshooting.md quotes messages that the code has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from benchmarks.reference import FOLDER, MKDOCS, ROOT, _models, pages, with_nav
from heed.jobs.job import BUILT_IN_JOB
from preferences.page.config import LabelingConfig


def fields_without_description(model: type[BaseModel], place: str) -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        is_section = model is BUILT_IN_JOB and bool(inner)
        if not is_section and not (field.description or "").endswith("."):
            found.append(f"{place}{name}")
        for below in inner:
            found += fields_without_description(below, f"{place}{name}.")
    return found


def test_every_field_has_a_sentence() -> None:
    assert fields_without_description(BUILT_IN_JOB, "") == []
    assert fields_without_description(LabelingConfig, "labeling: ") == []


def test_the_pages_are_those_that_the_code_gives() -> None:
    current = pages()
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.md")} == set(current)
    for name, text in current.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, (
            f"docs/reference/{name} is old: run `make reference`"
        )
    listed = MKDOCS.read_text(encoding="utf-8")
    assert with_nav(listed) == listed, "mkdocs.yml is old: run `make reference`"


def test_every_key_has_a_heading_with_type_and_default() -> None:
    written = pages()
    for name, field in BUILT_IN_JOB.model_fields.items():
        models = _models(field.annotation)
        for page in [text for path, text in written.items() if re.fullmatch(rf"job/{name}(-\w+)?\.md", path)]:
            assert any(all(f"\n## `{key}`\n" in page for key in model.model_fields) for model in models)
    assert (
        "## `coef`\n\nWeight of the penalty, per nat; with a `target`, its initial value.\n\n"
        "Type: number, ≥ 0. Default: `0.05`.\n" in written["tables/kl.md"]
    )
    assert "Type: [optimizer](../tables/optimizer.md). Required." in written["job/ppo.md"]
    assert "# `[world] kind = 'playground'`" in written["job/world-playground.md"]
    assert "Type: `0`, `1`, `2`, `3`. Default: `0`." in written["job/engine.md"]
    assert "[kl](job/ppo.md#kl)" in written["configuration.md"]
    assert "[`ppo.policy_optimizer`](../job/ppo.md#policy_optimizer)" in written["tables/optimizer.md"]


def test_every_command_has_a_page_with_examples_and_options() -> None:
    written = pages()
    run = written["commands/run.md"]
    assert "heed run mine.toml --set ppo.kl.coef=0.1" in run
    assert "| `--set TEXT` |" in run
    assert "[`heed run`](commands/run.md)" in written["cli.md"]
    for path, text in written.items():
        if path.startswith("commands/"):
            assert re.search(r"## Examples\n\n```\n(.*\n)*(.*\| )?heed ", text), path


def test_pages_that_a_text_names_become_links() -> None:
    assert "([docs/data.md](../../data.md))" in pages()["commands/init.md"]


def test_mkdocs_without_the_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 pairs of markers"):
        with_nav("nav:\n  - Home: index.md\n")


# --- docs/troubleshooting.md -----------------------------------------------------------------------------------------


def texts_of_the_code() -> Iterator[str]:
    """Every string of Heed's modules, with "…" for what is filled in, and the Makefile."""
    yield (ROOT / "Makefile").read_text(encoding="utf-8")
    for package in {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}:
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    page = Path(ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) >= 20
    said = "\n".join(text.replace("\n", " ") for text in texts_of_the_code())
    for message in quoted:
        pattern = ".*".join(map(re.escape, message.split("…")))
        assert re.search(pattern, said), f"docs/troubleshooting.md quotes what the code does not say: {message}"


def test_troubleshooting_gives_each_message_a_cause_and_a_fix() -> None:
    page = Path(ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for part in page.split("\n### ")[1:]:
        assert "\n**Cause.** " in part, part
        assert "\n**Fix.** " in part, part
