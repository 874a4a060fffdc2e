"""Tests whether the analysis of a usability study finds planted effects, and whether its intervals cover them.

    python -m benchmarks.label_usability                    # simulated studies: coverage, bias and width
    python -m benchmarks.label_usability --http 6           # one study of 6 scripted users over HTTP, on real pages

Two forms are compared on one batch of pairs. Each scripted user has levels of load, usability, speed and accuracy. The
second form changes each level by a planted effect that differs somewhat between users. Later forms are more tiring and
faster, some tasks are harder for everybody, and sometimes a user leaves a task open over a break. Over HTTP, a user
signs in, reads the instructions, and fills in the forms and questionnaires on the pages; a simulated clock adds the
time that the user takes. The truth is computed from 20,000 users, with the questionnaires' rounding.
"""

import argparse
import html
import math
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import uvicorn

from preferences import usability
from preferences.accounts import Accounts
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from preferences.page.serve import listening
from preferences.page.study_config import StudyConfig
from preferences.questionnaire import LOAD, LOAD_STEP, MAX_LOAD, SUS
from preferences.records import Judgment, Message, Task
from preferences.statistics.estimates import Floats
from preferences.statistics.usability import UsabilityReport, read_report, usability_report
from preferences.statistics.usability_tables import conclusions, usability_tables
from preferences.store import LabelStore
from preferences.usability import Participant, QuestionnaireAnswer, Study, latin_square

BATCH, PRACTICE = "study", 2
PAUSE_RATE, PAUSE_TIMES = 0.03, 40.0  # how often a task is left open over a break, and how much longer it takes
TASK_SPREAD, DIFFICULTY = 0.4, 0.7  # standard deviations of log seconds and of the log-odds to be right, between tasks
SCALE_NOISE, ITEM_NOISE = 10.0, 0.8  # of a scale of load, in points, and of a statement of the SUS
LEVELS = {"load": (45.0, 10.0), "sus": (65.0, 10.0), "seconds": (math.log(30), 0.35), "accuracy": (1.2, 0.5)}
OWN_EFFECT = {"load": 6.0, "sus": 6.0, "seconds": 0.12, "accuracy": 0.3}  # standard deviations between users


@dataclass(frozen=True)
class Effects:
    """What the second form adds, and what each later place adds: points, log seconds, and log-odds to be right."""

    form: Mapping[str, float] = field(
        default_factory=lambda: {"load": 12.0, "sus": -10.0, "seconds": math.log(1.5), "accuracy": -0.6}
    )
    place: Mapping[str, float] = field(
        default_factory=lambda: {"load": 4.0, "sus": 0.0, "seconds": math.log(0.85), "accuracy": 0.0}
    )


@dataclass(frozen=True)
class Size:
    num_labelers: int = 12
    num_tasks: int = 45  # of the batch; every third is a gold task
    tasks_per_condition: int = 20


class User:
    """A scripted user, drawn from a generator."""

    def __init__(self, effects: Effects, generator: np.random.Generator, name: str = "user") -> None:
        self.name, self.effects, self._generator = name, effects, generator
        self.level = {what: float(generator.normal(*level)) for what, level in LEVELS.items()}
        self.own = {what: float(generator.normal(effects.form[what], spread)) for what, spread in OWN_EFFECT.items()}

    def at(self, what: str, form: int, place: int) -> float:
        """Returns this user's level with a form (0 or 1) at a place."""
        return self.level[what] + form * self.own[what] + place * self.effects.place[what]

    def judge(self, difficulty: float, form: int, place: int) -> tuple[bool, float]:
        """Returns whether the user orders a task's pair right, and the seconds that it takes."""
        odds = self.at("accuracy", form, place) - difficulty
        is_right = bool(self._generator.random() < 1 / (1 + math.exp(-odds)))
        seconds = math.exp(self._generator.normal(self.at("seconds", form, place), TASK_SPREAD))
        return is_right, seconds * (PAUSE_TIMES if self._generator.random() < PAUSE_RATE else 1.0)

    def load(self, form: int, place: int) -> tuple[int, ...]:
        return tuple(map(int, as_load(np.full(1, self.at("load", form, place)), self._generator)[0]))

    def sus(self, form: int, place: int) -> tuple[int, ...]:
        return tuple(map(int, as_sus(np.full(1, self.at("sus", form, place)), self._generator)[0]))


