"""What the errors of the hub's clients come to."""

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from files.hub_errors import OFFLINE, REFUSED, UNREACHABLE, hub_reason

ABSENT = type("DatasetNotFoundError", (FileNotFoundError,), {})("gone")


def wrapped() -> OSError:
    """As `datasets` wraps an error of the hub's client."""
    try:
        raise ConnectionError("no route")
    except ConnectionError as cause:
        error = OSError("Couldn't reach it")
        error.__cause__ = cause
        return error


@pytest.mark.parametrize(
    ("error", "online", "offline"),
    [
        (LocalEntryNotFoundError("a\nlong story"), UNREACHABLE, OFFLINE),
        (wrapped(), UNREACHABLE, OFFLINE),
        (ABSENT, REFUSED, OFFLINE),
        (ValueError("Unknown split\n'dev'"), "ValueError: Unknown split 'dev'", "ValueError: Unknown split 'dev'"),
    ],
)
def test_an_error_has_a_reason_in_a_line(
    error: Exception, online: str, offline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert hub_reason(error) == online
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_reason(error) == offline
