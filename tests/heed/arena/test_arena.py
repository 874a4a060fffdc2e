"""The arena's live policies: processes with tiny models, an endpoint, and sampling an answer again from a verdict."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import tomli_w

from files.hashes import derive_seed
from heed.arena import ArenaPolicy, ArenaSampling, PolicyProcesses, arena_policy, open_speaker
from heed.cli import main
from heed.commands.arena import arena_config, read_prompts, two_policies
from preferences.accounts import Account
from preferences.arena_records import Conversation
from preferences.formats.merging import clusters_of_arena
from preferences.page import arena as arena_module
from preferences.page.arena import CHOICES, NO_ANSWER, TOO_LONG, Arena, ArenaSetup, Given
from preferences.page.config import LabelingConfig
from preferences.records import Message
from preferences.store import LabelStore
from tests.models import load_language_model
from tests.rows import jsonl
from tests.serving import serving

if TYPE_CHECKING:
    from lm.tokenizer import Tokenizer

SAMPLING = ArenaSampling(temperature=0.9, max_new_tokens=12, seed=3)
WAIT_SECONDS = 120.0
SMOL = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct.gguf"


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: "Tokenizer", tiny_config: Any) -> Path:
    """A model with the shape of `model_folder` and other weights."""
    from lm.model import LanguageModel, init_weights
    from lm.weights import save_model

    model = LanguageModel(tiny_config)
    init_weights(model, seed=8)
    folder = tmp_path_factory.mktemp("other") / "model"
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


@pytest.fixture(scope="module")
def processes(model_folder: Path, other_folder: Path) -> Iterator[PolicyProcesses]:
    found = two_policies([f"one={model_folder}", f"two={other_folder}"])
    opened = PolicyProcesses(found, SAMPLING)
    yield opened
    opened.close()


class Heard:
    """Collects what one policy writes."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, str]] = []
        self.text, self.record, self.failure = "", {}, ""
        self.is_over = threading.Event()

    def wrote(self, side: int, text: str) -> None:
        self.texts.append((side, text))

    def ended(self, side: int, text: str, record: Any) -> None:
        self.texts.append((side, text))
        self.text, self.record = text, dict(record)
        self.is_over.set()

    def failed(self, reason: str) -> None:
        self.failure = reason
        self.is_over.set()

    def wait(self) -> "Heard":
        assert self.is_over.wait(WAIT_SECONDS)
        return self


def alone(folder: Path, question: str, seed: int) -> str:
    """Returns what `generate` gives for one prompt alone."""
    from lm.generation import generate
    from lm.sampling import Choice
    from lm.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": question}])
    (response,) = generate(
        load_language_model(folder).eval(), [prompt], max_new_tokens=SAMPLING.max_new_tokens,
        end_ids=tokenizer.end_ids, choice=Choice(SAMPLING.temperature), seeds=[seed],
    ).responses  # fmt: skip
    return tokenizer.decode(response).strip()


def test_many_at_once_get_what_each_would_get_alone(
    processes: PolicyProcesses, model_folder: Path, other_folder: Path
) -> None:
    heard = {}
    for number in range(10):
        for policy in (0, 1):
            heard[number, policy] = Heard()
            question = (Message("user", f"Where is the fox {number}?"),)
            processes.start(f"c{number}", policy, question, ("arena", number), policy, heard[number, policy])
    for (number, policy), one in heard.items():
        one.wait()
        seed = derive_seed(SAMPLING.seed, "arena", number)
        folder = (model_folder, other_folder)[policy]
        assert one.text == alone(folder, f"Where is the fox {number}?", seed)
        assert (one.record["policy"], one.record["seed"], one.record["kind"]) == (policy, seed, "model")


def test_a_conversation_that_is_too_long_fails_with_a_sentence(processes: PolicyProcesses) -> None:
    heard = Heard()
    processes.start("long", 0, (Message("user", "fox " * 500),), ("x",), 0, heard)
    assert heard.wait().failure == TOO_LONG


