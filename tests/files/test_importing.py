"""A user's functions: files with any name, and modules next to them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from files.importing import file_of, function_named, load_function


@pytest.fixture(autouse=True)
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_files_may_have_one_name_and_that_of_a_package(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def score():\n    return {folder!r}\n")
    first, second = (load_function(f"{tmp_path / folder}/reward.py:score", "reward function") for folder in "ab")
    assert (first(), second()) == ("a", "b")
    assert file_of(first) == tmp_path / "a" / "reward.py"
    assert file_of(second) == tmp_path / "b" / "reward.py"
    import reward

    assert reward.__file__ == str(Path(__file__).parents[2] / "reward" / "__init__.py")


def test_a_file_imports_modules_next_to_it_and_none_of_them_hides_another(tmp_path: Path) -> None:
    (tmp_path / "words_of_mine.py").write_text("WORDS = ('red', 'blue')\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('in place of the standard library')\n")
    (tmp_path / "score.py").write_text("import colorsys\nfrom words_of_mine import WORDS\ndef f():\n    return WORDS\n")
    assert load_function(f"{tmp_path}/score.py:f", "reward function")() == ("red", "blue")


def test_a_module_with_a_packages_name_is_said_to_be_heeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def score():\n    return 1\n")
    with pytest.raises(ValueError, match=r"reward has no function 'score'; reward is a package of Heed: 'reward.py:sc"):
        load_function("reward:score", "reward function")


def test_a_file_without_a_function_stands_for_its_only_public_one(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("from math import sqrt\n\ndef _help(): ...\n\ndef reward(prompts, responses): ...\n")
    assert function_named(str(path), "--reward") == f"{path}:reward"
    assert function_named("any.py:name", "--reward") == "any.py:name"
    several = tmp_path / "several.py"
    several.write_text("def first(): ...\n\ndef second(): ...\n")
    with pytest.raises(ValueError, match=f"names no function; one of {several}:first, {several}:second was expected"):
        function_named(str(several), "--reward")
    path = tmp_path / "none.py"
    path.write_text("X = 1\n")
    with pytest.raises(ValueError, match=f"{path}:NAME, of a function in the file, was expected"):
        function_named(str(path), "--reward")
