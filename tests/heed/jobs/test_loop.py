"""`heed loop`: what each round reads, when it stops, people who answer while it runs, and a loop that is killed."""

import cProfile
import html
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tomli_w
import uvicorn

from benchmarks.label_client import LabelClient, answer_in_turns
from benchmarks.postgres_server import PostgresServer
from evaluation.compare.folder import CompareConfig
from evaluation.judges.judge import ScoreJudge
from evaluation.verdicts import Verdict
from files.atomic import lock, write_json
from files.records import as_json, read_record
from heed import cli
from heed.commands.jobs import submit
from heed.jobs import loop as controller
from heed.jobs.job_file import load_job
from heed.jobs.loop import run_loop, why_stopped
from heed.jobs.plan import Setting, make_plan
from heed.jobs.report import write_run_report
from heed.jobs.run import Run
from heed.jobs.times import GPUS
from heed.jobs.watch import now_of
from heed.loop import collect
from heed.loop.collect import (
    TASKS,
    AddedTask,
    AddedTasks,
    LabelsWaitError,
    RoundResults,
    added_by,
    effective_number,
    missing_labels,
    preflight,
    require_labels,
    waiting_for_store,
)
from heed.loop.config import LoopConfig, RoundConfig
from heed.loop.gain import GainResults, gain_of, round_judge
from heed.loop.report import LoopState, read_state
from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.stage import was_measured
from preferences import database, organizing
from preferences.accounts import Accounts
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from preferences.records import Answer, Labeler, Message, Task
from preferences.statistics.estimates import Interval
from preferences.statistics.intervals import clustered_mean
from preferences.store import LabelStore
from preferences.task_selection import Candidate, PromptCandidates
from research.chaos.campaign import run_chaos
from stages.lineage import LINEAGE
from stages.progress import RunStatus
from stages.run import StageRun
from training.data import Prompt

JOBS = Path(__file__).parents[3] / "configs" / "jobs"
LOOP = JOBS / "loop.toml"
TINY = """
base = "{base}"
name = "tiny"
without = ["dpo", "compare.best_of"]
[world]
num_collect_prompts = 30
num_compare_prompts = 8
[collect]
overlap_share = 0.0
responses_per_prompt = 2
[pretrain]
num_steps = 4
[sft]
num_epochs = 0.3
[reward]
heldout_share = 0.5
[ppo]
num_iterations = 2
[loop]
labels = {labels}
rounds = {rounds}
least_gain = -1000.0
num_samples = 4
{more}
"""


def job_file(folder: Path, labels: int, rounds: int, more: str = "") -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY.format(base=JOBS / "debug.toml", labels=labels, rounds=rounds, more=more), encoding="utf-8")
    return path


def loader(path: Path) -> Any:
    return lambda rounds: load_job(path, [f"rounds={rounds}"] if rounds else [])


# ---- what the rounds are ----


def test_a_round_reads_the_newest_models_and_all_labels() -> None:
    job = load_job(LOOP)
    assert (job.rounds, job.stage_names[2:6]) == (3, ("collect", "reward", "ppo", "gain"))
    assert job.parents("collect_2") == ("collect", "reward", "ppo")  # samples ppo, and the rule reads its reward model
    assert job.parents("reward_2") == ("sft", "collect_2")  # starts from SFT again, on all labels
    assert job.parents("ppo_2") == ("pretrain", "ppo", "reward_2")
    assert job.parents("gain_2") == ("sft", "gain", "collect_2", "ppo_2")
    assert job.parents("compare") == ("pretrain", "sft", "reward", "ppo", "ppo_2", "ppo_3")
    rounds = [job.part(name) for name in ("collect", "collect_2", "collect_3")]
    assert [(one.choose, one.models, one.labels, one.asked) for one in rounds] == [
        ("uniform", (), 3000, 3000),  # no reward model can choose yet
        ("large-gap", ("reward",), 4800, 4800),
        ("large-gap", ("reward_2",), 6600, 6600),
    ]
    assert not was_measured(Run(job, Path("run"), None, None).of("ppo_2"))  # chosen samples are not typical
    planned = {stage.name for stage in make_plan(job, Setting(GPUS["h100"], 0.4, 1000)).stages}
    assert {"collect_3", "gain_3"} <= planned


