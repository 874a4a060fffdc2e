"""Replays of recorded human labels: votes by hand, a toy whose answer is known, people's files, the docs' tables."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.recorded_labels import (
    COMPARED,
    FIRST_LABELS,
    NUM_ROUNDS,
    Judged,
    Pool,
    accuracy_difference,
    components,
    judged_prompts,
    read,
    replay,
    right_pairs,
    table,
    write,
)
from preferences.records import Message, Ranking
from reward.comparisons import RankingsConfig, read_rankings

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
FILES = {"pandalm": DATA / "pandalm_testset-v1.json", "oasst": DATA / "oasst_en_100_tree.jsonl"}
PROMPT = (Message("user", "q"),)


def test_votes_by_hand() -> None:
    """Two labelers rank a, b and c; a third compares c with a, shown the other way round."""
    rankings = [
        Ranking("t1", PROMPT, ("a", "b", "c"), (1, 2, 3), "one"),
        Ranking("t1", PROMPT, ("a", "b", "c"), (2, 1, 1), "two"),
        Ranking("t2", PROMPT, ("c", "a"), (2, 1), "three"),
        Ranking("t3", (Message("user", "other"),), ("x", "y"), (1, 1), "one"),
    ]
    one, other = judged_prompts(rankings)
    assert one.responses == ("a", "b", "c")
    assert one.votes == {(0, 1): [1.0, 0.0], (0, 2): [1.0, 0.0, 1.0], (1, 2): [1.0, 0.5]}
    assert other.votes == {(0, 1): [0.5]}
    # a > c by two votes of three, b > c by one and a half of two; a and b are tied.
    pool = Pool([one], [np.array([[1.0], [2.0], [0.0]])])
    assert right_pairs(pool, 0, np.array([1.0])) == (2.0, 2)
    assert right_pairs(pool, 0, np.array([-1.0])) == (0.0, 2)
    assert right_pairs(pool, 0, np.array([0.0])) == (1.0, 2)


def toy_pool(num_prompts: int = 60, num_responses: int = 5) -> Pool:
    """People prefer the response with the larger first feature; the second feature says nothing."""
    rng = np.random.default_rng(0)
    judged, features = [], []
    for number in range(num_prompts):
        values_CD = rng.normal(size=(num_responses, 2))
        votes = {
            (i, j): [float(values_CD[i, 0] > values_CD[j, 0])]
            for i in range(num_responses)
            for j in range(i + 1, num_responses)
        }
        names = tuple(f"r{place}" for place in range(num_responses))
        judged.append(Judged((Message("user", f"q{number}"),), names, votes))
        features.append(values_CD)
    return Pool(judged, features)


def test_every_rule_learns_the_toy_and_starts_alike() -> None:
    pool, heldout = toy_pool(), list(range(15))
    found = {rule: replay(pool, rule, 3, heldout) for rule in ("uniform", *COMPARED)}
    for right_RT in found.values():
        assert right_RT.shape == (NUM_ROUNDS, 15)
        assert np.array_equal(right_RT[0], found["uniform"][0])
        assert right_RT[-1].sum() / 150 > 0.93
    assert len({tuple(right_RT[1]) for right_RT in found.values()}) > 1
    with pytest.raises(
        ValueError, match=f"10 pairs to reveal; at least {FIRST_LABELS << (NUM_ROUNDS - 1)} were expected"
    ):
        replay(pool, "uniform", 0, list(range(59)))


def test_components_keep_what_varies() -> None:
    rng = np.random.default_rng(1)
    shared_C1 = rng.normal(size=(200, 1))
    found_CD = components(
        np.concatenate([shared_C1 + 0.01 * rng.normal(size=(200, 80)), rng.normal(size=(200, 1))], axis=1)
    )
    assert found_CD.shape == (200, 64)
    assert found_CD.var(axis=0).mean() == pytest.approx(1)
    assert abs(np.corrcoef(found_CD[:, 0], shared_C1[:, 0])[0, 1]) > 0.999


def test_a_difference_by_hand(tmp_path: Path) -> None:
    """Prompts with 2, 3 and 0 pairs: (2 + 2 - 1 - 2) / 5 = .2."""
    right = {"uniform": np.array([[1.0, 2.0, 0.0]] * NUM_ROUNDS), "compared": np.array([2.0, 3.0, 0.0])}
    split = right | {rule: np.array([[2.0, 2.0, 0.0]] * NUM_ROUNDS) for rule in COMPARED}
    assert accuracy_difference(split, "near-tie", -1, 0).mean == pytest.approx(0.2)
    write(tmp_path, "toy", [split] * 5)
    assert read(tmp_path / "toy.npz")[4].keys() == split.keys()
    assert "| near-tie minus uniform, 256 labels | +0.200, +0.200" in table("toy", read(tmp_path / "toy.npz"))


@pytest.mark.parametrize("name", FILES)
def test_the_documented_tables_come_from_the_measures(name: str) -> None:
    page = (ROOT / "research" / "findings" / "label-choice.md").read_text(encoding="utf-8")
    for line in table(name, read(ROOT / "research" / "findings" / "measures-recorded" / f"{name}.npz")).splitlines():
        assert line in page


@pytest.mark.parametrize(("name", "num_prompts", "num_pairs"), [("pandalm", 170, 863), ("oasst", 212, 754)])
def test_peoples_files_have_the_pairs_that_the_docs_name(name: str, num_prompts: int, num_pairs: int) -> None:
    if not FILES[name].is_file():
        pytest.skip(f"{FILES[name].name} is not here")
    judged = judged_prompts(read_rankings(RankingsConfig(source=str(FILES[name]))))
    assert len(judged) == num_prompts
    assert sum(len(of.votes) for of in judged) == num_pairs
