"""Rewards from a Python function and from a real HTTP server on loopback."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from files import retries
from reward.external import RemoteReward, RewardFunction, Scored, score_in_parts
from tests.serving import serving
from training.notices import speaking_through

ASKED = [[{"role": "user", "content": text}] for text in ("one?", "two?", "three?")]
TEXTS = ["a", "bb", "ccc"]

FUNCTIONS = """
import json

calls = []

def lengths(prompts, responses):
    calls.append(len(responses))
    assert prompts[0][-1]["role"] == "user"
    return [float(len(text)) for text in responses]

def picky(prompts, responses):
    calls.append(len(responses))
    if "bb" in responses:
        raise KeyError("no bb")
    return [len(text) for text in responses]

def some(prompts, responses):
    return [None, float("nan"), 2]

def short(prompts, responses):
    return [1.0]

def words(prompts, responses):
    return ["1.0" for _ in responses]

def nothing(prompts, responses):
    print("nothing to say")

def huge(prompts, responses):
    return [10 ** 1000, [1, 2], float("inf")]

def deep(prompts, responses):
    return helper(responses[0])

def helper(text):
    return json.loads("{" + text)

value = 3
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RewardFunction]:
    """A function of a file in the current folder, by its name."""
    (tmp_path / "fruit_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    sys.modules.pop("fruit_rewards", None)
    return lambda name: RewardFunction(function=f"fruit_rewards:{name}")


def calls_of(reward: RewardFunction) -> list[int]:
    calls: list[int] = vars(sys.modules[reward.load().__module__])["calls"]
    return calls


def test_a_function_is_called_with_prompts_and_texts(rewards: Callable[[str], RewardFunction]) -> None:
    reward = rewards("lengths")
    assert reward.score(ASKED, TEXTS) == [Scored(1.0), Scored(2.0), Scored(3.0)]
    assert calls_of(reward) == [3]
    assert reward.file.name == "fruit_rewards.py"
    by_file = RewardFunction(function="fruit_rewards.py:lengths")
    assert by_file.score(ASKED[:1], TEXTS[:1]) == [Scored(1.0)]
    assert by_file.file == reward.file.resolve()


def test_one_bad_response_costs_no_other(rewards: Callable[[str], RewardFunction]) -> None:
    reward = rewards("picky")
    first, second, third = reward.score(ASKED, TEXTS)
    assert (first, third) == (Scored(1.0), Scored(3.0))
    assert math.isnan(second.score)
    line = 1 + FUNCTIONS.splitlines().index('        raise KeyError("no bb")')
    assert second.failure.splitlines() == [
        "fruit_rewards:picky raised KeyError: 'no bb'",
        f'  File "{reward.file}", line {line}, in picky',
        '    raise KeyError("no bb")',
    ]
    assert calls_of(reward) == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "failures"),
    [
        ("some", ["returned None; a finite number was expected", "returned nan; a finite number was expected", ""]),
        ("short", ["returned 1 values for 3 responses"] * 3),
        ("words", ["returned '1.0'; a finite number was expected"] * 3),
        ("nothing", ["returned NoneType for 3 responses"] * 3),
        (
            "huge",
            [f"returned {what}; a finite number was expected" for what in ("an integer of 3322 bits", "[1, 2]", "inf")],
        ),
    ],
)
def test_what_is_no_score_fails_and_says_so(
    rewards: Callable[[str], RewardFunction], name: str, failures: list[str]
) -> None:
    found = rewards(name).score(ASKED, TEXTS)
    line = 1 + FUNCTIONS.splitlines().index(f"def {name}(prompts, responses):")
    place = f'\n  File "{Path.cwd() / "fruit_rewards.py"}", line {line}, in {name}'
    expected = [f"fruit_rewards:{name} {why}{place}" if why else "" for why in failures]
    assert [scored.failure for scored in found] == expected
    assert [math.isnan(scored.score) for scored in found] == [bool(why) for why in failures]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "fruit_rewards:missing",
            r"reward function 'fruit_rewards:missing': fruit_rewards has no function 'missing'",
        ),
        ("fruit_rewards:value", "has no function 'value'"),
        ("fruit_rewards:nothing_here", "has no function 'nothing_here'"),
        ("no_such_module:f", "reward function 'no_such_module': No module named 'no_such_module'"),
        ("nowhere.py:f", "nowhere.py: no such file"),
    ],
)
def test_a_function_that_is_not_there_is_named(rewards: Callable[[str], RewardFunction], name: str, words: str) -> None:
    del rewards
    with pytest.raises(ValueError, match=words):
        RewardFunction(function=name).load()