def test_a_rule_that_compares_models_waits_for_them_and_reads_the_newest() -> None:
    job = load_job(LOOP, ["loop.choose=disagreement"])
    chosen = [(job.part(name).choose, job.part(name).models) for name in ("collect", "collect_2", "collect_3")]
    assert chosen == [("uniform", ()), ("uniform", ()), ("disagreement", ("reward_2", "reward"))]


def test_fewer_rounds_leave_the_settings_of_earlier_stages_alone() -> None:
    whole, first = load_job(LOOP), load_job(LOOP, ["rounds=1"])
    assert first.part("collect") == whole.part("collect")
    assert first.stage_names[-1] == "compare"
    assert "collect_2" not in first.stage_names


def test_dpo_runs_in_a_loop_with_a_reward_model_only_for_the_rule() -> None:
    overrides = ["loop.labels=300", "loop.rounds=2", "loop.choose=near-tie"]
    job = load_job(JOBS / "dpo.toml", [*overrides, "reward.rankings.source=collect:rankings", *BATCHES])
    assert job.stage_names[2:-1] == (
        "collect", "reward", "dpo", "gain", "collect_2", "reward_2", "dpo_2", "gain_2",
    )  # fmt: skip
    assert job.parents("dpo_2") == ("dpo", "collect_2")
    assert load_job(JOBS / "dpo.toml", ["loop.labels=300", "loop.rounds=2"]).stage_names[2:5] == (
        "collect", "dpo", "gain",
    )  # fmt: skip


BATCHES = (
    "reward.batch.batch_size=16",
    "reward.batch.micro_batch_size=8",
    "reward.optimizer.learning_rate=1e-3",
    "reward.save_every_steps=100",
    "reward.evaluate_every_steps=100",
)


def test_the_budget_is_split_and_never_exceeded() -> None:
    even = LoopConfig(labels=100, rounds=3)
    assert [even.labels_until(number) for number in (1, 2, 3, 4)] == [33, 66, 100, 100]
    given = LoopConfig(labels=100, rounds=2, labels_per_round=(70, 20))
    assert [given.labels_until(number) for number in (1, 2, 3)] == [70, 90, 90]
    people = LoopConfig(labels=100, rounds=2, store="labels.sqlite")
    assert [people.asked_until(number) for number in (1, 2)] == [100, 100]  # a round ahead, and no more than all
    overlapping = {"overlap_share": 0.5, "overlap_labelers": 3, "prompts": {"source": "p.jsonl"}, "max_new_tokens": 4}
    settings = {"round": 1, "labels": 9, "asked": 9, "asked_before": 0, "choose": "uniform", "models": ()}
    shared = {"evaluation_share": 0.1, "num_samples": 4, "prompts_per_task": 1.0}
    config = RoundConfig.model_validate({**overlapping, **settings, **shared, "store": "", "enough_share": 0.9})
    for num_labels in range(30):
        found = config.quotas(config.num_tasks(num_labels))
        assert num_labels - 3 < sum(found) <= num_labels or not num_labels


def test_a_round_that_is_added_leaves_finished_ones_alone_although_people_get_tasks_ahead(tmp_path: Path) -> None:
    more = f'store = "{tmp_path / "people.sqlite"}"'
    found = []
    for labels, rounds in ((36, 3), (48, 4)):
        job = load_job(job_file(tmp_path, labels, rounds, more))
        config, ignored = job.part("collect_3").model_dump(), job.stage("collect_3").layout_keys
        found.append({name: value for name, value in config.items() if name not in ignored})
    assert config["asked"] == 48  # a round ahead, now that there is one
    assert found[0] == found[1]


def test_effective_number_of_tasks() -> None:
    assert effective_number([2.0, 2.0, 2.0]) == pytest.approx(3)
    assert effective_number([3.0, 1.0]) == pytest.approx(16 / 10)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loop.rounds=9", "loop.labels=4"], "rounds is 9 and labels is 4; at least one label per round"),
        (["loop.choose=best"], "loop.choose: one of uniform, near-tie.* was expected, not 'best'"),
        (["loop.labels_per_round=[1, 2]"], "labels_per_round has 2 entries; one for each of rounds = 3"),
        (["loop.labels_per_round=[9000, 1, 1]"], "sum is at most labels = 6600"),
        (["compare=none"], r"loop: the job has no \[compare\], which says how a policy is judged"),
        (["rounds=4"], "rounds is 4; at most loop.rounds = 3 was expected"),
        (["loop.num_samples=3"], "loop.num_samples is 3; at least collect.responses_per_prompt = 4"),
        (["loop.num_samples=24"], "loop.num_samples is 24, which make 10,626 sets of .* at most 5,000"),
        (
            ["loop.rounds=7", "loop.labels_per_round=[]", "compare.judge_people=labels.sqlite"],
            "loop.rounds is 7; at most 6 was expected with",
        ),
        (["loop.store=postgresql://a:secret@host/labels"], "loop.store has a password"),
    ],
)
def test_a_loop_that_cannot_run_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_job(LOOP, overrides)


