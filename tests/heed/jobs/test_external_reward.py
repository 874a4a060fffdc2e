"""Jobs with a reward that is not a model, as a user runs them: the example job's function, and a server that sleeps."""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from heed.cli import main
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.jobs.submission import named_paths
from ppo.rollout_log import NUM_FOLLOWED
from reward.external import RewardFunction
from tests.rows import jsonl
from tests.serving import serving
from training.metrics import read_metrics

ROOT = Path(__file__).parents[3]
JOBS = ROOT / "configs" / "jobs"
SMALL = (
    "world.num_pretrain_texts=60", "world.num_pretrain_heldout=8", "world.num_demonstrations=40",
    "world.num_demonstrations_heldout=8", "world.num_ppo_prompts=32", "model.hidden_size=24",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1", "pretrain.num_steps=4", "sft.num_epochs=1", "ppo.num_iterations=2",
    "ppo.rollout_batch_size=32", "ppo.max_new_tokens=12", "engine.precision=fp32", "cluster.cpu_threads=1",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.mark.long
def test_the_example_job_runs_without_labels_and_reward_model(tmp_path: Path) -> None:
    """With another function than its own, because the world's judge finds everything by so small a model worthless."""
    function = f"{tmp_path / 'rewards.py'}:vowels"
    (tmp_path / "rewards.py").write_text(
        "def vowels(prompts, responses):\n    return [sum(text.count(v) for v in 'aeiou') for text in responses]\n"
    )
    job = load_job(JOBS / "function.toml", [*SMALL, f"ppo.reward.function={function}"])
    assert job.parents("ppo") == ("sft",)
    run = run_job(job, tmp_path / "runs")
    figures = read_metrics(run / "ppo" / "metrics.jsonl")
    assert [line["failed_scores"] for line in figures] == [0.0, 0.0]
    assert all(line["score"] > 0 for line in figures)
    assert not (run / "reward").exists()
    lineage = json.loads((run / "ppo" / "lineage.json").read_text())
    assert function in lineage["data"]  # the file's hash: another function means another stage


def test_the_example_function_is_the_worlds_own_judge() -> None:
    reward = load_job(JOBS / "function.toml").ppo.external_reward  # type: ignore[union-attr]
    assert isinstance(reward, RewardFunction)
    assert reward.file == ROOT / "heed" / "worlds" / "rewards.py"
    asked = [[{"role": "user", "content": "Mia has a blue ball. Tom has a red kite. What does Mia have?"}]] * 2
    right, wrong = reward.score(asked, ["Mia has a blue ball.", "ball"])
    assert 0 <= wrong.score < 0.5 < right.score <= 1


class Endpoint(ThreadingHTTPServer):
    """Scores texts by their length for a number of requests, then sleeps. `broken` returns what it answers instead."""

    answers_left = 0
    num_asked = 0
    broken: Callable[[int], bytes] = staticmethod(lambda _num_asked: b"")


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"scores": [len(text) for text in sent["responses"]]}).encode()
        self.server.num_asked += 1
        self.server.answers_left -= 1
        body = self.server.broken(self.server.num_asked) or body
        self.send_response(200 if self.server.answers_left >= 0 else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppresses terminal output."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving(Endpoint(("127.0.0.1", 0), Handler)) as server:
        yield server


def function_reward(name: str) -> dict[str, str]:
    return {"kind": "function", "function": name}


def ppo_job(tmp_path: Path, model_folder: Path, **changes: Any) -> Path:
    """PPO alone, from a model directory and a file of prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(jsonl({"prompt": f"Where is {i}?"} for i in range(16)))
    values = tomllib.loads((JOBS / "debug.toml").read_text())
    kept = {key: values[key] for key in ("name", "engine", "cluster")}
    start = {"init_from": str(model_folder), "prompts": {"source": str(prompts)}, "num_iterations": 1}
    values["ppo"].pop("ptx")
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps({**kept, "ppo": {**values["ppo"], **start, **changes}}))
    return path


@pytest.mark.nightly
def test_a_server_that_was_asleep_stops_the_run_and_is_asked_again(
    tmp_path: Path, model_folder: Path, endpoint: Endpoint
) -> None:
    url = f"http://127.0.0.1:{endpoint.server_port}/"
    job = load_job(ppo_job(tmp_path, model_folder, reward={"kind": "url", "url": url, "max_wait_seconds": 0}))
    with pytest.raises(ValueError, match=r"16 of 16 samples .* The first: .*: status 400"):
        run_job(job, tmp_path / "runs")
    endpoint.answers_left = 1  # the SFT policy's samples are scored, the first rollout is not
    with pytest.raises(ValueError, match=r"16 of 16 responses .* The first: .*: status 400"):
        run_job(job, tmp_path / "runs")
    endpoint.answers_left, endpoint.num_asked = 100, 0
    run = run_job(job, tmp_path / "runs")
    # In micro-batches: the rollout, and the responses to prompts that PPO follows. The score's scale was kept.
    assert endpoint.num_asked == (16 + NUM_FOLLOWED) // 4
    (line,) = read_metrics(run / "ppo" / "metrics.jsonl")
    assert line["failed_scores"] == 0
    assert line["score"] > 0
    patient = load_job(tmp_path / "job.toml", ["ppo.reward.max_wait_seconds=5"])
    before = (run / "ppo" / "lineage.json").stat().st_mtime_ns
    run_job(patient, tmp_path / "runs")  # the retry settings for a server are not an input: nothing runs again
    assert (run / "ppo" / "lineage.json").stat().st_mtime_ns == before


@pytest.mark.nightly
def test_an_outage_is_waited_for_and_one_that_lasts_costs_no_iteration(
    tmp_path: Path, model_folder: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{endpoint.server_port}/"
    reward = {"kind": "url", "url": url, "max_wait_seconds": 20}
    path = ppo_job(tmp_path, model_folder, reward=reward, num_iterations=3, save_every_iterations=3)
    endpoint.answers_left = 1000
    calm = run_job(load_job(path, ["name=calm"]), tmp_path / "runs")
    disturbed = tmp_path / "runs" / "disturbed"
    metrics = disturbed / "ppo" / "metrics.jsonl"
    endpoint.broken = lambda _: b'{"scores": [1, ' if len(read_metrics(metrics)) == 2 else b""
    words = rf"16 of 16 responses .* continues after iteration 2\. The first: {url}: '.*; no proper answer for 2\d s"
    with pytest.raises(ValueError, match=words):
        run_job(load_job(path, ["name=disturbed"]), tmp_path / "runs")
    assert f"waiting up to 20 s for {url}: '" in capsys.readouterr().err
    assert (disturbed / "ppo" / "checkpoints" / "step-000002").is_dir()
    endpoint.broken = lambda number: b"" if number % 3 else b'{"scores": [Infinity]}'  # now and then
    run_job(load_job(path, ["name=disturbed", "ppo.reward.max_wait_seconds=60"]), tmp_path / "runs")
    assert "ppo: resumes from iteration 2 of 3" in capsys.readouterr().err
    for name in ("ppo/model/model.safetensors", "ppo/samples.jsonl"):
        assert (disturbed / name).read_bytes() == (calm / name).read_bytes()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return [{}[text] for text in responses]\n", "raised KeyError: "),
        pytest.param("    return [1.0]\n", "returned 1 values for 16 responses", marks=pytest.mark.nightly),
        pytest.param("    pass\n", "returned NoneType for 16 responses", marks=pytest.mark.nightly),
    ],
)
def test_a_failing_function_is_reported_with_its_own_file_and_line(
    tmp_path: Path,
    model_folder: Path,
    body: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`heed run` prints the function, its failure and where it happened, and nothing of Heed's own code."""
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text(f"def score(prompts, responses):\n{body}")
    path = ppo_job(tmp_path, model_folder, reward=function_reward(f"{rewards}:score"))
    monkeypatch.setattr("sys.argv", ["heed", "run", str(path), "--runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    # Wherever the terminal wrapped lines.
    printed = "".join(capsys.readouterr().err.split("error: ")[1:]).replace("\n", " ")
    words = " ".join(printed.split())
    assert "16 of 16 samples of the initial policy have no finite score" in words
    assert said in words
    assert f'my_rewards.py", line {2 if "raised" in said else 1}, in ' in words
    assert "Traceback" not in words
    assert "elsewhere.py" not in words


def test_a_damaged_model_and_a_missing_file_are_named(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "rewards.py").write_text(
        "def score(prompts, responses):\n    return [len(text) for text in responses]\n"
    )
    file = ppo_job(tmp_path, folder, reward=function_reward(f"{tmp_path / 'rewards.py'}:score"))
    with pytest.raises(ValueError, match=rf"^{path}: incomplete or damaged: .*; write or download it again$"):
        run_job(load_job(file), tmp_path / "runs")
    with pytest.raises(
        ValueError, match=r"job\.toml:19: ppo\.prompts\.source: nofile\.jsonl: no such file in /.*, where relative"
    ):
        run_job(load_job(file, ["ppo.prompts.source=nofile.jsonl"]), tmp_path / "runs")


def test_a_function_that_is_not_there_is_named_before_anything_runs(tmp_path: Path, model_folder: Path) -> None:
    job = load_job(ppo_job(tmp_path, model_folder, reward=function_reward("heed.worlds.rewards:silver")))
    with pytest.raises(ValueError, match=r"heed.worlds.rewards has no function 'silver'"):
        run_job(job, tmp_path / "runs")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [],
            r"ppo needs reward: \[reward\] or ppo.reward.model or ppo.reward.function or ppo.reward.url"
            " or ppo.reward.verifier or ppo.reward.sources was expected",
        ),
        (
            ['ppo.reward={kind="function", function="a:b", url="http://h/"}'],
            r'`url`: unknown key in \[ppo.reward\]; only a table of kind "url" has this key',
        ),
    ],
)
def test_one_source_of_reward_is_wanted(tmp_path: Path, model_folder: Path, changes: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_job(ppo_job(tmp_path, model_folder), changes)


def test_a_reward_stage_together_with_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ppo.reward.function and \[reward\] are both set"):
        load_job(JOBS / "debug.toml", ["ppo.reward.kind=function", "ppo.reward.function=a:b"])


def test_a_function_in_a_file_is_shipped() -> None:
    job = load_job(JOBS / "debug.toml")

    def named(function: str) -> str | None:
        ppo = job.ppo.model_copy(update={"reward": RewardFunction(function=function)})
        return dict(named_paths(job.model_copy(update={"ppo": ppo}))).get("ppo.reward.function")

    assert named("my/rewards.py:score") == "my/rewards.py"
    assert named("heed.worlds.rewards:gold") is None
