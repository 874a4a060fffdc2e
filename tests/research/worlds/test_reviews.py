"""The reviews world, on small files made here and on the real ones if there are any."""

import gzip
import json
import math
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from heed.jobs.job_file import load_job
from preferences.records import Message, ShownTask
from research.worlds.reviews import (
    Finder,
    LabeledText,
    ReviewLabeler,
    ReviewsConfig,
    ReviewsWorld,
    SentimentClassifier,
    cut,
    read_labeled,
    sentences_of,
    split_sentences,
    words_of,
)
from stages.world import World

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "data"
FILES = (
    "pretrain", "pretrain_heldout", "demonstrations", "demonstrations_heldout",
    "collect_prompts", "ppo_prompts", "compare_prompts", "human_pairs",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "num_collect_prompts": 60,
    "num_ppo_prompts": 40,
    "num_compare_prompts": 10,
    "num_human_pairs": 20,
    "heldout_share": 0.2,
}
QUOTED = "nobody who loves films will ever forget this good and patient story ."


def made_sentence(rng: random.Random, positive: bool) -> str:
    tone = ["good", "warm", "lovely", "bright"] if positive else ["bad", "cold", "dull", "sour"]
    words = [f"w{rng.randrange(400)}" for _ in range(rng.randrange(9, 14))]
    words[rng.randrange(1, len(words))] = rng.choice(tone)
    return " ".join(words) + " ."


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.fixture(scope="module")
def made_config(tmp_path_factory: pytest.TempPathFactory) -> ReviewsConfig:
    folder, rng = tmp_path_factory.mktemp("made"), random.Random(0)
    snippets = [(made_sentence(rng, index % 2 == 0), index % 2 == 0) for index in range(400)]
    snippets += [(text.upper().replace(" .", " !"), positive) for text, positive in snippets[:40]]
    reviews = []
    for index in range(60):
        lines = [made_sentence(rng, index % 2 == 0) for _ in range(12)]
        # Some snippets are quoted across line breaks; hidden ones among them must be found and excluded.
        if index < 8:
            lines.append(snippets[index * 5][0].replace(" ", " \n", 3).upper())
        reviews.append({"text": " \n".join(lines), "sentiment": ("positive", "negative")[index % 2], "source": "x"})
    names = ("positive", "negative")
    return ReviewsConfig(
        sentences=write_rows(
            folder / "sentences.jsonl", [{"text": text, "sentiment": names[not up]} for text, up in snippets]
        ),
        reviews=write_rows(folder / "reviews.jsonl.gz", reviews),
        **SIZES,
    )


@pytest.fixture(scope="module")
def made_world(made_config: ReviewsConfig) -> ReviewsWorld:
    return ReviewsWorld(made_config)


@pytest.fixture(scope="module")
def real_world() -> ReviewsWorld:
    if not REAL.is_dir():
        pytest.skip(f"the real data ({REAL}) is not on this machine")
    copies = [
        f"world.{field}={REAL / name}"
        for field, name in (
            ("sentences", "sentence_polarity.jsonl"),
            ("reviews", "movie_reviews.jsonl.gz"),
        )
    ]
    world = load_job(ROOT / "research" / "jobs" / "reviews.toml", copies).open_world()
    assert type(world).__name__ == "ReviewsWorld"  # loaded by its path, as a module of its own
    return world


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def plain(text: str) -> str:
    """An independent definition of the same text: lower-case letters and digits only, no articles."""
    runs = re.findall(r"[^\W_]+", text.lower())
    return " " + " ".join(run for run in runs if run not in ("a", "an", "the")) + " "