def test_a_process_that_is_killed_fails_its_answers_and_comes_back(processes: PolicyProcesses) -> None:
    process = processes._processes[1].process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)  # so that the answer is still unfinished
    heard = Heard()
    processes.start("lost", 1, (Message("user", "?"),), ("x",), 0, heard)
    os.kill(process.pid, signal.SIGKILL)
    assert heard.wait().failure == NO_ANSWER
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        heard = Heard()
        processes.start("again", 1, (Message("user", "?"),), ("x",), 0, heard)
        if heard.is_over.wait(5.0) and not heard.failure:
            break
        assert time.monotonic() < deadline
    assert heard.record["num_tokens"] > 0


def test_an_answer_that_begins_while_its_process_is_down_fails(processes: PolicyProcesses) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    heard = Heard()
    with patch.object(processes._processes[0], "_pipe", ours):
        processes.start("down", 0, (Message("user", "?"),), ("x",), 0, heard)
    assert heard.is_over.wait(60.0)
    assert heard.failure == NO_ANSWER


def test_a_stopped_answer_is_forgotten(processes: PolicyProcesses) -> None:
    stopped, next_one = Heard(), Heard()
    processes.start("stopped", 0, (Message("user", "?"),), ("x",), 0, stopped)
    processes.stop("stopped")
    processes.start("next", 0, (Message("user", "?"),), ("x",), 0, next_one)
    next_one.wait()
    assert not stopped.is_over.is_set()


# ---- endpoints ----


class Endpoint(BaseHTTPRequestHandler):
    """Streams an answer, or sends it whole, or fails, as the model's name says."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] == "broken":
            return self.send_error(500)
        self.send_response(200)
        streams = asked["model"] in ("streams", "breaks-off")
        self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
        self.end_headers()
        if streams:
            for part in ("Hello", ", fox", "."):
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": {"content": part}}]}).encode() + b"\n\n")
                self.wfile.flush()
            if asked["model"] == "breaks-off":
                return None
            last = {"model": "m-1", "choices": [{"delta": {}, "finish_reason": "stop"}]}
            self.wfile.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        else:
            whole = {"choices": [{"message": {"content": "Hello, fox."}, "finish_reason": "length"}]}
            self.wfile.write(json.dumps(whole).encode())
        return None

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"


def said_by(policy: ArenaPolicy) -> tuple[list[str], Any]:
    answering = open_speaker(policy, SAMPLING, 1).answer([{"role": "user", "content": "?"}], 2**40)
    texts = []
    while True:
        try:
            text = next(answering)
        except StopIteration as ended:
            return texts, ended.value
        if text is not None and text not in texts:
            texts.append(text)


def test_an_endpoint_streams(endpoint: str) -> None:
    texts, written = said_by(arena_policy("remote", f"{endpoint}#streams"))
    assert texts == ["Hello", "Hello, fox", "Hello, fox."]
    assert (written.text, written.record["served_model"], written.record["finished"]) == ("Hello, fox.", "m-1", True)
    assert written.record["sha256"] == ""
    assert written.record["seed"] < 2**31


def test_a_stream_that_breaks_off_is_no_answer(endpoint: str) -> None:
    with pytest.raises(ValueError, match="the stream ended before the answer did"):
        said_by(arena_policy("remote", f"{endpoint}#breaks-off"))


def test_an_endpoint_without_streams_gives_whole_answers(endpoint: str) -> None:
    texts, written = said_by(arena_policy("remote", f"{endpoint}#whole"))
    assert (texts, written.record["finished"]) == (["Hello, fox."], False)


def test_an_endpoint_that_fails_says_so(endpoint: str) -> None:
    with pytest.raises(ValueError, match="status 500"):
        said_by(arena_policy("remote", f"{endpoint}#broken"))


# ---- from a verdict back to the answer ----


def account(name: str) -> Account:
    return Account(name, "labeler", "admitted", arena_config(LabelingConfig()).version)


@pytest.fixture
def judge(tmp_path: Path, sqlite_tables: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Has people talk to two policies and judge each turn. Returns the store's path."""
    monkeypatch.setattr(arena_module, "USUAL_PACE", 1e6)

    def talk(writers: PolicyProcesses, people: dict[str, str], turns: tuple[str, ...] = ("Where is the fox?",)) -> str:
        path = str(shutil.copy(sqlite_tables, tmp_path / "labels.db"))
        config = arena_config(LabelingConfig())
        with LabelStore(path) as store, ArenaSetup(writers, "arena").opened(path, store, config) as arena:
            for name, choice in people.items():
                handle = arena.begin(account(name), turns[0])
                for number, question in enumerate(turns):
                    if number:
                        arena.ask(account(name), handle, number, question, "own" if number == 1 else "a")
                    conversation = written(arena, name, handle)
                    arena.judge(account(name), conversation, number, Given(choice))
        return path

    return talk