def test_only_the_users_own_lines_are_shown(rewards: Callable[[str], RewardFunction]) -> None:
    """Neither Heed's frames nor those of the library that raised."""
    (scored,) = rewards("deep").score(ASKED[:1], TEXTS[:1])
    first, *frames = scored.failure.splitlines()
    assert first.startswith("fruit_rewards:deep raised JSONDecodeError: Expecting property name")
    file = Path.cwd() / "fruit_rewards.py"
    assert [line.strip() for line in frames if "^" not in line] == [
        f'File "{file}", line {_line("    return helper(responses[0])")}, in deep',
        "return helper(responses[0])",
        f'File "{file}", line {_line("""    return json.loads("{" + text)""")}, in helper',
        'return json.loads("{" + text)',
    ]


def _line(text: str) -> int:
    return 1 + FUNCTIONS.splitlines().index(text)


@pytest.mark.parametrize("name", ["broken.py:score", "broken:score"])
def test_a_file_that_fails_on_import_says_so_every_time(
    rewards: Callable[[str], RewardFunction], tmp_path: Path, name: str
) -> None:
    del rewards
    (tmp_path / "broken.py").write_text("def score(prompts, responses):\n    return []\n\nWEIGHT = {}['w']\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"broken.*raised KeyError: 'w'\n.*broken\.py\", line 4, in <module>"):
            RewardFunction(function=name).score(ASKED, TEXTS)
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    with pytest.raises(ValueError, match="No module named 'no_such_library'"):
        RewardFunction(function=name).score(ASKED, TEXTS)
    (tmp_path / "broken.py").write_text("def score(prompts, responses)\n")
    with pytest.raises(ValueError, match=r"SyntaxError: expected ':' \(broken\.py, line 1\)"):
        RewardFunction(function=name).score(ASKED, TEXTS)


class Endpoint(ThreadingHTTPServer):
    """Answers with what was queued, (status, body) each; remembers what it was sent."""

    daemon_threads = False  # closing the server waits for the answers under way

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.sent: list[dict[str, Any]] = []
        self.silence_seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        self.server.sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        time.sleep(self.server.silence_seconds)
        status, body = self.server.answers.pop(0)
        with suppress(BrokenPipeError, ConnectionResetError):  # who asked may have stopped waiting
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Endpoint()) as server:
        yield server


GOOD = b'{"scores": [1, 2.5, null]}'


def failures_of(found: list[Scored]) -> list[str]:
    assert [math.isnan(scored.score) for scored in found] == [bool(scored.failure) for scored in found]
    return [scored.failure for scored in found]


def test_an_endpoint_is_sent_prompts_and_responses(endpoint: Endpoint) -> None:
    endpoint.answers = [(200, GOOD)]
    found = RemoteReward(url=endpoint.url).score(ASKED, TEXTS)
    assert endpoint.sent == [{"prompts": ASKED, "responses": TEXTS}]
    assert found[:2] == [Scored(1.0), Scored(2.5)]
    assert failures_of(found) == ["", "", f"{endpoint.url} returned None; a finite number was expected"]


