"""Sets the number of examples for property tests."""

from typing import Any

import hypothesis

share = 0.25  # of the numbers that tests ask for, or 1; set by tests/conftest.py before tests are imported


def examples(number: int, **options: Any) -> hypothesis.settings:
    """Returns a decorator: `number` examples with `pytest --nightly`, else a quarter of them, at least five."""
    tried = min(number, max(5, int(number * share)))
    return hypothesis.settings(max_examples=tried, deadline=None, **options)
