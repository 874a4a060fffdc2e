"""External judgments: published formats and Heed's own export become verdicts that name their line."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.judges.external import ExternalJudgments, read_verdict_file
from evaluation.judges.judge import pairs_of
from evaluation.judges.people import PeopleJudge
from evaluation.verdicts import Response
from preferences.formats.exchange import export
from preferences.formats.merging import clusters_of_arena
from preferences.formats.registry import format_to_write
from preferences.records import Answer, Message, ShownTask, Task
from preferences.scripted import answer_all
from preferences.store import LabelStore
from training.data import Prompt

PANDALM = Path(__file__).parents[3] / "shared" / "data" / "pandalm_testset-v1.json"

Read = Callable[..., ExternalJudgments]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def of_rows(rows: Sequence[dict[str, Any]], **more: Any) -> ExternalJudgments:
        path = tmp_path / "judged.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_verdict_file(str(path), **{"judge": "judged", **more})

    return of_rows


def alpaca(preference: float | None, annotator: str = "gpt", **more: Any) -> dict[str, Any]:
    row = {"instruction": "Sing", "output_1": "la", "output_2": "lalala", "generator_1": "old", "generator_2": "new"}
    return {**row, "annotator": annotator, "preference": preference, **more}


def test_judgments_are_clustered_by_a_field_of_their_rows(read: Read) -> None:
    rows = [alpaca(1.0, dataset="t"), alpaca(2.0, instruction="Hum", dataset="t"), alpaca(1.0, instruction="Whistle")]
    assert [prompt.cluster for prompt in read(rows[:2], cluster_by="dataset").prompts] == ["t", "t"]
    assert [prompt.cluster for prompt in read(rows).prompts] == ["", "", ""]
    with pytest.raises(ValueError, match=r"judged\.jsonl: line 3: the field 'dataset' to cluster by is missing"):
        read(rows, cluster_by="dataset")


def test_what_one_person_says_in_an_arena_is_one_cluster() -> None:
    def asked(person: str, prompt: str) -> Task:
        details = {"person": person, "conversation": f"{person}/{prompt}"}
        return Task(prompt, (Message("user", prompt),), ("a", "b"), ("old", "new"), details=details)

    own = [asked(person, f"{person} asks {number}") for person in ("ann", "bo") for number in range(3)]
    assert clusters_of_arena([*own, asked("ann", "hello"), asked("bo", "hello")]) == "person"
    listed = [asked(person, f"number {number}") for person in ("ann", "bo") for number in range(3)]
    assert clusters_of_arena(listed) == ""
    assert clusters_of_arena([*own, replace(own[0], details={})]) == ""


def test_alpacaeval_stays_as_unsure_as_it_was(read: Read) -> None:
    found = read(
        [
            alpaca(1.75, dataset="songs"),
            alpaca(1.0, "other", dataset="songs"),
            alpaca(1.5, output_1="lo", instruction="Hum"),
            alpaca(None, instruction="Whistle"),
        ]
    )
    assert found.format == "alpacaeval"
    assert (found.policies, found.judges) == (("new", "old"), ("gpt", "other"))
    assert [(v.policy_a, v.preference_a, v.labeler, v.category) for v in found.verdicts] == [
        ("old", 0.25, "gpt", "songs"), ("old", 1.0, "other", "songs"), ("old", 0.5, "gpt", "")
    ]  # fmt: skip
    assert [v.where.rpartition(": ")[2] for v in found.verdicts] == ["line 1", "line 2", "line 3"]
    assert [(p.messages[0]["content"], p.kind) for p in found.prompts] == [("Sing", "songs"), ("Hum", "")]
    assert [(r.policy, r.index, r.text) for r in found.responses] == [
        ("old", 0, "la"), ("new", 0, "lalala"), ("old", 0, "lo"), ("new", 0, "lalala")
    ]  # fmt: skip
    assert (found.verdicts[0].length_a, found.verdicts[0].length_b) == (2, 6)
    assert found.report.counts() == {"no preference": 1}


def test_who_judged_both_orders_counts_once(read: Read) -> None:
    turned = {"output_1": "lalala", "output_2": "la", "generator_1": "new", "generator_2": "old"}
    found = read([alpaca(2.0), alpaca(1.5, "other"), alpaca(1.75, **turned)])
    assert [(v.policy_a, v.labeler, v.preference_a) for v in found.verdicts] == [
        ("old", "gpt", (0.0 + 0.75) / 2), ("old", "other", 0.5)
    ]  # fmt: skip
    assert found.verdicts[0].where.count("line ") == 2
    assert found.num_again == 1
    assert len(found.responses) == 2


@pytest.mark.parametrize("policies", [[1, 2], ["ab", "cd"], [["x"], [3]], [["x"]], {"a": 1}])
def test_details_called_policies_may_be_something_else(read: Read, policies: Any) -> None:
    """Details called `policies` say who wrote what only if `heed compare` wrote them: a list of names per response."""
    act = {
        "labeler": "ann", "revision": 0, "kind": "answer", "ranks": [1, 2], "ratings": [], "flags": [], "note": "",
        "shown_order": [], "instructions_version": "", "milliseconds": 1, "client": "", "created_at": 1,
    }  # fmt: skip
    row = {
        "task_id": "t", "batch": "b", "num_labelers": 1, "prompt": [{"role": "user", "content": "q"}],
        "responses": ["a", "b"], "sources": ["old", "new"], "objective": "overall", "gold_ranks": [], "repeat_of": "",
        "details": json.dumps({"policies": policies}),
        "judgments": [act],
    }  # fmt: skip
    (verdict,) = read([row]).verdicts
    assert (verdict.policy_a, verdict.policy_b, verdict.preference_a) == ("old", "new", 1.0)


def battle(winner: str, a: str, b: str, **more: Any) -> dict[str, Any]:
    turns = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"I am {name}"}] for name in (a, b)]
    sides = {"conversation_a": turns[0], "conversation_b": turns[1]}
    return {"model_a": a, "model_b": b, "winner": winner, "judge": "ann", **sides, **more}


def test_arena_battles_of_three_models(read: Read) -> None:
    found = read(
        [battle("model_a", "x", "y"), battle("tie", "y", "z"), battle("model_b", "z", "x"), battle("tie", "x", "x")]
    )
    assert found.policies == ("x", "y", "z")
    assert [(v.policy_a, v.policy_b, v.preference_a) for v in found.verdicts] == [
        ("x", "y", 1.0), ("y", "z", 0.5), ("z", "x", 0.0)
    ]  # fmt: skip
    assert {(v.judge, v.labeler, v.first) for v in found.verdicts} == {("judged", "ann", "a")}
    assert len(found.prompts) == 1
    assert len(found.responses) == 3  # the same text by one model is one response
    assert found.num_same_policy == 1


class Longest:
    name = "ann"

    def judge(self, shown: ShownTask) -> Answer:
        order = sorted({len(text) for text in shown.responses}, reverse=True)
        return Answer(tuple(order.index(len(text)) + 1 for text in shown.responses), 5)


def test_our_own_export_gives_the_verdicts_that_people_gave(sqlite_tables: Path, tmp_path: Path) -> None:
    prompts = [Prompt(prompt_id=f"p{n}", messages=({"role": "user", "content": f"{n}?"},), kind="k") for n in range(2)]
    texts = {"a": ("one word", "same"), "b": ("one", "same"), "c": ("word", "different")}
    responses = {name: [Response(name, f"p{n}", 0, t) for n, t in enumerate(own)] for name, own in texts.items()}
    pairs = pairs_of(prompts, responses)
    path = tmp_path / "labels.sqlite"
    path.write_bytes(sqlite_tables.read_bytes())
    judge = PeopleJudge("people", "", str(path), "b", 1, seed=0, open_labels=LabelStore)
    judge.put_tasks(pairs)
    with LabelStore(path) as store:
        answer_all(store, [Longest()], batch="b", client="t", instructions_version="1")
        export(store, format_to_write("heed"), tmp_path / "labels.parquet")
    found = read_verdict_file(str(tmp_path / "labels.parquet"), judge="people")
    said = {(v.policy_a, v.policy_b, v.length_a): v for v in judge.judge(pairs, lambda *_: None)}
    assert len(found.verdicts) == len(said) == 6
    for verdict in found.verdicts:
        turned = (verdict.policy_a, verdict.policy_b, verdict.length_a) not in said
        sides = (verdict.policy_b, verdict.policy_a) if turned else (verdict.policy_a, verdict.policy_b)
        own = said[*sides, verdict.length_b if turned else verdict.length_a]
        assert own.preference_a == (1 - verdict.preference_a if turned else verdict.preference_a)
        flipped = {"a": "b", "b": "a", "": ""}[verdict.first]
        assert own.first == (flipped if turned else verdict.first)
        assert verdict.category == "k"
        assert re.fullmatch("labeler-[0-9a-f]{12}", verdict.labeler)  # exports name nobody


def test_tasks_that_measure_labelers_give_no_verdicts(sqlite_tables: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.sqlite"
    path.write_bytes(sqlite_tables.read_bytes())
    asked = Task("t", (Message("user", "?"),), ("long", "no"), ("a", "b"))
    gold, again = replace(asked, task_id="g", gold_ranks=(1, 2)), replace(asked, task_id="r", repeat_of="t")
    with LabelStore(path) as store:
        store.add_tasks([asked, gold, again], batch="b", num_labelers=1)
        answer_all(store, [Longest()], batch="b", client="t", instructions_version="1")
        export(store, format_to_write("heed"), tmp_path / "labels.jsonl")
    found = read_verdict_file(str(tmp_path / "labels.jsonl"), judge="people")
    assert [verdict.preference_a for verdict in found.verdicts] == [1.0]
    assert found.report.counts() == {"gold task": 1, "hidden repeat": 1}


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([alpaca(3.0)], {}, r"line 1: field 'preference' is 3.0; a number from 1 to 2"),
        ([alpaca(math.nan)], {}, "1 rows of alpacaeval contain no verdict on two policies"),
        ([alpaca(1.0, generator_1="new")], {}, "1 compare a policy with itself"),
        ([alpaca(1.0, generator_1="")], {}, "1 pairs name no policy"),
        ([alpaca(1.0)], {"category": "level"}, "the category field 'level' is missing"),
        ([{"text": "x"}], {}, r"line 1: no known format has the fields"),
        ([alpaca(1.0)], {"form": "arena"}, "line 1: field 'conversation_a'"),
        ([alpaca(1.0)], {"form": "nothing"}, "format 'nothing': one of heed"),
    ],
)
def test_files_without_verdicts(read: Read, rows: list[dict[str, Any]], more: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(rows, **more)


@pytest.mark.skipif(not PANDALM.is_file(), reason="PandaLM's test set is not here")
def test_pandalms_test_set_against_its_own_numbers() -> None:
    rows = json.loads(PANDALM.read_text())
    found = read_verdict_file(str(PANDALM), judge="pandalm")
    assert found.format == "pandalm"
    assert found.policies == tuple(sorted({name for row in rows for name in row["cmp_key"].split("_")}))
    wins: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for row in rows:
        names = row["cmp_key"].split("_")
        for annotator in ("annotator1", "annotator2", "annotator3"):
            if row["response1"] != row["response2"] or not row[annotator]:  # of two equal responses, neither is better
                wins[names[row[annotator] - 1] if row[annotator] else "tie"] += 1
    for verdict in found.verdicts:
        counted[{0.5: "tie", 1.0: verdict.policy_a, 0.0: verdict.policy_b}[verdict.preference_a]] += 1
    assert counted == wins
