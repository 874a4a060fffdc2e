"""Ratings against choix and properties that must hold.

The expected numbers are from choix 0.4 (`opt_pairwise`, alpha=0, of the wins below).
"""

import math

import numpy as np
import pytest
from scipy import special, stats

from benchmarks.compare_worlds import comparisons
from evaluation.statistics.ratings import ALL_TIED, islands_of, rate
from evaluation.statistics.win_rates import prompt_means

WINS = np.array([[0, 7, 9, 4], [3, 0, 6, 5], [1, 4, 0, 2], [6, 5, 8, 0]])  # wins of the row over the column
CHOIX = [0.0, -0.6586452, -1.46859776, -0.11291925]


def games(rows):
    """Makes comparisons from rows (a, b, preference for a, prompt)."""
    a_V, b_V, won_V, prompt_V = (np.array(column) for column in zip(*rows, strict=True))
    return comparisons(won_V.astype(np.float64), prompt_V.astype(np.int64), pairs=(a_V, b_V))


def won(*pairs, times=1):
    """Makes rows in which the first of each pair wins, one prompt per row."""
    return [(a, b, 1.0, number) for number, (a, b) in enumerate([pair for pair in pairs for _ in range(times)])]


def everything():
    return won(*((a, b) for a in range(4) for b in range(4) for _ in range(WINS[a, b])))


def values(ratings):
    return [rating.value for rating in ratings.policies]


def test_bradley_terry_agrees_with_choix():
    found = rate(games(everything()), anchor="p0", seed=0)
    assert values(found) == pytest.approx(CHOIX, abs=1e-6)
    assert not found.shrunk


def test_independent_prompts_have_the_sandwich_near_the_inverse_information():
    """Two policies against a third, with one verdict per prompt: the standard error is 1/√(n·p·(1-p)) with n = 50
    prompts each, times CR3's factor, n/(n-1)·√((2n-1)/2n)."""
    rows = [(a, 1, float(n < 30), 50 * place + n) for place, a in enumerate((0, 2)) for n in range(50)]
    found = rate(games(rows), anchor="p1", seed=0).policies[0]
    error = math.sqrt(1 / (50 * 0.6 * 0.4) * (50 / 49) ** 2 * 99 / 100)
    assert (found.high - found.low) / 2 == pytest.approx(1.98422 * error, rel=1e-4)


@pytest.mark.parametrize(("wins", "losses"), [(45, 5), (12, 8), (20, 0), (1, 0)])
def test_of_two_policies_the_interval_is_wilsons_in_log_odds(wins, losses):
    rows = [(0, 1, float(n < wins), n) for n in range(wins + losses)]
    first, second = rate(games(rows), anchor="p1", seed=0).policies
    num = wins + losses
    # Wilson's with the critical value of the exact test: that of the most wins that show no difference.
    undecided = max(k for k in range(num + 1) if stats.binomtest(k, num).pvalue >= 0.05)
    level = 1 - 2 * stats.norm.sf(max(stats.norm.isf(0.025), (2 * undecided - num) / num**0.5))
    expected = stats.binomtest(wins, num).proportion_ci(level, method="wilson")
    assert (first.low, first.high) == pytest.approx((special.logit(expected.low), special.logit(expected.high)))
    assert (second.low, second.high) == (0, 0)
    assert first.low < first.value < first.high
    is_ahead = expected.low > 0.5
    assert (first.worst_rank, second.best_rank) == ((1, 2) if is_ahead else (2, 1))


def test_of_two_policies_it_is_the_logit_of_the_win_rate():
    rows = [(0, 1, 1.0, 0), (0, 1, 0.5, 0), (0, 1, 0.2, 1), (1, 0, 0.1, 2), (0, 1, 1.0, 2), (0, 1, 0.0, 3)]
    found = rate(games(rows), anchor="p1", seed=0)
    mean = prompt_means(games(rows).between(0, 1)).mean()
    assert values(found) == pytest.approx([special.logit(mean), 0.0])


def test_copies_of_a_prompts_verdicts_do_not_narrow_the_interval():
    once = rate(games(everything()), anchor="p0", seed=0)
    often = rate(games([row for row in everything() for _ in range(3)]), anchor="p0", seed=0)
    assert often == once


def test_ratings_from_their_mean():
    centred = rate(games(everything()), anchor="", seed=0)
    assert sum(values(centred)) == pytest.approx(0)
    assert np.diff(values(centred)) == pytest.approx(np.diff(CHOIX), abs=1e-6)
    assert all(rating.low < rating.value < rating.high for rating in centred.policies)


def test_the_anchor_is_0_and_its_choice_only_shifts():
    other = rate(games(everything()), anchor="p2", seed=0)
    assert (other.policies[2].low, other.policies[2].value, other.policies[2].high) == (0, 0, 0)
    assert values(other) == pytest.approx(np.array(CHOIX) - CHOIX[2], abs=1e-6)
    of_first = rate(games(everything()), anchor="p0", seed=0)
    assert (other.policies[0].low, other.policies[0].high) == pytest.approx(
        (-of_first.policies[2].high, -of_first.policies[2].low)
    )


