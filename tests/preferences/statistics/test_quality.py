"""Agreement, self-agreement, gold, position and time: counts by hand, naive loops, known distributions."""

import dataclasses
import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from preferences.records import Judgment, Message, Ranking, Task, dense_ranks
from preferences.statistics.agreement import pairwise_agreement
from preferences.statistics.estimates import Share
from preferences.statistics.intervals import (
    MAX_CLUSTERS,
    Tally,
    clustered_mean,
    clustered_shares,
    difference_of_means,
    resampled_sums,
    wilson,
)
from preferences.statistics.panel import Panel
from preferences.statistics.quality import (
    agreement_counts,
    agreement_with_others,
    flag_counts,
    gold_accuracy,
    num_words,
    paces,
    ratings_of,
    screen,
    self_agreement,
    shown_first,
    words_per_minute,
)  # fmt: skip


def task_of(name, size=3, **fields):
    responses = fields.pop("responses", tuple(f"{fields.get('repeat_of', name)} {place}" for place in range(size)))
    prompt = (Message("user", f"prompt {fields.get('repeat_of', name)}"),)
    return Task(name, prompt, responses, ("p",) * len(responses), **fields)


def judged(labeler, task, *ranks, order=(), milliseconds=9_000, ratings=(), flags=(), at=0.0):
    order = order or tuple(range(len(ranks)))
    return Judgment(task, labeler, 1, "answer", ranks, ratings, flags, "", order, "1", milliseconds, "test", at)


def counted(share):
    return share.mean, share.num_pairs, share.num_tasks


@pytest.fixture(scope="module")
def crowd():
    """Tasks of two to four responses, each with answers by one to five of five labelers."""
    generator = np.random.default_rng(0)
    tasks, answers = [], []
    for index in range(150):
        size = int(generator.integers(2, 5))
        tasks.append(task_of(f"t{index}", size))
        quality = generator.normal(size=size)
        for labeler in generator.permutation(5)[: generator.integers(1, 6)]:
            ranks = dense_ranks((-(quality + generator.normal(size=size)).round()).tolist())
            order = tuple(generator.permutation(size).tolist())
            answers.append(judged(f"l{labeler}", f"t{index}", *ranks, order=order))
    return Panel.of(tasks, answers)


# ---- agreement ----


def test_agreement_over_all_is_that_of_rankings(crowd):
    rankings = [
        Ranking(a.task_id, crowd.tasks[t].prompt, crowd.tasks[t].responses, a.ranks, a.labeler)
        for a, t in zip(crowd.answers, crowd.task_J, strict=True)
    ]
    same, compared = agreement_counts(crowd)
    expected = pairwise_agreement(rankings)
    assert (same.sum() / compared.sum(), compared.sum()) == (pytest.approx(expected.mean), expected.num_pairs)
    assert (compared > 0).sum() == expected.num_tasks


def test_agreement_with_others_is_a_loop_over_all_others(crowd):
    by_task = {}
    for answer in crowd.answers:
        by_task.setdefault(answer.task_id, []).append(answer)
    for name, share in zip(crowd.labelers, agreement_with_others(crowd), strict=True):
        same = compared = 0
        tasks = set()
        for answers in by_task.values():
            mine = [answer for answer in answers if answer.labeler == name]
            for other in (answer for answer in answers if mine and answer.labeler != name):
                for i, j in combinations(range(len(other.ranks)), 2):
                    product = (mine[0].ranks[i] - mine[0].ranks[j]) * (other.ranks[i] - other.ranks[j])
                    same += product > 0
                    compared += product != 0
                    tasks |= {other.task_id} if product else set()
        assert counted(share) == (pytest.approx(same / compared), compared, len(tasks))


def test_self_agreement_by_hand_and_in_another_order():
    tasks = [
        task_of("t"),
        task_of("again", repeat_of="t"),
        task_of("u"),
        task_of("turned", repeat_of="u", responses=("u 2", "u 0", "u 1")),
    ]
    answers = [
        judged("ann", "t", 1, 2, 3), judged("ann", "again", 1, 3, 2),  # 2 of 3
        judged("ann", "u", 1, 1, 2), judged("ann", "turned", 3, 1, 2),  # u's 01 is a tie; 02 and 12 are the same
        judged("bob", "t", 1, 2, 3), judged("bob", "turned", 1, 2, 3),  # never both on one task
    ]  # fmt: skip
    ann, bob = self_agreement(Panel.of(tasks, answers))
    assert counted(ann) == (4 / 5, 5, 2)
    assert math.isnan(bob.mean)


