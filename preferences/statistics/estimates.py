"""An estimate with its interval. All intervals here are 95%."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its interval, in the unit of the values. `low` and `high` are NaN for a single prompt."""

    mean: float
    low: float
    high: float

    def __neg__(self) -> "Interval":
        return Interval(-self.mean, -self.high, -self.low)

    def as_dict(self) -> dict[str, float | None]:
        """Returns the numbers for JSON: NaN (unknown) becomes None."""
        return without_nan(asdict(self))


UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Share:
    """A share of comparisons of two responses, from 0 to 1, with a 95% interval.

    It counts `num_pairs` comparisons from `num_tasks` tasks. Unknown values are NaN: `mean`, `low` and `high` if
    nothing was compared; `low` and `high` if an interval is bootstrapped from a single prompt.
    """

    mean: float
    low: float
    high: float
    num_pairs: int
    num_tasks: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Returns the numbers for JSON: NaN becomes None."""
        return without_nan(asdict(self))


def without_nan(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces NaN, which JSON lacks, with None."""
    return {
        name: None if isinstance(number, float) and math.isnan(number) else number for name, number in numbers.items()
    }
