"""People as spot checkers: the evidence by other code, late answers, and runs while people answer on a real server."""

import itertools
import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks.alarm_rates import PEOPLE, People, people_run
from benchmarks.label_client import answer_in_turns
from lm.tokenizer import Tokenizer
from ppo import loop
from ppo.config import PPOConfig
from ppo.people import BETS, INITIAL, PEOPLE_CHECKS, evidence_of_verdicts, number_to_send, planned_rows
from ppo.rank import InitialModels
from ppo.report import report
from ppo.roles import Roles
from preferences import database
from preferences.page.config import LabelingConfig
from preferences.records import Answer, Message, ShownTask, Task
from preferences.store import LabelStore
from stages.data import Fitting
from stages.reports.run_folder import StageFolder
from tests.ppo.test_ppo_stage import ENGINE, Killed
from tests.preferences.page.conftest import Running
from training.data import Prompt
from training.engine import StageContext
from training.packing import Sampler

NUM_ITERATIONS = 5


def stakes(verdicts: list[float], policies: list[int], begins: list[int]) -> float:
    """The mean stake of all bets and beginnings, iteration by iteration; a missing verdict counts as 1."""
    found = []
    for begin, bet in itertools.product(begins, BETS):
        stake = 1.0
        for policy in sorted({*policies}):
            own = [1 if math.isnan(v) else v for v, of in zip(verdicts, policies, strict=True) if of == policy]
            stake *= 1 - bet * float(np.mean(own)) if policy >= begin else 1
        found.append(stake)
    return float(np.mean(found))


def test_the_evidence_is_the_largest_mean_stake_of_the_first_iterations() -> None:
    rng = np.random.default_rng(1)
    verdicts = rng.choice([-1.0, -1.0, -1.0, 0.0, math.nan], 40)
    policies = np.repeat([1, 2, 3, 4, 5, 6, 7, 8], 5)
    prefixes = [stakes(verdicts[:n].tolist(), policies[:n].tolist(), [1, 3, 5, 7]) for n in range(5, 41, 5)]
    found = evidence_of_verdicts(verdicts, policies, 8)
    assert max(prefixes) > 1
    assert found.nats == pytest.approx(math.log(max(prefixes)))
    best = 5 + 5 * int(np.argmax(prefixes))
    by_begin = [stakes(verdicts[:best].tolist(), policies[:best].tolist(), [begin]) for begin in (1, 3, 5, 7)]
    assert found.fall == 1 + 2 * int(np.argmax(by_begin))
    nothing = evidence_of_verdicts(np.array([]), np.array([], dtype=np.int64), 8)
    assert (nothing.nats, nothing.fall) == (0.0, 0)
    assert evidence_of_verdicts(np.full(9, math.nan), np.arange(9), 8).nats == 0.0  # nobody has answered


def test_an_answer_that_comes_can_only_add_evidence() -> None:
    rng = np.random.default_rng(2)
    policies = np.repeat(np.arange(1, 9), 4)
    for _ in range(50):
        verdicts = rng.choice([-1.0, 0.0, 1.0], 32)
        missing = rng.random(32) < rng.random()
        late = evidence_of_verdicts(np.where(missing, math.nan, verdicts), policies, 8)
        assert late.nats <= evidence_of_verdicts(verdicts, policies, 8).nats + 1e-12


def test_what_the_verdicts_of_an_iteration_have_in_common_rings_no_alarm() -> None:
    """All are .4 better or worse at random. As single bets, they rang in a third of such runs."""
    world = next(world for world in PEOPLE if world.shock == 0.4)
    assert sum(people_run(world, seed)[0] > 0 for seed in range(40)) <= 4
    worse = People("from the first iteration on", -0.4, is_step=True)
    assert sum(people_run(worse, seed)[0] > 0 for seed in range(10)) >= 9


def test_more_is_sent_near_an_alarm_and_nothing_to_people_who_are_behind() -> None:
    assert [number_to_send(16, nats, 3.0, 0) for nats in (-1.0, 0.0, 1.5, 3.0, 9.0)] == [4, 4, 10, 16, 16]
    assert [number_to_send(16, 3.0, 3.0, num_open) for num_open in (0, 20, 32, 40)] == [16, 12, 0, 0]


def test_prompts_are_compared_once_and_spread_over_the_iterations(ppo_config: Callable[..., PPOConfig]) -> None:
    config = ppo_config(alarm={"source": {"kind": "people", "store": "labels.db"}, "initial_checks": 30})
    assert config.alarm is not None
    order = Sampler(100, 16, 3)
    plan = planned_rows(order, 21, config.alarm, seed=7)
    rows = [*itertools.chain(*plan.values())]
    assert len(rows) == len({*rows}) == 30
    assert {len(own) for own in plan.values()} == {1, 2}
    assert all({*own} <= {*np.asarray(order.batch(iteration)).tolist()} for iteration, own in plan.items())
    assert plan == planned_rows(order, 21, config.alarm, seed=7)


