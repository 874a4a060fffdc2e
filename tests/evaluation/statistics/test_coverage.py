"""The intervals of a comparison cover planted effects, and p-values are uniform if there is none.

`python -m benchmarks.compare_coverage` runs 2,000 worlds. With 120, a coverage of 95% has a standard error of 2%; the
worlds are fixed by their seed, so the tests are deterministic.
"""

import pytest
from scipy import stats

from benchmarks import compare_worlds, dependent_worlds
from benchmarks.compare_coverage import coverage, p_values

pytestmark = pytest.mark.long

LEAST, MOST = 0.89, 0.995


@pytest.fixture(autouse=True)
def _few_permutations(monkeypatch):
    monkeypatch.setattr("evaluation.statistics.significance.NUM_PERMUTATIONS", 1_000)


def shares(draw, num_prompts, num_worlds=120):
    found = coverage(draw, num_prompts, num_worlds, seed=0)
    return {what: round(covered.share, 3) for what, covered in found.items()}


@pytest.mark.nightly
def test_win_rates():
    found = shares(compare_worlds.win_rates, 20)
    # Wilson's interval with few losses covers 91 to 98%, depending on the rate.
    discrete = found.pop("0.90, no ties"), found.pop("0.95, no ties")
    assert len(found) == 12
    assert {what: share for what, share in found.items() if not LEAST <= share <= MOST} == {}
    assert min(discrete) > 0.87


@pytest.mark.nightly
def test_labelers_who_differ_are_covered_by_the_interval_over_labelers_only():
    found = shares(compare_worlds.over_labelers, 40, 80)
    assert all(share >= 0.87 for what, share in found.items() if "prompts only" not in what), found
    assert found["5 labelers, λ = 0.2: prompts only"] < 0.8


def test_ratings():
    found = shares(compare_worlds.ratings, 20, 50)
    assert all(share >= 0.88 for share in found.values()), found


def test_two_policies_far_apart():
    """With 20 prompts, one world in eight has no loss."""
    found = shares(compare_worlds.two_policies, 20)
    assert {what: share for what, share in found.items() if not LEAST <= share <= MOST} == {}


def test_length_controlled_win_rates():
    found = shares(compare_worlds.lengths, 30, 60)
    assert {what: share for what, share in found.items() if share < 0.87} == {}


def test_position_bias():
    found = shares(compare_worlds.positions, 20, 50)
    assert {what: share for what, share in found.items() if share < 0.86} == {}


def test_flips_and_agreement():
    found = shares(compare_worlds.flipped, 30, 60)
    assert all(share >= 0.86 for share in found.values()), found


def test_resampling_rows_covers_too_seldom_and_prompts_do_not():
    rows, prompts, ours = shares(compare_worlds.rows_or_prompts, 100, 100).values()
    assert rows < 0.8
    assert prompts > 0.9
    assert ours > 0.9


@pytest.mark.parametrize("num_prompts", [12, 60])
def test_p_is_uniform_where_policies_are_equal(num_prompts):
    p_W = p_values(num_prompts, 0, 200, seed=0)
    assert stats.kstest(p_W, "uniform").pvalue > 0.05
    assert stats.kstest(p_values(num_prompts, 0, 200, seed=0) ** 1.5, "uniform").pvalue < 0.001


@pytest.mark.nightly
def test_templates_are_covered_if_they_are_clusters():
    found = shares(dependent_worlds.templates, 10, 40)
    clustered = {what: share for what, share in found.items() if what.endswith(": clustered")}
    assert len(clustered) == 13
    assert {what: share for what, share in clustered.items() if share < 0.85} == {}
    assert found["win rate 0.5, ρ = 0.5: as if independent"] < 0.9


@pytest.mark.nightly
def test_algorithms_are_covered_over_seeds():
    found = shares(dependent_worlds.seeds, 3, 40)
    ours = {what: share for what, share in found.items() if "one run of each" not in what}
    assert len(ours) == 11
    assert {what: share for what, share in ours.items() if share < 0.85} == {}
    assert found["win rate, σ = 0.6, μ = 0: one run of each, over prompts"] < 0.5
