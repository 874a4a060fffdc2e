"""Tasks of several steps: the rule that says what is solved, against the answers that careless writing gives."""

import json
import random
from pathlib import Path

import pytest

from heed.worlds.arithmetic import careless_steps, draw_prompt, is_solved
from heed.worlds.rewards import solved
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld, write_counting

PROMPT = "Start at 8. Add 1, 3, 2. Keep the last digit."
RIGHT = ["8 + 1 = 9", "9 + 3 = 2", "2 + 2 = 4"]


@pytest.mark.parametrize(
    "steps",
    [
        RIGHT,
        RIGHT[:2],  # stops too soon
        RIGHT[:1],
        [],
        [*RIGHT, "4 + 1 = 5"],  # nothing more was asked for
        ["8 + 1 = 9", "9 + 3 = 3", "3 + 2 = 5"],
        ["8 + 1 = 9", "9 + 2 = 1", "1 + 2 = 3"],  # adds another number
        ["1 + 8 = 9", *RIGHT[1:]],
    ],
)
def test_a_response_is_solved_if_it_has_all_right_steps(steps: list[str]) -> None:
    asked = [[{"role": "user", "content": PROMPT}]]
    assert solved(asked, ["\n".join(steps)]) == [float(steps == RIGHT)]
    assert solved(asked, ["\n\n".join([*steps, ""])]) == [float(steps == RIGHT)]


def test_careful_answers_are_right_and_careless_ones_go_wrong_at_random() -> None:
    rng = random.Random(3)
    prompts = [draw_prompt(rng) for _ in range(300)]
    assert all(is_solved(prompt, "\n".join(careless_steps(prompt, rng, 0.0))) for prompt in prompts)
    wrong = [not is_solved(prompt, "\n".join(careless_steps(prompt, rng))) for prompt in prompts]
    assert 0.6 < sum(wrong) / len(wrong) < 0.76  # the mean of 1 - .75^n over n = 3, 4, 5 is .68


def test_another_prompt_has_no_steps() -> None:
    with pytest.raises(ValueError, match=r"'Tell a story.' is no counting task of the playground"):
        is_solved("Tell a story.", "a")


def test_the_world_writes_as_many_as_asked(tmp_path: Path) -> None:
    write_counting(tmp_path, 20, seed=1)
    sizes = {path.stem: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
    assert sizes == {
        "counting_compare": 20,
        "counting_prompts": 20,
        "counting_demonstrations": 20,
        "counting_demonstrations_heldout": 2,
    }
    asked = {
        path.stem: {row["messages"][0]["content"] for row in map(json.loads, path.read_text().splitlines())}
        for path in tmp_path.iterdir()
    }
    compared = asked.pop("counting_compare")
    assert len(compared) == 20
    assert not compared & set().union(*asked.values())  # no stage that learns has seen them
    assert not PlaygroundWorld(PlaygroundConfig()).config.num_counting  # other worlds have none
