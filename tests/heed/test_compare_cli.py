"""`heed compare` and `heed judge` in this process: real models, a real endpoint, a real label store."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation import endpoint as endpoint_module
from evaluation import sampling
from evaluation.verdicts import Verdict, read_responses, read_verdicts
from heed.cli import main
from heed.hold import hold
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, initialise
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from playground.gold import gold_score
from playground.world import PlaygroundConfig, PlaygroundWorld, draw_prompts
from preferences.door import answer_all
from preferences.records import Answer, ShownTask
from preferences.store import LabelStore

FILES = ("compare.json", "prompts.jsonl", "responses.parquet", "verdicts.parquet")
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def heed_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `heed` with arguments; the exit code, and all that it said."""
    monkeypatch.setattr(endpoint_module, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        for name in [name for name in sys.modules if name.startswith("heed_reward_")]:
            del sys.modules[name]  # a command reads a function's file once, and each command is another process
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(caught.value.code or 0), said.out + said.err

    return call


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    """Two policies and a reward model of random weights. Read only."""
    folder = tmp_path_factory.mktemp("compared")
    for seed, name in enumerate(("one", "two")):
        model = LanguageModel(tiny_config)
        initialise(model, seed=seed)
        save_model(folder / name / "model", model, model.state_dict(), tokenizer)
    judge = ScalarModel(tiny_config)
    initialise(judge, seed=5)
    save_model(folder / "reward", judge, judge.state_dict(), tokenizer)
    return folder


@pytest.fixture
def place(tmp_path: Path, models: Path) -> Path:
    """A folder to work in, with prompts, outputs, a function that judges, and the models."""
    prompts = [{"prompt_id": f"p{n}", "prompt": f"The fox {n}?", "category": "ab"[n % 2]} for n in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    saved = [{"prompt_id": f"p{n}", "output": f"A fox has {'x' * n} legs."} for n in range(5)]
    (tmp_path / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    (tmp_path / "judges.py").write_text(
        "def length(prompts, responses):\n    return [len(text) for text in responses]\n"
        "def picky(prompts, responses):\n    return [None if 'xx' in text else len(text) for text in responses]\n"
    )
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def compare(
    place: Path, *policies: str, judges: tuple[str, ...], out: str = "out", more: tuple[str, ...] = ()
) -> list[str]:
    named = [part for judge in judges for part in ("--judge", judge)]
    given = ["--prompts", str(place / "prompts.jsonl"), "--out", str(place / out)]
    return ["compare", *policies, *given, *named, "--max-tokens", "6", "--retries", "0", *more]


def settings_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return settings


def by_judge(folder: Path) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in read_verdicts(folder / "verdicts.parquet"):
        found.setdefault(verdict.judge, []).append(verdict)
    return found


def test_a_model_an_endpoint_and_a_file_before_three_judges(place: Path, chat_server: Any, heed_main: Call) -> None:
    policies = (str(place / "models/one/model"), f"{chat_server.url}#writer", str(place / "saved.jsonl"))
    judges = (str(place / "models/reward"), f"{place / 'judges.py'}:length", f"lm={chat_server.url}#longer")
    more = ("--num-samples", "2", "--reference", str(place / "models/two/model"))
    code, said = heed_main(*compare(place, *policies, judges=judges, more=more))
    assert code == 0, said
    assert str(place / "out/report.html") in said
    assert "one against saved" in said or "saved against one" in said
    folder = place / "out"
    assert [entry["name"] for entry in settings_of(folder)["policies"]] == ["one", "writer", "saved"]
    responses = read_responses(folder / "responses.parquet")
    assert [sum(row.policy == name for row in responses) for name in ("one", "writer", "saved")] == [10, 10, 5]
    assert all(row.log_ratio == row.log_ratio for row in responses if row.policy == "one")
    assert all(row.log_ratio != row.log_ratio for row in responses if row.policy != "one")
    found = by_judge(folder)
    assert {name: len(own) for name, own in found.items() if name != "lm"} == {"reward": 30, "length": 30}
    text = {(row.policy, row.prompt_id, row.index): row.text for row in responses}
    for verdict in found["length"] + found["lm"]:
        a = len(text[verdict.policy_a, verdict.prompt_id, verdict.index_a])
        b = len(text[verdict.policy_b, verdict.prompt_id, verdict.index_b])
        assert verdict.preference_a == (0.5 if a == b else float(a > b))
        assert (verdict.length_a, verdict.length_b) == (a, b)
    assert {v.category for v in found["lm"]} == {"a", "b"}
    assert [entry["num_failed"] for entry in settings_of(folder)["judges"]] == [0, 0, 0]
    measures = json.loads((folder / "measures.json").read_text())["policies"]
    assert measures["one"]["kl_nats"]["mean"] == pytest.approx(
        sum(row.log_ratio for row in responses if row.policy == "one") / 10
    )
    assert (measures["saved"]["kl_nats"]["mean"], measures["saved"]["diversity"]["num_responses"]) == (None, 5)
    assert sorted(path.name for path in place.glob("out*")) == ["out"]


def test_the_same_command_gives_the_same_bytes(place: Path, chat_server: Any, heed_main: Call) -> None:
    policies = (str(place / "models/one/model"), f"{chat_server.url}#writer")
    judges = (f"{place / 'judges.py'}:length", f"{chat_server.url}#first")
    for out in ("first/run", "second/run"):
        assert heed_main(*compare(place, *policies, judges=judges, out=out))[0] == 0
    for name in (*FILES, "measures.json", "report.json", "report.html"):
        assert (place / "first/run" / name).read_bytes() == (place / "second/run" / name).read_bytes(), name
    num_asked = len(chat_server.bodies)
    before = (place / "first/run/verdicts.parquet").stat().st_mtime_ns
    assert heed_main(*compare(place, *policies, judges=judges, out="first/run"))[0] == 0
    assert (place / "first/run/verdicts.parquet").stat().st_mtime_ns == before
    assert len(chat_server.bodies) == num_asked
    code, said = heed_main(*compare(place, *policies, judges=judges, out="first/run", more=("--seed", "1")))
    assert (code, "holds a comparison whose policies differ" in said) == (2, True)


def test_an_interrupted_comparison_samples_nothing_again(
    place: Path, chat_server: Any, heed_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = (str(place / "models/one/model"), str(place / "models/two/model"))
    judge = f"{chat_server.url}#longer"
    chat_server.fails = lambda _: True
    code, said = heed_main(*compare(place, *policies, judges=(judge,)))
    assert (code, "requests to longer failed" in said, (place / "out").exists()) == (2, True, False)
    chat_server.fails = lambda _: False
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "generate", None)  # a model that samples now would fail
        code, said = heed_main(*compare(place, *policies, judges=(judge,)))
        assert code == 0, said
    shutil.rmtree(place / "out")
    assert heed_main(*compare(place, *policies, judges=(judge,), out="whole"))[0] == 0
    assert len(by_judge(place / "whole")["longer"]) > 5


def test_judging_again_samples_nothing_and_keeps_the_others(place: Path, heed_main: Call) -> None:
    policies = (str(place / "models/one/model"), str(place / "saved.jsonl"))
    length, reward = f"{place / 'judges.py'}:length", str(place / "models/reward")
    assert heed_main(*compare(place, *policies, judges=(length,)))[0] == 0
    shutil.copytree(place / "out", place / "copy")
    assert heed_main("judge", str(place / "out"), reward)[0] == 0
    assert [entry["name"] for entry in settings_of(place / "out")["judges"]] == ["length", "reward"]
    assert heed_main(*compare(place, *policies, judges=(length, reward), out="both"))[0] == 0
    for name in FILES:
        assert (place / "out" / name).read_bytes() == (place / "both" / name).read_bytes(), name
    # Another function of the same name takes the place of what that one said.
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


def test_people_judge_over_several_runs(place: Path, heed_main: Call) -> None:
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


def test_the_gold_scorer_of_a_world(place: Path, heed_main: Call) -> None:
    saved = (f"a={place / 'saved.jsonl'}", f"b={place / 'other.jsonl'}")
    shutil.copy(place / "saved.jsonl", place / "other.jsonl")
    code, said = heed_main(*compare(place, *saved, judges=("gold:playground",)))
    assert (code, "judge 'gold': prompt 'p0': prompt 'The fox 0?' is not of the playground" in said) == (2, True)
    world, rng = PlaygroundWorld(PlaygroundConfig(flaw_rate=0)), random.Random(0)
    asked = [(prompt, world.answer(request, rng)) for prompt, request in draw_prompts(5, rng, set())]
    for name, rows in (
        ("prompts", [{"prompt": prompt} for prompt, _ in asked]),
        ("saved", [{"prompt": prompt, "output": response} for prompt, response in asked]),
        ("other", [{"prompt": prompt, "output": "ball ball"} for prompt, _ in asked]),
    ):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Path(__file__).parents[2] / "configs" / "jobs" / "debug.toml"
    assert heed_main(*compare(place, *saved, judges=("gold:playground", f"job=gold:{job}")))[0] == 0
    verdicts = by_judge(place / "out")["gold"]
    assert [v.score_a for v in by_judge(place / "out")["job"]] == [v.score_a for v in verdicts]
    assert [(v.score_a, v.score_b) for v in verdicts] == [
        (gold_score(prompt, response), gold_score(prompt, "ball ball")) for prompt, response in asked
    ]
    assert [verdict.preference_a for verdict in verdicts] == [1.0] * 5


def test_verdicts_made_elsewhere(place: Path, heed_main: Call) -> None:
    rows = [
        {"instruction": f"Sing {n}", "output_1": "la", "output_2": "lala", "generator_1": "old", "generator_2": "new",
         "annotator": "gpt", "preference": 2.0 if n else None}
        for n in range(4)
    ]  # fmt: skip
    (place / "annotations.json").write_text(json.dumps(rows))
    command = ("compare", "--verdicts", str(place / "annotations.json"), "--out", str(place / "out"))
    code, said = heed_main(*command)
    assert (code, "no preference: 1" in said) == (0, True)
    (oddity,) = (place / "out" / "oddities.jsonl").read_text().splitlines()
    assert json.loads(oddity)["kind"] == "no preference"
    settings = settings_of(place / "out")
    assert [policy["name"] for policy in settings["policies"]] == ["new", "old"]
    assert (settings["verdicts"]["format"], settings["verdicts"]["oddities"]) == ("alpacaeval", {"no preference": 1})
    assert [v.preference_a for v in by_judge(place / "out")["gpt"]] == [0.0] * 3
    assert heed_main(*command)[0] == 0  # once more: it is there
    # Its responses can be judged by others too, without sampling.
    assert heed_main("judge", str(place / "out"), f"{place / 'judges.py'}:length")[0] == 0
    assert [(v.policy_a, v.preference_a) for v in by_judge(place / "out")["length"]] == [("new", 1.0)] * 3
    code, said = heed_main("judge", str(place / "out"), f"gpt={place / 'judges.py'}:length")
    assert (code, "called like that of judgments made elsewhere" in said) == (2, True)


def test_failed_verdicts_are_masked_or_end_it(place: Path, heed_main: Call) -> None:
    policies = (str(place / "saved.jsonl"), f"again={place / 'saved.jsonl'}")
    picky = f"{place / 'judges.py'}:picky"
    code, said = heed_main(*compare(place, *policies, judges=(picky,)))
    assert (code, "judge 'picky' failed on 3 of 5 verdicts, more than 10%" in said) == (2, True)
    assert "The first, of prompt 'p2': saved: " in said
    assert not (place / "out").exists()
    assert heed_main(*compare(place, *policies, judges=(picky,), more=("--max-failed-share", "0.6")))[0] == 0
    assert [bool(v.failure) for v in by_judge(place / "out")["picky"]] == [False] * 2 + [True] * 3
    assert settings_of(place / "out")["judges"][0]["num_failed"] == 3


def test_what_is_told_of_policies(place: Path, heed_main: Call) -> None:
    rows = [{"prompt_id": f"p{n}", "output": "  " if n == 2 else "yes"} for n in range(9)]
    (place / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = shutil.copytree(place / "models/one/model", place / "other/model")
    Tokenizer.load(other).with_template("{{ messages[-1]['content'] }}").save(other)
    policies = (str(other), str(place / "more.jsonl"))
    more = ("--allow-empty", "--reference", str(place / "models/two/model"))
    code, said = heed_main(*compare(place, *policies, judges=(f"{place / 'judges.py'}:length",), more=more))
    assert code == 0
    assert "other: its KL is not measured, for it reads other tokens than the reference" in said
    assert "more: 4 rows of " in said
    assert "more: 1 of 5 responses are empty" in said


def test_refusals_before_anything_is_sampled(
    place: Path, heed_main: Call, monkeypatch: pytest.MonkeyPatch, encoder_folder: Path
) -> None:
    monkeypatch.setattr(sampling, "generate", None)
    one, two, saved = str(place / "models/one/model"), str(place / "models/two/model"), str(place / "saved.jsonl")
    length = f"{place / 'judges.py'}:length"
    (place / "short.jsonl").write_text((place / "saved.jsonl").read_text().split("\n", 1)[1])
    for policies, judges, words in (
        ((one,), (length,), "1 policies; at least two"),
        ((one, two), (), "--judge is missing"),
        ((one, one), (length,), "is given twice"),
        ((one, str(place / "nowhere")), (length,), "nowhere: no such folder"),
        ((one, str(encoder_folder)), (length,), "architectures"),
        ((one, "http://me:secret@127.0.0.1/v1#m"), (length,), "keys go into HEED_API_KEY"),
        ((one, str(place / "short.jsonl")), (length,), "has no response to 1 of 5 prompts: 'p0'"),
        ((one, saved), (f"{place / 'judges.py'}:none",), "has no function 'none'"),
        ((one, saved), (one,), "architectures"),
        ((one, saved), ("gold:nothing",), "gold:playground, or gold:JOB.toml"),
        ((one, saved), ("people:",), "people:STORE was expected"),
        ((one, saved), (length, length), "is given twice"),
    ):
        code, said = heed_main(*compare(place, *policies, judges=judges))
        assert (code, words in said, "secret" in said) == (2, True, False), said
    for more, words in (
        (("--verdicts", saved), "--verdicts names policies, prompts and judges itself"),
        (("--prompts", ""), "or --verdicts alone, were expected"),
        (("--max-tokens", "90"), "do not fit its context of 96"),
        (("--category", "level"), "line 1: field 'level' is missing"),
        (("--template", str(place / "saved.jsonl")), ""),
    ):
        judges = ("http://127.0.0.1:1/v1#m",) if "--template" in more else (length,)
        code, said = heed_main(*compare(place, one, saved, judges=judges, more=more))
        assert (code, words in said) == (2, True), said
    assert not (place / "out").exists()
    assert heed_main("judge", str(place), length)[1].count("the folder of a finished comparison was expected") == 1


def test_a_folder_is_compared_in_by_one_at_a_time(place: Path, heed_main: Call) -> None:
    aside = place / "out.sampling"
    aside.mkdir()
    policies = (str(place / "saved.jsonl"), f"again={place / 'saved.jsonl'}")
    with hold(aside):
        code, said = heed_main(*compare(place, *policies, judges=(f"{place / 'judges.py'}:length",)))
    assert (code, "is comparing here; wait for it, or run with another --out" in said) == (2, True)
