"""Known labelers sign in to a running server and label over HTTP; the lead's page recovers their traits.

Without `--all`, they answer through the store in all tests but the last. The server is uvicorn on the loopback address.
Its clock is the test's: judging takes the time that a labeler's answer says, and no longer. `benchmarks.label_coverage`
and `tests/preferences/statistics/test_coverage.py` count how often intervals hold the truth; here they are read off the
API, and the judgments shown to be those that are counted there.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from scipy import stats

from benchmarks.known_labelers import FLAG, REASON, TRAITS, KnownLabeler, Size, draw_tasks, judged
from benchmarks.label_client import answer_in_turns
from benchmarks.label_truth import held_against_truth, is_covered
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from preferences.page.config import LabelingConfig
from preferences.records import Task
from preferences.scripted import answer_all
from preferences.statistics.estimates import LEVEL
from preferences.statistics.summary import LabelReport, summary
from preferences.store import LabelStore
from tests.heed.worlds.tasks import draw_tasks as draw_playground_tasks

SIZE, WORLD = Size(num_ordinary=48, num_gold=24, num_repeats=24), 0
CONFIG = LabelingConfig(flags=(FLAG, "rude"), task_order="arrival")
LABELERS = [KnownLabeler(traits, WORLD) for traits in TRAITS]


@dataclass(frozen=True)
class Labeled:
    """A batch that was labeled: the stored judgments, the report, and the numbers that the lead is told."""

    tasks: list[Task]
    judgments: list
    report: LabelReport
    told: dict


def label_over_http(run_server, url: str, size: Size) -> Labeled:
    """Lets all labelers answer in turns until no task is open for any of them."""
    drawn = draw_tasks(size, WORLD)
    tasks = [task for task, _ in drawn]
    with run_server(url, CONFIG) as running, ExitStack() as clients:
        running.store.add_tasks(tasks, batch="main", num_labelers=[quota for _, quota in drawn])
        for labeler in LABELERS:
            running.join(labeler.name)
        running.join("eve", "lead")
        waiting = answer_in_turns([clients.enter_context(running.client(labeler)) for labeler in LABELERS])
        assert waiting == {labeler.name: "nothing open" for labeler in LABELERS}
        judgments = running.store.judgments("main")
        return Labeled(tasks, judgments, summary(tasks, judgments), running.get("eve", "/quality/main"))


def label_in_process(url: str) -> Labeled:
    """Lets the labelers answer through the store, one after another."""
    drawn = draw_tasks(SIZE, WORLD)
    tasks = [task for task, _ in drawn]
    with LabelStore(url) as store:
        store.add_tasks(tasks, batch="main", num_labelers=[quota for _, quota in drawn])
        answer_all(store, LABELERS, batch="main", client="script", instructions_version="1")
        judgments = store.judgments("main")
    report = summary(tasks, judgments)
    return Labeled(tasks, judgments, report, report.as_dict())


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    return label_in_process(str(tmp_path_factory.mktemp("store") / "labels.db"))


@pytest.fixture(scope="module")
def over_http(run_server, tmp_path_factory):
    return label_over_http(run_server, str(tmp_path_factory.mktemp("door") / "labels.db"), SIZE)


@pytest.fixture(params=["in_process", pytest.param("over_http", marks=pytest.mark.long)])
def labeled(request):
    return request.getfixturevalue(request.param)


@pytest.mark.long
def test_the_lead_is_told_what_was_judged_over_http(over_http):
    """The API returns the same numbers as the report that the other tests check."""
    assert over_http.told == over_http.report.as_dict()
    assert {judgment.client for judgment in over_http.judgments} == {"api"}
    assert {judgment.instructions_version for judgment in over_http.judgments} == {CONFIG.version}
    assert over_http.told["num_answers"] > 400


def test_every_statistic_holds_the_truth(labeled):
    """34 intervals of 95%: more than 6 of independent ones would miss once in a thousand worlds."""
    found = list(held_against_truth(labeled.report))
    missed = [(what, who) for what, who, estimate, truth in found if not is_covered(estimate, truth)]
    assert len(found) == 34
    assert len(missed) <= stats.binom.ppf(0.999, len(found), 1 - LEVEL), missed


@pytest.mark.parametrize(
    ("who", "what"),
    [
        ("biased", "shown first, by labeler"),  # a bonus for the first place
        ("lazy", "shown first, by labeler"),  # answers in the order shown
        ("lazy", "too fast"),
        ("lazy", "accuracy on gold"),
        ("noisy", "self-agreement"),
        ("noisy", "accuracy on gold"),
        ("opinionated", "agreement with others"),  # taste of one's own
        ("opinionated", "accuracy on gold"),
    ],
)
def test_what_was_planted_is_found(labeled, who, what):
    """The interval covers this labeler's true value, and not a careful labeler's."""
    found = {(kind, name): (estimate, truth) for kind, name, estimate, truth in held_against_truth(labeled.report)}
    estimate, truth = found[what, who]
    assert is_covered(estimate, truth), (estimate, truth)
    assert not is_covered(estimate, found[what, "careful"][1]), (estimate, truth)


def test_a_wrong_truth_is_missed(labeled):
    """Compared with the next labeler's true value, far more intervals miss."""
    held = [found for found in held_against_truth(labeled.report) if found[1]]
    truths = {(what, who): truth for what, who, _, truth in held}
    names = [traits.name for traits in TRAITS]
    after = dict(zip(names, names[1:] + names[:1], strict=True))
    missed = [(what, who) for what, who, estimate, _ in held if not is_covered(estimate, truths[what, after[who]])]
    assert len(missed) >= 10, missed


