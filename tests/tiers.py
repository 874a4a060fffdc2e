"""Which variants of a test CI tries, where one program computes all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def in_ci(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`; those that are not chosen are left to the nightly tests."""
    every, kept = [*values], [*chosen]
    assert all(value in every for value in kept), (every, kept)  # else CI would try fewer than it says, or none
    return [value if value in kept else pytest.param(value, marks=pytest.mark.nightly) for value in every]


def tried(request: pytest.FixtureRequest, name: str) -> list[str]:
    """The values of a parameter, as text, in the tests of the fixture's file that this run of pytest has."""
    of_file = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    found = [str(of_test.params[name]) for of_test in of_file if of_test is not None and name in of_test.params]
    return [*dict.fromkeys(found)]
