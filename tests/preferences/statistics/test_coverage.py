"""The intervals of a lead's page cover the known properties of scripted labelers at their nominal rate."""

import pytest

from benchmarks.known_labelers import Size
from benchmarks.label_coverage import coverage, few_tasks

pytestmark = pytest.mark.long

NUM_WORLDS, SIZE = 150, Size(num_ordinary=60, num_gold=24, num_repeats=24)

# With 150 worlds, a coverage of 95% has a standard error of 1.8% (less where five labelers are counted). The worlds are
# fixed by their seed, so the test is deterministic; `python -m benchmarks.label_coverage` runs 2,000.
LEAST, MOST = 0.915, 0.985


@pytest.fixture(scope="module")
def covered():
    return coverage(NUM_WORLDS, seed=10_000, size=SIZE)


def test_intervals_cover_as_often_as_they_say(covered):
    shares = {what: round(found.share, 3) for what, found in covered.items()}
    assert len(shares) == 13
    assert {what: share for what, share in shares.items() if not LEAST <= share <= MOST} == {}


def test_estimates_are_unbiased(covered):
    """Far less than the width of an interval; the median is in milliseconds."""
    for what, found in covered.items():
        assert abs(found.bias) < 0.05 * found.width, what


def test_few_gold_tasks_are_covered_too():
    """With few tasks, intervals for pairs are too wide rather than wrong; with four responses they are closer to
    95%."""
    for num_tasks in (5, 20):
        for noise, careless in ((0.15, 0.0), (0.5, 0.0), (0.15, 0.2)):
            for num_responses in (2, 4):
                found = few_tasks(num_tasks, num_responses, noise, careless, num_labelers=1_000, seed=0)
                assert found.share > 0.92, (num_tasks, num_responses, noise, careless)
    assert few_tasks(20, 4, 0.5, 0.0, num_labelers=1_000, seed=0).width < 0.16