def written(arena: Arena, name: str, handle: str) -> Conversation:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := arena.conversation(account(name), handle)).turns[-1].is_finished:
        glance = arena.look(handle, len(found.turns) - 1)
        assert glance is None or not glance.failure, glance
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def run(*arguments: str) -> int:
    with patch.object(sys, "argv", ["heed", *arguments]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_verdicts_become_a_comparison_with_clusters_and_rankings_for_a_reward_model(
    processes: PolicyProcesses, judge: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = ("a", "b", "a-much", "tie", "bad", "b-much")
    path = judge(processes, {f"p{number}": choice for number, choice in enumerate(choices)})
    exported, rankings, out = tmp_path / "arena.jsonl", tmp_path / "rankings.jsonl", tmp_path / "compared"
    assert run("label", "export", "--store", path, "--batch", "arena", "--out", str(exported)) == 0
    assert run("verdicts", str(exported), "--out", str(out)) == 0
    assert "cluster_by" not in json.loads((out / "compare.json").read_text())["prompts"]  # all six had the same prompt
    with LabelStore(path) as store:
        assert clusters_of_arena([store.tasks("arena")[0].task]) == "person"
    report = json.loads((out / "report.json").read_text())
    assert "one" in json.dumps(report)
    assert (out / "report.html").is_file()
    assert run("label", "export", "--store", path, "--out", str(rankings), "--format", "rankings") == 0
    rows = [json.loads(line) for line in rankings.read_text().splitlines()]
    assert len(rows) == len(choices)
    assert sum(row["ranks"] == [1, 1] for row in rows) == 2
    capsys.readouterr()


@pytest.mark.nightly
def test_a_reward_model_learns_from_verdicts(
    processes: PolicyProcesses, model_folder: Path, judge: Callable[..., str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = judge(processes, {})
    config = arena_config(LabelingConfig())
    with LabelStore(path) as store, ArenaSetup(processes, "arena").opened(path, store, config) as arena:
        for number, choice in enumerate(("a", "b", "a-much", "tie", "bad", "b-much", "a", "b")):
            person = f"p{number % 3}"
            handle = arena.begin(account(person), f"Where is fox {number}?")
            arena.judge(account(person), written(arena, person, handle), 0, Given(choice))
            arena.ask(account(person), handle, 1, "And the dog?", "own" if number % 2 else "a")
            arena.judge(account(person), written(arena, person, handle), 1, Given(choice))
    rankings, job = tmp_path / "rankings.jsonl", tmp_path / "job.toml"
    exported = ("--batch", "arena", "--format", "rankings", "--out", str(rankings))
    assert run("label", "export", "--store", path, *exported) == 0
    assert len(rankings.read_text().splitlines()) == 12  # without the four verdicts on whole dialogues
    capsys.readouterr()
    reward = {
        "init_from": str(model_folder), "rankings": {"source": str(rankings)}, "heldout_share": 0.3,
        "batch": {"batch_size": 4, "micro_batch_size": 2}, "optimizer": {"learning_rate": 1e-3},
        "save_every_steps": 3, "evaluate_every_steps": 1,
    }  # fmt: skip
    job.write_text(tomli_w.dumps({"name": "arena", "engine": {"precision": "fp32"}, "reward": reward}))
    assert run("run", str(job), "--runs", str(tmp_path)) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "arena" / "reward" / "results.json").read_text())
    assert results["train_comparisons"] + results["heldout_comparisons"] == 12
    assert 0 < results["heldout_accuracy"]["num_pairs"] <= results["heldout_comparisons"]  # ties order no pair


def test_ten_people_at_once(processes: PolicyProcesses, judge: Callable[..., str]) -> None:
    """All get both answers, and all verdicts are stored."""
    path = judge(processes, {})
    choices = dict(zip((f"p{number}" for number in range(10)), cycle(CHOICES), strict=False))
    config = arena_config(LabelingConfig())
    with LabelStore(path) as store, ArenaSetup(processes, "arena").opened(path, store, config) as arena:

        def talk(name: str) -> None:
            handle = arena.begin(account(name), f"{name}: where is the fox?")
            arena.judge(account(name), written(arena, name, handle), 0, Given(choices[name]))

        with ThreadPoolExecutor(len(choices)) as pool:
            list(pool.map(talk, choices))
        judgments = store.judgments("arena")
    assert {act.labeler for act in judgments} == set(choices)


# ---- what is given on the command line ----


def test_folders_of_runs_and_stages_stand_for_their_models(
    model_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "ppo").mkdir(parents=True)
    (tmp_path / "run" / "ppo" / "model").symlink_to(model_folder)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model").symlink_to(other_folder)
    first, second = two_policies([str(tmp_path / "run"), f"b={tmp_path / 'sft'}"])
    assert first.spec == str(tmp_path / "run" / "ppo" / "model")
    assert second.name == "b"
    assert len(first.sha256) == 64


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["MODEL"], "1 policies were given; two were expected"),
        (["MODEL", "b=MODEL"], "are the same model"),
        (["MODEL", "http://127.0.0.1:1/v1"], "URL#MODEL was expected"),
        (["MODEL", "b=ENCODER"], "a model that writes text was expected"),
        (["MODEL", "nowhere/at/all"], "no such folder"),
    ],
)
def test_wrong_policies_are_refused(specs: list[str], message: str, model_folder: Path, encoder_folder: Path) -> None:
    given = [spec.replace("MODEL", str(model_folder)).replace("ENCODER", str(encoder_folder)) for spec in specs]
    given = [spec.replace(f"URL#{model_folder}", "URL#MODEL") for spec in given]
    with pytest.raises(ValueError, match=message):
        two_policies(given)