@dataclass
class Person:
    """Prefers the initial policy's responses. They know who wrote what; real labelers do not."""

    name: str
    store: LabelStore
    batch: str

    def judge(self, shown: ShownTask) -> Answer:
        task = next(one.task for one in self.store.tasks(self.batch) if one.task.task_id == shown.task_id)
        best = task.responses[task.sources.index(INITIAL)]
        return Answer(tuple(1 if response == best else 2 for response in shown.responses), 100)


Run = Callable[..., None]


@pytest.fixture(autouse=True)
def _cheap_hashes(cheap_hashes: None) -> None:
    """In every test here."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Running]:
    with Running(str(tmp_path / "labels.db"), LabelingConfig(task_order="arrival", asks_ratings=False)) as running:
        for name in ("ann", "bo"):
            running.join(name)
        yield running


@pytest.fixture
def run(
    adapted: InitialModels,
    prompts: list[list[int]],
    ppo_config: Callable[..., PPOConfig],
    page: Running,
    tmp_path: Path,
) -> Run:
    """Runs the stage; at the end of the iterations `answering`, ann answers everything that is open on the page."""
    tokenizer = Tokenizer.load(adapted.sft)
    asked = [
        Prompt(prompt_id=str(i), messages=({"role": "user", "content": tokenizer.decode(tokens).strip()},), kind="")
        for i, tokens in enumerate(prompts)
    ]

    def build(folder: Path, answering: range, killed_after: int = -1, **alarm: object) -> None:
        source = {"kind": "people", "store": str(tmp_path / "labels.db"), "batch": folder.name}
        table = {"source": source, "checks_per_iteration": 16, "initial_checks": 16, "false_alarms": 0.4, **alarm}
        config = ppo_config(learning_rate=1e-2, keep_policies_every=1, num_iterations=NUM_ITERATIONS, alarm=table)
        roles = Roles.in_process(config, ENGINE, adapted)
        send_weights = roles.sync_weights

        def people_answer() -> None:
            send_weights()
            lines = lines_of(folder / PEOPLE_CHECKS)
            iteration = max((line["iteration"] for line in lines if "sent" in line), default=0)
            if iteration in answering:
                with page.client(Person("ann", page.store, folder.name)) as client:
                    answer_in_turns([client])
            if iteration == killed_after:
                roles.learners.finish_saving()
                raise Killed

        object.__setattr__(roles, "sync_weights", people_answer)  # the class is frozen
        with closing(roles):
            context, fitting = StageContext(folder, 11, 1, ENGINE), Fitting(asked, prompts)
            loop.train(context, config, roles, adapted, fitting, open_labels=LabelStore)

    return build


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_ids(lines: list[dict[str, Any]]) -> list[Any]:
    """Lines of people_checks.jsonl without tasks' ids, which depend on the batch."""
    return [
        {name: [{**one, "task_id": ""} for one in value] if name == "sent" else value for name, value in line.items()}
        | ({"read": sorted(line["read"].values())} if "read" in line else {})
        for line in lines
    ]


def test_people_answer_while_ppo_runs_and_ring_the_alarm(
    run: Run, page: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "run", range(10), action="roll_back")
    log = lines_of(tmp_path / "run" / "metrics.jsonl")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    sent = [line for line in lines_of(tmp_path / "run" / PEOPLE_CHECKS) if "sent" in line]
    alarm = results["alarm"]
    assert (alarm["fall"], alarm["result"], alarm["by_people"]) == (1, 0, True)
    told = report(StageFolder("ppo", tmp_path / "run", results, log, {})).warning
    rang = f"after iteration {alarm['policy']} and {alarm['num_checks']} spot checks"
    assert f"rang the alarm {rang}: people prefer the initial policy, most likely" in told
    assert alarm["policy"] == len(log) - 1 == sent[-1]["policy"]
    assert [line["spot_checks"] for line in log] == [0, 0, *np.cumsum([len(line["read"]) for line in sent[1:]])]
    assert all(verdict == -1 for line in sent for verdict in line["read"].values())
    assert log[-1]["alarm_nats"] >= -math.log(0.4) > log[-2]["alarm_nats"]
    (said,) = [message for message in caplog.messages if "alarm:" in message]
    assert "comparisons by people in batch 'run' show that the policy is worse than the initial one" in said
    # To labelers these are tasks like any other.
    tasks = page.store.tasks("run")
    assert all({*one.task.sources} == {"policy", "initial policy"} for one in tasks)
    assert len({one.task.sources for one in tasks}) == 2  # the order of the responses says nothing
    compared = [one for line in sent for one in line["sent"]]
    assert len(tasks) == sum(bool(one["task_id"]) for one in compared)
    assert len({one["prompt_id"] for one in compared}) == len(compared) == 16


