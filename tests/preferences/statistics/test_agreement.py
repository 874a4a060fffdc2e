"""Agreement between labelers and with the truth against counts by hand; Krippendorff's alpha against published and
hand-worked values and a loop version, and where it is undefined.
"""

import math
from itertools import combinations

import numpy as np
import pytest

from preferences.rankings import ranking_of
from preferences.records import Judgment, Message, Ranking, Task, dense_ranks
from preferences.statistics.agreement import (
    NO_OVERLAP,
    NO_VARIATION,
    Alpha,
    accuracy_against,
    ordinal_alpha,
    pairwise_agreement,
    ranking_alpha,
    rating_alpha,
)
from preferences.statistics.estimates import Z
from preferences.statistics.panel import Panel, count_pairs, pair_signs

# Krippendorff 2011, Computing Krippendorff's Alpha-Reliability, part C: four observers, twelve units; 0 is missing.
PUBLISHED = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3),
    (0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0),
)


# ---- agreement ----


def prompt_of(text):
    return (Message("user", text),)


def ranked(task_id, labeler, *ranks):
    return Ranking(task_id, prompt_of(task_id), tuple(f"{task_id}{i}" for i in range(len(ranks))), ranks, labeler)


def test_agreement_by_hand():
    rankings = [
        ranked("t1", "ann", 1, 2, 3),
        ranked("t1", "bob", 1, 3, 2),  # of 3 pairs: 01 same, 02 same, 12 not -> 2 of 3
        ranked("t2", "ann", 1, 1, 2),
        ranked("t2", "bob", 1, 2, 3),  # 01 is tied for ann; 02 and 12 same -> 2 of 2
        ranked("t3", "ann", 1, 2),  # judged once
        ranked("t4", "ann", 1, 1),
        ranked("t4", "bob", 1, 2),  # nothing left to compare
    ]
    result = pairwise_agreement(rankings)
    assert (result.mean, result.num_pairs, result.num_tasks) == (4 / 5, 5, 2)
    assert result.low < 2 / 3  # of two prompts
    assert result.high == pytest.approx(1.0, abs=0.05)


def test_three_labelers_make_three_comparisons():
    rankings = [ranked("t", "ann", 1, 2), ranked("t", "bob", 1, 2), ranked("t", "cy", 2, 1)]
    result = pairwise_agreement(rankings)
    assert (result.mean, result.num_pairs, result.num_tasks) == (1 / 3, 3, 1)
    assert result.low < 1 / 3 < result.high


def test_labelers_who_always_agree_have_an_interval_with_a_width():
    """Wilson's lower end for n of n is n / (n + z²); a pair of two responses counts as one."""
    rankings = [ranked(f"t{task}", name, 1, 2) for task in range(20) for name in ("ann", "bob")]
    agreement, accuracy = pairwise_agreement(rankings), accuracy_against(rankings, lambda _: [1.0, 0.0])
    assert (agreement.mean, agreement.low, agreement.high) == pytest.approx((1.0, 20 / (20 + 1.959964**2), 1.0))
    assert (accuracy.mean, accuracy.low, accuracy.high) == pytest.approx((1.0, 20 / (20 + 1.959964**2), 1.0))


def test_agreement_without_overlap_is_unknown():
    result = pairwise_agreement([ranked("t1", "ann", 1, 2), ranked("t2", "bob", 1, 2)])
    assert (result.num_pairs, result.num_tasks) == (0, 0)
    assert result.as_dict() == {"mean": None, "low": None, "high": None, "num_pairs": 0, "num_tasks": 0}


def test_rankings_of_other_responses_are_refused():
    other = Ranking("t", prompt_of("t"), ("x", "y"), (1, 2), "bob")
    with pytest.raises(ValueError, match="'t': responses differ"):
        pairwise_agreement([ranked("t", "ann", 1, 2), other])


def test_accuracy_by_hand_from_a_mapping_or_a_function():
    rankings = [
        ranked("t1", "ann", 1, 2, 3),  # truth 3 > 2 > 1: all 3 pairs right
        ranked("t1", "bob", 3, 2, 1),  # all 3 wrong
        ranked("t2", "ann", 1, 1, 2),  # untied in both: 02 right, 12 right
        ranked("t3", "ann", 2, 1),  # the truth ties them
    ]
    scores = {"t1": [3.0, 2.0, 1.0], "t2": [5.0, 4.0, 0.0], "t3": [1.0, 1.0]}
    result = accuracy_against(rankings, scores)
    assert (result.mean, result.num_pairs, result.num_tasks) == (5 / 8, 8, 2)
    assert accuracy_against(rankings, scores.__getitem__) == result


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "'t': scores has no entry"),
        ({"t": [1.0]}, "'t': scores has 1 entries for 2"),
        ({"t": [1.0, float("nan")]}, "'t': scores is"),
    ],
)
def test_accuracy_refuses_by_task(scores, message):
    with pytest.raises(ValueError, match=message):
        accuracy_against([ranked("t", "ann", 1, 2)], scores)


