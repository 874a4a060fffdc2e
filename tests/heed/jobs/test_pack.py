"""The files that are sent to a cluster, and errors before anything is sent."""

import re
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heed.cli import main
from heed.jobs import submission
from heed.jobs.job_file import load_job
from heed.jobs.submission import PACKAGES, Shipment, named_paths
from ppo.environments.kinds import OwnEnvironment
from reward.external import RewardFunction

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
REVIEWS = ROOT / "research" / "jobs" / "reviews.toml"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs `heed` in an empty folder with arguments that are errors; returns the one line that it prints."""
    monkeypatch.delenv("HEED_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")  # that of this machine may be open to others
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return call


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder contains data."""
    folder = tmp_path / "here"
    (folder / "data" / "model").mkdir(parents=True)
    (folder / "data" / "prompts.jsonl").write_text("rows")
    (folder / "data" / "model" / "config.json").write_text("{}")
    (tmp_path / "outside.jsonl").write_text("rows")
    monkeypatch.chdir(folder)
    return folder


def pack_debug(*overrides: str) -> set[str]:
    """Returns the files that are sent for the debug job with overrides."""
    job = load_job(DEBUG, overrides)
    with Shipment.of(DEBUG, overrides, job).packed() as folder:
        assert load_job(folder / "debug.toml") == job
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_package_that_a_run_needs_is_sent() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*PACKAGES, "benchmarks", "research"}


@pytest.mark.usefixtures("here")
def test_code_job_file_and_named_files_are_sent_and_nothing_else() -> None:
    sent = pack_debug("ppo.prompts.source=data/prompts.jsonl", "sft.heldout=[{ source = 'some/hub-id' }]")
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    shipped = {str(path.relative_to(ROOT)) for path in code if path.parent.name != "__pycache__"}
    assert sent == shipped | {"debug.toml", "data/prompts.jsonl"}
    assert {"stages/reports/page.html.jinja", "lm/families/family.py", "configs/jobs/demo.toml"} <= sent


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reward/external.py", "reward/external.py has the same path as a file of Heed's code"),
        ("datasets.py", "datasets.py would hide the installed module 'datasets'"),
        ("queue.py", "queue.py would hide the installed module 'queue'"),
    ],
)
def test_a_file_that_would_hide_another_on_the_cluster_is_refused(name: str, words: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("def score(prompts, responses):\n    return [1.0 for _ in responses]\n")
    job = load_job(DEBUG)
    ppo = job.ppo.model_copy(update={"reward": RewardFunction(function=f"{name}:score")})  # type: ignore[union-attr]
    with (
        pytest.raises(ValueError, match=rf"^ppo\.reward\.function: {words}"),
    ):
        Shipment.of(DEBUG, (), job.model_copy(update={"ppo": ppo}))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("function", "sent"),
    [
        ("own_checks:score", {"own_checks.py"}),
        ("own_package.rewards:score", {"own_package/__init__.py", "own_package/rewards.py"}),
        ("operator:add", set[str]()),  # installed on the cluster too
        ("heed.worlds.rewards:gold", set[str]()),
    ],
)
@pytest.mark.parametrize("key", ["reward", "environment"])
def test_a_module_in_the_current_folder_is_sent(key: str, function: str, sent: set[str]) -> None:
    Path("own_package").mkdir()
    Path("own_package/__init__.py").write_text("")
    for file in ("own_checks.py", "own_package/rewards.py"):
        Path(file).write_text("def score(prompts, responses):\n    return [1.0 for _ in responses]\n")
    table = RewardFunction(function=function) if key == "reward" else OwnEnvironment(class_name=function)
    job = load_job(DEBUG)
    assert job.ppo is not None
    job = job.model_copy(update={"ppo": job.ppo.model_copy(update={key: table})})
    assert {str(path) for path in Shipment.of(DEBUG, (), job).files} == sent


