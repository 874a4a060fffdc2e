"""Selecting tasks for labelers: exact propensities, a slice that no score touched, weights that undo the selection."""

import math
from itertools import combinations

import numpy as np
import pytest

from preferences.records import Message, Task
from preferences.task_selection import (
    RULES,
    Candidate,
    PromptCandidates,
    choose_tasks,
    distinct,
    inclusion_probabilities,
    systematic_sample,
    uniform_mean,
)  # fmt: skip

UNIFORM = RULES["uniform"]
USUAL = {
    "batch": "b", "rule": RULES["near-tie"], "responses_per_task": 2, "tasks_per_prompt": 2, "evaluation_share": 0.2,
    "seed": 0,
}  # fmt: skip


def candidates_of(scores, prompt_id="p"):
    made = tuple(Candidate(f"response {place}", "policy", (score,)) for place, score in enumerate(scores))
    return PromptCandidates(prompt_id, (Message("user", f"prompt {prompt_id}"),), made)


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(0)
    return [candidates_of(2 * generator.normal(size=5), f"p{index}") for index in range(1_500)]


def test_equal_responses_are_put_once():
    found = distinct([Candidate("a", "one"), Candidate(" a\n", "two"), Candidate("b", "one"), Candidate("a", "one")])
    assert [(candidate.response, candidate.source) for candidate in found] == [("a", "one"), ("b", "one")]
    same = PromptCandidates("p", (Message("user", "x"),), (Candidate("a", "one"), Candidate("a ", "two")))
    assert choose_tasks([same], **{**USUAL, "rule": UNIFORM}) == []


PAIRS = [(0, 1), (0, 2), (1, 2)]


def sigmoid(difference):
    return 1 / (1 + math.exp(-difference))


def weights_of(name, scores, sets=PAIRS):
    return RULES[name].weights(np.array(scores, dtype=float), sets).tolist()


def test_near_ties_by_hand():
    chance = sigmoid(2)
    clear = (4 * chance * (1 - chance)) ** 8
    assert weights_of("near-tie", [[1], [1], [3]]) == pytest.approx([1, clear, clear])
    # Two models that are sure of opposite answers are together as unsure as one that cannot decide.
    assert weights_of("near-tie", [[9, 0], [0, 9], [0, 0]])[0] == pytest.approx(1)
    # A larger set has the mean of its pairs.
    assert weights_of("near-tie", [[1], [1], [3]], [(0, 1, 2)]) == pytest.approx([(1 + 2 * clear) / 3])


def test_disagreement_by_hand():
    """Two models that are sure of opposite answers contradict each other; two that cannot decide do not."""
    entropy = -sigmoid(9) * math.log(sigmoid(9)) - sigmoid(-9) * math.log(sigmoid(-9))
    found = weights_of("disagreement", [[9, 0], [0, 9], [9, 0]])
    assert found == pytest.approx([math.log(2) - entropy, 0, math.log(2) - entropy], abs=1e-9)


def test_information_by_hand():
    """p(1 - p) times the variance of the models' differences: none where they agree, most where they cannot decide."""
    alike = weights_of("information", [[1, 3], [1, 3], [2, 2]])[0]
    torn, clear = weights_of("information", [[0, 0], [1, -1], [9, 7]])[:2]
    mean = (sigmoid(-1) + sigmoid(1)) / 2
    assert alike == 0 < clear < torn == pytest.approx(mean * (1 - mean))


def test_large_gaps_by_hand():
    # Both models call 0 the best; one calls 1 the worst, the other 2.
    assert weights_of("large-gap", [[5, 5], [0, 1], [1, 0]]) == [0.5, 0.5, 0]
    # Two of four pairs of models name one candidate as best and worst; the others name 0 and 1, either way around.
    assert weights_of("large-gap", [[5, 0], [0, 5], [1, 1]]) == [1, 0, 0]
    assert weights_of("large-gap", [[5, 5], [0, 1], [1, 0]], [(0, 1, 2)]) == [1]


def test_inclusion_probabilities_by_hand():
    assert inclusion_probabilities(np.array([1.0, 1, 2]), 1).tolist() == [0.25, 0.25, 0.5]
    # 2·6/10 is above 1, so it is cut, and the rest is shared 1:1:2.
    assert inclusion_probabilities(np.array([1.0, 1, 2, 6]), 2).tolist() == [0.25, 0.25, 0.5, 1]
    assert inclusion_probabilities(np.array([1.0, 5]), 3).tolist() == [1, 1]


