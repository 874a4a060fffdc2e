"""Best-of-n against enumerating every subset and against drawing."""

import itertools
import math

import numpy as np
import pytest

from evaluation.measures.best_of_n import best_of_n_expected, best_of_n_kl


def enumerate_subsets(gold, proxy, n):
    """The mean gold score, over all subsets of n, of the proxy's favourite; ties are shared."""
    outcomes = []
    for subset in itertools.combinations(range(len(gold)), n):
        best = max(proxy[i] for i in subset)
        outcomes.append(np.mean([gold[i] for i in subset if proxy[i] == best]))
    return np.mean(outcomes)


@pytest.mark.parametrize("num_values", [1_000_000, 3, 1], ids=["no ties", "ties", "all tied"])
def test_every_n_equals_enumeration(num_values):
    generator = np.random.default_rng(num_values)
    gold = generator.normal(size=(4, 9))
    proxy = generator.integers(0, num_values, size=(4, 9)).astype(float)
    expected = best_of_n_expected(gold, proxy)
    assert expected.shape == (4, 9)
    for prompt, n in itertools.product(range(4), range(1, 10)):
        assert expected[prompt, n - 1] == pytest.approx(enumerate_subsets(gold[prompt], proxy[prompt], n))


def test_equal_proxies_at_a_row_border_stay_apart():
    # The last sample of prompt 0 and the first of prompt 1 have the same proxy score, but do not tie.
    expected = best_of_n_expected([[0.0, 1.0], [10.0, 20.0]], [[1.0, 5.0], [5.0, 9.0]])
    np.testing.assert_allclose(expected, [[0.5, 1.0], [15.0, 20.0]])


def test_by_hand_when_the_proxy_is_wrong():
    # Gold 3, 2, 1 for proxy 1, 2, 3. n = 2: subsets {3,2} -> 2, {3,1} -> 1, {2,1} -> 1.
    np.testing.assert_allclose(best_of_n_expected([[3.0, 2.0, 1.0]], [[1.0, 2.0, 3.0]]), [[2.0, 4 / 3, 1.0]])


def test_a_large_pool_stays_exact():
    # For gold = proxy = 1..N the expected maximum of n drawn is n (N + 1) / (n + 1).
    pool = np.arange(1.0, 1001.0)[None, :]
    n = np.arange(1, 1001)
    np.testing.assert_allclose(best_of_n_expected(pool, pool)[0], n * 1001 / (n + 1), rtol=1e-9)


def test_refusals_name_the_field():
    with pytest.raises(ValueError, match="gold has shape"):
        best_of_n_expected([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"proxy\[1\]"):
        best_of_n_expected(np.zeros((2, 2)), [[0.0, 1.0], [float("nan"), 1.0]])


def test_kl_is_an_upper_bound_near_exact_for_many_outcomes():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(4) == pytest.approx(math.log(4) - 0.75)
    assert best_of_n_kl(64) == pytest.approx(3.1745, abs=1e-3)

    def exact(n, num_outcomes):  # uniform outcomes ranked without ties: P(best is k) = ((k+1)^n - k^n) / m^n
        edges = (np.arange(num_outcomes + 1) / num_outcomes) ** n
        chance = np.diff(edges)
        return float(np.sum(chance[chance > 0] * np.log(chance[chance > 0] * num_outcomes)))

    assert exact(64, 2) == pytest.approx(0.693, abs=1e-3)  # far below the bound
    assert exact(4, 10_000) == pytest.approx(best_of_n_kl(4), abs=1e-3)
    assert exact(4, 10_000) <= best_of_n_kl(4)
    with pytest.raises(ValueError, match="n is 0"):
        best_of_n_kl(0)


def test_the_bound_holds_for_every_draw_written_down():
    """Three draws of four outcomes, two of them tied; the tie goes to whichever was drawn first."""
    chance, score = np.array([0.1, 0.4, 0.3, 0.2]), [2.0, 5.0, 1.0, 5.0]
    kept = np.zeros(4)
    for drawn in itertools.product(range(4), repeat=3):
        kept[max(drawn, key=lambda outcome: score[outcome])] += np.prod(chance[list(drawn)])
    assert kept.sum() == pytest.approx(1)
    assert 0 < float((kept * np.log(kept / chance)).sum()) < best_of_n_kl(3)
