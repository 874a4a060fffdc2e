"""The jobs that Heed shows pass their preflight on tokenizers that have the special tokens of the models they name."""

import re
from pathlib import Path

import pytest

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import check_data
from heed.jobs.run import Run
from tests.lm.published_tokens import PUBLISHED
from tests.lm.test_published_tokens import write
from tests.rows import jsonl

ROOT = Path(__file__).parents[3]
CLUSTER_JOBS = sorted((ROOT / "configs" / "jobs" / "cluster").glob("*.toml"))
FINE_TUNING = [path for path in CLUSTER_JOBS if not path.stem.startswith(("gpt2-pretrain", "gpt3"))]
# The tokens of a family's other sizes and versions.
SAME_TOKENS = dict.fromkeys(("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-70B"), "meta-llama/Meta-Llama-3-8B")
SAME_TOKENS["Qwen/Qwen3-30B-A3B"] = "Qwen/Qwen3-0.6B"

TURNS = [
    ("Why is the sky blue?", "Air scatters blue light.", "It is paint."),
    ("Say hello.", "Hello!", "Go away."),
] * 12
DEMONSTRATIONS = [
    {"prompt": f"{prompt} {number}", "completion": good} for number, (prompt, good, _) in enumerate(TURNS)
]
TEXTS = [
    {"prompt": f"{prompt} {number}", "chosen": good, "rejected": bad}
    for number, (prompt, good, bad) in enumerate(TURNS)
]
PREFERENCES = {
    "trl": TEXTS,
    "auto": TEXTS,
    "hh": [
        {
            "chosen": f"\n\nHuman: {prompt} {number}\n\nAssistant: {good}",
            "rejected": f"\n\nHuman: {prompt} {number}\n\nAssistant: {bad}",
        }
        for number, (prompt, good, bad) in enumerate(TURNS)
    ],
}


def overrides_for(path: Path, folder: Path) -> list[str]:
    """`--set` values that put tiny models with the published tokens, and small files, in place of what a job names."""
    job = load_job(path, opens_models=False)
    changes, sources = (
        list[str](),
        {"demonstrations": DEMONSTRATIONS, "prompts": [{**row, "answer": "7"} for row in DEMONSTRATIONS]},
    )
    for name, rows in sources.items():
        (folder / f"{name}.jsonl").write_text(jsonl(rows))
    for stage in job.stages:
        section = job.section_of(stage).model_dump()
        if model := section.get("init_from"):
            home = folder / re.sub(r"\W", "-", model)
            if not home.exists():
                home.mkdir()
                write(home, PUBLISHED[SAME_TOKENS.get(model, model)])
            changes.append(f'{stage.name}.init_from="{home}"')
        if section.get("sampler", {}).get("tensor_parallel_size", 1) > 1:  # the tiny models have two heads
            changes.append("ppo.sampler.tensor_parallel_size=1")
        if section.get("seq_len", 0) > 2048:  # more than the tiny models have, as are four heads
            changes += [f"{stage.name}.seq_len=2048", "engine.sequence_parallel_size=1"]
        if "rankings" in section:
            kind = section["rankings"]["format"]
            (folder / "pairs.jsonl").write_text(jsonl(PREFERENCES[kind]))
            changes.append(f'{stage.name}.rankings={{source="{folder}/pairs.jsonl", format="{kind}"}}')
        for field in ("demonstrations", "heldout"):
            if section.get(field):
                changes.append(f'{stage.name}.{field}=[{{source="{folder}/demonstrations.jsonl"}}]')
        if section.get("prompts"):
            changes.append(f'{stage.name}.prompts={{source="{folder}/prompts.jsonl"}}')
    return changes


def check(path: Path, folder: Path) -> None:
    job = load_job(path, overrides_for(path, folder))
    (folder / "run").mkdir()
    check_data(Run(job, folder / "run", None, None))  # type: ignore[arg-type]  # no worker is asked


@pytest.mark.parametrize("path", FINE_TUNING, ids=lambda path: path.stem)
def test_a_cluster_job_passes_preflight_with_the_published_tokens(path: Path, tmp_path: Path) -> None:
    check(path, tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/one-gpu.md"])
def test_a_documented_job_passes_preflight_with_the_published_tokens(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    jobs = re.findall(r"^name = \"[^\n]+\n.*?(?=^(?:```|END))", text, flags=re.M | re.S)
    assert jobs, f"{page} shows a job"
    for number, job in enumerate(jobs):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "job.toml").write_text(job)
        check(folder / "job.toml", folder)
