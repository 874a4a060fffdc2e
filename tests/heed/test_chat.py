"""`heed chat` at a terminal: streaming, commands, history; and what it reads of the system's turn."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from files.hashes import derive_seed
from heed.cli import main
from lm.generation import generate
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from tests.models import load_language_model

ASKED = "Where is the fox?"
OPTIONS = ("--system", "Be kind.", "--max-new-tokens", "6", "--seed")


def printable(model_folder: Path) -> tuple[str, str]:
    """A seed with which the model, which knows nothing, answers in characters that a terminal shows; the answer."""
    answers = ((seed, answer(model_folder, seed)) for seed in range(500))
    return next((str(seed), text) for seed, text in answers if len(text) > 1 and text.isascii() and text.isprintable())


def answer(model_folder: Path, seed: int) -> str:
    """What the model says first, sampled without the command."""
    tokenizer = Tokenizer.load(model_folder)
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ASKED}]
    (response,) = generate(
        load_language_model(model_folder).eval(), [tokenizer.encode_prompt(turns)], max_new_tokens=6,
        end_ids=[tokenizer.end_id], choice=Choice(0.7), seeds=[derive_seed(seed, "chat", 1, f"{ASKED}\n", 0)],
    ).responses  # fmt: skip
    return tokenizer.decode(response).strip()


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_a_conversation_on_a_pipe(
    leave: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, expected = printable(model_folder)
    typed = f"{ASKED}\n/nope\n/reset\n{ASKED}\n{leave}\nnever read\n"
    monkeypatch.setattr(sys, "argv", ["heed", "chat", str(model_folder), *OPTIONS, seed])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr()
    assert said.out == 2 * f"{expected}\n"
    assert "/nope: no such command; /help lists them" in said.err


def test_the_folder_of_a_stage_leads_to_its_model(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model").symlink_to(model_folder)
    monkeypatch.setattr(sys, "argv", ["heed", "chat", str(tmp_path / "sft")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"its model is {tmp_path}/sft/model" in capsys.readouterr().err


def test_the_folder_of_a_run_leads_to_its_models(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "model").symlink_to(model_folder)
    monkeypatch.setattr(sys, "argv", ["heed", "chat", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"is the folder of a run; its models are {tmp_path}/ppo/model" in capsys.readouterr().err.replace("\n", "")


def test_a_conversation_at_a_terminal(model_folder: Path, tmp_path: Path) -> None:
    """The answer appears as it is sampled; the up arrow brings back the last line, also of an earlier session; commands
    are not turns.
    """
    history = tmp_path / "heed" / "chat_history"
    history.parent.mkdir()
    history.write_text(f"{ASKED}\n")
    seed, expected = printable(model_folder)
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "heed", "chat", str(model_folder), *OPTIONS, seed]
    environment = os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(tmp_path)}
    chat = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        assert "type a message; /help lists commands" in read_until(ours, "\n> ")
        os.write(ours, b"\x1b[A\n")
        said = read_until(ours, "\n> ")
        assert f"{ASKED}\n{expected}\n> " in said.replace("\r", "")
        os.write(ours, b"/reset\n\x1b[A\x1b[A\n")
        assert expected in read_until(ours, expected)  # the line of history is asked again
        os.write(ours, b"/help\nquit\n")
        assert "/reset  start over" in read_until(ours, "chat_history")
        assert chat.wait(30) == 0
        assert history.read_text().splitlines() == [ASKED, "/reset", ASKED, "/help", "quit"]  # repeats once
        assert history.stat().st_mode & 0o777 == 0o600
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)


def read_until(terminal: int, end: str, *, seconds: float = 60) -> str:
    text, last = "", time.monotonic() + seconds
    while end not in text:
        assert time.monotonic() < last, text
        if select.select([terminal], [], [], 0.5)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
    return text
