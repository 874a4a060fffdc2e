"""How many examples a property is tried with."""

from typing import Any

import hypothesis

takes_all = False  # set by tests/conftest.py before tests are imported


def examples(number: int, **options: Any) -> hypothesis.settings:
    """As a decorator: so many examples with `pytest --all`, and a quarter of them (at least five) without."""
    tried = number if takes_all else min(number, max(5, number // 4))
    return hypothesis.settings(max_examples=tried, deadline=None, **options)
