"""Jobs that inherit from a base."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

from heed.jobs.job_file import load_job, merged, read_job_values
from heed.jobs.run import Run, world_hash
from heed.jobs.submission import Shipment

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return path


def test_tables_are_merged_and_everything_else_is_replaced() -> None:
    below = {"seed": 1, "ppo": {"num_epochs": 2, "prompts": {"source": "a", "split": "test"}}, "texts": [1, 2], "x": {}}
    above = {"ppo": {"prompts": {"source": "b"}, "temperature": 0.9}, "texts": [3], "x": 1}
    assert merged(below, above) == {
        "seed": 1,
        "ppo": {"num_epochs": 2, "prompts": {"source": "b", "split": "test"}, "temperature": 0.9},
        "texts": [3],
        "x": 1,
    }
    assert below["ppo"] == {"num_epochs": 2, "prompts": {"source": "a", "split": "test"}}, "the base stays as it is"


def test_a_job_is_its_base_but_for_what_it_says(tmp_path: Path) -> None:
    middle = write(tmp_path / "bases" / "middle.toml", f'base = "{DEBUG}"\nname = "middle"\nnote = "x"\nseed = 3\n')
    path = write(
        tmp_path / "mine.toml",
        """
        base = "bases/middle.toml"
        name = "mine"
        [ppo]
        kl = { coef = 0.3 }
        policy_optimizer = { learning_rate = 2e-3 }
        [sft]
        heldout = [{ source = "world:demonstrations" }]
        """,
    )
    job, debug = load_job(path, ["ppo.temperature=0.5"]), load_job(DEBUG)
    assert (job.name, job.note, job.seed) == ("mine", debug.note and "", 3)
    assert job.ppo == debug.ppo.model_copy(
        update={
            "kl": debug.ppo.kl.model_copy(update={"coef": 0.3}),
            "temperature": 0.5,
            "policy_optimizer": debug.ppo.policy_optimizer.model_copy(update={"learning_rate": 2e-3}),
        }
    )
    assert [data.source for data in job.sft.heldout] == ["world:demonstrations"]
    assert job.pretrain == debug.pretrain
    with Shipment.of(path, ["ppo.temperature=0.5"], job).packed() as folder:
        assert load_job(folder / "mine.toml") == job, "a submitted job needs no base"
    assert middle.is_file()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('"absent.toml"', r"mine\.toml:1: base 'absent\.toml': no such file; paths are relative to the job file"),
        ("3", r"mine\.toml:1: base is 3; the path of a job file was expected"),
        ('"mine.toml"', r"mine\.toml:1: base 'mine\.toml' inherits from itself: mine\.toml -> mine\.toml"),
        ('"other.toml"', r"other\.toml:1: base 'mine\.toml' .* mine\.toml -> other\.toml -> mine\.toml"),
    ],
)
def test_a_base_that_cannot_be_read_is_named(tmp_path: Path, base: str, message: str) -> None:
    path = write(tmp_path / "mine.toml", f"base = {base}\n")
    write(tmp_path / "other.toml", 'base = "mine.toml"\n')
    with pytest.raises(ValueError, match=message):
        read_job_values(path)


def test_a_key_of_the_base_can_be_left_out(tmp_path: Path) -> None:
    base = write(tmp_path / "base.toml", "seed = 1\n[ppo]\ntemperature = 0.9\nkl = {coef = 0.1}\n[dpo]\nbeta = 1.0\n")
    path = write(
        tmp_path / "mine.toml", 'base = "base.toml"\nwithout = ["ppo.temperature", "dpo"]\n[ppo]\nkl.coef = 0.2\n'
    )
    assert read_job_values(path) == {"seed": 1, "ppo": {"kl": {"coef": 0.2}}}
    for without, message in (
        ('"ppo"', "without is 'ppo'; a list"),
        ('["ppo.temperatur"]', "without 'ppo.temperatur': base .* no such key"),
    ):
        write(path, f'base = "{base}"\nwithout = {without}\n')
        with pytest.raises(ValueError, match=message):
            read_job_values(path)


def test_a_name_is_not_inherited(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", f'base = "{DEBUG}"\n')
    with pytest.raises(ValueError, match=r"mine\.toml: name: missing"):
        load_job(path)


@pytest.mark.parametrize("page", ["alarm.md", "loop.md"])
def test_the_tables_on_a_page_can_be_added_to_a_job(tmp_path: Path, page: str) -> None:
    """Each block as it stands, without further keys that it would need."""
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL | re.M)
    assert blocks
    for block in blocks:
        job = f'base = "{DEBUG}"\nname = "mine"\nwithout = ["dpo"]\n{block}'
        load_job(write(tmp_path / "mine.toml", job))


WORLD = """
from typing import ClassVar

from heed.worlds.world import PlaygroundConfig, PlaygroundWorld


class PoemsConfig(PlaygroundConfig):
    num_poems: int = 3


class Poems(PlaygroundWorld):
    config_type: ClassVar = PoemsConfig


class NoConfig:
    pass


class NoLabels:
    config_type = PoemsConfig
    judge_names = ()
"""


def test_a_world_is_named_by_its_place(tmp_path: Path) -> None:
    place = f"{write(tmp_path / 'poems.py', WORLD)}:Poems"
    job = load_job(DEBUG, [f"world.kind={place}", "world.num_poems=4"])
    world = job.open_world()
    assert (type(world).__name__, world.config.num_poems) == ("Poems", 4)
    assert world.config.num_compare_prompts == load_job(DEBUG).world.num_compare_prompts
    assert job.world.model_dump()["kind"] == place
    run = Run(job, tmp_path, world, None)
    first = world_hash(run)
    assert [*first] == ["world"]
    write(tmp_path / "poems.py", WORLD + "\n")
    assert world_hash(run) != first
    assert world_hash(Run(load_job(DEBUG), tmp_path, None, None)) == {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["world.kind=gone.py:Poems"], r"world\.kind: world: gone\.py: no such file"),
        (["world.kind=POEMS:Sonnets"], r"world\.kind: world '.*': .*poems\.py has no function 'Sonnets'"),
        (["world.kind=POEMS:NoConfig"], r"world\.kind: .*poems\.py:NoConfig has no `config_type`; a class with"),
        (["world.kind=POEMS:NoLabels"], r"world\.kind: .*poems\.py:NoLabels has no `describe`"),
        (
            ["world.kind=POEMS:Poems", "world.num_poem=4"],
            r"`num_poem`: unknown key in \[world\]; did you mean `num_poems`\?",
        ),
        (["world.kind=POEMS:Poems", "world.num_poems=x"], r"world\.num_poems: a whole number was expected, not 'x'"),
    ],
)
def test_a_wrong_world_is_named_with_its_place(overrides: list[str], words: str, tmp_path: Path) -> None:
    file = str(write(tmp_path / "poems.py", WORLD))
    with pytest.raises(ValueError, match=words):
        load_job(DEBUG, [override.replace("POEMS", file) for override in overrides])
