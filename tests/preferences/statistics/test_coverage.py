"""The intervals of a lead's page cover the known properties of scripted labelers at their nominal rate."""

import pytest

from benchmarks.known_labelers import Size
from benchmarks.label_coverage import (
    FEW_PROMPTS,
    NOISES,
    TEAMS,
    coverage,
    differing_tasks,
    few_prompts,
    few_tasks,
    team_results,
)

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
    assert len(shares) == 10
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


@pytest.mark.parametrize("shape", FEW_PROMPTS)
@pytest.mark.parametrize("noise", NOISES)
def test_alphas_of_few_prompts_are_covered(shape, noise):
    """With 500 worlds the standard error is 1%. The percentile bootstrap covered 88% to 93% with 8 and 15 prompts."""
    for what, found in few_prompts(shape, noise, num_worlds=500, seed=20_000).items():
        assert found.share > 0.92, what
        assert abs(found.bias) < 0.1 * found.width, what


@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("num_labelers", [2, 5])
def test_agreement_with_others_is_covered_whatever_the_tasks_difficulty(num_labelers, spread):
    """With 500 worlds the standard error is 1%, or .7% where labelers differ."""
    assert 0.93 < differing_tasks(num_labelers, 60, spread, num_worlds=500, seed=2).share < 0.98


def test_what_reversing_labelers_would_win_and_lose():
    """The table in docs/labels-quality.md: reversing a labeler who is upside down helps; a misled majority harms."""
    gains = {}
    for name, team in TEAMS.items():
        _, cut, reversed_ = team_results(team, num_worlds=40, seed=2)
        gains[name] = reversed_ - cut
    assert gains["4 at 0.8, 1 upside down (0.1), 200 × 3"] > 0.03
    assert gains["4 misled on 60% of pairs, 3 good, 300 × 3"] < -0.005