def test_what_the_loop_needs_from_the_job_is_named(tmp_path: Path) -> None:
    path = job_file(tmp_path, 9, 3, 'choose = "large-gap"')
    text = path.read_text(encoding="utf-8")
    text = text.replace('"dpo", ', '"dpo", "reward", ').replace("[reward]\nheldout_share = 0.5\n", "")
    path.write_text(text + '[ppo.reward]\nmodel = "m"\n', encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"loop.choose is 'large-gap', which reads reward models, but .* no \[reward\]"
    ):
        load_job(path, opens_models=False)
    with pytest.raises(ValueError, match=r"loop.store: missing; nobody labels"):
        load_job(people_without_a_store(tmp_path), opens_models=False)
    with pytest.raises(ValueError, match=r"job 'debug' has no \[loop\]; a table \[loop\] with labels and rounds"):
        run_loop(loader(JOBS / "debug.toml"), tmp_path)
    with pytest.raises(ValueError, match=r"rounds is 2; only loop.rounds was expected"):
        run_loop(lambda rounds: load_job(LOOP, [f"rounds={rounds or 2}"]), tmp_path)


def people_without_a_store(folder: Path) -> Path:
    path = folder / "people.toml"
    path.write_text(
        """
name = "people"
[model]
vocab_size = 512
max_position_embeddings = 160
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 64
[sft]
init_from = "m"
demonstrations = [{ source = "d.jsonl" }]
seq_len = 100
batch = { batch_size = 4, micro_batch_size = 4 }
optimizer = { learning_rate = 1e-3 }
save_every_steps = 5
evaluate_every_steps = 5
[collect]
prompts = { source = "p.jsonl" }
max_new_tokens = 8
[dpo]
rankings = { source = "collect:rankings" }
batch = { batch_size = 4, micro_batch_size = 4 }
optimizer = { learning_rate = 1e-3 }
save_every_steps = 5
evaluate_every_steps = 5
[compare]
prompts = { source = "p.jsonl" }
max_new_tokens = 8
judge_function = "judge.py:score"
[loop]
labels = 10
rounds = 2
""",
        encoding="utf-8",
    )
    return path


def gain(folder: Path, number: int, low: float, high: float) -> None:
    per_hundred = Interval((low + high) / 2, low, high)
    unknown = Interval(nan, nan, nan)
    found = GainResults(
        number, "ppo", "sft", "gold", "score", 8, 100, per_hundred, per_hundred, unknown, unknown, unknown
    )
    name = folder / ("gain" if number == 1 else f"gain_{number}")
    name.mkdir(parents=True, exist_ok=True)
    write_json(name / "results.json", as_json(found))


def test_it_stops_when_the_gain_is_shown_to_be_too_small_or_the_labels_are_used(tmp_path: Path) -> None:
    loop = LoopConfig(labels=300, rounds=3, least_gain=0.05)
    gain(tmp_path, 1, 0.2, 0.4)
    assert why_stopped(tmp_path, loop, 1) == ""
    gain(tmp_path, 2, -0.01, 0.06)  # it may still be worth it
    assert why_stopped(tmp_path, loop, 2) == ""
    gain(tmp_path, 2, -0.01, 0.04)
    assert why_stopped(tmp_path, loop, 2) == (
        "the gain of round 2 per hundred labels, -0.01 to 0.04, lies below loop.least_gain = 0.05."
    )
    gain(tmp_path, 3, 0.2, 0.4)
    assert why_stopped(tmp_path, loop, 3) == "the budget of 300 labels is spent."


