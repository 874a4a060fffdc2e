"""Current judgments, counts, the whole report, and its charts."""

import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from preferences.page.quality_reports import share_plot
from preferences.rankings import current_judgments
from preferences.records import Judgment, Message, Ranking, Task
from preferences.statistics.agreement import pairwise_agreement
from preferences.statistics.quality import labeler_counts
from preferences.statistics.summary import summary

REAL = Path(__file__).parents[4] / "shared" / "data" / "pandalm_testset-v1.json"


def task_of(name, size=2, **fields):
    responses = tuple(f"{name} {place}" for place in range(size))
    return Task(name, (Message("user", f"prompt {name}"),), responses, ("p",) * size, **fields)


def act(labeler, task, *ranks, kind="answer", revision=1, at=0.0, note="", **fields):
    fields = {"ratings": (), "flags": (), "milliseconds": 9_000} | fields
    order = tuple(range(len(ranks)))
    return Judgment(
        task, labeler, revision, kind, ranks, note=note, shown_order=order, instructions_version="1", client="test",
        created_at=at, **fields,
    )  # fmt: skip


ACTS = (
    act("ann", "t", 1, 2, at=1),
    act("ann", "t", 2, 1, revision=2, at=5),
    act("bob", "t", 1, 2, at=2),
    act("lead", "t", 1, 1, kind="adjudication", at=9),
    act("bob", "u", 1, 2, at=3),
    act("bob", "u", kind="undo", revision=2, note="slip", at=4),
    act("ann", "u", kind="skip", note="unclear", at=6),
    act("ann", "v", 1, 2, at=7),
    act("cy", "v", 2, 1, at=8),
)
TASKS = [task_of("t"), task_of("u"), task_of("v")]


def test_what_stands_in_any_order():
    for acts in (ACTS, ACTS[::-1]):
        stands = current_judgments(acts)
        answers = {(answer.task_id, answer.labeler): answer.ranks for answer in stands.answers}
        assert answers == {("t", "ann"): (2, 1), ("t", "bob"): (1, 2), ("v", "ann"): (1, 2), ("v", "cy"): (2, 1)}
        assert [(skip.labeler, skip.note) for skip in stands.skips] == [("ann", "unclear")]
        assert Counter(judgment.task_id for judgment in stands.final) == {"t": 1, "v": 2}
        assert {(old.task_id, old.labeler, old.revision) for old in stands.replaced} == {
            ("t", "ann", 1),
            ("u", "bob", 1),
        }


def test_the_last_adjudication_settles():
    later = act("other lead", "t", 2, 1, kind="adjudication", at=10)
    assert current_judgments((later, *ACTS)).adjudications == (later,)


def test_one_revision_twice_is_refused():
    with pytest.raises(ValueError, match="'t', labeler 'ann': revision 2 appears twice"):
        current_judgments((*ACTS, act("ann", "t", 1, 2, revision=2)))


def test_who_did_what():
    ann, bob, cy, lead = labeler_counts(ACTS, current_judgments(ACTS))
    assert dataclasses.astuple(ann) == ("ann", 2, 1, 0, 0, 1, 7)
    assert dataclasses.astuple(bob) == ("bob", 1, 0, 1, 0, 0, 4)
    assert (cy.num_answers, lead.num_answers) == (1, 0)


def test_a_report_of_little_is_json_with_none_for_what_is_unknown():
    report = summary(TASKS, ACTS)
    assert (report.num_tasks, report.num_answers, report.num_skips, report.num_adjudications) == (3, 4, 1, 1)
    assert [labeler.labeler for labeler in report.labelers] == ["ann", "bob", "cy", "lead"]
    assert report.labelers[0].skip_reasons == {"unclear": 1}
    figures = report.as_dict()
    assert figures["labelers"][0]["gold_accuracy"]["mean"] is None
    assert figures["rating_alpha"]["value"] is None
    assert "no two" in figures["rating_alpha"]["reason"]
    json.dumps(figures, allow_nan=False)
    json.dumps(summary(TASKS, []).as_dict(), allow_nan=False)
    json.dumps(summary([], []).as_dict(), allow_nan=False)


def test_gold_and_repeats_stay_out_of_agreement():
    tasks = [
        task_of("half", 3), task_of("tie", 3), task_of("all", 3), task_of("none", 3),
        task_of("gold", 3, gold_ranks=(1, 2, 3)),
        dataclasses.replace(task_of("half", 3), task_id="r", repeat_of="half"),
    ]  # fmt: skip
    said = {"half": (1, 3, 2), "tie": (1, 2, 2), "all": (3, 2, 1), "none": (1, 2, 3)}
    said |= {"gold": (3, 2, 1), "r": (3, 2, 1)}
    acts = [act("ann", task, 1, 2, 3) for task in said] + [act("bob", task, *ranks) for task, ranks in said.items()]
    report = summary(tasks, acts)
    assert report.agreement.num_tasks == 4
    assert report.labelers[0].gold_accuracy.mean == 1
    assert report.labelers[0].self_agreement.num_pairs == 3