def assert_data_is_sound(world: ReviewsWorld, folder: Path) -> None:
    """Checks every write_data: hidden texts stay hidden, prompts are disjoint, held-out data is held out."""
    config = world.config
    for pair in rows_of(folder, "human_pairs"):
        assert set(pair) == {"positive", "negative"}
    unseen = [plain(text) for pair in rows_of(folder, "human_pairs") for text in pair.values()]
    assert len(set(unseen)) == 2 * config.num_human_pairs

    texts = {name: [row["text"] for row in rows_of(folder, name)] for name in ("pretrain", "pretrain_heldout")}
    demonstrations = {}
    for name in ("demonstrations", "demonstrations_heldout"):
        turns = [row["messages"] for row in rows_of(folder, name)]
        assert all([turn["role"] for turn in pair] == ["user", "assistant"] for pair in turns)
        assert all(turn["content"] == turn["content"].strip() != "" for pair in turns for turn in pair)
        demonstrations[name] = [f"{user['content']} {assistant['content']}" for user, assistant in turns]
        lengths = [len(sentence.split()) for sentence in demonstrations[name]]
        assert min(lengths) >= config.sentence_words[0]
        assert max(lengths) <= config.sentence_words[1]
    prompts = {
        name: [row["messages"][0]["content"] for row in rows_of(folder, f"{name}_prompts")]
        for name in ("collect", "ppo", "compare")
    }
    everything = "|".join(map(plain, [text for group in (*texts.values(), *demonstrations.values()) for text in group]))
    assert not [sentence for sentence in unseen if sentence in everything]

    every_prompt = [prompt for group in prompts.values() for prompt in group]
    assert len(set(map(plain, every_prompt))) == len(every_prompt)
    low, high = config.prompt_words
    assert {len(prompt.split()) for prompt in every_prompt} == set(range(low, high + 1))
    for name in ("collect", "ppo", "compare"):
        assert len(prompts[name]) == getattr(config, f"num_{name}_prompts")
        assert {row["kind"] for row in rows_of(folder, f"{name}_prompts")} == {"positive_review", "negative_review"}
    assert len({row["prompt_id"] for name in prompts for row in rows_of(folder, f"{name}_prompts")}) == len(
        every_prompt
    )

    assert not set(texts["pretrain"]) & set(texts["pretrain_heldout"])
    assert not set(map(plain, demonstrations["demonstrations"])) & set(
        map(plain, demonstrations["demonstrations_heldout"])
    )
    # A compare prompt starts a line of a held-out review.
    openings = "|".join(plain(line) for text in texts["pretrain_heldout"] for line in text.splitlines())
    assert all(plain(prompt) in openings for prompt in prompts["compare"])


def test_it_is_a_world(made_world: ReviewsWorld) -> None:
    world: World = made_world  # mypy holds the signatures
    assert len(world.judge_names) == 1
    assert world.describe().startswith(world.judge_names[0])


def test_made_data_is_sound(made_world: ReviewsWorld, tmp_path: Path) -> None:
    made_world.write_data(tmp_path, seed=3)
    assert_data_is_sound(made_world, tmp_path)


def test_a_review_that_quotes_an_unseen_sentence_is_left_out(made_world: ReviewsWorld, tmp_path: Path) -> None:
    made_world.write_data(tmp_path, seed=3)
    quoted = [json.loads(line) for line in gzip.decompress(made_world.config.reviews.read_bytes()).splitlines()]
    unseen = [plain(snippet.text) for snippet in made_world.split.unseen]
    hits = {row["text"] for row in quoted if any(sentence in plain(row["text"]) for sentence in unseen)}
    assert hits, "the made files quote no unseen sentence; the test would hold of anything"
    kept = {row["text"] for name in ("pretrain", "pretrain_heldout") for row in rows_of(tmp_path, name)}
    assert len(kept & {row["text"] for row in quoted}) == len(quoted) - len(hits)


