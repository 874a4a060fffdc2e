"""The checks of configs/jobs/smollm2: every prompt has an instruction that they know, and each measure is right."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from heed.jobs.job_file import load_job
from training.data import SourceConfig

ROOT = Path(__file__).parents[2]
JOB, FOLDER = ROOT / "configs" / "jobs" / "smollm2.toml", ROOT / "configs" / "jobs" / "smollm2"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_checks", FOLDER / "checks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks = loaded()


def prompts(name: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def kinds(name: str) -> set[str]:
    """The kinds of instruction in a file. Each prompt must have exactly one."""
    found = set()
    for prompt in prompts(name):
        matching = [pattern for pattern in checks.KINDS if re.search(pattern, prompt)]
        assert len(matching) == 1, prompt
        found.update(matching)
    return found


def test_the_job_parses_and_names_files_that_exist() -> None:
    job = load_job(JOB, ["ppo.init_from=HuggingFaceTB/SmolLM2-135M-Instruct"], opens_models=False)
    assert (job.name, job.stage_names) == ("smollm2", ("ppo", "compare"))
    assert job.ppo is not None
    assert job.compare is not None
    names = [job.ppo.prompts.source, job.compare.prompts.source, job.ppo.reward.function, job.compare.judge_function]
    for name in names:
        file, _, function = name.partition(":")
        assert (ROOT / file).is_file()
        assert not function or callable(getattr(checks, function))


def test_the_judge_of_human_labels_has_rows_of_its_own() -> None:
    def loaded_job(name: str, *stages: str) -> Any:
        starts = [f"{stage}.init_from=HuggingFaceTB/SmolLM2-135M-Instruct" for stage in stages]
        return load_job(FOLDER / f"{name}.toml", starts, opens_models=False)

    def rows(data: SourceConfig) -> range:
        return range(data.skip_rows, data.skip_rows + (data.max_rows or 0))

    job, judges = loaded_job("hh", "reward", "dpo", "ppo"), loaded_job("hh-judge", "reward")
    assert job.compare.judge_from == f"runs/{judges.name}/reward/model"
    trained, judged, compared = rows(job.reward.rankings), rows(judges.reward.rankings), rows(job.compare.prompts)
    assert trained == rows(job.dpo.rankings) == rows(job.ppo.prompts)
    assert trained.stop <= judged.start < judged.stop <= compared.start < compared.stop
    read = {(data.source, data.split) for data in (job.reward.rankings, judges.reward.rankings, job.compare.prompts)}
    assert len(read) == 1


def test_the_files_have_the_kinds_that_they_are_described_with() -> None:
    assert kinds("prompts") == kinds("heldout")
    assert not kinds("prompts") & kinds("new-kinds")
    assert kinds("prompts") | kinds("new-kinds") == set(checks.KINDS)


def test_held_out_prompts_are_about_other_topics() -> None:
    """No topic of training, the text between a task and its instruction, is in a held-out prompt."""
    tasks = r"Describe|Tell me something about|Write a short text about|What do people like about|Explain"

    def topics(name: str) -> set[str]:
        found = (re.match(rf"(?:{tasks}) (.*?)(?: to a child)?[.?] ", prompt) for prompt in prompts(name))
        return {match[1] for match in found if match}

    assert len(topics("prompts")) == 40
    assert len(topics("heldout")) == 15
    assert topics("heldout") == topics("new-kinds")
    assert not topics("prompts") & topics("heldout")


@pytest.mark.parametrize(
    ("instruction", "response", "degree"),
    [
        ("Do not use any commas.", "The sea is wide and blue.", 1.0),
        ("Do not use any commas.", "The sea, wide and blue.", 0.5),
        ("Do not use any commas.", "The sea is wide and", 0.5),  # cut off
        ("Do not use any commas.", "The sea, wide, and", 1 / 6),
        ("Use at most 12 words.", "It is a big and very old sea.", 1.0),
        ("Use at most 12 words.", " ".join(["sea"] * 24) + ".", 0.5),
        ("Answer in exactly 2 sentences.", "The sea is wide. It is blue!", 1.0),
        ("Answer in exactly 2 sentences.", "The sea is about 3.5 km wide.", 0.5),
        ("Answer in exactly 1 sentence.", "The sea is wide and", 0.0),
        ("Write everything in lowercase letters.", "the sea is wide.", 1.0),
        ("Write everything in lowercase letters.", "The Sea is wide.", 0.5),
        ("Answer with a numbered list of exactly 2 items.", "1. Blue sea\n2. Salty wind", 1.0),
        ("Answer with a numbered list of exactly 2 items.", "1) Blue sea\n\n2) Salty wind", 1.0),
        ("Answer with a numbered list of exactly 2 items.", "1. Blue sea\n2. Salty wind\n3. Sand", 2 / 3),
        ("Answer with a numbered list of exactly 2 items.", "Here you are:\n1. Blue water\n2. Wind", 0.0),
        ("Answer with exactly 2 bullet points.", "- Blue sea\n- Salty wind", 1.0),
        ("Answer with exactly 2 bullet points.", "* Blue sea and wind", 0.5),
        ("Answer with exactly 2 bullet points.", "The sea is wide and blue.", 0.0),
        ('Begin with the word "Today".', "Today the sea is blue.", 1.0),
        ('Begin with the word "Today".', "The sea is blue today.", 0.0),
        ('Use the word "seven".', "I know of Seven seas.", 1.0),
        ('Use the word "seven".', "I know of seventy seas.", 0.0),
        ('Do not use the word "the".', "Sea water is wide and blue.", 1.0),
        ('Do not use the word "the".', "The sea is blue.", 0.5),
        ("Use exactly 2 commas.", "A wide, blue, cold sea.", 1.0),
        ("Use exactly 2 commas.", "A wide, blue and salty sea.", 0.5),
        ("End with an exclamation mark.", "The sea is so blue!", 1.0),
        ("End with an exclamation mark.", "Oh! The sea is blue.", 0.5),
        ("Write everything in capital letters.", "THE SEA IS BLUE.", 1.0),
        ("Answer with a single question.", "Is the sea really blue?", 1.0),
        ("Answer with a single question.", "It is. Is the sea blue?", 0.5),
        ("Use at most 12 words.", "This is a creative idea.", 0.5),  # not about the sea
        ("Do not use any commas.", "Do not use any commas.", 0.5),
        ("Use at most 12 words.", "Blue. Wide.", 0.0),  # three words or fewer are no answer
        ("Use at most 12 words.", "", 0.0),
    ],
)
def test_degrees_by_hand(instruction: str, response: str, degree: float) -> None:
    assert checks.degree(f"Describe the sea. {instruction}", response) == pytest.approx(degree)
    prompt = [{"role": "user", "content": f"Describe the sea. {instruction}"}]
    assert checks.followed([prompt], [response]) == [float(degree == 1.0)]
    assert checks.reward([prompt], [response]) == pytest.approx([1.0 if degree == 1.0 else degree / 2])


def test_a_prompt_without_an_instruction_is_an_error() -> None:
    with pytest.raises(ValueError, match="none of the instructions"):
        checks.degree("Describe the sea.", "It is blue.")