def test_systematic_sampling_keeps_its_probabilities():
    generator = np.random.default_rng(1)
    probabilities = inclusion_probabilities(generator.random(7) + 0.05, 3)
    times = np.zeros(7)
    for _ in range(4_000):
        chosen = systematic_sample(probabilities, generator.random(), generator.permutation(7).tolist())
        assert len(set(chosen)) == 3
        times[chosen] += 1
    assert times / 4_000 == pytest.approx(probabilities, abs=0.03)


def test_the_logged_propensity_is_how_often_a_set_is_chosen():
    """The same prompt under many seeds: each pair of a slice is chosen with its stated propensity."""
    prompt = candidates_of((2.0, 1.9, 0.0, -3.0))
    times, said, num_training = {}, {}, 0
    for seed in range(2_000):
        tasks = choose_tasks([prompt], **{**USUAL, "seed": seed})
        assert len(tasks) == 2
        num_training += tasks[0].details["slice"] == "training"
        for task in tasks:
            key = (task.task_id, task.details["slice"])
            times[key] = times.get(key, 0) + 1
            said.setdefault(key, task.details["propensity"])
            assert said[key] == task.details["propensity"]
    assert num_training / 2_000 == pytest.approx(0.8, abs=0.03)
    for (task_id, slice_name), count in times.items():
        drawn = num_training if slice_name == "training" else 2_000 - num_training
        assert count / drawn == pytest.approx(said[task_id, slice_name], abs=0.06)
    assert said["b/p/0-1", "training"] > said["b/p/0-3", "training"] > 0
    assert [own for (_, name), own in said.items() if name == "evaluation"] == pytest.approx([2 / 6] * 6)


def test_weights_recover_the_uniform_mean(prompts):
    """The mean distance between two scores over chosen pairs: far too small unweighted, right when weighted."""
    tasks = choose_tasks(prompts, **{**USUAL, "evaluation_share": 0.0})
    scores = {p.prompt: {c.response: c.scores[0] for c in p.candidates} for p in prompts}

    def gap(task):
        return abs(scores[task.prompt][task.responses[0]] - scores[task.prompt][task.responses[1]])

    every = [[c.scores[0] for c in p.candidates] for p in prompts]
    truth = np.mean([abs(a - b) for row in every for a, b in combinations(row, 2)])
    gaps = [gap(task) for task in tasks]
    weighted = uniform_mean(tasks, gaps, seed=0)
    assert np.mean(gaps) < 0.8 * truth
    assert weighted.low < truth < weighted.high
    assert weighted.high - weighted.low < 0.15 * truth


def test_the_interval_covers_the_mean_if_rare_sets_have_unusual_values():
    """Of two sets, the rare one has a value of 2 on average and the other .15. Percentiles covered 79 of 100 worlds."""
    covered = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        is_rare = generator.random(60) < 0.1
        tasks = [
            Task(str(place), (Message("user", str(place)),), ("a", "b"), ("x", "x"),
                 details={"propensity": 0.1 if rare else 0.9, "num_sets": 2})
            for place, rare in enumerate(is_rare)
        ]  # fmt: skip
        found = uniform_mean(tasks, np.where(is_rare, generator.gamma(2, 1, 60), 0.3 * generator.random(60)), seed=0)
        covered += found.low <= (2 + 0.15) / 2 <= found.high
    assert covered >= 36


def test_the_evaluation_slice_is_untouched_by_scores(prompts):
    some = prompts[:600]
    tasks = choose_tasks(some, **USUAL)
    uniform = choose_tasks(some, **{**USUAL, "rule": UNIFORM})
    held = [task for task in tasks if task.details["slice"] == "evaluation"]
    assert held == [task for task in uniform if task.details["slice"] == "evaluation"]
    assert {task.details["method"] for task in held} == {"uniform"}
    assert len(held) / len(tasks) == pytest.approx(0.2, abs=0.05)
    assert choose_tasks(some, **USUAL) == tasks
    assert choose_tasks(some, **{**USUAL, "seed": 1}) != tasks