def test_prompts_and_configuration(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(jsonl({"messages": messages} for messages in (turns[1:], turns)))
    assert [len(prompt.messages) for prompt in read_prompts(str(file))] == [1, 2]
    assert arena_config(LabelingConfig()).title == "Arena"
    assert arena_config(LabelingConfig(title="Mine")).title == "Mine"
    assert "two models" in arena_config(LabelingConfig(title="Mine")).instructions


@pytest.mark.long
@pytest.mark.skipif(not SMOL.is_file(), reason="models/SmolLM2-135M-Instruct.gguf is not here")
def test_a_real_policy_against_a_changed_copy(tmp_path: Path, judge: Callable[..., str]) -> None:
    from lm.hub import model_directory
    from lm.tokenizer import Tokenizer
    from lm.weights import save_model

    folder = model_directory(str(SMOL))
    model = load_language_model(folder)
    for block in model.decoder.blocks:
        block.mlp.down.weight.data *= 0.97
    save_model(tmp_path / "changed", model, model.state_dict(), Tokenizer.load(folder))
    del model
    writers = PolicyProcesses(two_policies([f"smol={SMOL}", f"changed={tmp_path / 'changed'}"]), SAMPLING)
    try:
        path = judge(writers, {"ann": "a", "bob": "tie"}, ("What is the capital of France?", "And of Italy?"))
    finally:
        writers.close()
    with LabelStore(path) as store:
        tasks = [one.task for one in store.tasks("arena")]
    # Not every answer: each run draws new seeds, and a right answer may have one word.
    assert any(len(response.split()) > 2 for task in tasks for response in task.responses)
