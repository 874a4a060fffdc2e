"""A token that others can read."""

from pathlib import Path

import pytest

from cluster import processes
from cluster.connection import connect
from training.notices import RunError, speaking_through


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token where Ray looks for it, with the mode that `ray get-auth-token --generate` leaves."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("secret")
    path.chmod(0o644)
    return path


def test_a_token_that_others_can_read_is_reported(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = processes.token_warning()
    assert said.startswith(f"{token} has mode 0644: ")
    assert said.endswith(f"expected 0600: chmod 600 {token}")
    assert "secret" not in said
    token.chmod(0o640)
    assert "has mode 0640" in processes.token_warning()
    other = token.with_name("other")
    other.touch(mode=0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    assert processes.token_warning() == ""


def test_a_token_that_only_its_owner_can_read_is_not(token: Path) -> None:
    token.chmod(0o600)
    assert processes.token_warning() == ""
    token.unlink()
    assert processes.token_warning() == ""


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "another")])
@pytest.mark.usefixtures("token")
def test_a_file_that_ray_does_not_read_is_not(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert processes.token_warning() == ""


def test_a_job_says_so_too(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("cluster.connection.ray.init", lambda **_: (_ for _ in ()).throw(ConnectionError("no one")))
    said: list[str] = []
    with speaking_through(said.append), pytest.raises(RunError, match="cannot join a Ray cluster there: no one"):
        connect(1)
    assert said == ["joining the Ray cluster", processes.token_warning()]
    assert str(token) in said[1]
