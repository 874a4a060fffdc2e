"""Fixtures shared by several packages' tests: a tiny shape, a tiny tokenizer, a tiny model on disk, a label store."""

import atexit
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from files.importing import PACKAGES
from tests import examples
from tests.serving import serving

pytest_plugins = ["tests.databases"]

# Read when the libraries are first imported. No test uses the network or DeepSpeed's GPU backend, and matrices of 16
# columns gain nothing from threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test checks a certificate, and reading all of a machine's takes each HTTP client 30 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Otherwise each of the hundreds of processes that tests start compiles the tree again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if Path("/dev/nvidia0").exists():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are for CPUs; tests/gpu has its own command

# Tests press Ctrl-C in commands that they start. Started in the background, a process ignores it, and so would they.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test process must not find, or join, a Ray cluster that another one started.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")
    atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

    from lm.config import ModelConfig
    from lm.tokenizer import Tokenizer
    from preferences.store import LabelStore

# Repetitive enough for a few merges, with bytes outside ASCII.
TEXTS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "A bird in the hand is worth two in the bush, and the bush is far.",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein. 山高月小。",
    "The fox and the dog and the bird went over the bush and slept in the hand.",
)


gc.disable()  # while tests are imported


# The files that take longest, first: a long one that starts last would leave the other processes without work.
# `test_two_hosts` and `test_hangs` mostly wait. They are far apart in this list, so that they run one after another, at
# the same time as files that compute.
LONGEST = [
    "heed/jobs/test_kill.py", "test_splits.py", "fake_cuda/test_fake_cuda.py", "heed/jobs/test_loop.py",
    "heed/jobs/test_mixture_job.py", "lm/samplers/test_draws.py", "lm/test_kernels_both_ways.py", "test_tutorials.py",
    "real/test_smollm2.py", "real/test_training.py", "cluster/test_two_hosts.py", "heed/jobs/test_stage_jobs.py",
    "preferences/page/test_browser.py", "lm/test_generation.py", "test_worked_examples.py",
    "heed/jobs/test_lost_head.py", "heed/jobs/test_resuming.py", "heed/jobs/test_submit.py",
    "heed/jobs/test_classify_jobs.py", "cluster/test_group.py", "heed/jobs/test_plan.py",
    "lm/samplers/test_verify.py", "heed/jobs/test_custom_stage.py", "cluster/test_hangs.py",
    "preferences/page/test_attacks.py", "ppo/test_disaggregated.py", "heed/jobs/test_pipeline.py",
    "lm/test_gpu_kernels.py", "heed/arena/test_arena.py", "heed/jobs/test_returning_nodes.py",
    "preferences/page/test_team_tutorial.py", "heed/jobs/test_verifier_job.py", "heed/jobs/test_folders.py",
    "research/studies/test_study_algorithms.py", "heed/jobs/test_ahead.py", "heed/jobs/test_recovery.py",
    "preferences/test_scripted.py", "preferences/page/test_kills.py", "heed/jobs/test_replay.py",
    "ppo/test_planned_memory.py", "research/chaos/test_local_cluster.py", "benchmarks/test_speed.py",
    "benchmarks/test_quarter.py", "heed/jobs/test_begun_workers.py", "classify/test_classify_stage.py",
    "research/studies/test_study.py", "training/test_sharding.py", "heed/jobs/test_judge_job.py",
    "ppo/test_ppo_ranks.py", "ppo/test_generator_teams.py", "preferences/test_backup.py",
    "heed/jobs/test_external_reward.py", "heed/jobs/test_rounds.py", "heed/jobs/test_fewer_workers.py",
    "training/test_deadline.py", "research/studies/test_label_choice.py", "ppo/test_people.py",
    "ppo/test_memory_ranks.py", "benchmarks/test_gpu.py", "heed/jobs/test_documented_commands_run.py",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the long tests, as CI does")
    parser.addoption("--nightly", action="store_true", help="all tests, and properties with all their examples")


def pytest_configure(config: pytest.Config) -> None:
    examples.share = 1.0 if config.getoption("--nightly") else 0.1
    # A warning that Heed's own code causes is an error.
    config.addinivalue_line("filterwarnings", rf"error:::({'|'.join(PACKAGES)})(\..*)?")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.markexpr:
        _leave_out_long_ones(config, items)
    here = Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST)}
    assert all(path.exists() for path in place), [str(path) for path in place if not path.exists()]
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def _leave_out_long_ones(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests of the tiers that the command does not ask for, except in files that it names."""
    tiers = {"nightly", "long"} if not config.getoption("--all") else {"nightly"}
    if config.getoption("--nightly"):
        return
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    is_left_out = {
        item: any(map(item.get_closest_marker, tiers)) and item.path.resolve() not in named for item in items
    }
    items[:] = [item for item, is_out in is_left_out.items() if not is_out]
    config.hook.pytest_deselected(items=[item for item, is_out in is_left_out.items() if is_out])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Otherwise what a test draws without a seed would depend on which tests this process has run before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What the imports of all tests have made stays: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_a_file_leaves_is_not_looked_at_again() -> Iterator[None]:
    """Engines collect garbage when they close, which takes seconds among all that thousands of tests have left."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_ray_is_left_to_the_next_file() -> Iterator[None]:
    """A refused `heed run` leaves the Ray that it began, with this file's environment, to the end of the process."""
    from cluster import local_ray

    yield
    local_ray.close()


@pytest.fixture
def heed_label(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `heed label` with arguments; returns (exit code, standard output, standard error)."""
    from heed.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["heed", "label", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `heed` with arguments that it must refuse; returns the one line that says why.

    A job whose file is right says first what will run, in two lines.
    """
    from heed.cli import main

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        *before, line = said.err.strip().splitlines()
        assert len(before) in (0, 2), said.err
        assert line.startswith("error: ")
        if before:
            assert "; results in " in before[0]
            assert before[1] == "checking the data"
        return line

    return call


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    """A byte-level vocabulary of 280 tokens with the chat template."""
    from lm.tokenizer import Tokenizer

    return Tokenizer.train(TEXTS, 280, "chat")


@pytest.fixture(scope="session")
def wordpiece() -> "Tokenizer":
    """A WordPiece vocabulary of ten tokens, like BERT's: lower case, no accents, no spaces."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    from lm.tokenizer import Tokenizer

    pieces = ["[PAD]", "[SEP]", "[UNK]", "the", "uber", "dog", "##s", "sleep", "!", "山"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    bpe = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bpe.normalizer = normalizers.BertNormalizer()
    bpe.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bpe.decoder = decoders.WordPiece()
    bpe.add_special_tokens(pieces[:3])
    return Tokenizer(bpe, pad="[PAD]", end="[SEP]", chat_template="")


@pytest.fixture(scope="session")
def tiny_config() -> "ModelConfig":
    """Two layers, grouped queries, swiglu, tied; 288 tokens, more than the vocabulary above needs."""
    from lm.config import ModelConfig

    return ModelConfig(
        vocab_size=288,
        max_position_embeddings=96,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: "Tokenizer", tiny_config: "ModelConfig") -> Path:
    """A language model of random weights with its tokenizer, in the Hugging Face layout. Read only."""
    from lm.model import LanguageModel, init_weights
    from lm.weights import save_model

    model = LanguageModel(tiny_config)
    init_weights(model, seed=7)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


@pytest.fixture(scope="session")
def masking_tokenizer() -> "Tokenizer":
    """A byte-level vocabulary of 284 tokens, a mask token among them, with the plain template."""
    from lm.tokenizer import Tokenizer

    return Tokenizer.train(TEXTS, 284, "plain", has_mask=True)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory, masking_tokenizer: "Tokenizer") -> Path:
    """An encoder of BERT's shape and random weights with its tokenizer, in the Hugging Face layout. Read only."""
    from lm.config import ModelConfig
    from lm.encoder import MaskedLanguageModel
    from lm.model import init_weights
    from lm.weights import save_model

    config = ModelConfig(
        kind="encoder", vocab_size=288, max_position_embeddings=64, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=24, mlp="gelu", mlp_bias=True, attention_bias="all", positions="learned", norm="layer",
        norm_place="post", embedding_norm=True, type_vocab_size=2,
    )  # fmt: skip
    model = MaskedLanguageModel(config)
    init_weights(model, seed=8)
    folder = tmp_path_factory.mktemp("encoder") / "model"
    save_model(folder, model, model.state_dict(), masking_tokenizer)
    return folder


@pytest.fixture(scope="session")
def sqlite_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty label store; copying it is faster than creating its tables."""
    from preferences.store import LabelStore

    path = tmp_path_factory.mktemp("tables") / "labels.db"
    LabelStore(path).close()
    return path


@pytest.fixture
def new_store(sqlite_tables: Path, tmp_path: Path) -> "Iterator[Callable[[], LabelStore]]":
    """Creates another empty label store per call."""
    from preferences.store import LabelStore

    opened: list[LabelStore] = []

    def new() -> LabelStore:
        opened.append(LabelStore(shutil.copy(sqlite_tables, tmp_path / f"store{len(opened)}.db")))
        return opened[-1]

    yield new
    for store in opened:
        store.close()


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Headless Chromium; tests are skipped if none is installed."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # on a busy machine a page may take more than the usual 5 s
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no browser: chromium, chromium-browser or google-chrome on the PATH was expected")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=arguments)
        new_context = opened.new_context

        def patient(**options: Any) -> "BrowserContext":
            context = new_context(**options)
            context.set_default_timeout(60_000)  # nor the usual 30 s for a click
            return context

        opened.new_context = patient  # type: ignore[method-assign]
        yield opened
        opened.close()


SHOWN = re.compile(r"<response 1>\n(.*)\n</response 1>.*<response 2>\n(.*)\n</response 2>", re.DOTALL)


def _longer(first: str, second: str) -> str:
    return "tie" if len(first) == len(second) else "1" if len(first) > len(second) else "2"


class ChatServer(ThreadingHTTPServer):
    """An OpenAI-compatible server on loopback; each model name selects a behaviour.

    writer answers by prompt and seed, terse more briefly; longer judges by length, first prefers the response shown
    first, mumbling gives no verdict; flaky answers each request on the second try, overloaded never, forbidden repeats
    the key, moved redirects, odd sends a malformed body, slow answers after 2 s.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.seen: Counter[bytes] = Counter()
        self.fails: Callable[[dict[str, Any]], bool] = lambda _: False

    def handle_error(self, *_: object) -> None:
        """Ignores clients that stopped waiting for a slow answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, model: str, asked: str, seed: int) -> str:
        if model in ("longer", "flaky", "first", "mumbling"):
            found = SHOWN.search(asked)
            assert found is not None, asked
            said = {"first": "1", "mumbling": "both are fine"}.get(model) or _longer(found[1], found[2])
            return f"The one is shorter than the other.\nVerdict: {said}"
        words = asked.split()
        return " ".join([*words[:2], f"number {seed % 97}."] if model == "writer" else words[:1])


class _ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(sent)
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("Authorization", ""))
        self.server.seen[sent] += 1
        status, answer = self._answer(body, is_first=self.server.seen[sent] == 1)
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        if status == 307:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()
        self.wfile.write(said)

    def _answer(self, body: dict[str, Any], *, is_first: bool) -> tuple[int, Any]:
        model = body["model"]
        if model == "slow":
            time.sleep(2)
        if model == "overloaded" or (model == "flaky" and is_first) or self.server.fails(body):
            return 503, {"error": "overloaded"}
        if model == "forbidden":
            return 401, {"error": f"no such key: {self.headers.get('Authorization', '')}"}
        if model == "moved":
            return 307, {}
        if model == "odd":
            return 200, {"choices": []}
        said = self.server.answer(model, body["messages"][-1]["content"], body.get("seed", 0))
        tokens = len(said.split())
        reason = "length" if tokens > body["max_tokens"] else "stop"
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": reason}
        return 200, {"choices": [choice], "usage": {"completion_tokens": tokens}}

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def chat_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A running server with its `url` and the requests it received (`bodies`, `keys`)."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in [name for name in os.environ if name.startswith("HEED_API_KEY")]:
        monkeypatch.delenv(name)
    with serving(ChatServer()) as server:
        yield server


class Outline(HTMLParser):
    """Collects a page's tags, ids, references, comments and open elements; checks that it loads and runs nothing."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.comments: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has the handler {name}"
            assert name != "src", f"{tag} loads {value}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "aria-labelledby"):
                self.references.append((value or "").removeprefix("#"))
            if name == "clip-path":
                self.references.append((value or "")[5:-1])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture(scope="session")
def read_page() -> Callable[[str], Outline]:
    """Parses a page."""
    return Outline
