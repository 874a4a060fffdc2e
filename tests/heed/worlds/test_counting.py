"""Tasks of several steps: the rule that labels steps, against the answers that careless writing gives."""

import json
import random
from pathlib import Path

import pytest

from heed.worlds.arithmetic import careless_steps, draw_prompt, is_solved, label_steps, labelled_row
from heed.worlds.rewards import right_steps, solved
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld, write_counting

PROMPT = "Start at 8. Add 1, 3, 2. Keep the last digit."
RIGHT = ["8 + 1 = 9", "9 + 3 = 2", "2 + 2 = 4"]


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        (RIGHT, [True, True, True]),
        (RIGHT[:2], [True, False]),  # stops too soon
        (RIGHT[:1], [False]),
        ([*RIGHT, "4 + 1 = 5"], [True, True, True, False]),  # nothing more was asked for
        (["8 + 1 = 9", "9 + 3 = 3", "3 + 2 = 5"], [True, False, False]),  # all after the first error are wrong
        (["8 + 1 = 9", "9 + 2 = 1"], [True, False]),  # adds another number
        (["1 + 8 = 9"], [False]),
    ],
)
def test_a_step_is_right_if_it_and_all_before_it_are(steps: list[str], labels: list[bool]) -> None:
    assert label_steps(PROMPT, steps) == labels
    asked = [[{"role": "user", "content": PROMPT}]]
    assert right_steps(asked, [steps]) == [[*map(float, labels)]]
    assert solved(asked, ["\n".join(steps)]) == [float(steps == RIGHT)] == [float(min(labels))]


def test_careful_answers_are_right_and_careless_ones_go_wrong_at_random() -> None:
    rng = random.Random(3)
    prompts = [draw_prompt(rng) for _ in range(300)]
    assert all(is_solved(prompt, "\n".join(careless_steps(prompt, rng, 0.0))) for prompt in prompts)
    rows = [labelled_row(rng) for _ in range(300)]
    first_wrong = [row["labels"].index(False) for row in rows if not all(row["labels"])]
    assert 0.65 < len(first_wrong) / len(rows) < 0.85  # the mean of 1 - .75^n over n = 3, 4, 5 is .68; some are short
    assert {0, 1, 2, 3} <= set(first_wrong)
    short = [row for row in rows if len(row["completions"]) < row["prompt"].count(",") + 1]
    assert 0.17 < len(short) / len(rows) < 0.33
    assert not any(row["labels"][-1] for row in short)


def test_another_prompt_has_no_steps() -> None:
    with pytest.raises(ValueError, match=r"'Tell a story.' is no counting task of the playground"):
        label_steps("Tell a story.", ["a"])


def test_the_world_writes_as_many_as_asked(tmp_path: Path) -> None:
    write_counting(tmp_path, 20, seed=1)
    sizes = {path.stem: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
    assert sizes == {
        "counting_compare": 20,
        "counting_labels": 20,
        "counting_prompts": 20,
        "counting_demonstrations": 20,
        "counting_demonstrations_heldout": 2,
    }
    asked = {
        path.stem: {
            row.get("prompt") or row["messages"][0]["content"] for row in map(json.loads, path.read_text().splitlines())
        }
        for path in tmp_path.iterdir()
    }
    compared = asked.pop("counting_compare")
    assert len(compared) == 20
    assert not compared & set().union(*asked.values())  # no stage that learns has seen them
    row = json.loads((tmp_path / "counting_labels.jsonl").read_text().splitlines()[0])
    assert label_steps(row["prompt"], row["completions"]) == row["labels"]
    assert not PlaygroundWorld(PlaygroundConfig()).config.num_counting  # other worlds have none
