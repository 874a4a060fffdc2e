"""Judges: scorers, a language model, people; each on the same responses of three policies."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.judges.judge import Pair, ScoreJudge, pairs_of, refuse_too_many_failures, reward_model_score
from evaluation.judges.language_model import OWN_TEMPLATE, LanguageModelJudge, fill, read_template, read_verdict
from evaluation.judges.people import PeopleJudge
from evaluation.verdicts import Response, Verdict
from files import retries
from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from preferences.accounts import Accounts
from preferences.records import Answer, ShownTask
from preferences.scripted import answer_all
from preferences.store import LabelStore
from reward.endpoint import Asker, Endpoint
from reward.external import RewardFunction
from reward.scoring import RewardModel
from training.data import Prompt

PROMPTS = [
    Prompt(prompt_id=f"p{n}", messages=({"role": "user", "content": f"What is {n}?"},), kind=kind)
    for n, kind in enumerate(("small", "small", "large"))
]
TEXTS = {"a": ("one word more", "same", "xx"), "b": ("one", "same", "yyy"), "c": ("one two", "other", "xx")}


def ignore(_done: int, _total: int) -> None:
    """Ignores progress."""


def responses_of(texts: dict[str, tuple[str, ...]]) -> dict[str, list[Response]]:
    return {name: [Response(name, f"p{n}", 0, text) for n, text in enumerate(own)] for name, own in texts.items()}


@pytest.fixture
def pairs() -> list[Pair]:
    return pairs_of(PROMPTS, responses_of(TEXTS))


def by_length(pair: Pair) -> float:
    """The preference for a by a judge that prefers longer texts."""
    difference = len(pair.a.text) - len(pair.b.text)
    return 0.5 if difference == 0 else float(difference > 0)


def test_what_is_compared(pairs: Sequence[Pair]) -> None:
    assert [(p.prompt.prompt_id, p.a.policy, p.b.policy) for p in pairs] == [
        (f"p{n}", *two) for n in range(3) for two in (("a", "b"), ("a", "c"), ("b", "c"))
    ]
    uneven = {"a": [Response("a", "p0", i, f"a{i}") for i in range(3)], "b": [Response("b", "p0", 0, "b")]}
    assert [(p.a.index, p.b.index) for p in pairs_of(PROMPTS[:1], uneven)] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(("num_a", "num_b"), [(3, 2), (2, 3), (4, 4), (1, 5)])
def test_every_two_samples_meet_once_where_that_is_few_enough(num_a: int, num_b: int) -> None:
    own = {"a": [Response("a", "p0", i, f"a{i}") for i in range(num_a)]}
    own["b"] = [Response("b", "p0", i, f"b{i}") for i in range(num_b)]
    found = [(p.a.index, p.b.index) for p in pairs_of(PROMPTS[:1], own, max_pairs=16)]
    assert sorted(found) == [(i, j) for i in range(num_a) for j in range(num_b)]
    # Whole rounds: in each, every sample of the longer side comes once.
    few = [(p.a.index, p.b.index) for p in pairs_of(PROMPTS[:1], own, max_pairs=7)]
    longer = max(num_a, num_b)
    assert len(few) == longer * min(num_a, num_b, max(1, 7 // longer))
    assert len(set(few)) == len(few)


def test_a_function_scores_each_text_once(pairs: Sequence[Pair], tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(
        "asked = []\n"
        "def length(prompts, responses):\n"
        "    asked.extend(responses)\n"
        "    return [None if text == 'yyy' else len(text) for text in responses]\n"
    )
    function = RewardFunction(function=f"{tmp_path / 'judges.py'}:length")
    judge = ScoreJudge("f", "function", function.function, function.score)
    verdicts = judge.judge(pairs, ignore)
    assert len(vars(__import__("sys").modules[function.load().__module__])["asked"]) == 3 + 2 + 2
    failed = [verdict for verdict in verdicts if verdict.failure]
    assert [(v.policy_a, v.policy_b) for v in failed] == [("a", "b"), ("b", "c")]
    assert failed[0].failure.startswith("b: ")
    assert "returned None; a finite number was expected" in failed[0].failure
    assert all(math.isnan(verdict.preference_a) for verdict in failed)
    sound = [(v, p) for v, p in zip(verdicts, pairs, strict=True) if not v.failure]
    assert [v.preference_a for v, _ in sound] == [by_length(p) for _, p in sound]
    assert {(v.first, v.labeler) for v in verdicts} == {("", "f")}
    assert (verdicts[0].score_a, verdicts[0].score_b, verdicts[0].length_a) == (13, 3, 13)
    assert [v.category for v in verdicts] == ["small"] * 6 + ["large"] * 3
    refuse_too_many_failures(verdicts, 0.5)
    with pytest.raises(ValueError, match=r"judge 'f' failed on 2 of 9 verdicts, more than 10% .*prompt 'p2': b: "):
        refuse_too_many_failures(verdicts, 0.1)


@pytest.fixture
def reward_folder(tmp_path: Path, tiny_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    model = ScalarModel(tiny_config)
    init_weights(model, seed=5)
    save_model(tmp_path / "reward", model, model.state_dict(), tokenizer)
    return tmp_path / "reward"


def test_a_reward_model_scores_whole_conversations(reward_folder: Path) -> None:
    score = reward_model_score(reward_folder, {})
    long = "word " * 200
    found = score([PROMPTS[0].messages] * 3, ["one word more", "", long])
    assert found[2].failure.endswith("tokens; the reward model reads at most 96")
    model = RewardModel.load(reward_folder)
    query = model.tokenizer.encode_prompt(PROMPTS[0].messages)
    tokens = [model.tokenizer.encode(text) for text in (" one word more", " ")]  # formatted as in the template
    expected = model.score(model.tokenizer, [PROMPTS[0].messages] * 2, [query] * 2, tokens)
    assert [scored.score for scored in found[:2]] == pytest.approx(expected, abs=1e-6)


def test_the_templates_fields_and_verdicts(tmp_path: Path) -> None:
    asked = fill(OWN_TEMPLATE, PROMPTS[0].messages, "costs $first", "{second}")
    assert "<conversation>\nWhat is 0?\n</conversation>" in asked
    assert "<response 1>\ncosts $first\n</response 1>" in asked
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert "Assistant:\nassistant\n\nUser:\nuser" in fill("$prompt", turns, "", "")
    for answer, preference in (
        ("So.\nVerdict: 1", 1.0), ("Verdict: 2\n\n", 0.0), ("**Verdict: Tie.**", 0.5), ("verdict: 1 \nVerdict: 2", 0.0)
    ):  # fmt: skip
        assert read_verdict(answer) == (preference, "")
    for answer in ("", "Verdict: 3", "Verdict: 1 or 2", "Verdict: 1\nor maybe not", "The verdict: 1"):
        preference, failure = read_verdict(answer)
        assert math.isnan(preference)
        assert failure.startswith("no verdict: the answer ends with ")
    path = tmp_path / "template.txt"
    for text, words in (("$prompt $first", "first, [$]prompt; "), ("$prompt $first $second $x", "[$]x"), ("$", "lone")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_template(path)
    path.write_text("$prompt $first $second")
    assert read_template(path) == "$prompt $first $second"
    with pytest.raises(ValueError, match="no such file"):
        read_template(tmp_path / "none.txt")


def language_model(chat_server: Any, tmp_path: Path, model: str, share: float = 0.5) -> LanguageModelJudge:
    max_wait = 0 if model == "overloaded" else 60
    endpoint = Endpoint.of(f"{chat_server.url}#{model}", "lm", timeout_seconds=5, max_wait_seconds=max_wait)
    return LanguageModelJudge("lm", Asker(endpoint, tmp_path / "answers.sqlite", 3, share), OWN_TEMPLATE, 50)


def test_a_language_model_judges_both_orders_once(pairs: Sequence[Pair], chat_server: Any, tmp_path: Path) -> None:
    judge = language_model(chat_server, tmp_path, "longer")
    verdicts = judge.judge(pairs, ignore)
    asked = [pair for pair in pairs if not pair.is_same]
    assert len(asked) == 7
    assert len(chat_server.bodies) == 10  # two policies wrote the same text, so those questions are sent once
    assert {(body["temperature"], body["max_tokens"]) for body in chat_server.bodies} == {(0, 50)}
    same = [verdict for verdict in verdicts if verdict.first == ""]
    assert [(v.prompt_id, v.policy_a, v.policy_b, v.preference_a) for v in same] == [
        ("p1", "a", "b", 0.5), ("p2", "a", "c", 0.5)
    ]  # fmt: skip
    for side in ("a", "b"):
        assert [v.preference_a for v in verdicts if v.first == side] == [by_length(pair) for pair in asked]
    assert repr(judge.judge(pairs, ignore)) == repr(verdicts)
    assert len(chat_server.bodies) == 10


def test_a_language_model_that_prefers_the_first(pairs: Sequence[Pair], chat_server: Any, tmp_path: Path) -> None:
    verdicts = language_model(chat_server, tmp_path, "first").judge(pairs, ignore)
    assert {(v.first, v.preference_a) for v in verdicts} == {("a", 1.0), ("b", 0.0), ("", 0.5)}


def test_no_verdict_is_a_failed_verdict(
    pairs: Sequence[Pair], chat_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    mumbling = language_model(chat_server, tmp_path, "mumbling").judge(pairs, ignore)
    failures = {verdict.failure for verdict in mumbling if verdict.first}
    expected = "a line 'Verdict: 1', '2' or 'tie' was expected"
    assert failures == {f"no verdict: the answer ends with 'Verdict: both are fine'; {expected}"}
    assert [v.failure for v in language_model(chat_server, tmp_path, "flaky").judge(pairs, ignore)] == [""] * 16
    with pytest.raises(ValueError, match=r"of the first \d+ requests to overloaded failed.*status 503"):
        language_model(chat_server, tmp_path, "overloaded").judge(pairs, ignore)


def test_an_answer_that_was_cut_off_says_so(pairs: Sequence[Pair], chat_server: Any, tmp_path: Path) -> None:
    judge = language_model(chat_server, tmp_path, "mumbling")
    short = LanguageModelJudge("lm", judge.asker, OWN_TEMPLATE, max_tokens=2)
    assert short.judge(pairs, ignore)[0].failure.endswith("the answer was truncated at 2 tokens")


class Scripted:
    """Ranks texts by a key, by default by their length."""

    def __init__(self, name: str, key: Callable[[str], Any] = len) -> None:
        self.name, self.key = name, key

    def judge(self, shown: ShownTask) -> Answer:
        keys = [self.key(text) for text in shown.responses]
        order = sorted(set(keys), reverse=True)
        lengths = tuple(float(len(text)) for text in shown.responses)
        return Answer(tuple(order.index(key) + 1 for key in keys), 900, ratings=lengths)


def people(store: Path, labelers: int = 1) -> PeopleJudge:
    return PeopleJudge("people", f"people:{store}", str(store), "b", labelers, seed=0, open_labels=LabelStore)


def test_people_rank_all_policies_at_once(pairs: Sequence[Pair], sqlite_tables: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.sqlite"
    path.write_bytes(sqlite_tables.read_bytes())
    judge = people(path, labelers=2)
    assert judge.judge(pairs, ignore) == []
    covered = judge.put_tasks(pairs)
    assert (covered.num_tasks, covered.num_open, covered.num_judgments) == (3, 3, 0)
    with LabelStore(path) as store:
        stored = store.tasks("b")
        # p0 has three different texts; of p1 and p2, two policies wrote the same one.
        assert [len(one.task.responses) for one in stored] == [3, 2, 2]
        assert sorted(stored[1].task.sources) == ["a, b", "c"]
        both = [Scripted("ann"), Scripted("bob", lambda _: 0)]
        answer_all(store, both, batch="b", client="t", instructions_version="1")
    accounts = Accounts(path)
    known = accounts.pseudonyms()
    accounts.close()
    verdicts = judge.judge(pairs, ignore)
    assert len(verdicts) == 9 * 2
    ann = [verdict for verdict in verdicts if verdict.labeler == known["ann"]]
    assert [v.preference_a for v in ann] == [by_length(pair) for pair in pairs]
    assert {v.preference_a for v in verdicts if v.labeler == known["bob"]} == {0.5}
    assert [v.first == "" for v in ann] == [pair.is_same for pair in pairs]
    assert {v.first for v in verdicts} == {"a", "b", ""}
    assert (ann[0].score_a, ann[0].score_b) == (13, 3)
    assert judge.put_tasks(pairs).num_open == 0


def test_who_skips_a_task_gives_failed_verdicts(pairs: Sequence[Pair], sqlite_tables: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.sqlite"
    path.write_bytes(sqlite_tables.read_bytes())
    judge = people(path)
    judge.put_tasks(pairs)
    with LabelStore(path) as store:
        lease = store.lease("ann", seconds=60, batch="b")
        assert lease is not None
        store.skip(lease, "not my language", 10, client="t", instructions_version="1")
    verdicts = judge.judge(pairs, ignore)
    assert [(v.prompt_id, v.failure) for v in verdicts] == [("p0", "skipped: not my language")] * 3


def test_identical_responses_are_a_tie_without_a_labeler(sqlite_tables: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.sqlite"
    path.write_bytes(sqlite_tables.read_bytes())
    texts: dict[str, tuple[str, ...]] = {"a": ("same", "x"), "b": ("same", "y")}
    pairs = pairs_of(PROMPTS[:2], responses_of(texts))
    judge = people(path)
    assert judge.put_tasks(pairs).num_tasks == 1
    with LabelStore(path) as store:
        answer_all(store, [Scripted("ann")], batch="b", client="t", instructions_version="1")
    found: list[Verdict] = judge.judge(pairs, ignore)
    assert [(v.prompt_id, v.preference_a) for v in found] == [("p0", 0.5), ("p1", 0.5)]
    assert (found[0].labeler, found[1].labeler.startswith("labeler-")) == ("people", True)


def test_the_stores_address_is_not_written() -> None:
    judge = PeopleJudge("people", "people:postgresql://u:***@h/d", "postgresql://u:secret@h/d", "b", 1, 0, LabelStore)
    assert "secret" not in json.dumps(judge.describe()) + repr(judge)