def as_load(level_L: Floats, generator: np.random.Generator) -> Floats:
    """Returns [L, scales]: each user's marks on the scales of load."""
    noisy = level_L[:, None] + generator.normal(0, SCALE_NOISE, (len(level_L), len(LOAD)))
    return np.clip(np.round(noisy / LOAD_STEP) * LOAD_STEP, 0, MAX_LOAD)


def as_sus(level_L: Floats, generator: np.random.Generator) -> Floats:
    """Returns [L, statements]: each user's agreement with the statements; every other one is a complaint."""
    noisy = level_L[:, None] / 25 + generator.normal(0, ITEM_NOISE, (len(level_L), len(SUS)))
    praise = np.clip(np.round(noisy), 0, 4)
    return np.where(np.arange(len(SUS)) % 2 == 0, praise + 1, 5 - praise)


# ---- the batch, and what is true ----


def difficulties(num_tasks: int) -> Floats:
    """Returns [tasks]: the log-odds that each task takes from everybody. They are the same in every study."""
    return np.random.default_rng(7).normal(0, DIFFICULTY, num_tasks)


def is_gold(number: int) -> bool:
    return number % 3 == 0


def batch_of(num_tasks: int) -> list[Task]:
    """Returns the tasks, whose first response is the right one; every third is a gold task."""
    return [
        Task(
            f"t{number}",
            (Message("user", f"Question {number}."),),
            (f"Right answer to {number}.", f"Wrong answer to {number}."),
            ("right", "wrong"),
            gold_ranks=(1, 2) if is_gold(number) else (),
        )
        for number in range(num_tasks)
    ]


def study_config(size: Size, names: Sequence[str]) -> StudyConfig:
    conditions = [
        {"name": "ranks", "batch": BATCH, "flags": [], "asks_ratings": False},
        {"name": "ranks and a criterion", "batch": BATCH, "flags": [], "asks_ratings": False},
    ]
    return StudyConfig.model_validate(
        {
            "name": "scripted",
            "labelers": names,
            "tasks_per_condition": size.tasks_per_condition,
            "practice_tasks": PRACTICE,
            "conditions": [conditions[0], conditions[1] | {"criteria": [{"name": "helpful"}]}],
        }
    )


def truths(effects: Effects, num_tasks: int, num_users: int = 20_000) -> dict[tuple[str, str], float]:
    """Returns what a study of all users would find, by measure and "difference", "first form" or "order"."""
    generator = np.random.default_rng(11)
    level = {what: generator.normal(*one, num_users) for what, one in LEVELS.items()}
    own = {what: generator.normal(effects.form[what], spread, num_users) for what, spread in OWN_EFFECT.items()}

    def mean(what: str, form: int, place: int) -> float:
        level_L = level[what] + form * own[what] + place * effects.place[what]
        if what == "load":
            return float(as_load(level_L, generator).mean())
        praise = as_sus(level_L, generator)
        return float(2.5 * np.where(np.arange(len(SUS)) % 2 == 0, praise - 1, 5 - praise).sum(axis=1).mean())

    found = {}
    for what in ("load", "sus"):
        cell = np.array([[mean(what, form, place) for place in (0, 1)] for form in (0, 1)])
        found[what, "first form"] = float(cell[0].mean())
        found[what, "difference"] = float(cell[1].mean() - cell[0].mean())
        found[what, "order"] = float((cell[:, 1] - cell[:, 0]).mean())
    found["seconds", "difference"] = math.exp(effects.form["seconds"])
    found["seconds", "order"] = math.exp(effects.place["seconds"])
    hard_T = difficulties(num_tasks)
    gold_T = np.array([is_gold(number) for number in range(num_tasks)])
    right_FT = np.zeros((2, num_tasks))
    for form in (0, 1):
        for place in (0, 1):
            odds_L = level["accuracy"] + form * own["accuracy"] + place * effects.place["accuracy"]
            right_FT[form] += [float((1 / (1 + np.exp(hard - odds_L))).mean()) / 2 for hard in hard_T]
    gold_F = right_FT[:, gold_T].mean(axis=1)
    same_F = (right_FT**2 + (1 - right_FT) ** 2)[:, ~gold_T].mean(axis=1)
    for what, by_form in (("gold", gold_F), ("agreement", same_F)):
        found[what, "first form"] = float(by_form[0])
        found[what, "difference"] = float(by_form[1] - by_form[0])
    return found