def test_a_gain_is_paired_over_prompts_and_has_the_sign_of_the_new_policy() -> None:
    prompts = [Prompt(prompt_id=name, messages=(), kind="") for name in "ab"]

    def verdict(prompt: str, first: str, scores: tuple[float, float], preference: float) -> Verdict:
        other = "old" if first == "new" else "new"
        return Verdict(prompt, first, other, 0, 0, "judge", "judge", preference, score_a=scores[0], score_b=scores[1])

    scored = [verdict("a", "new", (3.0, 1.0), 1.0), verdict("b", "old", (2.0, 6.0), 0.0)]
    found, score, before = gain_of(prompts, scored, "new")
    assert (found.mean, score.mean, before.mean) == (3.0, 4.5, 1.5)
    assert found == clustered_mean(np.array([2.0, 4.0]), np.array([0, 1]))
    judged = [verdict("a", "new", (nan, nan), 1.0), verdict("b", "old", (nan, nan), 0.25)]
    found, score, _ = gain_of(prompts, judged, "new")
    assert found.mean == pytest.approx((0.5 + 0.25) / 2)
    assert isnan(score.mean)


def test_commands_that_run_all_rounds_refuse_a_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # so that no Ray is started ahead
    with pytest.raises(ValueError, match=r"the job has \[loop\]; `heed loop .*loop.toml` runs it"):
        cli.run(LOOP, None, 0, "", "", tmp_path)
    with pytest.raises(ValueError, match=r"the job has \[loop\], which only `heed loop` runs"):
        submit(tmp_path, LOOP, "", None, 0, "", "", dry_run=True)
    with pytest.raises(ValueError, match=r"job 'loop' has \[loop\], whose rounds depend on what they find"):
        run_chaos(LOOP, [], tmp_path, num_faults=1, seed=0, num_nodes=1)


def test_the_reward_judges_a_round_whether_the_job_trains_it_or_names_it(
    tmp_path: Path, tiny_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    trained, named = tmp_path / "loop" / "reward_2" / "model", tmp_path / "named"
    for seed, folder in enumerate((trained, named)):
        model = ScalarModel(tiny_config)
        init_weights(model, seed=seed)
        folder.mkdir(parents=True)
        save_model(folder, model, model.state_dict(), tokenizer)
    judged = ["loop.choose=uniform", "compare.judge_reward=true"]
    for overrides, expected in ((judged, trained), ([*judged, "reward=none", f"ppo.reward.model={named}"], named)):
        job = load_job(LOOP, overrides)
        config = job.part("gain_2")
        assert isinstance(config, CompareConfig)
        judge = round_judge(Run(job, tmp_path / "loop", None, None).of("gain_2"), config)
        assert isinstance(judge, ScoreJudge)
        assert judge.spec == str(expected)


# ---- a loop that runs ----


@pytest.fixture(scope="module")
def one_ray(one_ray: None) -> Iterator[None]:  # noqa: ARG001
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "POLL_SECONDS", 0.05)
        yield


LABELS, ROUNDS = 30, 2
MORE = 'choose = "near-tie"'