def test_a_hundred_thousand_judgments_take_little_time():
    """Here a tenth of them in at most one CPU second: five times what it takes, because busy machines are slow."""
    generator = np.random.default_rng(0)
    tasks = [task_of(f"t{index}", 4) for index in range(2_500)]
    ranks = generator.permuted(np.tile(np.arange(1, 5), (10_000, 1)), axis=1).tolist()
    acts = [act(f"l{row % 4}", f"t{row // 4}", *ranks[row], ratings=(1.0, 2.0, 3.0, 4.0)) for row in range(10_000)]
    started = time.process_time()
    report = summary(tasks, acts)
    assert time.process_time() - started < 1.0
    assert report.agreement.num_pairs == 2_500 * 6 * 6


# ---- charts ----


@pytest.fixture(scope="module")
def many():
    generator = np.random.default_rng(1)
    tasks = [task_of(f"t{index}", 3) for index in range(60)]
    acts = [
        act(name, task.task_id, *(generator.permutation(3) + 1).tolist(), at=1.8e9 + 600 * index, milliseconds=20_000)
        for index, task in enumerate(tasks)
        for name in ("ann", "<b>bob & co</b>")
    ]
    return summary(tasks, acts)


def chart_of(report):
    rows = [(labeler.labeler, labeler.agreement) for labeler in report.labelers]
    return share_plot(rows, name="agreement", title="Agreement with others", chance=0.5)


def test_a_chart_is_xml_with_a_title_and_no_fixed_colours(many):
    root = ElementTree.fromstring(chart_of(many))
    title, text = root[0], root[1]
    assert (title.tag, text.tag, root.get("role")) == ("title", "desc", "img")
    assert root.get("aria-labelledby") == f"{title.get('id')} {text.get('id')}"
    assert title.text
    assert any(character.isdigit() for character in text.text)
    assert not {"script", "style"} & {element.tag for element in root.iter()}
    colours = {element.get(key) for element in root.iter() for key in ("fill", "stroke")} - {None, "none"}
    assert all(colour.endswith("currentColor)") for colour in colours)


def test_a_chart_says_what_it_shows(many):
    chart = chart_of(many)
    assert f"ann {many.labelers[1].agreement.mean:.0%}" in chart
    assert "&lt;b&gt;bob" in chart
    assert "<b>" not in chart


def test_dots_lie_where_the_numbers_are(many):
    root = ElementTree.fromstring(chart_of(many))
    zero, one = (next(float(e.get("x")) for e in root.iter("text") if e.text == text) for text in ("0%", "100%"))
    dots = [float(dot.get("cx")) for dot in root.iter("circle")]
    expected = [labeler.agreement.mean for labeler in many.labelers]
    assert [(dot - zero) / (one - zero) for dot in dots] == pytest.approx(expected, abs=1e-3)


def test_no_data_no_chart():
    assert chart_of(summary(TASKS, [])) == ""


# ---- people ----


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is absent; it holds PandaLM's human comparisons")
def test_three_people_on_999_pairs():
    """PandaLM's test set: 0 is a tie, 1 and 2 the better response. Statistics against counts of the file itself."""
    rows = json.loads(REAL.read_text())
    ranks = {0: (1, 1), 1: (1, 2), 2: (2, 1)}
    tasks = [
        Task(str(row["idx"]), (Message("user", f"{row['instruction']}\n{row['input']}"),),
             (f"1: {row['response1']}", f"2: {row['response2']}"), ("a", "b"))
        for row in rows
    ]  # fmt: skip
    names = ("annotator1", "annotator2", "annotator3")
    acts = [act(name, str(row["idx"]), *ranks[row[name]]) for row in rows for name in names]
    report = summary(tasks, acts)
    said = np.array([[row[name] for name in names] for row in rows])
    pairs = [(said[:, i], said[:, j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    same = sum(int(((a == b) & (a > 0)).sum()) for a, b in pairs)
    opposite = sum(int(((a != b) & (a > 0) & (b > 0)).sum()) for a, b in pairs)
    one_tied = sum(int(((a == 0) != (b == 0)).sum()) for a, b in pairs)
    assert report.agreement.mean == pytest.approx(same / (same + opposite))
    assert report.tie_share == pytest.approx((said == 0).mean())
    observed = (opposite + one_tied / 4) / (3 * len(rows))
    assert report.alpha.value == pytest.approx(1 - observed / ((said > 0).mean() / 2))
    assert report.alpha.low < report.alpha.value < report.alpha.high
    prompts = {task.task_id: task.prompt for task in tasks}
    rankings = [Ranking(a.task_id, prompts[a.task_id], ("1", "2"), a.ranks, a.labeler) for a in acts]
    again = pairwise_agreement(rankings)
    assert dataclasses.astuple(again) == pytest.approx(dataclasses.astuple(report.agreement))