def test_same_seed_same_bytes_and_another_seed_other_bytes(made_config: ReviewsConfig, tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        ReviewsWorld(made_config).write_data(tmp_path / name, seed)
    for file in FILES:
        first, second, other = (
            (tmp_path / name / f"{file}.jsonl").read_bytes() for name in ("first", "second", "other")
        )
        assert first == second
        assert (first == other) == (file == "human_pairs")  # the data seed does not set the pairs


def test_order_of_the_sentences_file_does_not_matter(made_config: ReviewsConfig) -> None:
    labeled = read_labeled(made_config.sentences, "sentences")
    forward, backward = (split_sentences(rows, 20, (8, 28)) for rows in (labeled, labeled[::-1]))
    assert forward == backward


def test_variants_of_a_sentence_do_not_straddle_and_contradictions_go() -> None:
    rng = random.Random(1)
    labeled = [LabeledText(made_sentence(rng, up), up) for up in (True, False) * 60]
    variants = [LabeledText("The " + s.text.replace(" ", " , ").title(), s.positive) for s in labeled]
    contradicted = LabeledText(labeled[0].text, not labeled[0].positive)
    split = split_sentences([*labeled, *variants, contradicted], 10, (8, 28))
    sides = [{plain(s.text) for s in side} for side in (split.labeler, split.judge, split.unseen)]
    assert len(sides[0] | sides[1] | sides[2]) == sum(map(len, sides)) == 119
    assert all(plain(labeled[0].text) not in side for side in sides)
    assert sum(s.positive for s in split.unseen) == 10


def test_finder_sees_through_case_punctuation_and_line_breaks() -> None:
    finder = Finder([QUOTED])
    assert finder.occurs_in(
        "He said: Nobody, who loves \nfilms, will EVER forget this good-and-patient story! And so on."
    )
    assert not finder.occurs_in("nobody who loves films will ever forget this good and patient tale .")
    assert not finder.occurs_in("")
    with pytest.raises(ValueError, match="at least 8"):
        Finder(["horrible"])


def test_sentences_of_drops_boilerplate_fragments_and_wrong_lengths() -> None:
    lines = [
        "one two three four .",
        "rated r",
        "( a note of four words here .",
        "same words again here .",
        "only five words are here",
    ]
    reviews = [
        LabeledText(" \n".join(lines), True),
        LabeledText("same words , again here !\nlast one is this ?", False),
    ]
    assert sentences_of(reviews, (4, 8)) == [
        LabeledText("one two three four .", True),
        LabeledText("last one is this ?", False),
    ]


def test_cut() -> None:
    assert cut("an odd , slow film .", 3) == ("an odd ,", "slow film .")
    with pytest.raises(ValueError, match="num_words is 2; expected 1 to 1"):
        cut("two words", 2)


def test_windows_quotes_become_plain(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "s.jsonl", [{"text": "it\x92s \x93fine\x94 \x96 crème", "sentiment": "positive"}])
    assert read_labeled(path, "sentences")[0].text == 'it\'s "fine" - crème'


def test_rows_of_the_hub_are_read_as_others(tmp_path: Path) -> None:
    """Labels are numbers there, and IMDb's reviews are pieces of web pages with several sentences per line."""
    named = [{"text": "good .", "sentiment": "positive"}, {"text": "bad .", "sentiment": "negative"}]
    hub = [{"text": "good .", "label": 1}, {"text": "bad .", "label": 0}]
    paths = [write_rows(tmp_path / f"{index}.jsonl", rows) for index, rows in enumerate((named, hub))]
    assert read_labeled(paths[0], "sentences") == read_labeled(paths[1], "sentences")
    page = "I liked it a lot.<br /><br />It was too long! But Dr. Strangelove is a great film. and so on."
    (review,) = read_labeled(write_rows(tmp_path / "page.jsonl", [{"text": page, "label": 1}]), "reviews")
    found = [sentence.text for sentence in sentences_of([review], (3, 12))]
    assert found == ["I liked it a lot.", "It was too long!", "Strangelove is a great film. and so on."]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "fine ."}', "sentiment is None; expected 'positive' or 'negative'"),
        ('{"text": "fine .", "sentiment": "meh"}', "sentiment is 'meh'"),
        ('{"sentiment": "positive"}', "text is None; expected a string"),
        ('{"text": "  ", "sentiment": "positive"}', "text is '  '"),
        ('["text"]', "a JSON object was expected"),
        ("{oops", "not JSON"),
    ],
)
def test_a_bad_row_is_named_by_field_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good .", "sentiment": "positive"}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"sentences: {path}: line 2: ")) as caught:
        read_labeled(path, "sentences")
    assert message in str(caught.value)