# ---- simulated studies, without a store ----


def simulate(effects: Effects, size: Size, seed: int) -> UsabilityReport:
    """Draws users and their answers, and returns the study's report."""
    generator = np.random.default_rng(seed)
    names = [f"user {number}" for number in range(size.num_labelers)]
    study, _ = study_config(size, names).study(LabelingConfig())
    square, hard = latin_square(2), difficulties(size.num_tasks)
    people: list[Participant] = []
    said: list[QuestionnaireAnswer] = []
    judgments: list[Judgment] = []
    for number, name in enumerate(names):
        user, order = User(effects, generator, name), square[number % len(square)]
        people.append(Participant(name, order))
        drawn = generator.permutation(size.num_tasks)
        for place, form in enumerate(order):
            tasks = drawn[place * size.tasks_per_condition :][: size.tasks_per_condition]
            judgments += _answers(user, study, [(int(task), float(hard[task])) for task in tasks], form, place)
            said.append(QuestionnaireAnswer(name, form, user.load(form, place), user.sus(form, place)))
    return usability_report(study, people, said, {BATCH: batch_of(size.num_tasks)}, {BATCH: judgments})


def _answers(user: User, study: Study, tasks: Sequence[tuple[int, float]], form: int, place: int) -> Iterator[Judgment]:
    for index, (task, hard) in enumerate(tasks):
        is_right, seconds = user.judge(hard, form, place)
        ranks, milliseconds = (1, 2) if is_right else (2, 1), int(1_000 * seconds)
        version, at = study.conditions[form].version, 1_000.0 * place + index
        yield Judgment(
            f"t{task}", user.name, 0, "answer", ranks, (), (), "", (0, 1), version, milliseconds, "scripted", at
        )  # fmt: skip


@dataclass(frozen=True)
class Covered:
    """How often an interval contained the truth; `bias` is the mean of estimate - truth, `width` the mean width."""

    share: float
    num: int
    bias: float
    width: float


def coverage(effects: Effects, size: Size, num_studies: int, seed: int) -> dict[tuple[str, str], Covered]:
    """Compares the intervals of studies `seed`, `seed + 1`, ... with the truth."""
    true = truths(effects, size.num_tasks)
    rows: dict[tuple[str, str], list[tuple[bool, float, float]]] = {}
    for number in range(num_studies):
        for key, interval in estimates(simulate(effects, size, seed + number)).items():
            if key in true:
                low, mean, high = interval
                rows.setdefault(key, []).append((low <= true[key] <= high, mean - true[key], high - low))
    means = {key: np.mean(found, axis=0).tolist() for key, found in rows.items()}
    return {key: Covered(share, len(rows[key]), bias, width) for key, (share, bias, width) in means.items()}