def test_a_known_noise_is_recovered():
    """Two labelers who each flip a pair with probability 0.2 agree on 0.8^2 + 0.2^2 = 0.68 of pairs."""
    generator = np.random.default_rng(0)
    rankings = [
        ranked(f"t{task}", name, *((2, 1) if generator.random() < 0.2 else (1, 2)))
        for task in range(1_500)
        for name in ("ann", "bob")
    ]
    agreement = pairwise_agreement(rankings)
    accuracy = accuracy_against(rankings, lambda _: [1.0, 0.0])
    assert agreement.low < 0.68 < agreement.high
    assert accuracy.low < 0.80 < accuracy.high
    assert agreement.high - agreement.low < 0.06


# ---- Krippendorff's alpha ----


def judged(labeler, task, *ranks, ratings=()):
    order = tuple(range(len(ranks)))
    return Judgment(task, labeler, 1, "answer", ranks, ratings, (), "", order, "1", 9_000, "test", 0.0)


def tasks_of(answers):
    sizes = {answer.task_id: len(answer.ranks) for answer in answers}
    return [
        Task(name, (Message("user", name),), tuple(f"r{place}" for place in range(size)), ("p",) * size)
        for name, size in sizes.items()
    ]


def alpha_of(*answers) -> Alpha:
    panel = Panel.of(tasks_of(answers), answers)
    return ranking_alpha(count_pairs(panel, pair_signs(panel.ranks_JK)), panel.prompt_T, sizes_of(panel))


def sizes_of(panel):
    return np.array([len(task.responses) for task in panel.tasks], dtype=np.int64)


def ratings_alpha_of(*answers) -> Alpha:
    panel = Panel.of(tasks_of(answers), answers)
    return rating_alpha(panel)


def counts_of(table, num_values):
    columns = np.array(table).T
    return np.array([[(column == value).sum() for value in range(1, num_values + 1)] for column in columns], float)


def test_the_published_value():
    assert ordinal_alpha(counts_of(PUBLISHED, 5)) == pytest.approx(0.815, abs=0.0005)


def test_a_loop_over_all_pairs_of_values_gives_the_same():
    """Krippendorff's definition read literally: δ between any two values, within units and over all of them."""
    table = np.random.default_rng(3).integers(0, 5, size=(4, 30))  # 0 is missing
    units = [[value for value in column if value] for column in table.T]
    units = [unit for unit in units if len(unit) > 1]
    pool = [value for unit in units for value in unit]

    def square(c, k):
        low, high = sorted((c, k))
        between = sum(low <= value <= high for value in pool)
        return (between - (pool.count(c) + pool.count(k)) / 2) ** 2

    within = sum(2 * sum(square(a, b) for a, b in combinations(unit, 2)) / (len(unit) - 1) for unit in units)
    over_all = 2 * sum(square(a, b) for a, b in combinations(pool, 2)) / (len(pool) - 1)
    assert ordinal_alpha(counts_of(table, 4)) == pytest.approx(1 - within / over_all)


def test_ratings_are_separate_units():
    answers = [
        judged(f"labeler {row}", f"t{unit}", 1, 2, ratings=(float(value), 1.0))
        for row, values in enumerate(PUBLISHED)
        for unit, value in enumerate(values)
        if value
    ]
    units = [*counts_of(PUBLISHED, 5), *np.array([[m, 0, 0, 0, 0] for m in (np.array(PUBLISHED) > 0).sum(axis=0)])]
    result = ratings_alpha_of(*answers)
    assert result.value == pytest.approx(ordinal_alpha(np.array(units)))
    assert result.low < result.value < result.high
    assert (result.num_units, result.num_tasks) == (2 * 11, 11)  # one task was rated only once


def test_rankings_by_hand():
    """Units 01 of t1: alike (0), 02: a tie and a preference (1/4), 12: opposite (1). t2's only pair: alike.

    Four units of two values: D_o = 2·(1/4 + 1)/8; of eight values one is a tie: D_e = (7/8)/2.
    """
    result = alpha_of(
        judged("ann", "t1", 1, 2, 3), judged("bob", "t1", 2, 3, 2), judged("ann", "t2", 1, 2), judged("bob", "t2", 1, 2)
    )
    assert result.value == pytest.approx(1 - (2 * 1.25 / 8) / (7 / 16))
    assert (result.num_units, result.num_tasks, result.reason) == (4, 2, "")


def test_three_labelers_weigh_as_krippendorff_has_it():
    """One unit with three values, two alike and one opposite, and one unit with two alike.

    D_o = [2/(3-1)·2 + 0]/5 and D_e = 1/2.
    """
    answers = [judged("a", "t", 1, 2), judged("b", "t", 1, 2), judged("c", "t", 2, 1)]
    assert alpha_of(*answers, judged("a", "u", 2, 1), judged("b", "u", 2, 1)).value == pytest.approx(1 - (2 / 5) / 0.5)


