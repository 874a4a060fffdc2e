"""Commands of README and docs on a run of the debug job, which stands for the demo: exactly as they are written."""

import io
import shutil
import sys
from itertools import islice
from pathlib import Path

import pytest

from heed.cli import main
from tests.heed.test_documented_commands import WRITTEN

# Commands that take seconds and read nothing but a run and the files below; those that follow need what these leave.
RUN = (
    ("inspect",), ("few-shot",), ("measure", "tax"), ("compare", "runs/demo/sft/model"),
    ("compare", "sft=runs/demo/sft/model"), ("judge",), ("report",), ("chat", "runs/demo"), ("label", "sample"),
    ("label", "invite", "ann"), ("label", "person"),
)  # fmt: skip


def is_run(words: list[str]) -> bool:
    own = any(words[: len(prefix)] == [*prefix] for prefix in RUN)
    absent = ("runs/mine", "configs/", "models/SmolLM2")  # the last is what `make smollm2-model` downloads
    return own and not any(word == "JUDGE" or any(name in word for name in absent) for word in words)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_they_run_as_written(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished_run, tmp_path / "runs" / "demo")
    data = tmp_path / "runs" / "demo" / "world" / "data"
    for name, source in (
        ("prompts.jsonl", data / "compare_prompts.jsonl"),
        ("rankings.jsonl", data.parents[1] / "collect" / "rankings.jsonl"),
    ):
        with source.open(encoding="utf-8") as lines:
            (tmp_path / name).write_text("".join(islice(lines, 8)), encoding="utf-8")
    (tmp_path / "heldout.txt").write_text("Mia has a red kite.\n\nThe cat sleeps.\n", encoding="utf-8")
    examples = ('{"prompt": "Mia has a", "completion": " kite."}\n' for _ in range(6))
    (tmp_path / "examples.jsonl").write_text("".join(examples), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = list(dict.fromkeys(tuple(words) for _, words in WRITTEN if is_run(words)))
    # `heed label sample` makes the label store, which the other commands of labels and the judges need.
    ran.sort(key=lambda words: (words[:2] != ("label", "sample"), words[0] != "label"))
    for words in ran:
        monkeypatch.setattr(sys, "argv", ["heed", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n"))
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert caught.value.code in (0, None), f"heed {' '.join(words)}\n{said.out}{said.err}"
    assert len(ran) > 15
    assert (tmp_path / "runs" / "sft-or-ppo" / "report.html").is_file()
