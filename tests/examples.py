"""Sets the number of examples for property tests, and whether they are the same in every run."""

from collections.abc import Collection
from typing import Any

import hypothesis

share = 0.1  # of the numbers that tests ask for, or 1; set by tests/conftest.py before tests are imported


def examples(
    number: int, *, suppress_health_check: Collection[hypothesis.HealthCheck] = (), **options: Any
) -> hypothesis.settings:
    """Returns a decorator: `number` examples with `pytest --nightly`, else a tenth of them, at least five.

    Only the nightly tests draw other examples in every run: a change is not to fail in CI because of an example that
    has to do with something else. How long examples take to draw depends on the machine's load.
    """
    tried, is_nightly = min(number, max(5, int(number * share))), share == 1
    unchecked = {hypothesis.HealthCheck.too_slow, *suppress_health_check}
    options = {"derandomize": not is_nightly} | options
    return hypothesis.settings(
        max_examples=tried, deadline=None, suppress_health_check=tuple(unchecked), print_blob=True, **options
    )