@pytest.fixture(scope="module")
def finished_loop(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    folder = tmp_path_factory.mktemp("loop")
    return run_loop(loader(job_file(folder, LABELS, ROUNDS, MORE)), folder / "runs")


def results(run: Path) -> list[RoundResults]:
    paths = sorted(run.glob("collect*/results.json"))
    return sorted((read_record(path, RoundResults) for path in paths), key=lambda one: one.round)


@pytest.mark.long
def test_each_round_learns_from_all_labels_so_far(finished_loop: Path) -> None:
    rounds = results(finished_loop)
    assert [one.num_labels for one in rounds] == [15, 30]
    assert [one.num_new_labels for one in rounds] == [15, 15]
    assert [one.rule for one in rounds] == ["uniform", "near-tie"]
    assert [one.policy for one in rounds] == ["sft", "ppo"]
    rankings = [
        {json.loads(line)["task_id"] for line in (finished_loop / name / "rankings.jsonl").read_text().splitlines()}
        for name in ("collect", "collect_2")
    ]
    assert all(before < after for before, after in pairwise(rankings))
    assert 0 < rounds[1].effective_tasks <= rounds[1].num_tasks == 15
    lineage = json.loads((finished_loop / "reward_2" / LINEAGE).read_text())
    assert set(lineage["parents"]) == {"sft", "collect_2"}


@pytest.mark.long
def test_the_gain_is_between_neighbouring_rounds_on_the_same_responses(finished_loop: Path) -> None:
    gains = [read_record(finished_loop / name / "results.json", GainResults) for name in ("gain", "gain_2")]
    assert [(one.before, one.policy) for one in gains] == [("sft", "ppo"), ("ppo", "ppo_2")]
    for before, after in pairwise(gains):
        assert after.before_score == before.score  # the responses of the round before are not sampled again
    for one in gains:
        assert one.gain.mean == pytest.approx(one.score.mean - one.before_score.mean)
        assert one.per_hundred.mean == pytest.approx(one.gain.mean / one.num_new_labels * 100)


@pytest.mark.long
def test_the_page_grows_with_each_round(finished_loop: Path, tmp_path: Path) -> None:
    page = (finished_loop / "report.html").read_text(encoding="utf-8")
    assert "The loop has stopped: the budget of 30 labels is spent." in page
    assert "30 of 30" in page
    for name in ("collect_2", "reward_2", "ppo_2", "gain"):
        assert f'href="#{name}"' in page and f'id="{name}"' in page  # noqa: PT018
    report = json.loads((finished_loop / "report.json").read_text(encoding="utf-8"))
    assert report["gain_2"]["num_new_labels"] == 15
    begun = tmp_path / "tiny"  # as after the first round's labels
    for part in ("job.toml", "collect/results.json", "collect/lineage.json"):
        (begun / part).parent.mkdir(parents=True, exist_ok=True)
        (begun / part).write_bytes((finished_loop / part).read_bytes())
    write_json(begun / "loop.json", as_json(LoopState(2, 5)))
    write_run_report(begun)
    page = (begun / "report.html").read_text(encoding="utf-8")
    assert "Round 2 waits for 5 labels." in page
    assert "The loop has not compared a policy yet." in page


@pytest.mark.long
def test_a_finished_loop_runs_nothing_again(finished_loop: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished_loop.glob("*/lineage.json")}
    run_loop(loader(finished_loop.parents[1] / "tiny.toml"), finished_loop.parent)
    assert {path: path.stat().st_mtime_ns for path in finished_loop.glob("*/lineage.json")} == before


# ---- people ----


@contextmanager
def label_server(store: str, labelers: Sequence[Labeler]) -> Iterator[threading.Event]:
    """Serves the labeling pages on loopback, and lets labelers answer through the API until the block ends. They begin
    when the event is set.
    """
    opened, accounts, begins, ends = LabelStore(store), Accounts(store), threading.Event(), threading.Event()
    app = make_app(opened, accounts, LabelingConfig(asks_ratings=False))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    keys = {one.name: accounts.accept(accounts.invite(one.name, "labeler"))[1] for one in labelers}  # type: ignore[index]

    def label() -> None:
        clients = [LabelClient(address, one, keys[one.name]) for one in labelers]
        for client in clients:
            client.confirm_reading()
        begins.wait()
        while not ends.is_set():
            answer_in_turns(clients)
            ends.wait(0.1)

    labeling = threading.Thread(target=label, daemon=True)
    labeling.start()
    try:
        yield begins
    finally:
        ends.set()
        begins.set()
        labeling.join()
        server.should_exit = True
        serving.join()
        accounts.close()
        opened.close()


@pytest.mark.long
@pytest.mark.usefixtures("one_ray")
def test_people_label_through_the_server_while_the_loop_runs(heed: Any, tmp_path: Path) -> None:
    """The loop is killed while it waits for the first labels, and continued by the same command."""
    store, folder = str(tmp_path / "people.sqlite"), tmp_path / "runs" / "tiny"
    path = job_file(tmp_path, 24, 2, f'store = "{store}"\nenough_share = 0.5')
    world = load_job(path).open_world()
    assert world is not None
    waiting = heed("loop", str(path), "--runs", str(folder.parent))
    while "waiting for 6 labels" not in waiting.output:  # half of the first twelve
        assert waiting.process.poll() is None, waiting.output
        time.sleep(0.05)
    read_status = partial(read_record, folder / "status.json", RunStatus)
    status = read_status()
    while read_status().updated == status.updated:  # so `heed watch` says that it waits
        time.sleep(0.05)
    with pytest.raises(ValueError, match=f"process {waiting.process.pid} on .* is running this job here"):
        run_loop(loader(path), folder.parent, waits=False)
    waiting.kill_everything()
    waiting.wait_until_gone()
    killed = read_status()
    assert killed.state == "waiting"
    assert killed.message.startswith("collect waits for labels of batch 'tiny' in ")
    assert "The waiting command ended or was killed" in now_of(killed, [], killed.updated + 60).text
    assert run_loop(loader(path), folder.parent, waits=False) == folder  # nobody has answered yet
    assert read_state(folder) == LoopState(1, waits_for=6)
    answer(store, 8)
    with label_server(store, world.labelers(0)[:2]) as begins, ThreadPoolExecutor(1) as beside:
        # The first round has the eight labels; the second waits for more.
        answering = beside.submit(after, folder / "collect" / "results.json", begins.set)
        assert run_loop(loader(path), tmp_path / "runs") == folder
        answering.result()
    rounds = results(folder)
    assert [one.num_asked for one in rounds] == [24, 24]  # a round ahead, and never more than the budget
    assert rounds[0].num_labels == 8  # the tasks without an answer stayed open
    assert rounds[0].num_open_tasks == 16
    assert [one.num_labels for one in rounds] == sorted(one.num_labels for one in rounds)
    assert rounds[-1].num_labels > 12  # labels of the first round's open tasks, and of later ones
    state = read_state(folder)
    assert state is not None
    assert state.stopped == "the budget of 24 labels is spent."
    with LabelStore(store) as opened:
        assert opened.batches() == ["tiny"]
        assert rounds[-1].num_labels <= opened.progress("tiny").num_judgments <= 24
        assert len({ranking.labeler for ranking in opened.rankings("tiny")}) == 3


def after(path: Path, act: Callable[[], None]) -> None:
    """Acts once a file is there."""
    end = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < end, f"{path} has not come"
        time.sleep(0.02)
    act()


def answer(store: str, num: int) -> None:
    with LabelStore(store) as opened:
        for lease in opened.lease_many("ann", num, seconds=60, batch="tiny"):
            opened.submit(lease, Answer((1, 2), milliseconds=1000), client="test", instructions_version="1")


def add_tasks(run_folder: Path, store: str, num: int) -> None:
    """Add tasks as the first round of a loop would."""
    (run_folder / "collect").mkdir()
    tasks = [Task(f"t{n}", (Message("user", f"Say {n}."),), ("a", "b"), ("x", "y")) for n in range(num)]
    added = AddedTasks("tiny", tuple(AddedTask(one.task_id, one.task_id, 1, 1.0) for one in tasks), num, "sft")
    write_json(run_folder / "collect" / TASKS, as_json(added))
    with LabelStore(store) as opened:
        opened.add_tasks(tasks, batch="tiny", num_labelers=1)


def collect_in(run_folder: Path) -> StageRun:
    return cast(StageRun, SimpleNamespace(name="collect", run_folder=run_folder, open_labels=LabelStore))


def test_labels_of_the_world_do_not_depend_on_the_runs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "Mia has a blue ball. Tom has a red kite. What does Mia have?"
    prompts = [Prompt(prompt_id=f"p{n}", messages=[{"role": "user", "content": asked}], kind="") for n in range(12)]
    texts = ("Mia has a blue ball.", "ball", "Tom has a red kite.")
    candidates = [
        PromptCandidates(one.prompt_id, (Message("user", asked),), tuple(Candidate(text, "sft") for text in texts))
        for one in prompts
    ]
    monkeypatch.setattr(collect, "_candidates", lambda *_: candidates)
    job = load_job(job_file(tmp_path, 24, 1))
    found = []
    for name in ("one", "other"):
        folder = tmp_path / name
        (folder / "collect").mkdir(parents=True)
        write_json(folder / "collect" / "inputs.json", {"fingerprint": name * 12})  # as if its data had other paths
        own = {"run_folder": folder, "folder": folder / "collect", "own": lambda stage: stage, "seed": job.seed}
        own |= {"world": job.open_world(), "job": job, "show": lambda *_: None, "open_labels": LabelStore}
        run = cast(StageRun, SimpleNamespace(name="collect", **own))
        for responses in (2, 3):  # the stage runs again, with a change that leaves the samples alone
            write_json(folder / "collect" / "inputs.json", {"fingerprint": f"{responses}{name * 12}"})
            config = job.part("collect").model_copy(update={"responses_per_prompt": responses})
            collect._add_tasks(run, config, prompts, [])
            added = added_by(folder, 1)
            with LabelStore(str(folder / "labels.sqlite")) as store:
                collect._let_world_label(run, store, added)
                found.append([(one.task_id, one.labeler, one.ranks) for one in store.rankings(added.batch)])
    assert found[:2] == found[2:]
    assert all(len(rankings) >= 12 for rankings in found)


def test_a_round_waits_for_no_archived_task_and_for_no_store_without_its_tasks(tmp_path: Path) -> None:
    store = str(tmp_path / "people.sqlite")
    config = load_job(job_file(tmp_path, 10, 1, f'store = "{store}"\nenough_share = 1.0')).part("collect")
    add_tasks(tmp_path, store, 10)
    with LabelStore(store) as opened:
        answer(store, 5)
        assert missing_labels(collect_in(tmp_path), config) == 5
        with opened.writing() as connection:
            places = organizing.positions_of(connection, ["t0", "t7", "t8"])  # the first has its label
            organizing.set_archived(connection, places, is_archived=True, by="eve", now=1.0)
    assert missing_labels(collect_in(tmp_path), config) == 3
    other = config.model_copy(update={"store": str(tmp_path / "other.sqlite")})
    with pytest.raises(ValueError, match=r"other.sqlite lacks 10 tasks of batch 'tiny' that the loop has added"):
        missing_labels(collect_in(tmp_path), other)


def test_a_round_that_waits_says_how_many_people_a_task_needs(tmp_path: Path) -> None:
    store = str(tmp_path / "people.sqlite")
    config = load_job(job_file(tmp_path, 4, 1, f'store = "{store}"\nenough_share = 1.0')).part("collect")
    add_tasks(tmp_path, store, 4)
    run = collect_in(tmp_path)
    with LabelStore(store) as opened:
        with pytest.raises(LabelsWaitError, match=r"says$"):
            require_labels(run, opened, config, [added_by(tmp_path, 1)])
        with opened.writing() as connection:
            places = organizing.positions_of(connection, ["t0"])
            organizing.set_num_labelers(connection, places, 2, by="eve", now=1.0)
        with pytest.raises(LabelsWaitError, match=r"says, and some tasks need answers from 2 people$"):
            require_labels(run, opened, config, [added_by(tmp_path, 1)])


def test_a_locked_store_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MILLISECONDS", 50)
    store = str(tmp_path / "people.sqlite")
    LabelStore(store).close()
    said = r"collect waits for the label store .*people.sqlite: database is locked"
    with (
        pytest.raises(LabelsWaitError, match=said) as waiting,
        locked(store),
        waiting_for_store(collect_in(tmp_path), store),
    ):
        LabelStore(store)
    assert waiting.value.count_missing() == 0  # it is open again


@contextmanager
def locked(store: str) -> Iterator[None]:
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


def test_a_store_that_cannot_be_opened_at_the_start_is_a_mistake_and_later_is_waited_for(tmp_path: Path) -> None:
    store = "postgresql://heed@/labels?host=/nowhere"
    job = load_job(job_file(tmp_path, 12, 2, f'store = "{store}"'))
    run = Run(job, tmp_path / "tiny", None, None).of("collect")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"label store postgresql\S+ cannot be opened: connection .* failed"):
        preflight(run, job.part("collect"))
    run.folder.mkdir(parents=True)
    (run.folder / TASKS).touch()
    with pytest.raises(LabelsWaitError, match=r"collect waits for the label store postgresql://.*: connection"):
        preflight(run, job.part("collect"))