def test_what_may_pass_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.answers = [(500, b"oh"), (429, b"later"), (200, GOOD)]
    assert RemoteReward(url=endpoint.url).score(ASKED, TEXTS)[0] == Scored(1.0)
    assert len(endpoint.sent) == 3
    endpoint.answers = [(503, b"")]
    failures = failures_of(RemoteReward(url=endpoint.url, max_wait_seconds=0).score(ASKED, TEXTS))
    assert failures == [f"{endpoint.url}: status 503 (Service Unavailable)"] * 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"scores", "'scores' was answered; a JSON object with 'scores' was expected"),
        (b'{"scores": [1, ', "a JSON object with 'scores' was expected"),
        (b"[1, 2, 3]", "'[1, 2, 3]' was answered; a JSON object"),
        (b'{"scores": 3}', "'scores' with 3 numbers was expected"),
        (b'{"scores": [1, 2]}', "'scores' with 3 numbers was expected"),
        (b'{"scores": [1, Infinity, 2]}', "a JSON object with 'scores' was expected"),
    ],
)
def test_a_malformed_answer_is_tried_again(endpoint: Endpoint, body: bytes, words: str) -> None:
    endpoint.answers = [(200, body), (200, GOOD)]
    assert RemoteReward(url=endpoint.url).score(ASKED, TEXTS)[0] == Scored(1.0)
    endpoint.answers = [(200, body)]
    failures = failures_of(RemoteReward(url=endpoint.url, max_wait_seconds=0).score(ASKED, TEXTS))
    assert all(words in failure and endpoint.url in failure for failure in failures)


def test_a_refusal_or_a_response_without_a_score_is_not_tried_again(endpoint: Endpoint) -> None:
    endpoint.answers = [(404, b""), (200, b'{"scores": [1, NaN, "x"]}')]
    assert (
        failures_of(RemoteReward(url=endpoint.url).score(ASKED, TEXTS))
        == [f"{endpoint.url}: status 404 (Not Found)"] * 3
    )
    assert [bool(failure) for failure in failures_of(RemoteReward(url=endpoint.url).score(ASKED, TEXTS))] == [
        False,
        True,
        True,
    ]


def test_silence_and_a_closed_port_are_failures(endpoint: Endpoint) -> None:
    endpoint.silence_seconds, endpoint.answers = 0.6, [(200, GOOD)]
    silent = RemoteReward(url=endpoint.url, timeout_seconds=0.1, max_wait_seconds=0)
    assert all("no whole answer within 0.1 s" in failure for failure in failures_of(silent.score(ASKED, TEXTS)))
    closed = RemoteReward(url="http://127.0.0.1:9/", max_wait_seconds=0).score(ASKED, TEXTS)
    assert all("refused" in failure for failure in failures_of(closed))


class Parallel(ThreadingHTTPServer):
    """Answers the length of each response, and none before two requests are there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ParallelHandler)
        self.both = threading.Barrier(2, timeout=60.0)


class ParallelHandler(BaseHTTPRequestHandler):
    server: Parallel

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.both.wait()
        body = json.dumps({"scores": [len(response) for response in asked["responses"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


def test_an_endpoint_has_several_requests_at_once_and_scores_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    texts = ["a" * length for length in (3, 1, 4, 1, 5, 9, 2, 6)]
    with serving(Parallel()) as server:
        reward = RemoteReward(url=f"http://127.0.0.1:{server.server_port}/score", timeout_seconds=20.0, parallel=2)
        found = score_in_parts(reward, [ASKED[0]] * len(texts), texts, size=2)
    assert found == [Scored(float(len(text))) for text in texts]


def test_a_function_is_called_in_parts_on_the_calling_thread(tmp_path: Path) -> None:
    file = tmp_path / "whose.py"
    file.write_text(
        "import threading\n"
        "def score(prompts, responses):\n"
        "    assert threading.current_thread() is threading.main_thread()\n"
        "    return [len(responses)] * len(responses)\n"
    )
    found = score_in_parts(RewardFunction(function=f"{file}:score"), [ASKED[0]] * 5, TEXTS[:1] * 5, size=2)
    assert [scored.score for scored in found] == [2, 2, 2, 2, 1]


def test_what_a_function_prints_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the speaker of a worker; in the user's own process on standard output, as always."""
    path = tmp_path / "printing.py"
    path.write_text(
        "def score(prompts, responses):\n    print('scoring', *responses)\n    return [1.0] * len(responses)\n"
    )
    reward, heard = RewardFunction(function=f"{path}:score"), list[str]()
    with speaking_through(heard.append):
        assert reward.score(ASKED, TEXTS) == [Scored(1.0)] * 3
    assert heard == [f"{path}:score: scoring a bb ccc"]
    assert capsys.readouterr().out == ""
    reward.score(ASKED, TEXTS)
    assert capsys.readouterr().out == "scoring a bb ccc\n"