def test_without_ties_alpha_is_kendalls_tau():
    generator = np.random.default_rng(0)
    answers, taus = [], []
    for task in range(40):
        first, second = (generator.permutation(4) + 1 for _ in range(2))
        answers += [judged("a", f"t{task}", *map(int, first)), judged("b", f"t{task}", *map(int, second))]
        taus.append(
            np.mean([np.sign((first[i] - first[j]) * (second[i] - second[j])) for i, j in combinations(range(4), 2)])
        )
    assert alpha_of(*answers).value == pytest.approx(np.mean(taus))


def test_it_is_ordinal_alpha_of_pairs_read_both_ways():
    """Krippendorff's own formula on {second, tie, first}, every unit twice, once for each direction."""
    generator = np.random.default_rng(1)
    answers = []
    for task in range(300):
        quality = generator.normal(size=4)
        for labeler in generator.permutation(5)[: generator.integers(1, 5)]:
            scores = (quality + generator.normal(size=4)).round()
            answers.append(judged(f"l{labeler}", f"t{task}", *dense_ranks((-scores).tolist())))
    panel = Panel.of(tasks_of(answers), answers)
    counts = count_pairs(panel, pair_signs(panel.ranks_JK))
    values = np.stack([counts.second_TP, counts.tied_TP, counts.first_TP], axis=-1).reshape(-1, 3)
    both_ways = ordinal_alpha(np.concatenate([values, values[:, ::-1]]))
    # Krippendorff divides by n - 1, a correction that is not needed if pairs are oriented at random.
    assert ranking_alpha(counts, panel.prompt_T, sizes_of(panel)).value == pytest.approx(
        both_ways, abs=2 / values.sum()
    )


def test_turning_a_task_changes_nothing():
    answers = [judged("a", "t", 1, 2, 3), judged("b", "t", 1, 3, 3), judged("c", "t", 2, 1, 2)]
    turned = [judged(a.labeler, "t", a.ranks[2], a.ranks[0], a.ranks[1]) for a in answers]
    assert alpha_of(*answers).value == pytest.approx(alpha_of(*turned).value)


def test_random_answers_have_none_and_equal_answers_all():
    generator = np.random.default_rng(2)
    answers = [
        judged(f"l{labeler}", f"t{task}", *map(int, generator.permutation(3) + 1))
        for task in range(400)
        for labeler in range(3)
    ]
    by_chance = alpha_of(*answers)
    assert by_chance.low < 0 < by_chance.high
    assert abs(by_chance.value) < 0.05


def test_perfect_agreement_has_an_interval():
    """Twenty pairs without a disagreement. Alpha's lower end is 2·low - 1, with Wilson's interval for a share of 1."""
    alike = [judged(n, f"t{t}", 1, 2, ratings=(5.0, float(1 + t % 4))) for t in range(20) for n in "ab"]
    for alpha, num in ((alpha_of(*alike), 20), (ratings_alpha_of(*alike), 40)):
        assert (alpha.value, alpha.high) == (1, 1)
        assert alpha.low == pytest.approx(2 / (1 + Z**2 / num) - 1)


def test_the_interval_of_rankings_is_that_of_agreement():
    """For two labelers without ties, alpha is 2·agreement - 1, and so are both ends of the interval."""
    generator = np.random.default_rng(5)
    answers = [judged(n, f"t{t}", *map(int, generator.permutation(2) + 1)) for t in range(30) for n in "ab"]
    tasks = {task.task_id: task for task in tasks_of(answers)}
    share = pairwise_agreement([ranking_of(tasks[one.task_id], one) for one in answers])
    alpha = alpha_of(*answers)
    expected = (2 * share.mean - 1, 2 * share.low - 1, 2 * share.high - 1)
    assert (alpha.value, alpha.low, alpha.high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([], NO_OVERLAP),
        ([judged("a", "t", 1, 2), judged("a", "u", 2, 1)], NO_OVERLAP),
        ([judged("a", "t", 1, 2), judged("b", "u", 1, 2)], NO_OVERLAP),
        ([judged(name, task, 1, 1) for name in "ab" for task in "tu"], NO_VARIATION),
    ],
)
def test_what_is_unknown_is_nan_with_a_reason(answers, reason):
    result = alpha_of(*answers)
    assert result.reason == reason
    assert math.isnan(result.value)
    assert math.isnan(result.low)


def test_ratings_that_have_no_alpha():
    same = [judged(name, task, 1, 2, ratings=(4.0, 4.0)) for name in "ab" for task in "tu"]
    assert ratings_alpha_of(*same).reason == NO_VARIATION
    assert ratings_alpha_of(judged("a", "t", 1, 2), judged("b", "t", 1, 2)).reason == NO_OVERLAP
    many = [judged(name, f"t{task}", 1, 2, ratings=(task / 7, 0.0)) for name in "ab" for task in range(40)]
    assert "40 values" in ratings_alpha_of(*many).reason


def test_one_task_has_a_value_but_no_interval():
    result = alpha_of(judged("a", "t", 1, 2), judged("b", "t", 2, 1))
    assert result.value == -1  # 1 - 1/½: worse than chance
    assert math.isnan(result.low)
    assert result.reason == ""