@pytest.mark.usefixtures("here")
def test_a_file_may_have_a_packages_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder Python finds the package first, and the file is loaded by its path."""
    Path("reward.py").write_text("")
    monkeypatch.setattr(submission, "named_paths", lambda _: [("ppo.reward.function", "reward.py")])
    assert {"reward.py", "reward/__init__.py"} <= pack_debug()


@pytest.mark.usefixtures("here")
def test_a_named_folder_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "named_paths", lambda _: [("sft.init_from", "data/model")])
    assert "data/model/config.json" in pack_debug()


@pytest.fixture
def model_is_sent(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a model folder, which the job names."""
    monkeypatch.setattr(submission, "named_paths", lambda _: [("sft.init_from", "data/model")])
    return (here / "data" / "model").relative_to(here)


def test_files_with_a_dot_stay_here(model_is_sent: Path) -> None:
    (model_is_sent / ".git").mkdir()
    for name in (".env", ".git/config", "tokenizer.json"):
        (model_is_sent / name).write_text("KEY=secret")
    (model_is_sent / "settings").symlink_to(".env")
    (model_is_sent / ".outside").symlink_to("/etc/hostname")
    shipment = Shipment.of(DEBUG, (), load_job(DEBUG))
    assert shipment.files == [model_is_sent / "config.json", model_is_sent / "tokenizer.json"]
    assert shipment.left_out == [model_is_sent / name for name in (".env", ".git", ".outside", "settings")]
    sent = pack_debug()
    assert not {path for path in sent if path.startswith("data/model/.") or path == "data/model/settings"}
    assert {"data/model/config.json", "data/model/tokenizer.json"} <= sent


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../../../../outside.jsonl", "../../prompts.jsonl", "..", "absent.json"]
)
def test_links_that_leave_a_named_folder_are_refused(model_is_sent: Path, target: str) -> None:
    """So are a link to nothing, and a link to a folder that contains it, which would never end."""
    (model_is_sent / "below").mkdir()
    link = model_is_sent / "below" / "link"
    link.symlink_to(target)
    with pytest.raises(ValueError, match=rf"^sft\.init_from: {link} is a link to {link.resolve()}; in a folder"):
        Shipment.of(DEBUG, (), load_job(DEBUG))


def test_links_inside_a_named_folder_are_sent_as_files(model_is_sent: Path) -> None:
    (model_is_sent / "parts").mkdir()
    (model_is_sent / "parts" / "1.safetensors").write_text("weights")
    (model_is_sent / "model.safetensors").symlink_to("parts/1.safetensors")
    (model_is_sent / "copy").symlink_to("parts")
    assert {"data/model/model.safetensors", "data/model/copy/1.safetensors"} <= pack_debug()


@pytest.mark.usefixtures("model_is_sent")
def test_what_would_be_sent_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HEED_ADDRESS", raising=False)
    Path("data/model/config.json").write_text("{}" * 1000)
    Path("data/model/.env").write_text("KEY=secret")
    arguments = ["submit", str(DEBUG), "--runs", "/runs", "--set", "seed=77123", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["heed", *arguments])
    with pytest.raises(SystemExit, match="0"):
        main()  # without an address
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    job_bytes = len(Shipment.of(DEBUG, ["seed=77123"], load_job(DEBUG)).job_text)
    code = submission.code_files()
    code_bytes = sum((ROOT / file).stat().st_size for file in code)
    assert lines[:2] == [
        f"{job_bytes:,} debug.toml (the job, with its bases and --set values)",
        "2,000 data/model/config.json",
    ]
    assert lines[2].startswith(f"{code_bytes:,} heed/, evaluation/, ")
    assert lines[3:] == [
        f"{job_bytes + 2000 + code_bytes:,} bytes in all",
        "not sent data/model/.env",
        "command: python -m heed run debug.toml --runs /runs",
    ]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("../outside.jsonl", "ppo.prompts.source is '../outside.jsonl', which leads out of the current folder"),
        ("data/absent.jsonl.gz", "ppo.prompts.source: data/absent.jsonl.gz: no such file"),
    ],
)
def test_data_that_cannot_be_sent(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_debug(f"ppo.prompts.source={source}")


@pytest.mark.usefixtures("here")
def test_too_much_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "SHIPPED_MIB", 3 / 2**20)
    with pytest.raises(
        ValueError, match=r"^ppo\.prompts\.source: with data/prompts\.jsonl, more than .* MiB would be shipped"
    ):
        pack_debug("ppo.prompts.source=data/prompts.jsonl")