def test_flags_skips_and_ties_are_counted_to_the_last(labeled):
    """These are counts without uncertainty: exactly what the labelers did."""
    asked = asked_of(labeled.judgments)
    by_name = {entry["labeler"]: entry for entry in labeled.told["labelers"]}
    given = judged(labeled.tasks, LABELERS, asked)
    for traits in TRAITS:
        own = [judgment for judgment in given if judgment.labeler == traits.name]
        marks = sum(flag == FLAG for judgment in own for flags in judgment.flags for flag in flags)
        num_skips = sum(judgment.kind == "skip" for judgment in own)
        assert by_name[traits.name]["flags"] == ({FLAG: marks} if traits.flag else {})
        assert by_name[traits.name]["skip_reasons"] == ({REASON: num_skips} if traits.skip else {})
        assert bool(marks) == bool(traits.flag)
        assert bool(num_skips) == bool(traits.skip)
    pairs = [pair for judgment in given for pair in combinations(judgment.ranks, 2)]
    assert labeled.told["tie_share"] == pytest.approx(sum(one == other for one, other in pairs) / len(pairs))


def test_simulated_labelers_say_the_same(labeled):
    """They judge as `benchmarks.label_coverage` draws them."""
    assert said(labeled.judgments) == said(judged(labeled.tasks, LABELERS, asked_of(labeled.judgments)))


@pytest.mark.long
def test_over_http_and_through_the_store_they_say_the_same(over_http, in_process):
    for_all = {task.task_id for task, quota in draw_tasks(SIZE, WORLD) if quota == len(TRAITS)}
    shared = [
        said(judgment for judgment in labeled.judgments if judgment.task_id in for_all)
        for labeled in (over_http, in_process)
    ]
    assert shared[0] == shared[1]
    assert len(shared[0]) > 300


@pytest.mark.nightly  # in CI, test_store.py and its neighbours run every statement on both databases
def test_in_postgresql_it_is_the_same(run_server, postgres, postgres_tables):
    size = Size(num_ordinary=8, num_gold=4, num_repeats=4)
    labeled = label_over_http(run_server, postgres.new_database(postgres_tables), size)
    assert said(labeled.judgments) == said(judged(labeled.tasks, LABELERS, asked_of(labeled.judgments)))
    assert labeled.told == labeled.report.as_dict()
    assert labeled.told["num_answers"] > 60


def test_the_playgrounds_labelers_come_to_the_same_over_http(run_server, tmp_path):
    world = PlaygroundWorld(PlaygroundConfig())
    tasks = [
        Task(shown.task_id, shown.prompt, shown.responses, ("policy",) * len(shown.responses))
        for shown in draw_playground_tasks(world, num_tasks=8, num_responses=4, seed=0)
    ]
    labelers = world.labelers(seed=0)[:2]
    config = LabelingConfig(asks_ratings=False, task_order="arrival")
    with run_server(str(tmp_path / "http.db"), config) as running:
        running.store.add_tasks(tasks, batch="b", num_labelers=2)
        for labeler in labelers:
            running.join(labeler.name)
        with running.client(labelers[0]) as one, running.client(labelers[1]) as other:
            assert one.instructions()["version"] == config.version
            answer_in_turns([one, other])
        over_http, its_hash = running.store.judgments("b"), running.store.content_hash("b")
    with LabelStore(tmp_path / "store.db") as store:
        store.add_tasks(tasks, batch="b", num_labelers=2)
        answer_all(store, labelers, batch="b", client="script", instructions_version=config.version)
        assert said(over_http) == said(store.judgments("b"))
        assert its_hash == store.content_hash("b")


def asked_of(judgments) -> dict[str, list[str]]:
    """Returns the tasks that each labeler was given, in order."""
    asked: dict[str, list[str]] = {traits.name: [] for traits in TRAITS}
    for judgment in judgments:
        asked[judgment.labeler].append(judgment.task_id)
    return asked


def said(judgments) -> list:
    """Returns the judgments, sorted, without the client and time that they came by."""
    bare = [replace(judgment, client="", instructions_version="", created_at=0.0) for judgment in judgments]
    return sorted(bare, key=lambda judgment: (judgment.task_id, judgment.labeler))
