"""What scripted labelers say depends on what they are shown, not on the weights that a batch is named after."""

from pathlib import Path

import pytest

from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from preferences.records import Ranking, Task
from preferences.store import LabelStore
from reward.collect import CollectConfig, label_tasks, make_tasks
from reward.sampling import Sample
from training.data import DataConfig, Prompt, read_prompts

CONFIG = CollectConfig(prompts=DataConfig(source="unused"), responses_per_prompt=3, max_new_tokens=8, overlap_share=0.4)
WORLD = PlaygroundWorld(
    PlaygroundConfig(
        num_pretrain_texts=20, num_pretrain_heldout=5, num_demonstrations=20, num_collect_prompts=40, num_ppo_prompts=20
    )
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    folder = tmp_path_factory.mktemp("world")
    WORLD.write_data(folder, seed=0)
    return read_prompts(DataConfig(source=str(folder / "collect_prompts.jsonl")))[:30]


def samples(prompts: list[Prompt], changed: str = "") -> list[Sample]:
    """Three responses per prompt; one of the prompt `changed` is another text."""
    texts = {prompt.prompt_id: f"cat{'!' * (prompt.prompt_id == changed)}" for prompt in prompts}
    return [
        Sample(prompt_id, index, f"a dog, {'a ' * index}{text}", 4, True, 0.0, 0.0)
        for prompt_id, text in texts.items()
        for index in range(3)
    ]


def labeled(path: Path, batch: str, tasks: list[Task]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Ranks by prompt and labeler."""
    with LabelStore(path) as store:
        found = label_tasks(store, WORLD, tasks, CONFIG, batch=batch, seed=3, on_progress=lambda _: None)
    return {(ranking.prompt[0].content, ranking.labeler): ranking.ranks for ranking in found}


def test_the_same_texts_get_the_same_labels_whatever_the_weights(tmp_path: Path, prompts: list[Prompt]) -> None:
    """Two workers' SFT weights differ from one worker's by rounding: another batch, the same samples."""
    one = labeled(tmp_path / "one.sqlite", "0a1b", make_tasks("0a1b", prompts, samples(prompts), "sft"))
    two = labeled(tmp_path / "two.sqlite", "f9e8", make_tasks("f9e8", prompts, samples(prompts), "sft"))
    assert one == two
    assert len(set(one.values())) > 1  # they tell responses apart


def test_another_response_redraws_its_own_task_alone(tmp_path: Path, prompts: list[Prompt]) -> None:
    changed = prompts[7].prompt_id
    one = labeled(tmp_path / "one.sqlite", "0a1b", make_tasks("0a1b", prompts, samples(prompts), "sft"))
    two = labeled(tmp_path / "two.sqlite", "f9e8", make_tasks("f9e8", prompts, samples(prompts, changed), "sft"))
    differing = {prompt for prompt, labeler in one if one[prompt, labeler] != two[prompt, labeler]}
    assert differing <= {prompts[7].messages[0]["content"]}


def test_a_second_batch_in_one_store_asks_again_under_names_of_its_own(tmp_path: Path, prompts: list[Prompt]) -> None:
    store, changed = tmp_path / "labels.sqlite", prompts[7].prompt_id
    first = make_tasks("0a1b", prompts, samples(prompts), "sft")
    assert len(labeled(store, "0a1b", first)) == 30 + 12
    again = make_tasks("f9e8", prompts, samples(prompts, changed), "sft", taken={task.task_id for task in first})
    assert {task.task_id.count("/") for task in again} == {1, 2}  # one shows something new
    assert len(labeled(store, "f9e8", again)) == 30 + 12
    with LabelStore(store) as opened:
        rankings: list[Ranking] = opened.rankings("f9e8")
    assert {ranking.task_id for ranking in rankings} == {task.task_id for task in again}