def test_every_place_that_may_name_a_file() -> None:
    job = load_job(DEBUG, ["ppo.prompts.source=here.jsonl", "pretrain.heldout=[{ source = 'a/b' }]"])
    sft = job.sft.model_copy(update={"init_from": "model"})
    named = dict(named_paths(job.model_copy(update={"sft": sft})))
    assert named["ppo.prompts.source"] == "here.jsonl"
    assert named["pretrain.heldout.0.source"] == "a/b"
    assert named["sft.init_from"] == "model"
    teachers = ["ppo.teachers=[{ model = 'first' }, { model = 'second' }]"]
    named = dict(named_paths(load_job(DEBUG, teachers)))
    assert [named[f"ppo.teachers.{number}.model"] for number in range(2)] == ["first", "second"]
    assert "world.kind" not in named
    of_reviews = dict(named_paths(load_job(REVIEWS)))
    assert of_reviews["world.reviews"] == "stanfordnlp/imdb"
    assert of_reviews["world.kind"] == "research/worlds/reviews.py"


def test_the_command_is_the_run_that_was_asked_for() -> None:
    job = load_job(DEBUG)
    command = Shipment.of(DEBUG, (), job).command(["--from", "sft"], Path("/shared/run's"))
    expected = ["debug.toml", "--runs", "/shared/run's", "--from", "sft"]
    assert shlex.split(command) == ["python", "-m", "heed", "run", *expected]
    demo = Shipment.of(None, (), job)
    assert demo.command([], Path("/runs")) == "python -m heed run demo.toml --runs /runs"
    with demo.packed() as folder:
        assert load_job(folder / "demo.toml") == load_job(None)


def test_values_are_in_a_file_that_others_cannot_read_and_not_in_the_command() -> None:
    """Anybody who has the token can see the commands of all jobs."""
    overrides = ("note=https://me:hunter2@judge.example/score", "ppo.placement=none", "workers=2")
    shipment = Shipment.of(DEBUG, overrides, load_job(DEBUG, overrides))
    assert "hunter2" not in shipment.command([], Path("/runs"))
    with shipment.packed() as folder:
        assert (folder / "debug.toml").stat().st_mode & 0o777 == 0o600
        assert load_job(folder / "debug.toml") == load_job(DEBUG, overrides)


def test_mistakes_in_the_job_come_before_the_cluster(refused: Callable[..., str]) -> None:
    arguments = ("submit", str(DEBUG), "--runs", "/runs", "--address", "http://127.0.0.1:1")
    assert refused(*arguments, "--set", "ppo.kl.coeff=1").endswith("unknown key in [ppo.kl]; did you mean `coef`?")
    assert "--only 'pert': one of" in refused(*arguments, "--only", "pert")
    assert refused("submit", "--runs", "runs").startswith("error: --runs is 'runs'; an absolute path on storage")


@pytest.mark.parametrize(
    "command", [("submit", str(DEBUG), "--runs", "/runs"), ("jobs", "list"), ("jobs", "stop", "debug-1")]
)
def test_an_address_is_needed(refused: Callable[..., str], command: tuple[str, ...]) -> None:
    named = "pass --address http://HEAD:8265 or set the environment variable HEED_ADDRESS"
    assert refused(*command).startswith(f"error: no cluster address; {named}; without a running cluster, `heed submit`")
    line = refused(*command, "--address", "head:8265")
    assert line.startswith("error: address is 'head:8265'; the URL of the head's dashboard was expected")


def test_nothing_answers(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("HEED_ADDRESS", address)
    line = refused("jobs", "list")
    assert line.startswith(f"error: {address}: no answer (")
    assert line.endswith("is the head running with its dashboard, and reachable from this machine?")