def test_a_missing_file_is_named_by_field_and_path(made_config: ReviewsConfig) -> None:
    with pytest.raises(ValueError, match=r"reviews = 'no/such\.jsonl\.gz': no such file \(looked for /"):
        ReviewsWorld(made_config.model_copy(update={"reviews": Path("no/such.jsonl.gz")}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_collect_prompts": 10_000}, "num_collect_prompts is 10000; the reviews hold only"),
        ({"num_compare_prompts": 10_000}, "num_compare_prompts is 10000"),
        ({"num_human_pairs": 10_000}, "num_human_pairs is 10000"),
        ({"heldout_share": 0.001}, "heldout_share is 0.001, which holds out 0"),
    ],
)
def test_asking_for_too_much_says_what_there_is(
    made_config: ReviewsConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ReviewsWorld(made_config.model_copy(update=changes)).write_data(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_words": (5, 3)}, "smaller number first"),
        ({"prompt_words": (3, 8)}, "so that words are left for a response"),
        ({"labeller_noise": 1.0}, "Extra inputs"),
    ],
)
def test_config_refuses(made_config: ReviewsConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReviewsConfig(**{**made_config.model_dump(), **changes})


def test_scores_follow_the_words_and_read_the_whole_sentence(made_world: ReviewsWorld) -> None:
    prompts, responses = ["w1 w2", "w1 w2", "w1 good"], ["a good warm w3", "a bad dull w3", "w3"]
    for scores in (made_world.gold_scores(prompts, responses), made_world.label_truth(prompts, responses)):
        assert scores[0] > 0 > scores[1]
        assert scores[2] > 0  # the only word with a tone is in the prompt
    assert sum(score > made_world.pass_mark for score in made_world.gold_scores(prompts, responses)) == 2
    assert made_world.gold_scores([], []) == []
    with pytest.raises(ValueError, match="expected 1"):
        made_world.gold_scores(prompts, ["one"])


def test_world_and_labelers_survive_pickling(made_world: ReviewsWorld) -> None:
    before = made_world.gold_scores(["w1 w2"], ["good w3"])
    assert pickle.loads(pickle.dumps(made_world)).gold_scores(["w1 w2"], ["good w3"]) == before
    fresh = ReviewsWorld(made_world.config)
    assert fresh.gold_scores(["w1 w2"], ["good w3"]) == before
    labeler, shown = made_world.labelers(4)[0], shown_task("t", "good w3", "bad w3")
    assert pickle.loads(pickle.dumps(labeler)).judge(shown) == labeler.judge(shown)


def test_one_sentiment_only_is_refused() -> None:
    with pytest.raises(ValueError, match="without both sentiments"):
        SentimentClassifier([LabeledText("fine", True)])


def shown_task(task_id: str, *responses: str) -> ShownTask:
    return ShownTask(task_id, (Message("user", "w1 w2"),), responses)


def labeler_of(log_odds: dict[str, float], **changes: Any) -> ReviewLabeler:
    """A labeler whose classifier reads its answers from a table."""
    classifier: Any = SimpleNamespace(log_odds=lambda texts: [log_odds[text.removeprefix("w1 w2 ")] for text in texts])
    settings: dict[str, Any] = {"name": "r", "seed": 0, "noise": 0.6, "tie_threshold": 0.0}
    return ReviewLabeler(classifier=classifier, **{**settings, **changes})


def test_noise_gives_the_bradley_terry_share() -> None:
    labeler = labeler_of({"better": 0.5, "worse": 0.0})
    wins = sum(labeler.judge(shown_task(f"t{i}", "better", "worse")).ranks == (1, 2) for i in range(4000))
    expected = 1 / (1 + math.exp(-0.5 / 0.6))  # .697
    assert wins / 4000 == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 4000))