def test_a_repeat_of_other_responses_is_refused():
    tasks = [task_of("t"), task_of("again", repeat_of="t", responses=("x", "y", "z"))]
    answers = [judged("ann", "t", 1, 2, 3), judged("ann", "again", 1, 2, 3)]
    with pytest.raises(ValueError, match="'again': repeat_of is 't', which has other responses"):
        self_agreement(Panel.of(tasks, answers))


def test_gold_by_hand():
    tasks = [task_of("g", gold_ranks=(1, 2, 2)), task_of("h", gold_ranks=(2, 1, 3)), task_of("t")]
    answers = [
        judged("ann", "g", 1, 2, 3),  # gold leaves 12 open: 2 of 2
        judged("ann", "h", 1, 1, 2),  # 01 tied: half; 02 and 12 right
        judged("ann", "t", 3, 2, 1),
        judged("bob", "h", 1, 2, 3),  # 01 wrong
    ]
    ann, bob = gold_accuracy(Panel.of(tasks, answers))
    assert counted(ann) == (4.5 / 5, 5, 2)
    assert counted(bob) == (2 / 3, 3, 1)
    assert bob.low > 0
    assert bob.high < 1


def test_screening():
    share = Share(0.85, 0.6, 0.95, num_pairs=20, num_tasks=20)
    assert screen(share, threshold=0.8, min_tasks=20) == "passed"
    assert screen(share, threshold=0.8, min_tasks=21) == "not yet"
    assert screen(share, threshold=0.9, min_tasks=20) == "not yet"  # 0.95 is still possible
    assert screen(share, threshold=0.96, min_tasks=20) == "failed"
    unknown = Share(math.nan, math.nan, math.nan, 0, 0)
    assert screen(unknown, threshold=0.8, min_tasks=1) == "not yet"
    with pytest.raises(ValueError, match=r"threshold is 80"):
        screen(share, threshold=80, min_tasks=20)


# ---- position ----


def test_position_by_hand():
    answers = [
        judged("ann", "t", 1, 2, 3, order=(2, 0, 1)),  # shown as 3, 1, 2: of 3 pairs of places, one for the earlier
        judged("ann", "u", 1, 1, 2, order=(0, 1, 2)),  # shown as 1, 1, 2: two, both for the earlier
        judged("bob", "v", 1, 2, order=(1, 0)),  # shown as 2, 1
    ]
    panel = Panel.of([task_of("t"), task_of("u"), task_of("v", 2)], answers)
    overall, (ann, bob) = shown_first(panel)
    assert counted(overall) == (3 / 6, 6, 3)
    assert counted(ann) == (3 / 5, 5, 2)
    assert counted(bob) == (0, 1, 1)


def test_imported_answers_whose_order_is_not_known_do_not_count_in_it():
    known, unknown = (
        judged("ann", "t", 1, 2, order=(1, 0)),
        dataclasses.replace(judged("bob", "t", 1, 2), shown_order=()),
    )
    overall, (ann, bob) = shown_first(Panel.of([task_of("t", 2)], [known, unknown]))
    assert counted(overall) == counted(ann) == (0, 1, 1)
    assert bob.num_pairs == 0


def test_an_order_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"'t', labeler 'ann': shown_order is \[0, 0, 1\]"):
        Panel.of([task_of("t")], [judged("ann", "t", 1, 2, 3, order=(0, 0, 1))])
    with pytest.raises(ValueError, match=r"shown_order is \[1, 0\]"):
        Panel.of([task_of("t")], [judged("ann", "t", 1, 2, 3, order=(1, 0))])


def test_answers_that_fit_no_task_are_refused():
    with pytest.raises(ValueError, match="'u', labeler 'ann': an answer to none of the tasks"):
        Panel.of([task_of("t")], [judged("ann", "u", 1, 2, 3)])
    with pytest.raises(ValueError, match="'t', labeler 'ann': ranks has 2 entries for 3"):
        Panel.of([task_of("t")], [judged("ann", "t", 1, 2)])


# ---- time, flags, ratings ----


def test_pace_by_hand():
    tasks = [task_of("t", 2), task_of("u", 2, responses=("w " * 100, "w " * 98))]
    assert [num_words(task) for task in tasks] == [6, 200]
    answers = [judged("ann", "t", 1, 2, milliseconds=6_000), judged("ann", "u", 1, 2, milliseconds=12_000)]
    panel = Panel.of(tasks, answers)
    rates = words_per_minute(panel)
    assert rates.tolist() == [60, 1000]
    (ann,) = paces(panel, rates)
    assert (ann.milliseconds, ann.words_per_minute) == (9_000, 530)
    assert counted(ann.too_fast) == (0.5, 2, 2)
    assert paces(panel, rates, threshold=1_000)[0].too_fast.mean == 0