@pytest.mark.parametrize("name", sorted(RULES))
def test_prompts_compete_for_a_number_of_tasks(name):
    """Each set is chosen as often as its propensity says, and prompts whose sets have little weight get few."""
    generator = np.random.default_rng(2)
    few = [
        PromptCandidates(
            f"p{place}", (Message("user", f"prompt {place}"),),
            tuple(Candidate(f"r{n}", "policy", tuple(generator.normal(size=3) * spread)) for n in range(4)),
        )
        for place, spread in enumerate((0.1, 0.1, 6.0, 6.0, 1.0))
    ]  # fmt: skip
    times, said = {}, {}
    for seed in range(600):
        tasks = choose_tasks(
            few,
            **{
                **USUAL,
                "rule": RULES[name],
                "num_tasks": 4,
                "tasks_per_prompt": 2,
                "evaluation_share": 0,
                "seed": seed,
            },
        )
        assert len({task.task_id for task in tasks}) == len(tasks) == 4
        assert max(sum(task.prompt == prompt.prompt for task in tasks) for prompt in few) <= 2
        for task in tasks:
            times[task.task_id] = times.get(task.task_id, 0) + 1
            assert said.setdefault(task.task_id, task.details["propensity"]) == pytest.approx(
                task.details["propensity"]
            )
    assert len(times) == 5 * 6  # the uniform share leaves no set out
    for task_id, count in times.items():
        assert count / 600 == pytest.approx(said[task_id], abs=0.07)
    by_prompt = [sum(p for task_id, p in said.items() if f"/p{place}/" in task_id) for place in range(5)]
    assert sum(by_prompt) == pytest.approx(4)
    if name == "near-tie":
        assert min(by_prompt[:2]) > max(by_prompt[2:4])
    if name in ("disagreement", "information"):
        assert max(by_prompt[:2]) < min(by_prompt[2:])


def test_no_set_is_rarer_than_the_uniform_share_says_even_if_prompts_compete():
    """The second prompt has next to no weight for near ties, so its sets have the uniform part alone: .1 of 1/(2·3)."""
    few = [
        PromptCandidates(f"p{place}", (Message("user", f"prompt {place}"),), tuple(
            Candidate(f"r{n}", "policy", (n * spread,)) for n in range(3)
        ))
        for place, spread in enumerate((0.0, 20.0))
    ]  # fmt: skip
    settings = {**USUAL, "num_tasks": 1, "tasks_per_prompt": 1, "evaluation_share": 0, "uniform_share": 0.1}
    said = {}
    for seed in range(400):
        (task,) = choose_tasks(few, **{**settings, "seed": seed})
        said[task.task_id] = task.details["propensity"]
    rare = [chance for task_id, chance in said.items() if "/p1/" in task_id]
    assert rare == pytest.approx([0.1 / 6] * 3)
    assert sum(said.values()) == pytest.approx(1)


def test_evaluation_gets_its_part_of_the_tasks_that_prompts_compete_for(prompts):
    tasks = choose_tasks(prompts, **{**USUAL, "num_tasks": 300})
    held = [task for task in tasks if task.details["slice"] == "evaluation"]
    assert len(tasks) == 300
    assert len(held) / 300 == pytest.approx(0.2, abs=0.03)
    assert {task.details["method"] for task in held} == {"uniform"}
    assert len({round(task.details["propensity"], 9) for task in held}) == 1
    gaps = [1.0 for _ in tasks]
    assert uniform_mean(tasks, gaps, seed=0).mean == pytest.approx(1)
    assert len(choose_tasks(prompts[:3], **{**USUAL, "num_tasks": 300})) == 3 * 2  # there are no more


def test_tasks_of_four_responses(prompts):
    tasks = choose_tasks(prompts[:300], **{**USUAL, "responses_per_task": 4, "tasks_per_prompt": 1})
    assert {len(task.responses) for task in tasks} == {4}
    assert {task.details["num_sets"] for task in tasks} == {5}
    weights = [1 / (task.details["propensity"] * 5) for task in tasks]
    assert np.mean(weights) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("change", "prompt", "message"),
    [
        (
            {},
            PromptCandidates("q", (Message("user", "x"),), (Candidate("a", "p"), Candidate("b", "p"))),
            "'q'.*scores has 0",
        ),
        ({}, candidates_of((1.0, math.nan), "q"), "'q'.*finite numbers"),
        ({"responses_per_task": 1}, candidates_of((1.0, 2.0)), "is 1, but the rule .* chooses pairs"),
        ({"evaluation_share": 20}, candidates_of((1.0, 2.0)), "evaluation_share is 20"),
        ({"responses_per_task": 9}, candidates_of(np.arange(20.0)), "20 candidates make 167960 sets"),
        ({"uniform_share": 0}, candidates_of((1.0, 2.0)), "uniform_share is 0"),
        (
            {"rule": RULES["disagreement"]},
            candidates_of((1.0, 2.0)),
            "'disagreement' compares .* there is 1; at least 2",
        ),
    ],
)
def test_what_is_refused(change, prompt, message):
    with pytest.raises(ValueError, match=message):
        choose_tasks([prompt], **{**USUAL, **change})