def test_a_loop_waits_for_a_database_that_restarts_and_says_so_once(
    tmp_path: Path,
    postgres: PostgresServer,
    postgres_tables: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "POLL_SECONDS", 0.05)
    store = postgres.new_database(postgres_tables)
    job = load_job(job_file(tmp_path, 6, 1, f'store = "{store}"\nenough_share = 1.0'))
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job.model_dump(mode="json", exclude_none=True)))
    add_tasks(tmp_path, store, 6)

    def restart() -> None:
        page = tmp_path / "report.html"
        while not page.is_file():
            time.sleep(0.02)
        postgres.stop()
        try:
            while "Round 1 waits for the label store: connection" not in page.read_text(encoding="utf-8"):
                time.sleep(0.02)
        finally:
            postgres.start()
        answer(store, 6)

    restarting = threading.Thread(target=restart)
    restarting.start()
    waiting = LabelsWaitError("", partial(missing_labels, collect_in(tmp_path), job.part("collect")))
    assert controller._wait(tmp_path, LoopState(1), waiting, waits=True)
    restarting.join()
    said = capsys.readouterr().err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"where `heed label serve --store {store}` says" in html.unescape(page)
    assert "Open tasks" not in page  # nobody has counted them yet
    assert said.startswith("waiting for 6 labels\nthe label store cannot be used (connection")
    assert said.count("cannot be used") == said.count("the label store is back") == 1


