"""How many examples a property is tried with."""

from typing import Any

import hypothesis

share = 0.25  # of the numbers that properties name, or 1; set by tests/conftest.py before tests are imported


def examples(number: int, **options: Any) -> hypothesis.settings:
    """As a decorator: so many examples with `pytest --nightly`, else a quarter, at least five."""
    tried = min(number, max(5, int(number * share)))
    return hypothesis.settings(max_examples=tried, deadline=None, **options)
