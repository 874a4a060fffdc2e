"""What a stage's lineage records where something that it asks for is not installed."""

from pathlib import Path

import pytest

from cluster import hosts
from stages import lineage


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(lineage.CODE_VERSION, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lineage.code_version() == "unknown"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PACKAGES", ("no-such-package", "numpy"))
    versions = hosts.this_host.__wrapped__().versions
    assert versions["no-such-package"] == "none"
    assert versions["numpy"][0].isdigit()
