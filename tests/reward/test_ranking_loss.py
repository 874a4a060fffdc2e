"""The ranking loss by hand and against a double loop."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reward.objective import davidson_loss, ranking_loss, rating_loss
from tests.examples import examples

Loss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def looped(scores: list[float], ranks: list[int]) -> tuple[float, float]:
    """Loss and accuracy of one comparison, pair by pair."""
    losses, right = [], []
    for i, j in itertools.combinations(range(len(ranks)), 2):
        chance = 0.5 if ranks[i] == ranks[j] else float(ranks[i] < ranks[j])
        difference = scores[i] - scores[j]
        losses.append(chance * softplus(-difference) + (1 - chance) * softplus(difference))
        if ranks[i] != ranks[j]:
            right.append(difference > 0 if ranks[i] < ranks[j] else difference < 0)
    assert len(losses) == math.comb(len(ranks), 2)
    return sum(losses) / len(losses), sum(right) / len(right) if right else 0.5


comparison = st.integers(2, 6).flatmap(
    lambda K: st.tuples(
        st.lists(st.floats(-8, 8, width=32), min_size=K, max_size=K),
        st.lists(st.integers(1, 4), min_size=K, max_size=K),
    )
)


@examples(200)
@given(comparisons=st.lists(comparison, min_size=1, max_size=5), padding=st.floats(-50, 50, width=32))
def test_loss_and_accuracy_equal_a_double_loop(
    comparisons: list[tuple[list[float], list[int]]], padding: float
) -> None:
    widest = max(len(ranks) for _, ranks in comparisons)
    scores_BK = torch.tensor([[*scores, *[padding] * (widest - len(scores))] for scores, _ in comparisons])
    ranks_BK = torch.tensor([[*ranks, *[0] * (widest - len(ranks))] for _, ranks in comparisons])
    loss_B, accuracy_B = ranking_loss(scores_BK, ranks_BK)
    expected = [looped(scores, ranks) for scores, ranks in comparisons]
    assert loss_B.tolist() == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert accuracy_B.tolist() == pytest.approx([accuracy for _, accuracy in expected], abs=1e-6)


def test_a_pair_by_hand() -> None:
    # -log σ(2) = log(1 + e^-2); the worse one scored higher costs 2 more.
    better, worse = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    loss, accuracy = ranking_loss(
        torch.tensor([[3.0, 1.0], [1.0, 3.0], [3.0, 1.0]]), torch.tensor([[1, 2], [1, 2], [1, 1]])
    )
    assert loss.tolist() == pytest.approx([better, worse, (better + worse) / 2], abs=1e-6)
    assert accuracy.tolist() == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("K", [2, 4, 9])
def test_equal_scores_cost_log_2_whatever_k(K: int) -> None:
    loss, _ = ranking_loss(torch.zeros(1, K), torch.arange(1, K + 1)[None])
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)


def test_every_pair_pulls_once_with_weight_one_over_their_number() -> None:
    scores = torch.zeros(1, 4, requires_grad=True)
    loss, _ = ranking_loss(scores, torch.tensor([[3, 1, 4, 2]]))
    loss.sum().backward()
    # At equal scores each of the 6 pairs pulls its winner up by ½; wins minus losses are -1, 3, -3, 1.
    assert scores.grad is not None
    assert scores.grad[0].tolist() == pytest.approx([-x * 0.5 / 6 for x in (-1, 3, -3, 1)], abs=1e-7)


def test_a_common_shift_and_padding_change_nothing() -> None:
    scores, ranks = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([[2, 1, 2]])
    loss, accuracy = ranking_loss(scores, ranks)
    shifted, _ = ranking_loss(scores + 7, ranks)
    wide = torch.tensor([[0.3, -1.0, 2.0, 99.0]], requires_grad=True)
    padded, padded_accuracy = ranking_loss(wide, torch.tensor([[2, 1, 2, 0]]))
    torch.testing.assert_close(shifted, loss)
    torch.testing.assert_close(padded.detach(), loss)
    torch.testing.assert_close(padded_accuracy, accuracy)
    padded.sum().backward()
    assert wide.grad is not None
    assert float(wide.grad[0, 3]) == 0.0


def test_a_tie_in_scores_is_no_right_answer() -> None:
    _, accuracy = ranking_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[1, 2]]))
    assert float(accuracy) == 0.0


def davidson_looped(scores: list[float], ranks: list[int], nu: float) -> float:
    """Davidson's three probabilities from the strengths, pair by pair."""
    losses = []
    for i, j in itertools.combinations(range(len(ranks)), 2):
        first, second = math.exp(scores[i]), math.exp(scores[j])
        tie = nu * math.sqrt(first * second)
        seen = tie if ranks[i] == ranks[j] else first if ranks[i] < ranks[j] else second
        losses.append(-math.log(seen / (first + second + tie)))
    return sum(losses) / len(losses)


