"""docs/reference says what the code says."""

from pydantic import BaseModel

from heed.reference import FOLDER, _models, pages
from jobs.job import BUILT_IN_JOB
from labeling.config import LabelingConfig


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
    for name, text in pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, (
            f"docs/reference/{name} is old: run `make reference`"
        )


def test_the_pages_name_keys_options_and_defaults() -> None:
    written = pages()
    configuration = written["configuration.md"]
    assert "| `kl_coef` | number, ≥ 0 | `0.05` |" in configuration
    assert "| `policy_optimizer` | [optimizer](#optimizer) | required |" in configuration
    assert '## `[world] with kind = "reviews"`' in configuration
    assert "| `zero_stage` | `0`, `1`, `2`, `3` | `0` |" in configuration
    assert "## `heed run`" in written["cli.md"]
    assert "`--set" in written["cli.md"]
