"""A worker keeps its policy in memory from one part of the prompts to the next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.remote import Local
from lm.source import load_for_inference
from reward import sampling
from reward.sampling import SamplingSpec, sample_everywhere, sample_policy
from training.data import Prompt


@dataclass
class OneRank:
    """The part of `StageRun` that `sample_in_parts` uses, with one worker in this process."""

    folder: Path
    name: str = "collect"

    def workers(self) -> "OneRank":
        return self

    def put(self, _stage: str, factory: Any, *args: Any) -> Local[Any]:
        return Local(factory(*args))

    def show(self, done: int, total: int, what: str) -> None:
        pass


def test_a_worker_loads_each_model_once(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def load(source: Any, *args: Any) -> Any:
        loaded.append(source.folder)
        return load_for_inference(source, *args)

    monkeypatch.setattr(sampling, "load_for_inference", load)
    monkeypatch.setattr("stages.data.PROMPTS_AT_ONCE", 2)
    prompts = [
        Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": "a" * i},), kind="") for i in range(1, 8)
    ]
    spec = SamplingSpec(model_folder, 2, 5, 1.0, 3, "fp32", reference=str(model_folder))
    (tmp_path / "collect").mkdir()
    run: Any = OneRank(tmp_path / "collect")
    found = sample_everywhere(run, "phase", spec, prompts)
    assert len(list((tmp_path / "collect" / "samples" / "phase").iterdir())) == 4
    assert loaded == [model_folder] * 2, "the policy and the reference, once each for all four parts"
    assert [s.response for s in found] == [s.response for s in sample_policy(spec, prompts)]
    # After a kill, a rerun samples only what is missing.
    (tmp_path / "collect" / "samples" / "phase" / "00002.jsonl").unlink()
    assert sample_everywhere(run, "phase", spec, prompts) == found
