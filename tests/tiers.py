"""Chooses the variants of a test that CI runs, where one program computes all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def in_ci(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Returns values for `parametrize`. Those that are not in `chosen` run only in the nightly tests."""
    every, kept = [*values], [*chosen]
    assert all(value in every for value in kept), (every, kept)  # else CI would try fewer than it says, or none
    return [value if value in kept else pytest.param(value, marks=pytest.mark.nightly) for value in every]


def tried(request: pytest.FixtureRequest, name: str) -> list[str]:
    """Returns the values, as text, that a parameter has in this run's tests in the fixture's file."""
    of_file = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    found = [str(of_test.params[name]) for of_test in of_file if of_test is not None and name in of_test.params]
    return [*dict.fromkeys(found)]