def estimates(report: UsabilityReport) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Returns (low, mean, high) by measure and "difference", "first form" or "order"."""
    found = {}
    for one in report.measures:
        all_three = (one.differences[0].found, one.by_condition[0], one.order)
        for what, estimate in zip(("difference", "first form", "order"), all_three, strict=True):
            own = estimate.interval
            found[one.measure.key, what] = (own.low, own.mean, own.high)
    return found


# ---- one study over HTTP ----


class Clock:
    """Seconds since the epoch, moved by the users; it starts in 2026."""

    def __init__(self) -> None:
        self.seconds = 1_795_000_000.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def serving(store: LabelStore, accounts: Accounts, config: LabelingConfig, clock: Clock) -> Iterator[str]:
    """Serves the store's pages in a thread; gives their address."""
    listener = listening("127.0.0.1", 0)
    app = make_app(store, accounts, config, clock=clock)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def run_over_http(effects: Effects, size: Size, seed: int) -> UsabilityReport:
    """Lets scripted users do a whole study on real pages, one user after another. Returns its report."""
    generator, clock = np.random.default_rng(seed), Clock()
    users = [User(effects, generator, f"user-{number}") for number in range(size.num_labelers)]
    config = study_config(size, [user.name for user in users])
    study, _ = config.study(LabelingConfig())
    with tempfile.TemporaryDirectory() as folder, LabelStore(Path(folder) / "labels.sqlite", clock=clock) as store:
        accounts = Accounts(Path(folder) / "labels.sqlite", clock=clock)
        store.add_tasks(batch_of(size.num_tasks), batch=BATCH, num_labelers=size.num_labelers)
        keys = {}
        for user in users:
            accepted = accounts.accept(accounts.invite(user.name, "labeler"))
            assert accepted is not None
            keys[user.name] = accepted[1]
        with store.writing() as connection:
            usability.start(connection, study, config.labelers, clock())
        with serving(store, accounts, LabelingConfig(), clock) as address:
            for user in users:
                with httpx.Client(base_url=address, follow_redirects=True, timeout=60) as client:
                    client.post("/sign-in", data={"name": user.name, "key": keys[user.name]})
                    take_part(client, user, clock, difficulties(size.num_tasks))
        accounts.close()
        with store.reading() as connection:
            return read_report(connection, study.name, with_names=True)


def take_part(client: httpx.Client, user: User, clock: Clock, hard: Floats) -> None:
    """Follows the pages from the first instructions to the last questionnaire."""
    page, place, form = client.get("/task"), 0, 0
    while place < len(latin_square(2)[0]):
        fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.text))
        if page.url.path == "/instructions":
            page = client.post("/instructions", data=fields)
        elif page.url.path == "/usability":
            fields |= {f"load_{index}": str(mark) for index, mark in enumerate(user.load(form, place))}
            fields |= {f"sus_{index}": str(mark) for index, mark in enumerate(user.sus(form, place))}
            page, place = client.post("/usability", data=fields | {"preferred": "none"}), place + 1
        else:
            found = re.search(r"Question (\d+)\.", html.unescape(page.text))
            assert found is not None, page.text
            form = int('name="criterion_0_0"' in page.text)
            is_right, seconds = user.judge(float(hard[int(found[1])]), form, place)
            is_right_first = page.text.index("Right answer") < page.text.index("Wrong answer")
            first = 1 if is_right == is_right_first else 2
            fields |= {"rank_0": str(first), "rank_1": str(3 - first)}
            fields |= {"criterion_0_0": "5", "criterion_0_1": "5"} if form else {}
            clock.seconds += seconds
            page = client.post("/task/answer", data=fields)
        assert page.status_code == 200, (page.status_code, page.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", type=int, default=0, metavar="USERS", help="run one study over HTTP instead")
    parser.add_argument("--studies", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    effects = Effects()
    if asked.http:
        report = run_over_http(effects, Size(num_labelers=asked.http), asked.seed)
        for table in usability_tables(report):
            print(f"\n{table.title}")
            for row in (table.columns, *table.rows):
                print("  " + " | ".join(row))
        print("\n".join(["", *conclusions(report)]))
    true = truths(effects, Size().num_tasks)
    print("\n| labelers | measure | what | truth | covered | bias | mean width |\n|---|---|---|---|---|---|---|")
    for num_labelers in () if asked.http else (6, 12, 24):
        size = Size(num_labelers)
        for (measure, what), found in coverage(effects, size, asked.studies, asked.seed).items():
            ends = f"{found.share:.1%} | {found.bias:+.3f} | {found.width:.3f}"
            print(f"| {num_labelers} | {measure} | {what} | {true[measure, what]:.3f} | {ends} |", flush=True)


if __name__ == "__main__":
    main()
