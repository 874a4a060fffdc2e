"""Environments of the published package verifiers."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lm.generation import Generated
from lm.tokenizer import Tokenizer
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.conversations import Conversations
from ppo.environments.environment import Episode, Reply
from ppo.environments.verifiers import VerifiersEnvironment

ROOT = Path(__file__).parents[3]
FILE = str(Path(__file__).with_name("verifiers_environment.py"))
PROMPT = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Say the word."}]
ROW = {"example_id": 0, "answer": "plum", "info": {"hint": "a fruit"}}


def said(text: str, *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(text, text, calls)


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("verifiers.types", reason="the package verifiers, version 0.3, is not installed")


@contextmanager
def opened(**settings: Any) -> Iterator[tuple[Episode, Callable[..., Any]]]:
    """An episode, and what runs its calls as conversations do: one task per call, in one loop."""
    environment = VerifiersEnvironment(environment=FILE, settings=settings)
    environment.load()
    episode = environment.open(PROMPT, ROW, 0)
    with asyncio.Runner() as runner:
        yield episode, runner.run
        runner.run(episode.close())


def test_turns_are_answered_and_the_rubric_scores() -> None:
    with opened() as (first, run), opened() as (second, run_second):
        assert run(first.begin()) == ()
        assert run_second(second.begin()) == ()
        assert run(first.reply(said("fig"))) == Reply([{"role": "user", "content": "a fruit"}])
        assert run_second(second.reply(said("plum"))) == Reply(is_over=True)
        assert run(first.reply(said("plum"))) == Reply(is_over=True)
        assert (run(first.score()), run_second(second.score())) == (1 / 2, 1.0)
    with opened(max_turns=1) as (episode, run):
        run(episode.begin())
        assert run(episode.reply(said("fig"))) == Reply(is_over=True)
        assert run(episode.score()) == 0


def test_a_conversation_that_ends_early_is_scored() -> None:
    with opened(max_turns=9) as (episode, run):
        run(episode.begin())
        run(episode.reply(said("a plum or a fig")))
        assert run(episode.score()) == 1  # of what was said before the turn that was cut off
    with opened() as (episode, run):
        run(episode.begin())
        assert run(episode.score()) == 0


@dataclass
class Scripted:
    """A sampler that writes the next of `turns` in all conversations."""

    tokenizer: Tokenizer
    turns: list[str]

    def sample(self, _prompts: Any, _seeds: Any, *, max_new_tokens: Any, temperature: float) -> Generated:
        whole = [*self.tokenizer.encode_plain([self.turns.pop(0)])[0], self.tokenizer.turn_end_id]
        responses = [whole[:limit] for limit in max_new_tokens]
        assert temperature == 1
        return Generated(responses, [found == whole for found in responses], [[-1.0] * len(one) for one in responses])


def test_conversations_are_held_and_scored_even_if_room_runs_out(tokenizer: Tokenizer) -> None:
    chatty = tokenizer.with_template("chat")
    environment = VerifiersEnvironment(environment=FILE, settings={"max_turns": 9})
    environment.load()
    prompt, messages = chatty.encode_prompt(PROMPT), [PROMPT] * 3
    for turns, tokens, rewards in (
        (["fig", "plum"], 80, [0.0, 0.5]),
        (["a plum", "no room at all" * 9], 60, [0.0, 1.0]),
    ):
        talks = Conversations(
            environment, chatty, Scripted(chatty, turns),  # type: ignore[arg-type]
            max_new_tokens=tokens, max_prompt_tokens=200, temperature=1,
        )  # fmt: skip
        found = talks.sample([prompt] * 3, messages, [ROW] * 3, [1, 2, 3])
        assert found.failure == ""
        for talk in found.conversations:
            assert [sum(talk.rewards[:-1]), talk.rewards[-1]] == rewards
            assert "a fruit" in chatty.decode(talk.tokens)


def test_tools_are_called() -> None:
    environment = VerifiersEnvironment(environment=FILE, settings={"kind": "tool"})
    (tool,) = environment.tools
    assert (tool["type"], tool["function"]["name"]) == ("function", "add")
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    with opened(kind="tool") as (episode, run):
        run(episode.begin())
        reply = run(episode.reply(said("I add.", ToolCall("add", {"a": 2, "b": 3}), ToolCall("sub", {}))))
        first, second = reply.messages
        assert first == {"role": "tool", "name": "add", "content": "5"}
        assert (second["role"], second["name"]) == ("tool", "sub")
        assert "sub" in second["content"]
        unreadable = said("<tool_call>plum", ToolCall("", {}, "a call is not JSON"))
        assert run(episode.reply(unreadable)) == Reply(is_over=True)  # a text without calls ends it
        assert run(episode.score()) == 1 / 2


def test_what_fails_loses_the_conversation() -> None:
    for word, error in (("crash", "the disk is full"), ("fail", "the game is broken"), ("rewrite", "changed earlier")):
        with opened() as (episode, run):
            run(episode.begin())
            with pytest.raises(Exception, match=error):
                run(episode.reply(said(word)))


def test_close_ends_a_rollout() -> None:
    with opened() as (episode, run):
        run(episode.begin())
        run(episode.reply(said("fig")))
    loop, end = VerifiersEnvironment(environment=FILE)._loaded()[2], time.monotonic() + 10
    while asyncio.all_tasks(loop) and time.monotonic() < end:
        time.sleep(0.01)
    assert not asyncio.all_tasks(loop)


def test_mistakes_are_named_and_signals_stay_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    VerifiersEnvironment(environment=FILE, settings={"max_turns": 4}).check([])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(ValueError, match=r"load_environment of .* unexpected keyword argument 'turns'"):
        VerifiersEnvironment(environment=FILE, settings={"turns": 4}).check([])
    with pytest.raises(ValueError, match="its rubric scores groups"):
        VerifiersEnvironment(environment=FILE, settings={"kind": "group"}).check([])
    with pytest.raises(ValueError, match="wordl"):
        VerifiersEnvironment(environment="wordl").check([])


def test_a_job_with_two_workers_learns_in_it(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{**ROW, "prompt": PROMPT, "example_id": number} for number in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = (
        f"ppo.environment={{kind='verifiers', environment='{FILE}'}}", 'ppo.reward={kind="none"}',
        f"ppo.prompts={{source='{prompts}'}}", "workers=2", "ppo.num_iterations=2",
    )  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "heed",
        "run",
        str(ROOT / "configs/jobs/environment.toml"),
        "--runs",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, *(part for setting in settings for part in ("--set", setting))], cwd=ROOT, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (tmp_path / "environment" / "ppo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    assert len(metrics) == 2
    assert all(one["turns"] >= 1 and one["failed_scores"] == 0 for one in metrics)
    assert any(one["environment_tokens"] > 0 for one in metrics), "no turn was answered"


def test_rows_keep_what_rubrics_read_also_without_the_package() -> None:
    row = {**ROW, "prompt": PROMPT, "question": "Say the word."}
    assert VerifiersEnvironment(environment=FILE).row_fields.of("prompts.jsonl:1", row) == ROW


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match=r"needs the package verifiers, version 0\.3"):
        VerifiersEnvironment(environment="wordle").check([])