@examples(100)
@given(comparisons=st.lists(comparison, min_size=1, max_size=4), log_nu=st.floats(-6, 4, width=32))
def test_davidsons_loss_equals_a_double_loop(comparisons: list[tuple[list[float], list[int]]], log_nu: float) -> None:
    widest = max(len(ranks) for _, ranks in comparisons)
    scores_BK = torch.tensor([[*scores, *[9.0] * (widest - len(scores))] for scores, _ in comparisons])
    ranks_BK = torch.tensor([[*ranks, *[0] * (widest - len(ranks))] for _, ranks in comparisons])
    loss_B, accuracy_B = davidson_loss(scores_BK, ranks_BK, torch.full((len(comparisons),), log_nu))
    expected = [davidson_looped(scores, ranks, math.exp(log_nu)) for scores, ranks in comparisons]
    assert loss_B.tolist() == pytest.approx(expected, abs=2e-5)
    assert torch.equal(accuracy_B, ranking_loss(scores_BK, ranks_BK)[1])


def test_davidson_by_hand() -> None:
    # Equal strengths with ν = 2: the outcomes weigh 1, 2, 1, so a tie has probability ½ and a win ¼.
    loss, _ = davidson_loss(torch.zeros(2, 2), torch.tensor([[1, 1], [1, 2]]), torch.full((2,), math.log(2)))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4)], abs=1e-6)
    # Strengths 4 and 1 with ν = ½: 4, ½·2 = 1 and 1, of 6.
    scores = torch.tensor([[math.log(4), 0.0]]).expand(3, 2)
    loss, _ = davidson_loss(scores, torch.tensor([[1, 2], [1, 1], [2, 1]]), torch.full((3,), math.log(0.5)))
    assert loss.tolist() == pytest.approx([math.log(6 / 4), math.log(6), math.log(6)], abs=1e-6)


def test_davidson_without_ties_is_bradley_and_terry() -> None:
    scores, ranks = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([[2, 1, 3]])
    bradley_terry, _ = ranking_loss(scores, ranks)
    loss, _ = davidson_loss(scores, ranks, torch.tensor([-30.0]))
    torch.testing.assert_close(loss, bradley_terry)


def test_davidsons_gradient_by_hand() -> None:
    """For log ν it is expected minus observed ties; for a score, expected minus observed wins, a tie counting half."""
    scores = torch.tensor([[math.log(4), 0.0]], requires_grad=True)
    log_nu = torch.tensor([math.log(0.5)], requires_grad=True)
    for ranks, seen_tie, seen_share in ((([1, 1]), 1, 0.5), (([1, 2]), 0, 1.0), (([2, 1]), 0, 0.0)):
        loss, _ = davidson_loss(scores, torch.tensor([ranks]), log_nu)
        of_scores, of_nu = torch.autograd.grad(loss.sum(), [scores, log_nu])
        assert float(of_nu) == pytest.approx(1 / 6 - seen_tie, abs=1e-6)
        assert float(of_scores[0, 0]) == pytest.approx(4 / 6 + 0.5 * 1 / 6 - seen_share, abs=1e-6)


def test_ratings_by_hand_and_whatever_a_labeler_adds_to_all() -> None:
    nan = math.nan
    scores = torch.tensor([[2.0, 0.0, 1.0], [2.0, 0.0, 5.0], [1.0, 2.0, 3.0]], requires_grad=True)
    ratings = torch.tensor([[6.0, 2.0, 4.0], [3.0, 1.0, nan], [nan, nan, nan]])
    # Centred: ratings (2, -2, 0) against 3 · (1, -1, 0); (1, -1) against 3 · (1, -1); nothing.
    scale = torch.tensor([3.0, 3.0, 3.0])
    loss = rating_loss(scores, ratings, scale)
    assert loss.tolist() == pytest.approx([0.5 * (1 + 1 + 0) / 3, 0.5 * (4 + 4) / 2, 0.0])
    torch.testing.assert_close(rating_loss(scores + 4, ratings - 2.5, scale), loss)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert torch.isfinite(gradient).all()
    assert gradient[1, 2] == 0
    assert not gradient[2].any()
    # Its gradient for a score is -a · (error of the response less the mean error) / K.
    assert gradient[0].tolist() == pytest.approx([3 * 1 / 3, -3 * 1 / 3, 0.0], abs=1e-6)


@pytest.mark.parametrize("loss_of", [ranking_loss, lambda s, r: davidson_loss(s, r, torch.zeros(len(s)))])
def test_a_comparison_of_one_response_has_no_loss_and_padding_is_not_computed_with(loss_of: Loss) -> None:
    scores = torch.tensor([[1.0, math.nan, math.inf], [0.5, -0.5, -math.inf]], requires_grad=True)
    loss, accuracy = loss_of(scores, torch.tensor([[1, 0, 0], [1, 2, 0]]))
    alone, _ = loss_of(torch.tensor([[0.5, -0.5]]), torch.tensor([[1, 2]]))
    assert loss.tolist() == [0.0, pytest.approx(float(alone))]
    assert accuracy.tolist() == [0.5, 1.0]
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert scores.grad[0].tolist() == [0.0, 0.0, 0.0]
    single, _ = loss_of(torch.tensor([[1.0]]), torch.tensor([[1]]))
    assert single.tolist() == [0.0]
