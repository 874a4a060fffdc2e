"""Where Python looks for modules when `heed` starts, and what is said if a file hides a package all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from files.importing import PACKAGES, hiding_file
from heed import put_heed_first

ROOT = Path(__file__).parents[2]


def test_the_tree_comes_first_and_the_current_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for current in ("", str(tmp_path)):
        path = [current, "/python", str(ROOT), "/installed"]
        put_heed_first(path)
        assert path == [str(ROOT), "/python", "/installed", str(tmp_path)]
    path = ["/bin", str(ROOT), "/installed"]  # an installed command: nothing names the current folder
    put_heed_first(path)
    assert path == [str(ROOT), "/bin", "/installed"]
    monkeypatch.chdir(ROOT)
    path = ["", "/installed"]
    put_heed_first(path)
    assert path == [str(ROOT), "", "/installed"]


def test_no_package_is_hidden_here() -> None:
    assert {name: hiding_file(name) for name in PACKAGES} == dict.fromkeys(PACKAGES, "")


@pytest.mark.parametrize("hidden", ["sft", "files"])
def test_a_file_that_hides_a_package_is_named_in_one_line(tmp_path: Path, hidden: str) -> None:
    """Heed as installed packages, which PYTHONPATH precedes; a checkout precedes PYTHONPATH."""
    installed, hiding = tmp_path / "installed", tmp_path / "scripts"
    for folder in (installed, hiding):
        folder.mkdir()
    for package in PACKAGES:
        (installed / package).symlink_to(ROOT / package)
    (hiding / f"{hidden}.py").write_text("raise RuntimeError('imported')\n")
    # With a version of code that came with a job, this environment's own tree stands back.
    environment = os.environ | {"PYTHONPATH": f"{hiding}{os.pathsep}{installed}", "HEED_CODE_VERSION": "abc"}
    command = [sys.executable, "-m", "heed", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    place = "its folder" if hidden == "files" else str(hiding)
    assert done.stderr == (
        f"error: {hiding / hidden}.py hides Heed's package '{hidden}': rename it, or remove {place} from PYTHONPATH\n"
    )