def test_noise_does_not_depend_on_order_or_history_but_on_seed_name_and_task() -> None:
    odds = dict.fromkeys("abcdef", 0.0)
    base = labeler_of(odds).judge(shown_task("t", *"abcdef")).ranks
    assert labeler_of(odds).judge(shown_task("t", *"fedcba")).ranks == base[::-1]
    others = (labeler_of(odds, seed=1), labeler_of(odds, name="s"))
    assert base not in [other.judge(shown_task("t", *"abcdef")).ranks for other in others]
    assert labeler_of(odds).judge(shown_task("u", *"abcdef")).ranks != base


def test_ties_chain_from_the_best_of_their_group() -> None:
    odds = {"a": 1.0, "b": 0.95, "c": 0.88, "d": 0.0, "e": 0.0}
    labeler = labeler_of(odds, noise=0.0, tie_threshold=0.1)
    # c is within .1 of b but not of a, which leads the group.
    assert labeler.judge(shown_task("t", "d", "c", "a", "b", "e")).ranks == (3, 2, 1, 1, 3)
    assert labeler_of(odds).judge(shown_task("t", "d", "d")).ranks == (1, 1)


def test_reading_time_counts_words() -> None:
    assert labeler_of({"one": 0.0, "one two": 0.0}).judge(shown_task("t", "one", "one two")).milliseconds == 252 * 5


def area_under_curve(scores: list[float], labels: list[bool]) -> float:
    """The share of (positive, negative) pairs in the right order, counted by ranks."""
    ordered = sorted(range(len(scores)), key=lambda index: scores[index])
    rank_sum = sum(rank for rank, index in enumerate(ordered, start=1) if labels[index])
    num_positive = sum(labels)
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * (len(labels) - num_positive))


@pytest.mark.long
def test_real_data_is_sound(real_world: ReviewsWorld, tmp_path: Path) -> None:
    real_world.write_data(tmp_path, seed=1)
    assert_data_is_sound(real_world, tmp_path)


def test_real_classifiers_agree_with_people(real_world: ReviewsWorld) -> None:
    split = real_world.split
    for scores, other in ((real_world.label_truth, split.judge), (real_world.gold_scores, split.labeler)):
        for side in (other, split.unseen):
            texts, labels = [s.text for s in side], [s.positive for s in side]
            assert 0.79 < area_under_curve(scores([""] * len(texts), texts), labels) < 0.86


@pytest.mark.nightly
def test_real_labelers_agree_with_each_other_as_people_do(real_world: ReviewsWorld) -> None:
    """Between two continuations of one opening: .73, as InstructGPT reports of its labelers (arXiv 2203.02155)."""
    sentences = [s.text for s in sentences_of(read_labeled(real_world.config.reviews, "reviews"), (8, 28))]
    tasks = []
    for index in range(1500):
        prompt, response = cut(sentences[index], 4)
        tasks.append(
            ShownTask(f"t{index}", (Message("user", prompt),), (response, cut(sentences[index + 20_000], 4)[1]))
        )
    first, second = ([labeler.judge(task).ranks for task in tasks] for labeler in real_world.labelers(0)[:2])
    decided = [(a, b) for a, b in zip(first, second, strict=True) if len(set(a)) == len(set(b)) == 2]
    assert len(decided) > 0.9 * len(tasks)
    assert 0.70 < sum(a == b for a, b in decided) / len(decided) < 0.76


def test_real_sides_share_no_sentence(real_world: ReviewsWorld) -> None:
    split = real_world.split
    sides = [{words_of(s.text) for s in side} for side in (split.labeler, split.judge, split.unseen)]
    assert not sides[0] & sides[1] | sides[0] & sides[2] | sides[1] & sides[2]
    assert len(split.unseen) == 1000
