"""Judges of a comparison: adding one, people over several runs, a world's gold scorer."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.compare.judges import Asking, open_scorer, reward_judge
from evaluation.verdicts import Verdict
from heed.worlds.answers import write_answer
from heed.worlds.gold import gold_score
from heed.worlds.world import draw_prompts
from lm.tokenizer import Messages
from preferences.records import Answer, ShownTask
from preferences.scripted import answer_all
from preferences.store import LabelStore
from reward.endpoint import Budget
from reward.external import RemoteReward, RewardFunction

FILES = ("compare.json", "prompts.jsonl", "responses.parquet", "verdicts.parquet")
Call = Callable[..., tuple[int, str]]
Compare = Callable[..., list[str]]
SettingsOf = Callable[[Path], dict[str, Any]]
ByJudge = Callable[[Path], dict[str, list[Verdict]]]


def test_judging_again_samples_nothing_and_keeps_the_others(
    place: Path, heed_main: Call, compare: Compare, settings_of: SettingsOf, by_judge: ByJudge
) -> None:
    policies = (str(place / "models/one/model"), str(place / "saved.jsonl"))
    length, reward = f"{place / 'judges.py'}:length", str(place / "models/reward")
    assert heed_main(*compare(place, *policies, judges=(length,)))[0] == 0
    shutil.copytree(place / "out", place / "copy")
    assert heed_main("judge", str(place / "out"), reward)[0] == 0
    assert [entry["name"] for entry in settings_of(place / "out")["judges"]] == ["length", "reward"]
    assert heed_main(*compare(place, *policies, judges=(length, reward), out="both"))[0] == 0
    for name in FILES:
        assert (place / "out" / name).read_bytes() == (place / "both" / name).read_bytes(), name
    # A changed function with the same name replaces the earlier judge.
    (place / "judges.py").write_text("def length(prompts, responses):\n    return [-len(text) for text in responses]\n")
    assert heed_main("judge", str(place / "out"), length)[0] == 0
    turned = [1 - v.preference_a for v in by_judge(place / "copy")["length"]]
    assert [v.preference_a for v in by_judge(place / "out")["length"]] == turned
    assert repr(by_judge(place / "out")["reward"]) == repr(by_judge(place / "both")["reward"])


class Longest:
    """Prefers longer texts."""

    name = "ann"

    def judge(self, shown: ShownTask) -> Answer:
        order = sorted({len(text) for text in shown.responses}, reverse=True)
        return Answer(tuple(order.index(len(text)) + 1 for text in shown.responses), 900)


def test_people_judge_over_several_runs(
    place: Path, heed_main: Call, compare: Compare, settings_of: SettingsOf, by_judge: ByJudge
) -> None:
    policies, store = (str(place / "models/one/model"), str(place / "saved.jsonl")), place / "labels.sqlite"
    command = compare(place, *policies, judges=(f"people:{store}",))
    code, said = heed_main(*command)
    assert code == 0
    assert "people: 0 of 5 tasks are judged, in batch 'out'" in said
    assert "no verdicts yet" in said
    assert f"heed label serve --store {store}" in said
    assert not (place / "out").exists()
    with LabelStore(store) as opened:
        lease = opened.lease("ann", seconds=60, batch="out")
        assert lease is not None
        opened.submit(lease, Longest().judge(lease.shown), client="t", instructions_version="1")
    code, said = heed_main(*command)
    assert (code, "people: 1 of 5 tasks are judged" in said) == (0, True)
    assert len(by_judge(place / "out")["people"]) == 1
    with LabelStore(store) as opened:
        answer_all(opened, [Longest()], batch="out", client="t", instructions_version="1")
    assert heed_main(*command)[0] == 0
    assert len(by_judge(place / "out")["people"]) == 5
    (entry,) = settings_of(place / "out")["judges"]
    assert (entry["num_open"], entry["num_judgments"], entry["num_verdicts"]) == (0, 5, 5)


def test_the_gold_scorer_of_a_world(place: Path, heed_main: Call, compare: Compare, by_judge: ByJudge) -> None:
    saved = (f"a={place / 'saved.jsonl'}", f"b={place / 'other.jsonl'}")
    shutil.copy(place / "saved.jsonl", place / "other.jsonl")
    code, said = heed_main(*compare(place, *saved, judges=("gold:playground",)))
    assert (code, "judge 'gold': prompt 'p0': prompt 'The fox 0?' is not of the playground" in said) == (2, True)
    rng = random.Random(0)
    asked = [(prompt, write_answer(request, rng, 0, 0)) for prompt, request in draw_prompts(5, rng, set())]
    for name, rows in (
        ("prompts", [{"prompt": prompt} for prompt, _ in asked]),
        ("saved", [{"prompt": prompt, "output": response} for prompt, response in asked]),
        ("other", [{"prompt": prompt, "output": "ball ball"} for prompt, _ in asked]),
    ):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
    assert heed_main(*compare(place, *saved, judges=("gold:playground", f"job=gold:{job}")))[0] == 0
    verdicts = by_judge(place / "out")["gold"]
    assert [v.score_a for v in by_judge(place / "out")["job"]] == [v.score_a for v in verdicts]
    assert [(v.score_a, v.score_b) for v in verdicts] == [
        (gold_score(prompt, response), gold_score(prompt, "ball ball")) for prompt, response in asked
    ]
    assert [verdict.preference_a for verdict in verdicts] == [1.0] * 5


def test_a_reward_judges_and_is_described_as_the_reward(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(prompts, responses):\n    return [2.0] * len(responses)\n")
    by_function = reward_judge("reward", RewardFunction(function=f"{tmp_path}/r.py:score"), {})
    by_server = reward_judge("reward", RemoteReward(url="http://127.0.0.1:9/score", max_wait_seconds=0), {})
    assert [judge.kind for judge in (by_function, by_server)] == ["function", "reward endpoint"]
    for judge, what in (
        (by_function, f"the function {tmp_path}/r.py:score"),
        (by_server, "the endpoint http://127.0.0.1:9/score"),
    ):
        described = judge.describe()
        assert described["is_reward"]
        assert described["description"] == f"{what}, which is also the reward: whatever it overlooks stays unseen here"
    assert [scored.score for scored in by_function.score([[{"role": "user", "content": "q"}]], ["a"])] == [2.0]


def test_requests_to_a_reward_endpoint_count_toward_the_budget(tmp_path: Path, chat_server: Any) -> None:
    asking = Asking(tmp_path / "a.sqlite", 1, 5.0, 0, 1.0, Budget(1))
    judge = open_scorer("r", f"{chat_server.url}/score", asking)
    asked: list[Messages] = [[{"role": "user", "content": "q"}]]
    judge.score(asked, ["a"])
    with pytest.raises(ValueError, match=r"^--budget 1 requests is used up: a request to http://.*/score with 1 resp"):
        judge.score(asked, ["a"])
