"""Every format, on rows written here: what they become, warnings, and errors."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from preferences.formats.merging import ImportedLabels, collect, collect_all
from preferences.formats.registry import FORMATS, format_to_read, format_to_write, sniff
from preferences.records import Message, Ranking

ASKED = (Message("user", "Which bird?"),)
TURN = {"role": "user", "content": "Which bird?"}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "format_rows.json").read_text())
del ROWS["trl_text"]  # trl without a prompt in messages; TEXTS below has that


def read(name: str, *rows: dict[str, Any], objective: str = "") -> ImportedLabels:
    *_, found = collect(format_to_read(name), placed(*rows), objective=objective)
    return found


def placed(*rows: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"file: line {number}", row) for number, row in enumerate(rows, start=1)]


def rankings(name: str, *rows: dict[str, Any]) -> list[tuple[tuple[str, ...], tuple[int, ...], str]]:
    return [by_rank(ranking) for ranking in read(name, *rows).rankings]


def by_rank(ranking: Ranking) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    """Returns responses and ranks from best to worst, ties sorted by text, because formats order pairs in their own
    ways."""
    pairs = sorted(zip(ranking.ranks, ranking.responses, strict=True))
    return tuple(text for _, text in pairs), tuple(rank for rank, _ in pairs), ranking.labeler


EXPECTED: dict[str, list[Any]] = {
    "heed": [(("b", "a"), (1, 2), "ann")],
    "rankings": [(("b", "a", "c"), (1, 2, 2), "ann")],
    "argilla": [
        (("A crow.", "A rook.", "A cow."), (1, 1, 2), "u1"), (("A cow.", "A crow.", "A rook."), (1, 2, 3), "u2"),
    ],
    "label-studio": [
        (("A crow.", "A cow."), (1, 2), "annotator 1"), (("A cow.", "A crow."), (1, 1), "bo@example.org"),
    ],
    "hh": [(("Yes.", " No?\n"), (1, 2), "unknown")],
    "trl": [(("A crow.", "A cow."), (1, 2), "unknown")],
    "trl_unpaired": [(("A crow.",), (1,), "unknown")],
    "openai": [((" Birds.", " Crows."), (1, 2), "w7")],
    "webgpt": [(("A crow [1].", "A cow."), (1, 2), "unknown")],
    # Means 4.5, 4/3 (without the N/A) and 4.5.
    "ultrafeedback": [(("A crow.", "A rook.", "A cow."), (1, 1, 2), "gpt-4")],
    "ultrafeedback_binarized": [(("A crow.", "A cow."), (1, 2), "unknown")],
    "helpsteer3": [
        (("A crow.", "A cow."), (1, 2), "annotator1"), (("A cow.", "A crow."), (1, 1), "annotator2"),
    ],
    "helpsteer2": [(("Yes.", "No."), (1, 2), "consensus")],
    "oasst": [(("A rook.", "A crow."), (1, 2), "consensus"), (("Yes.", "Maybe."), (1, 2), "consensus")],
    "pandalm": [
        (("A crow.", "True"), (1, 2), "annotator1"), (("A crow.", "True"), (1, 1), "annotator2"),
        (("True", "A crow."), (1, 2), "annotator3"),
    ],
    "alpacaeval": [(("A crow.", "A cow."), (1, 2), "gpt4")],
    "rewardbench": [(("A crow.", "A cow."), (1, 2), "unknown")],
    "llmbar": [(("A crow.", "A cow."), (1, 2), "unknown")],
    "arena": [(("A cow.", "A crow."), (1, 1), "user_3")],
}  # fmt: skip
ODD = {
    "ultrafeedback": {"rating is no number": 1, "overall_score against ratings": 1},
    "helpsteer3": {"annotators disagree": 1},
    "oasst": {"unranked siblings": 1},
    "pandalm": {"response is no text": 1, "annotators disagree": 1},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_its_rankings(name: str) -> None:
    found = read(name, ROWS[name])
    assert [by_rank(ranking) for ranking in found.rankings] == EXPECTED[name]
    assert found.report.counts() == ODD.get(name, {})
    assert found.report.num_rows == 1


def test_every_format_that_is_read_has_a_row_here() -> None:
    assert set(ROWS) == {name for name, form in FORMATS.items() if form.read is not None} - {"trl_text"}


@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_guessed_from_its_fields(name: str) -> None:
    form, why = sniff(iter(placed(ROWS[name])), "file")
    assert form.name == name
    assert why.startswith("its rows have ")


def test_what_cannot_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"demonstrations belong in sft\.demonstrations"):
        sniff(iter(placed({"prompt": "a", "completion": "b"})), "file")
    with pytest.raises(ValueError, match=r"; `heed label outputs` makes tasks of rows without task_id$"):
        sniff(iter(placed({"prompt": "Why?", "responses": ["a", "b"]})), "file")
    with pytest.raises(ValueError, match=r"file: line 1: no known format has the fields \['text'\]; .* --format"):
        sniff(iter(placed({"text": "a"})), "file")
    with pytest.raises(ValueError, match=r"empty\.jsonl: there are no rows"):
        sniff(iter(()), "empty.jsonl")


def test_one_row_that_is_incomplete_does_not_hide_the_format() -> None:
    for name, field in (("trl", "chosen"), ("rankings", "ranks"), ("heed", "responses")):
        row = ROWS[name]
        incomplete = {key: value for key, value in row.items() if key != field}
        assert sniff(iter(placed(row, incomplete, row)), "file")[0].name == name
        with pytest.raises(ValueError, match=f"file: line 2: field '{field}' is missing"):
            read(name, row, incomplete, row)


def test_a_row_read_again_is_one_judgment_and_one_oddity() -> None:
    for name, row in ROWS.items():
        once, twice = read(name, row), read(name, row, row)
        assert (twice.tasks, twice.judgments) == (once.tasks, once.judgments)
        new = {kind: 2 * count for kind, count in once.report.counts().items()}
        assert twice.report.counts() == new | {"row seen twice": len(once.judgments)}


def test_the_id_of_a_row_depends_on_the_row_alone() -> None:
    for name, row in ROWS.items():
        again = json.loads(json.dumps(row))
        other = {**ROWS[name], "task_id": "another"}  # in Heed's own formats, ids come with the row
        assert read(name, again).tasks.keys() == read(name, row).tasks.keys()
        assert (read(name, other).tasks.keys() == read(name, row).tasks.keys()) == (name not in ("heed", "rankings"))


# ---- what else a row holds ----


def test_heed_gives_every_column_back() -> None:
    found = read("heed", ROWS["heed"] | {"gold_ranks": [1, 2], "repeat_of": "t0"})
    (task,), (act,) = found.tasks.values(), found.judgments
    assert (task.prompt, task.sources, task.objective, task.gold_ranks) == (ASKED, ("x", "y"), "helpful", (1, 2))
    assert (task.repeat_of, task.details, found.batches, found.quotas) == ("t0", {"n": 1}, {"t1": "b"}, {"t1": 2})
    assert (act.ratings, act.flags, act.note, act.shown_order) == ((1, 6.5), (("rude",), ()), "hm", (1, 0))
    assert (act.instructions_version, act.milliseconds, act.client, act.created_at) == ("3", 900, "page", 12.5)


def test_a_task_whose_prompt_is_a_text_asks_it_as_the_user() -> None:
    """Other fields are ignored, since rows may come from elsewhere."""
    row = {"task_id": "q1", "prompt": "Why?", "responses": ["a", "b"], "topic": "sky", "id": 7}
    (task,) = (found.task for found in read("heed", row).found_tasks)
    assert task.prompt == (Message("user", "Why?"),)


def test_hh_prompts_are_dialogues_and_places_say_nothing() -> None:
    found = read("hh", ROWS["hh"])
    (task,) = found.tasks.values()
    assert [message.role for message in task.prompt] == ["user", "assistant", "user"]
    assert [message.content for message in task.prompt] == ["Which bird?", "A crow.", "Sure?"]
    # A pair that someone judged the other way is the same task.
    turned = {"chosen": ROWS["hh"]["rejected"], "rejected": ROWS["hh"]["chosen"]}
    both = read("hh", ROWS["hh"], turned)
    assert both.tasks.keys() == found.tasks.keys()
    assert [ranking.labeler for ranking in both.rankings] == ["unknown", "unknown 2"]
    assert both.rankings[0].ranks == both.rankings[1].ranks[::-1]
    assert both.report.counts() == {"judged differently": 1}


def test_openai_keeps_what_the_prompt_leaves_out() -> None:
    found = read("openai", ROWS["openai"])
    (task,), (act,) = found.tasks.values(), found.judgments
    assert task.prompt[0].content == "SUBREDDIT: r/crows\n\nTITLE: Birds\n\nPOST: One.\nTwo.\n\nTL;DR:"
    assert task.sources == ("sup4", "ref")
    assert task.details["info"]["post"] == "One.\n\nTwo."
    said = {"batch": "batch3", "split": "train", "extra": {"confidence": 8}, "notes": ["naive", ""]}
    assert json.loads(act.note) == said
    news = ROWS["openai"] | {"info": {"id": "c", "site": "cnn", "title": "Birds", "article": "One.\n\nTwo."}}
    (task,) = read("openai", news).tasks.values()
    assert task.prompt[0].content == "TITLE: Birds\n\nOne.\nTwo.\n\nTL;DR:"


def test_a_named_worker_who_judges_again_revises() -> None:
    again = ROWS["openai"] | {"choice": 0, "batch": "batch4"}
    found = read("openai", ROWS["openai"], again, ROWS["openai"] | {"worker": "w8"})
    assert [(act.labeler, act.revision) for act in found.judgments] == [("w7", 0), ("w7", 1), ("w8", 0)]
    assert {ranking.labeler: ranking.ranks for ranking in found.rankings} == {"w7": (1, 2), "w8": (2, 1)}
    assert found.report.counts() == {"judged again": 1}
    assert found.quotas == dict.fromkeys(found.tasks, 2)


def test_ratings_are_kept_next_to_ranks() -> None:
    assert read("webgpt", ROWS["webgpt"]).judgments[0].ratings == (0.25, -0.25)
    assert read("ultrafeedback", ROWS["ultrafeedback"]).judgments[0].ratings == (4.5, pytest.approx(4 / 3), 4.5)
    assert [act.ratings for act in read("helpsteer3", ROWS["helpsteer3"]).judgments] == [(3, -3), (0, 0)]
    assert read("alpacaeval", ROWS["alpacaeval"]).judgments[0].ratings == (0.75, 0.25)
    found = read("ultrafeedback_binarized", ROWS["ultrafeedback_binarized"])
    (task,), (act,) = found.tasks.values(), found.judgments
    assert dict(zip(task.responses, act.ratings, strict=True)) == {"A crow.": 8.5, "A cow.": 3.0}
    assert task.details == {"prompt_id": "p1"}


def test_ultrafeedback_by_one_aspect() -> None:
    found = read("ultrafeedback", ROWS["ultrafeedback"], objective="instruction_following")
    assert [by_rank(ranking)[0] for ranking in found.rankings] == [("A rook.", "A crow.", "A cow.")]
    (task,) = found.tasks.values()
    assert task.objective == "instruction_following"
    assert task.task_id not in read("ultrafeedback", ROWS["ultrafeedback"]).tasks
    assert task.sources == ("m1", "m2", "m3")
    assert task.details["completions"][1]["overall_score"] == 10


def test_helpsteer_notes_and_prompts() -> None:
    assert json.loads(read("helpsteer3", ROWS["helpsteer3"]).judgments[0].note)["reasoning"] == "It is one."
    without = ROWS["helpsteer3"] | {"individual_preference": []}
    assert rankings("helpsteer3", without) == [(("A crow.", "A cow."), (1, 2), "consensus")]
    (task,) = read("helpsteer2", ROWS["helpsteer2"]).tasks.values()
    turns = [("user", "Which bird?"), ("assistant", "A crow."), ("user", "Sure?")]
    assert [(message.role, message.content) for message in task.prompt] == turns


def test_oasst_paths_names_and_ids() -> None:
    first, second = read("oasst", ROWS["oasst"]).tasks.values()
    assert (first.task_id, first.sources) == ("oasst/m0", ("person", "person"))
    assert (second.task_id, second.sources) == ("oasst/m3", ("chip", "person"))
    assert [message.content for message in second.prompt] == ["Which bird?", "A crow.", "Sure?"]
    assert [reply["message_id"] for reply in second.details["replies"]] == ["m4", "m6"]


def test_judges_names_models_and_times() -> None:
    (task,) = read("pandalm", ROWS["pandalm"]).tasks.values()
    assert (task.task_id, task.sources) == ("pandalm/4", ("bloom-7b", "opt-7b"))
    assert task.prompt == (Message("user", "Which bird?\n\nA picture."),)
    found = read("arena", ROWS["arena"])
    assert found.judgments[0].flags == (("bad",), ("bad",))
    assert found.judgments[0].created_at == 1682351591.5
    assert found.tasks.popitem()[1].details["language"] == "English"
    assert json.loads(read("alpacaeval", ROWS["alpacaeval"]).judgments[0].note) == {"price": 0.5}


def test_mt_bench_judges_the_first_of_two_turns() -> None:
    later = [{"role": "user", "content": "Sure?"}, reply("Yes.")]
    row = ROWS["arena"] | {name: ROWS["arena"][name] + later for name in ("conversation_a", "conversation_b")}
    (task,) = read("arena", row).tasks.values()
    assert (task.prompt, task.responses) == (ASKED, ("A crow.", "A cow."))
    assert read("arena", row | {"turn": 2}).report.counts() == {"dialogues part early": 1}


TEXTS = {"prompt": "Which bird?", "chosen": " A crow.", "rejected": " A cow."}


@pytest.mark.parametrize(
    ("row", "prompt", "chosen"),
    [
        (TEXTS, "Which bird?", " A crow."),
        ({"chosen": "Which bird? Crow.", "rejected": "Which bird? Owl."}, "Which bird?", " Crow."),
        ({"chosen": [TURN, reply("Crow.")], "rejected": [TURN, reply("Owl.")]}, "Which bird?", "Crow."),
        ({"prompt": "Which bird?", "chosen": [reply("Crow.")], "rejected": [reply("Owl.")]}, "Which bird?", "Crow."),
        (
            {"prompt": [TURN], "chosen": [TURN, reply("Crow.")], "rejected": [TURN, reply("Owl.")]},
            "Which bird?",
            "Crow.",
        ),
    ],
)
def test_every_form_of_trl(row: dict[str, Any], prompt: str, chosen: str) -> None:
    (ranking,) = read("trl", row).rankings
    assert ranking.prompt == (Message("user", prompt),)
    assert by_rank(ranking)[0][0] == chosen
    assert sniff(iter(placed(row)), "file")[0].name == "trl"


def test_what_json_has_no_word_for_is_kept_as_text() -> None:
    strange = {"when": datetime(2023, 1, 2), "scores": (1, float("nan"), b"x"), "none": None}
    (task,) = read("trl", ROWS["trl"] | strange).tasks.values()
    assert task.details == {"margin": 2.0, "when": "2023-01-02 00:00:00", "scores": [1, "nan", "b'x'"]}


# ---- warnings ----


def hh(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"chosen": f"{prompt}\n\nAssistant:{chosen}", "rejected": f"{prompt}\n\nAssistant:{rejected}"}


HUMAN = "\n\nHuman: Why?"


@pytest.mark.parametrize(
    ("name", "row", "kind", "num_judgments"),
    [
        ("hh", {**hh(HUMAN, " a", " b"), "rejected": "\n\nHuman: Who?\n\nAssistant: b"}, "prompts differ", 0),
        ("hh", hh(HUMAN, "", " b"), "empty reply", 0),
        ("hh", hh(HUMAN, " a", " "), "empty reply", 0),
        ("hh", hh(HUMAN, " a", " a"), "identical responses", 0),
        ("hh", hh(f"{HUMAN}\n\nAssistant: a", " a", " b"), "no user's turn", 0),
        ("hh", hh(f"{HUMAN}\n\nHuman: ", " a", " b"), "empty turn", 0),
        ("hh", hh(f"{HUMAN}{HUMAN}", " a", " b"), "same speaker twice", 1),
        ("hh", hh(HUMAN, f" a{HUMAN}", f" b{HUMAN}"), "prompts differ", 0),
        ("hh", {"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} b"}, "no reply", 0),
        ("trl", {"chosen": "Crow.", "rejected": "Owl."}, "prompts differ", 0),
        ("trl", {"chosen": [TURN, reply("a")], "rejected": [reply("b")]}, "prompts differ", 0),
        ("trl", {"chosen": [TURN, reply("a")], "rejected": [TURN, TURN]}, "no reply", 0),
        ("trl", {**TEXTS, "chosen": ""}, "empty reply", 1),
        ("webgpt", {**ROWS["webgpt"], "score_1": 0.0}, "scores do not mirror", 1),
        ("ultrafeedback_binarized", {**ROWS["ultrafeedback_binarized"], "score_rejected": 8.5}, "tied scores", 1),
        (
            "ultrafeedback_binarized",
            {**ROWS["ultrafeedback_binarized"], "score_rejected": 9.0},
            "scores against the choice",
            1,
        ),
        (
            "ultrafeedback",
            {**ROWS["ultrafeedback"], "completions": ROWS["ultrafeedback"]["completions"][:1]},
            "nothing to rank",
            0,
        ),
        ("alpacaeval", {**ROWS["alpacaeval"], "preference": None}, "no preference", 0),
        ("alpacaeval", {**ROWS["alpacaeval"], "preference": float("nan")}, "no preference", 0),
        ("pandalm", {**ROWS["pandalm"], "instruction": "", "response2": "b", "annotator2": 1, "annotator3": 1},
         "empty instruction", 3),
        ("arena", {**ROWS["arena"], "conversation_a": [TURN]}, "dialogues part early", 0),
    ],
)  # fmt: skip
def test_an_odd_row_is_reported(name: str, row: dict[str, Any], kind: str, num_judgments: int) -> None:
    found = read(name, row)
    assert found.report.counts() == {kind: 1}
    assert len(found.judgments) == num_judgments
    (warning,) = found.report.warnings
    assert warning.where == "file: line 1"
    assert warning.found
    assert ("left out" in warning.done) == (num_judgments == 0)
    with pytest.raises(ValueError, match=f"file: line 1: {kind}: .*; --strict refuses it"):
        list(collect(format_to_read(name), placed(row), strict=True))


def siblings(*ranks: int | None) -> dict[str, Any]:
    replies = [
        {"message_id": f"r{n}", "text": f"reply {n}", "role": "assistant", "rank": rank, "replies": []}
        for n, rank in enumerate(ranks)
    ]
    root = {"message_id": "m", "text": "Which?", "role": "prompter", "replies": replies}
    return {"message_tree_id": "m", "tree_state": "x", "prompt": root}


@pytest.mark.parametrize(
    ("tree", "counts", "num_tasks"),
    [
        (siblings(None, None), {"unranked siblings": 1}, 0),
        (siblings(0, None), {"unranked siblings": 1}, 0),
        (siblings(*range(9)), {}, 1),
        (siblings(*range(10)), {"too many siblings": 1}, 0),
        (siblings(0), {"nothing to rank": 1}, 0),
        (siblings(0, 0), {}, 1),
    ],
)
def test_odd_trees(tree: dict[str, Any], counts: dict[str, int], num_tasks: int) -> None:
    found = read("oasst", tree)
    assert found.report.counts() == counts
    assert len(found.tasks) == num_tasks


def test_deleted_replies_are_left_out_and_said() -> None:
    tree = siblings(0, 1, 2)
    tree["prompt"]["replies"][1]["deleted"] = True
    found = read("oasst", tree)
    assert found.rankings[0].responses == ("reply 0", "reply 2")
    assert found.rankings[0].ranks == (1, 2)
    assert found.report.counts() == {"deleted reply": 1}


def test_a_pair_of_two_subsets_of_rewardbench_counts_in_both() -> None:
    row = ROWS["rewardbench"]
    found = read("rewardbench", row, {**row, "subset": "refusals"}, {**row, "id": 31})
    assert [task.details["subset"] for task in found.tasks.values()] == [
        "alpacaeval-easy",
        "refusals",
        "alpacaeval-easy",
    ]
    task = next(iter(found.tasks.values()))
    assert task.sources[task.responses.index("A crow.")] == "m1"
    assert found.report.counts() == {}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("hh", {"rejected": None}, "field 'rejected' is null; a string was expected"),
        ("hh", {"chosen": "Human: a"}, "field 'chosen' begins with 'Human: a'"),
        ("trl", {"chosen": 7}, "field 'chosen' is int; a text or a list of messages was expected"),
        ("trl", {"chosen": [{"role": "bot", "content": "a"}]}, r"field 'chosen\[0\].role' is 'bot'; .* or tool was"),
        ("openai", {"choice": 2}, "field 'choice' is 2; a whole number from 0 to 1 was expected"),
        ("openai", {"summaries": [{"text": "a"}]}, "field 'summaries' has 1 entries; two objects were expected"),
        ("openai", {"info": {"id": "x"}}, r"info: neither 'post' nor 'article' is there; found \['id'\]"),
        ("webgpt", {"score_0": "1"}, "field 'score_0' is '1'; a number was expected"),
        ("webgpt", {"question": "Which?"}, "field 'question' is str; an object was expected"),
        ("ultrafeedback", {"completions": "none"}, "field 'completions' is str; a list was expected"),
        ("helpsteer3", {"overall_preference": 4}, "field 'overall_preference' is 4; a whole number from -3 to 3"),
        ("helpsteer2", {"preference_strength": None}, "field 'preference_strength' is None"),
        ("oasst", {"prompt": {"message_id": "m", "role": "robot"}}, "message m: field 'role' is 'robot'; prompter or"),
        ("pandalm", {"annotator2": 3}, "field 'annotator2' is 3; a whole number from 0 to 2 was expected"),
        ("alpacaeval", {"preference": 0.5}, "field 'preference' is 0.5; a number from 1 to 2 was expected"),
        ("arena", {"winner": "a"}, "field 'winner' is 'a'; one of model_a, model_b, tie"),
        ("arena", {"tstamp": 1682351395443.0}, "field 'tstamp' is 1682351395443.0; seconds since the epoch"),
        ("rewardbench", {"subset": ""}, "field 'subset' is empty"),
        ("llmbar", {"label": 0}, "field 'label' is 0; a whole number from 1 to 2 was expected"),
        ("rankings", {"ratings": [1]}, "field 'ratings' has 1 entries for 3 responses"),
        ("trl", {"prompt": None, "chosen": "a", "rejected": "b"}, "field 'prompt' is null"),
        ("trl", {"prompt": " ", "chosen": "a", "rejected": "b"}, "field 'prompt' is empty"),
        ("trl", {"prompt": None, "chosen": [reply("a")], "rejected": [reply("b")]}, "field 'prompt' is null"),
        ("trl", {"prompt": "", "chosen": [reply("a")], "rejected": [reply("b")]}, "field 'prompt' is empty"),
        ("trl", {"prompt": [], "chosen": [reply("a")], "rejected": [reply("b")]}, "field 'prompt' is empty"),
        ("heed", {"details": "{"}, "field 'details': not JSON"),
        ("heed", {"details": "[]"}, "field 'details' holds list; a JSON object was expected"),
        ("heed", {"batch": ""}, "field 'batch' is empty"),
        ("heed", {"num_labelers": 0}, "field 'num_labelers' is 0"),
        (
            "heed",
            {"num_labelers": None, "num_labellers": 2},
            r"unknown field 'num_labellers'; did you mean 'num_labelers'\?",
        ),
        ("heed", {"prompt": " "}, "field 'prompt' is empty"),
    ],
)
def test_a_malformed_row_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"file: line 1: {words}"):
        read(name, ROWS[name] | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "guess"}, "field 'kind' is 'guess'; one of answer, skip"),
        ({"ranks": []}, "field 'ranks' has 0 entries for 2 responses"),
        ({"shown_order": [0, 0]}, r"field 'shown_order' is \[0, 0\]; each of 0 to 1 once was expected"),
        ({"flags": [["a"]]}, "field 'flags' has 1 entries for 2 responses"),
        ({"revision": -1}, "field 'revision' is -1"),
    ],
)
def test_a_malformed_judgment_is_refused(change: dict[str, Any], words: str) -> None:
    act = ROWS["heed"]["judgments"][0] | change
    with pytest.raises(ValueError, match=rf"file: line 1: judgments\[0\]: {words}"):
        read("heed", ROWS["heed"] | {"judgments": [act]})


REQUIRED = {
    "heed": "task_id prompt responses",
    "rankings": "task_id prompt responses ranks labeler",
    "argilla": "fields responses suggestions",
    "label-studio": "data annotations",
    "hh": "chosen rejected",
    "trl_unpaired": "prompt completion label",
    "trl": "chosen rejected",
    "openai": "info summaries choice",
    "webgpt": "question answer_0 answer_1 score_0 score_1",
    "ultrafeedback": "instruction completions",
    "ultrafeedback_binarized": "chosen rejected",
    "helpsteer3": "context response1 response2 overall_preference",
    "helpsteer2": "prompt response_1 response_2 preference_strength",
    "oasst": "message_tree_id prompt",
    "pandalm": "instruction response1 response2 annotator1 annotator2 annotator3",
    "alpacaeval": "instruction output_1 output_2 preference",
    "rewardbench": "prompt chosen rejected subset",
    "llmbar": "input output_1 output_2 label",
    "arena": "model_a model_b winner conversation_a conversation_b",
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in REQUIRED for field in REQUIRED[name].split()])
def test_a_missing_field_is_named(name: str, field: str) -> None:
    row = {key: value for key, value in ROWS[name].items() if key != field}
    with pytest.raises(ValueError, match=f"file: line 1: field '{field}' "):
        read(name, row)


@pytest.mark.parametrize("name", ROWS)
def test_the_other_fields_may_be_missing(name: str) -> None:
    needed = REQUIRED[name].split() + (["prompt"] if name == "trl" else [])
    found = read(name, {field: ROWS[name][field] for field in needed})
    skips = {"argilla": 1, "label-studio": 1}
    assert len(found.judgments) == {"helpsteer3": 1, "heed": 0}.get(name, len(EXPECTED[name]) + skips.get(name, 0))


def test_unpaired_preferences_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="field 'chosen' is missing"):
        read("trl", ROWS["trl_unpaired"])


def test_one_id_for_two_tasks_is_refused() -> None:
    other = ROWS["pandalm"] | {"response1": "An owl."}
    with pytest.raises(ValueError, match=r"line 2: task 'pandalm/4': field 'responses' differs from that in .*line 1;"):
        read("pandalm", ROWS["pandalm"], other)
    retold = read("pandalm", ROWS["pandalm"], ROWS["pandalm"] | {"motivation_app": "Park"})
    assert retold.report.counts()["task described differently"] == 1


def test_one_revision_with_two_contents_is_refused() -> None:
    act = ROWS["heed"]["judgments"][0]
    with pytest.raises(ValueError, match="labeler 'ann': revision 0 appears twice with different content"):
        read("heed", ROWS["heed"] | {"judgments": [act, act | {"note": "other"}]})


def test_names_of_formats() -> None:
    with pytest.raises(
        ValueError, match=r"format 'hhh': one of heed, rankings, argilla, label-studio, openai, .* was expected"
    ):
        format_to_read("hhh")
    with pytest.raises(ValueError, match="format 'prompts': one of heed"):
        format_to_read("prompts")
    with pytest.raises(ValueError, match="format 'oasst': one of heed"):
        format_to_write("oasst")


def test_collect_shows_its_progress() -> None:
    steps = [found.report.num_rows for found in collect(format_to_read("trl"), placed(TEXTS, TEXTS))]
    assert steps == [0, 1, 2]
    assert collect_all(format_to_read("trl"), []).judgments == []