def test_islands_are_named_and_refused():
    found = rate(games(won((0, 1), (2, 3), (3, 2), (1, 0))), anchor="p0", seed=0)
    assert found.policies == ()
    assert found.islands == (("p0", "p1"), ("p2", "p3"))
    assert found.reason == "no verdict connects these groups of policies: p0, p1; p2, p3"


def test_a_policy_without_verdicts_is_an_island():
    assert islands_of(4, np.array([3]), np.array([0])) == ((0, 3), (1,), (2,))


def test_a_policy_that_never_lost_has_no_upper_end():
    rows = won((0, 1), (1, 0), (0, 2), times=20)
    found = rate(games(rows), anchor="p1", seed=0)
    first, _, last = found.policies
    assert found.shrunk
    assert (first.unbounded, last.unbounded) == ("", "below")
    assert last.low == -math.inf
    assert -4.5 < last.value < last.high < -0.5  # twenty losses, plus the prior's half a win and half a loss
    assert -1.5 < first.low < first.value < first.high < 1.5
    assert last.best_rank == last.worst_rank == 3


def test_all_wins_of_two_policies():
    winner = rate(games(won((0, 1), times=20)), anchor="p1", seed=0).policies[0]
    assert winner.value == pytest.approx(math.log(20.5 / 0.5))
    assert (winner.unbounded, winner.high) == ("above", math.inf)
    assert special.expit(winner.low) == pytest.approx(0.8389, abs=1e-4)  # Wilson's lower end for 20 of 20
    assert (winner.best_rank, winner.worst_rank) == (1, 1)


def test_where_no_chain_of_wins_tells_both_ends_are_open():
    """Both always beat the third and never met each other."""
    found = rate(games(won((0, 2), (1, 2), times=30)), anchor="p0", seed=0)
    assert [rating.unbounded for rating in found.policies] == ["", "both", "below"]
    assert [(rating.best_rank, rating.worst_rank) for rating in found.policies][:2] == [(1, 2), (1, 2)]


def test_ties_alone_give_no_ratings():
    pairs = [(0, 1), (1, 2), (0, 2)]
    for rows in ([(0, 1, 0.5, n) for n in range(10)], [(*pair, 0.5, n) for n in range(10) for pair in pairs]):
        found = rate(games(rows), anchor="p0", seed=0)
        assert (found.policies, len(found.islands), found.reason) == ((), 1, ALL_TIED)


def test_prompts_that_came_out_alike_leave_no_spread():
    """Every prompt says that p0 beats p1, p1 beats p2 and p2 beats p0: nothing is sure, though residuals add up to
    0."""
    rows = [(a, b, 1.0, n) for n in range(10) for a, b in ((0, 1), (1, 2), (2, 0))]
    found = rate(games(rows), anchor="p0", seed=0).policies
    assert (found[0].low, found[0].high) == (0, 0)
    assert np.isnan([found[1].low, found[1].high, found[2].low]).all()
    assert [(rating.best_rank, rating.worst_rank) for rating in found] == [(1, 3)] * 3


def test_rank_ranges_overlap_unless_the_difference_is_sure():
    close = rate(games(everything()), anchor="p0", seed=0)
    assert (close.policies[0].best_rank, close.policies[0].worst_rank) == (1, 3)
    rows = won((0, 1), times=95) + [(0, 1, 0.0, 95 + n) for n in range(5)]
    sure = rate(games(rows), anchor="p0", seed=0)
    assert [(rating.best_rank, rating.worst_rank) for rating in sure.policies] == [(1, 1), (2, 2)]


def test_one_prompt_has_values_and_of_three_policies_no_intervals():
    rows = [(a, b, won_by_a, 0) for a, b in ((0, 1), (1, 2), (0, 2)) for won_by_a in (1.0, 0.0)]
    found = rate(games(rows), anchor="p0", seed=0).policies[1]
    assert found.value == pytest.approx(0)
    assert np.isnan([found.low, found.high]).all()
    assert (found.best_rank, found.worst_rank) == (1, 3)
    of_two = rate(games(rows[:2]), anchor="p0", seed=0).policies[1]
    assert (of_two.low, of_two.high) == pytest.approx((-2.1613, 2.1613), abs=1e-4)  # for a win rate from .103 to .897


def test_refusals():
    with pytest.raises(ValueError, match="anchor is 'x'; one of p0, p1 was expected"):
        rate(games(won((0, 1))), anchor="x", seed=0)
    with pytest.raises(ValueError, match="no verdicts"):
        rate(games(won((0, 1))).where(np.array([False])), anchor="p0", seed=0)