def test_flags_and_ratings():
    answers = [
        judged("ann", f"t{index}", 1, 2, ratings=(rating, rating + 2), flags=(("false",), ("rude", "false")))
        for index, rating in enumerate((5.0, 4.0, 1.0, 2.0))
    ]
    (ratings,) = ratings_of(Panel.of([task_of(f"t{index}", 2) for index in range(4)], answers))
    assert ratings.counts == {1: 1, 2: 1, 3: 1, 4: 2, 5: 1, 6: 1, 7: 1}
    assert ratings.mean.mean == 4
    assert flag_counts(answers) == {"false": 8, "rude": 4}


# ---- intervals ----


def test_wilson_against_its_quadratic():
    """The ends are where (p - π)² = z²·π(1 - π)/n."""
    for mean, num in ((0.3, 20.0), (1.0, 5.0), (0.0, 7.5)):
        low, high = wilson(np.array([mean]), np.array([num]))
        for end in (low[0], high[0]):
            assert (mean - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / num, rel=1e-6)


def test_all_right_is_not_certain():
    """Ten gold pairs without an error are ten coin tosses; ten rankings of three hold 30 pairs, worth 30·9/11
    tosses."""
    ten = np.ones(10)
    tasks, group = np.arange(10), np.zeros(10, dtype=np.int64)
    (pairs,) = clustered_shares(Tally(group, tasks, tasks, ten, ten, ten, np.full(10, 2)), 1)
    assert (pairs.mean, pairs.high) == (1, 1)
    assert pairs.low == pytest.approx(10 / (10 + 1.959964**2))
    (triples,) = clustered_shares(Tally(group, tasks, tasks, 3 * ten, 3 * ten, 3 * ten, np.full(10, 3)), 1)
    assert triples.low == pytest.approx((270 / 11) / (270 / 11 + 1.959964**2))


def test_kendalls_variance_is_that_of_random_rankings():
    """The (2K + 5)/9 of `clustered_shares`: shares of pairs alike in random rankings, against as many coin tosses."""
    generator = np.random.default_rng(0)
    for k in (2, 3, 6):
        places = generator.permuted(np.tile(np.arange(k), (60_000, 1)), axis=1)
        shares = np.mean([places[:, i] < places[:, j] for i, j in combinations(range(k), 2)], axis=0)
        assert shares.var() / (0.25 / math.comb(k, 2)) == pytest.approx((2 * k + 5) / 9, rel=0.03)


def test_means_against_textbook_t():
    values = np.random.default_rng(1).normal(size=12)
    mean = clustered_mean(values, np.arange(12))
    assert (mean.low, mean.high) == pytest.approx(stats.ttest_1samp(values, 0).confidence_interval(0.95))
    other = np.random.default_rng(2).normal(2, 3, size=7)
    change = difference_of_means(values, other)
    expected = stats.ttest_ind(other, values, equal_var=False).confidence_interval(0.95)
    assert (change.low, change.high) == pytest.approx(expected)


def test_many_clusters_are_resampled_in_blocks():
    """Sums over blocks have the same variance as the clusters' own sums, drawn one by one."""
    generator = np.random.default_rng(4)
    table = generator.normal(size=(5 * MAX_CLUSTERS + 7, 1)) + 1
    sums = resampled_sums(table, seed=0, num_resamples=2_000)
    assert sums.mean() == pytest.approx(table.sum(), rel=0.01)
    assert sums.std() == pytest.approx(table.std() * math.sqrt(len(table)), rel=0.06)


def test_tasks_of_one_prompt_are_one_piece_of_evidence():
    """Each answer three times, as three tasks with one prompt, adds no evidence; as tasks with three prompts it
    would."""
    tasks, answers, apart = [], [], []
    for index in range(40):
        for copy in range(3):
            task = task_of(f"{index}-{copy}", 2, gold_ranks=(1, 2))
            tasks.append(dataclasses.replace(task, prompt=(Message("user", f"{index}"),)))
            apart.append(task)
            answers.append(judged("ann", task.task_id, *((1, 2) if index % 4 else (2, 1))))
    once = [row for row in range(120) if row % 3 == 0]
    (thrice,) = gold_accuracy(Panel.of(tasks, answers))
    (single,) = gold_accuracy(Panel.of([tasks[row] for row in once], [answers[row] for row in once]))
    (independent,) = gold_accuracy(Panel.of(apart, answers))
    assert (thrice.num_tasks, single.num_tasks) == (120, 40)
    assert (thrice.mean, thrice.low, thrice.high) == pytest.approx((single.mean, single.low, single.high))
    assert independent.high - independent.low < 0.7 * (thrice.high - thrice.low)