def test_without_answers_nothing_rings_and_no_more_is_sent_than_people_can_do(
    run: Run, page: Running, tmp_path: Path
) -> None:
    run(tmp_path / "run", range(0), action="stop", checks_per_iteration=2)
    log = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(log) == NUM_ITERATIONS
    assert {line["alarm_nats"] for line in log} == {0.0}
    assert [line["open_spot_checks"] for line in log] == [0, 1, 2, 3, 4]
    assert page.store.judgments("run") == []


def test_a_killed_run_sends_no_task_twice_and_keeps_its_record(run: Run, page: Running, tmp_path: Path) -> None:
    """Iteration 2 runs again after the kill: verdicts that came since are not read before iteration 3."""
    run(tmp_path / "whole", range(2, 10), action="warn")
    with pytest.raises(Killed):
        run(tmp_path / "killed", range(2, 10), killed_after=2, action="warn")
    path = tmp_path / "killed" / PEOPLE_CHECKS
    path.write_bytes(path.read_bytes() + b'{"iteration": 9, "sen')  # the kill tore a line
    run(tmp_path / "killed", range(2, 10), action="warn")
    names = ("alarm_nats", "spot_checks", "open_spot_checks", "spot_check", "kl_nats")
    logs = [lines_of(tmp_path / batch / "metrics.jsonl") for batch in ("whole", "killed")]
    logged, again = ([{name: line.get(name) for name in names} for line in log] for log in logs)
    assert logged == again
    results = [json.loads((tmp_path / batch / "results.json").read_text()) for batch in ("whole", "killed")]
    assert results[0] == results[1]
    whole, killed = (lines_of(tmp_path / batch / PEOPLE_CHECKS) for batch in ("whole", "killed"))
    assert without_ids(whole) == without_ids(killed)
    assert [bool(line["read"]) for line in whole if "sent" in line] == [False, False, True, True]
    sent = [one["task_id"] for line in killed for one in line.get("sent", []) if one["task_id"]]
    assert len({*sent}) == len(sent) == len(page.store.tasks("killed")) == len(page.store.judgments("killed"))


@pytest.mark.parametrize("what", ["locked", "away"])
def test_training_goes_on_while_the_store_is_locked_or_away(
    run: Run,
    page: Running,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    path, aside = tmp_path / "labels.db", tmp_path / "aside.db"
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MILLISECONDS", 20)
    page.accounts.close()
    page.store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        if what == "locked":
            other.execute("BEGIN IMMEDIATE")
        else:
            path.rename(aside)
        run(tmp_path / "run", range(0), action="stop")
    if what == "away":
        assert not path.exists()  # an empty store in its place would hide that it is missing
        aside.rename(path)
    log = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(log) == NUM_ITERATIONS
    assert log[-1]["open_spot_checks"] > 0
    said = "database is locked" if what == "locked" else "there is no such file"
    told = [message for message in caplog.messages if f"{said}. The next iteration tries again" in message]
    assert len(told) >= NUM_ITERATIONS - 1
    with LabelStore(path) as store:
        assert store.tasks("run") == []


@pytest.mark.parametrize(
    ("alarm", "message"),
    [
        ({"share": 0.5}, "share is set, but people give no scores"),
        ({"highest": 7.0}, "highest is set, but people give no scores"),
        ({"source": {"kind": "people", "store": ""}}, "String should match pattern"),
        (
            {"source": {"kind": "people", "store": "postgresql://a:secret@host/labels"}},
            "a URL without a password was expected",
        ),
        ({"source": {"kind": "crowd"}}, '"judge" or "people" was expected'),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    ppo_config: Callable[..., PPOConfig], alarm: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        ppo_config(alarm={"source": {"kind": "people", "store": "labels.db"}, **alarm})


def test_a_table_written_down_with_its_defaults_is_the_same(ppo_config: Callable[..., PPOConfig]) -> None:
    config = ppo_config(alarm={"source": {"kind": "people", "store": "labels.db"}})
    assert PPOConfig.model_validate(config.model_dump()) == config  # as a run does


def test_a_batch_of_single_responses_is_refused_before_training(
    ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    path = str(tmp_path / "labels.db")
    with LabelStore(path) as store:
        task = Task("t", (Message("user", "Why?"),), ("So.",), ("x",))
        store.add_tasks([task], batch="alarm", num_labelers=1)
    source = {"kind": "people", "store": path}
    config = ppo_config(alarm={"source": source})
    assert config.alarm is not None
    with pytest.raises(ValueError, match="batch 'alarm' has single responses, but people compare two"):
        config.alarm.source.check(LabelStore)
    other = ppo_config(alarm={"source": source | {"batch": "other"}})
    assert other.alarm is not None
    other.alarm.source.check(LabelStore)


def test_a_missing_store_is_named(ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> None:
    config = ppo_config(alarm={"source": {"kind": "people", "store": str(tmp_path / "none.db")}})
    assert config.alarm is not None
    with pytest.raises(ValueError, match=r"none\.db': there is no such file; `heed label serve --store .* --new`"):
        config.alarm.source.check(LabelStore)
