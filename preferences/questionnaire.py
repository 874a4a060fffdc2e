"""The two questionnaires of a usability study, and their published scores.

Load: the six rating scales of the NASA Task Load Index (Hart & Staveland 1988), each with 21 marks from 0 to 100, with
the questions and end points of NASA's paper form. The scales are not weighted. The score is their mean, the "raw TLX"
(Hart 2006, "NASA-Task Load Index (NASA-TLX); 20 years later", Proceedings of the Human Factors and Ergonomics Society
50(9)); lower is better. Performance goes from perfect (0) to failure (100).

Usability: the ten statements of the System Usability Scale (Brooke 1996, "SUS: a quick and dirty usability scale", in
Usability Evaluation in Industry), word for word, each from 1 (strongly disagree) to 5 (strongly agree). Odd statements
praise, and even ones complain. The score is 2.5 · (Σ_odd (x - 1) + Σ_even (5 - x)), from 0 to 100; higher is better.

Both instruments may be used freely: NASA's is a work of the US government, and Brooke asks only that the source is
named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LOAD_STEP, MAX_LOAD = 5, 100
MIN_SUS, MAX_SUS = 1, 5


@dataclass(frozen=True)
class LoadScale:
    """One scale of the NASA-TLX: its name, its question, and what its two ends say."""

    name: str
    question: str
    low: str = "very low"
    high: str = "very high"


LOAD = (
    LoadScale("Mental demand", "How mentally demanding was the task?"),
    LoadScale("Physical demand", "How physically demanding was the task?"),
    LoadScale("Temporal demand", "How hurried or rushed was the pace of the task?"),
    LoadScale(
        "Performance", "How successful were you in accomplishing what you were asked to do?", "perfect", "failure"
    ),
    LoadScale("Effort", "How hard did you have to work to accomplish your level of performance?"),
    LoadScale("Frustration", "How insecure, discouraged, irritated, stressed, and annoyed were you?"),
)
SUS = (
    "I think that I would like to use this system frequently",
    "I found the system unnecessarily complex",
    "I thought the system was easy to use",
    "I think that I would need the support of a technical person to be able to use this system",
    "I found the various functions in this system were well integrated",
    "I thought there was too much inconsistency in this system",
    "I would imagine that most people would learn to use this system very quickly",
    "I found the system very cumbersome to use",
    "I felt very confident using the system",
    "I needed to learn a lot of things before I could get going with this system",
)
LOAD_CHOICES = tuple(range(0, MAX_LOAD + 1, LOAD_STEP))
SUS_CHOICES = tuple(range(MIN_SUS, MAX_SUS + 1))


def load_score(ratings: Sequence[int]) -> float:
    """Returns the raw TLX, 0 (least load) to 100. Raises: as `require_load`."""
    require_load(ratings)
    return sum(ratings) / len(LOAD)


def sus_score(ratings: Sequence[int]) -> float:
    """Returns the score of the System Usability Scale, 0 to 100 (best). Raises: as `require_sus`."""
    require_sus(ratings)
    return 2.5 * sum(rating - 1 if index % 2 == 0 else 5 - rating for index, rating in enumerate(ratings))


def require_load(ratings: Sequence[int]) -> None:
    """Raises: ValueError for a wrong number of ratings, or a rating that is not a mark of the scale."""
    if len(ratings) != len(LOAD) or not set(ratings) <= set(LOAD_CHOICES):
        raise ValueError(
            f"load is {list(ratings)}; {len(LOAD)} numbers from 0 to {MAX_LOAD} in steps of {LOAD_STEP} were expected"
        )


def require_sus(ratings: Sequence[int]) -> None:
    """Raises: ValueError for a wrong number of ratings, or a rating outside 1 to 5."""
    if len(ratings) != len(SUS) or not set(ratings) <= set(SUS_CHOICES):
        raise ValueError(f"sus is {list(ratings)}; {len(SUS)} numbers from {MIN_SUS} to {MAX_SUS} were expected")