def failing_store() -> LabelsWaitError:
    """What a stage raises whose store opens, but cannot be written."""
    with pytest.raises(LabelsWaitError) as raised, waiting_for_store(collect_in(Path()), "sqlite://"):
        raise database.StoreClosedError("the disk is full", None)
    return raised.value


def test_a_store_that_opens_but_fails_again_is_not_tried_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, slept = [failing_store(), failing_store(), None], list[float]()
    for waiting in waits[:2]:
        waiting.count_missing = lambda: 0
    monkeypatch.setattr(controller, "run_stages", lambda *_, **__: waits.pop(0))
    monkeypatch.setattr(controller, "write_run_report", lambda _folder: {})
    monkeypatch.setattr(controller.time, "sleep", slept.append)
    assert controller._run_until(load_job(LOOP), tmp_path, LoopState(2), waits=True)
    assert slept == [controller.POLL_SECONDS] * 2
    waits[:] = [failing_store()]
    assert not controller._run_until(load_job(LOOP), tmp_path, LoopState(2), waits=False)
    assert read_state(tmp_path) == LoopState(2, store_away="the disk is full")


def test_a_loop_that_has_stopped_waits_for_its_store_before_the_last_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, stopped = [failing_store(), None], LoopState(2, stopped="the budget of 6 labels is spent.")
    waits[0].count_missing = lambda: 0
    monkeypatch.setattr(controller, "run_stages", lambda *_, **__: waits.pop(0))
    monkeypatch.setattr(controller, "write_run_report", lambda _folder: {})
    monkeypatch.setattr(controller, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(controller, "why_stopped", lambda *_: stopped.stopped)
    monkeypatch.setattr(controller, "_run_round", lambda *_, **__: True)
    job = load_job(LOOP)
    controller._run_rounds(lambda _rounds: job, LoopConfig(labels=6, rounds=2), tmp_path, waits=True)
    assert waits == []
    assert read_state(tmp_path) == replace(stopped, round=1)


def test_a_second_command_disturbs_nothing(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    state = json.dumps(as_json(LoopState(3, 5)))
    (tmp_path / "tiny" / "loop.json").write_text(state, encoding="utf-8")
    with lock(tmp_path / "tiny"), pytest.raises(ValueError, match="is running this job here"):
        run_loop(loader(job_file(tmp_path, 12, 2)), tmp_path)
    assert (tmp_path / "tiny" / "loop.json").read_text(encoding="utf-8") == state


@pytest.mark.parametrize("work", ["load_job", "make_plan"])
def test_the_work_before_a_run_grows_with_the_rounds_and_not_with_their_square(work: str) -> None:
    def num_calls(rounds: int) -> int:
        profile = cProfile.Profile()
        if work == "load_job":
            profile.runcall(load_job, LOOP, [f"loop.rounds={rounds}", "loop.labels_per_round=[]"])
        else:
            job = load_job(LOOP, [f"loop.rounds={rounds}", "loop.labels_per_round=[]"])
            profile.runcall(make_plan, job, Setting(GPUS["h100"], 0.4, 1000))
        return sum(entry.callcount for entry in profile.getstats())

    few, many = (8, 80) if work == "load_job" else (2, 12)
    num_calls(few)  # builds what is kept between calls, such as parameter counts
    assert num_calls(many) < 1.3 * many / few * num_calls(few)


# ---- kills ----


@pytest.mark.nightly
def test_a_loop_killed_at_any_stage_ends_with_the_same_bits(heed: Any, tmp_path: Path, finished_loop: Path) -> None:
    """Under another name, since no draw may depend on it."""
    path = job_file(tmp_path, LABELS, ROUNDS, MORE)
    path.write_text(path.read_text().replace('name = "tiny"', 'name = "other"'))
    run = tmp_path / "runs" / "other"
    kills = (
        lambda: (run / "labels.sqlite").exists(),  # while labels arrive
        lambda: (run / "ppo_2" / "metrics.jsonl").exists(),
    )
    for is_reached in kills:
        command = heed("loop", str(path), "--runs", str(tmp_path / "runs"))
        while not is_reached():
            assert command.process.poll() is None, command.output
            time.sleep(0.005)
        command.kill_everything()
    last = heed("loop", str(path), "--runs", str(tmp_path / "runs"))
    assert last.wait() == 0, last.output
    outputs = (
        "collect_2/rankings.jsonl",
        "collect_2/tasks.json",
        "reward_2/model/model.safetensors",
        "ppo_2/model/model.safetensors",
        "gain_2/responses.jsonl",
        "gain_2/results.json",
    )
    for name in outputs:
        assert (run / name).read_bytes() == (finished_loop / name).read_bytes(), name
