"""Items that share words with training data: planted overlap, and data found through a run's lineage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.contamination import OverlapSearch, overlaps, training_files, words_of
from evaluation.suites.mt_bench import SUITE as MT_BENCH
from evaluation.suites.suite import Item

LONG = "One morning a small red fox counted every single apple in the old garden behind the mill before breakfast"
SHORT = "Where does the sun rise in winter"  # seven words
MIDDLE = "Name three rivers that flow through the city"  # eight


def item(item_id: str, text: str) -> Item:
    return Item(item_id, ({"role": "system", "content": LONG}, {"role": "user", "content": text}))


def found_in(*texts: str, items: list[Item] | None = None) -> set[str]:
    items = items or [item("long", LONG), item("short", SHORT), item("middle", MIDDLE)]
    search = OverlapSearch({("s", one.item_id): one for one in items})
    return {item_id for text in texts for _, item_id in search.find(text)}


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not() -> None:
    words = LONG.split()
    assert found_in(f"He wrote: {' '.join(words[3:16])}, and stopped.") == {"long"}
    assert found_in(f"He wrote: {' '.join(words[3:15])}, and stopped.") == set()
    # Neither case nor punctuation counts.
    assert found_in(", ".join(words[:13]).upper() + "!") == {"long"}
    swapped = [*words[:5], words[6], words[5], *words[7:]]
    assert found_in(" ".join(swapped[:14])) == set()


def test_shorter_items_count_by_their_whole_text() -> None:
    assert found_in(f"Please: {MIDDLE.lower()}.") == {"middle"}
    assert found_in(MIDDLE.removesuffix(" city")) == set()
    assert found_in(SHORT + "?") == {"short"}
    assert found_in(f"He asked: {SHORT}?") == set()  # below eight words, within another text, it shows nothing


def test_words_that_many_items_have_in_common_are_an_instruction() -> None:
    items = [item(f"q{n}", f"{LONG}: {'x' * (n + 1)}") for n in range(12)]
    assert found_in(LONG, items=items) == set()
    assert found_in(LONG, items=items[:3]) == {"q0", "q1", "q2"}


def test_few_shot_examples_are_not_the_item() -> None:
    """SQuAD's few-shot prompt holds other items' paragraphs, which would count for every item."""
    paragraphs = [" ".join(f"{word}{n}" for word in LONG.split()) for n in range(3)]
    shown = "\n\n".join(paragraphs)
    items = [
        Item(f"q{n}", ({"role": "user", "content": f"{shown}\n\n{own}"},), own_texts=(own,))
        for n, own in enumerate(paragraphs)
    ]
    assert found_in(paragraphs[1], items=items) == {"q1"}


def test_the_second_question_of_a_conversation_is_searched(tmp_path: Path) -> None:
    rows = [{"question_id": 1, "category": "math", "turns": ["Hi?", MIDDLE]}]
    (tmp_path / "q.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert found_in(MIDDLE, items=MT_BENCH.read(str(tmp_path / "q.jsonl"))) == {"1"}


def test_random_texts_against_a_loop() -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    text = generator.integers(0, 3, size=4_000)
    items = [item(f"q{n}", " ".join(f"w{k}" for k in generator.integers(0, 3, size=13))) for n in range(300)]
    items += [item(f"p{n}", " ".join(f"w{k}" for k in text[n * 50 : n * 50 + 13])) for n in range(40)]
    joined = f" {' '.join(f'w{k}' for k in text)} "
    expected = {one.item_id for one in items if f" {one.messages[1]['content']} " in joined}
    assert len(expected) >= 40
    assert found_in(joined, items=items) == expected


def test_every_field_of_a_row_is_searched(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": LONG}]}, {"n": 1}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.txt").write_text(f"{MIDDLE}\n\n{SHORT}")
    items = {"s": [item("long", LONG), item("short", SHORT), item("middle", MIDDLE)]}
    data, text = str(tmp_path / "data.jsonl"), str(tmp_path / "text.txt")
    found = overlaps(items, {"a": [data], "b": [data, text], "c": []})
    assert found["a"]["s"].item_ids == {"long"}
    assert found["b"]["s"].item_ids == {"long", "short", "middle"}
    assert dict(found["b"]["s"].files) == {data: 2, text: 2}
    assert "c" not in found


def test_words() -> None:
    assert words_of("It's 3,5 — “no”, über_x!") == ["it's", "3", "5", "no", "über", "x"]


@pytest.fixture
def run(place: Path) -> Path:
    """A run whose SFT model started from its pretrained one, with data of each in its lineage."""
    folder = place / "run"
    (place / "start.gguf").write_bytes(b"GGUF")
    (folder / "world" / "data").mkdir(parents=True)
    (folder / "world" / "data" / "pretrain.jsonl").write_text(json.dumps({"text": "The fox xx?"}) + "\n")
    (place / "demos.jsonl").write_text(json.dumps({"prompt": "The fox xxxx?", "completion": "Yes."}) + "\n")
    for stage, data, parents in (
        ("pretrain", {"world:pretrain": "1"}, {}),
        (
            "sft",
            {str(place / "demos.jsonl"): "2", "pretrain:x": "3", "gone.jsonl": "4", str(place / "start.gguf"): "6"},
            {"pretrain": "5"},
        ),
    ):
        (folder / stage).mkdir()
        (folder / stage / "lineage.json").write_text(json.dumps({"data": data, "parents": parents}))
    (folder / "sft" / "model").symlink_to((place / "models" / "one" / "model").resolve(), target_is_directory=True)
    return folder


def test_a_run_brings_its_training_data(
    heed_main: Callable[..., tuple[int, str]], evaluate: Callable[..., list[str]], place: Path, run: Path
) -> None:
    extra = place / "extra.txt"
    extra.write_text("The fox xxxxx?")
    sft, two = f"sft={run / 'sft' / 'model'}", f"two={place / 'models' / 'two' / 'model'}"
    code, said = heed_main(*evaluate(place, sft, two, "--training-data", f"two={extra}"))
    assert code == 0, said
    report = json.loads((place / "out" / "report.json").read_text())
    sft_found, two_found = report["suites"][0]["contamination"]
    assert (sft_found["model"], sft_found["item_ids"], sft_found["unread"]) == (
        "sft", ["q2", "q4"], ["gone.jsonl", str(place / "start.gguf")]
    )  # fmt: skip
    assert (two_found["model"], two_found["item_ids"]) == ("two", ["q5"])
    clean = {row["measure"]: row for row in sft_found["clean"]}
    answers = json.loads((place / "out" / "evaluate.json").read_text())
    assert answers["training_data"]["two"] == [str(extra)]
    assert clean["length"]["num_items"] == 4
    assert "33% of the items share words with the training data of sft" in (place / "out" / "report.html").read_text()


def test_a_model_outside_a_run_has_no_known_data(place: Path) -> None:
    assert training_files(place / "models" / "one" / "model") == ([], [])
