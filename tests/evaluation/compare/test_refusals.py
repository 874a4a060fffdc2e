"""Errors of a comparison, raised before anything is sampled if possible; judges that fail."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.compare.folder import refuse_other_settings
from evaluation.verdicts import Verdict
from files.atomic import lock
from reward import sampling

Call = Callable[..., tuple[int, str]]
Compare = Callable[..., list[str]]
SettingsOf = Callable[[Path], dict[str, Any]]
ByJudge = Callable[[Path], dict[str, list[Verdict]]]


def test_failed_verdicts_are_masked_or_end_it(
    place: Path, heed_main: Call, compare: Compare, settings_of: SettingsOf, by_judge: ByJudge
) -> None:
    policies = (str(place / "saved.jsonl"), f"again={place / 'saved.jsonl'}")
    picky = f"{place / 'judges.py'}:picky"
    code, said = heed_main(*compare(place, *policies, judges=(picky,)))
    assert (code, "judge 'picky' failed on 3 of 5 verdicts, more than 10%" in said) == (2, True)
    assert "The first failure, on prompt 'p2': saved: " in said
    assert not (place / "out").exists()
    assert heed_main(*compare(place, *policies, judges=(picky,), more=("--max-failed-share", "0.6")))[0] == 0
    assert [bool(v.failure) for v in by_judge(place / "out")["picky"]] == [False] * 2 + [True] * 3
    assert settings_of(place / "out")["judges"][0]["num_failed"] == 3


def test_refusals_before_anything_is_sampled(
    place: Path, heed_main: Call, monkeypatch: pytest.MonkeyPatch, encoder_folder: Path, compare: Compare
) -> None:
    monkeypatch.setattr(sampling, "generate", None)
    one, two, saved = str(place / "models/one/model"), str(place / "models/two/model"), str(place / "saved.jsonl")
    length = f"{place / 'judges.py'}:length"
    (place / "fine.txt").write_text("$prompt $first $second")
    (place / "short.jsonl").write_text((place / "saved.jsonl").read_text().split("\n", 1)[1])
    for policies, judges, words in (
        ((one,), (length,), "1 policies; at least two"),
        ((one, two), (), "--judge is missing"),
        ((one, one), (length,), "is given twice"),
        ((one, str(place / "nowhere")), (length,), "nowhere: no such folder"),
        ((one, str(encoder_folder)), (length,), "architectures"),
        ((one, "http://me:secret@127.0.0.1/v1#m"), (length,), "put the key into HEED_API_KEY"),
        ((one, str(place / "short.jsonl")), (length,), "has no response to 1 of 5 prompts: 'p0'"),
        ((one, saved), (f"{place / 'judges.py'}:none",), "has no function 'none'"),
        ((one, saved), (one,), "architectures"),
        ((one, saved), (str(place / "judges.py"),), "judges.py names no function; FILE.py:FUNCTION was expected"),
        ((one, saved), ("gold:nothing",), "gold:playground, or gold:JOB.toml"),
        ((one, saved), ("people:",), "people:STORE was expected"),
        ((one, saved), (length, length), "is given twice"),
    ):
        code, said = heed_main(*compare(place, *policies, judges=judges))
        assert (code, words in said, "secret" in said) == (2, True, False), said
    for more, words in (
        (("--prompts", ""), "--prompts is empty; a file or a hub id was expected"),
        (("--category", "level"), "line 1: the category field 'level' is missing"),
        (("--template", str(place / "saved.jsonl")), "$prompt, $first and $second were expected"),
        (("--template", str(place / "nothere.txt")), "nothere.txt: no such file; a judge's template was expected"),
        (("--template", str(place / "fine.txt")), "no judge is a language model (URL#MODEL)"),
    ):
        judges = ("http://127.0.0.1:1/v1#m",) if "saved.jsonl" in more[1] and "--template" in more else (length,)
        code, said = heed_main(*compare(place, one, saved, judges=judges, more=more))
        assert (code, words in said) == (2, True), said
    assert not (place / "out").exists()
    assert heed_main("judge", str(place), length)[1].count("the folder of a finished comparison was expected") == 1


def test_a_limit_that_no_context_holds_is_reduced_for_all(
    place: Path, heed_main: Call, compare: Compare, settings_of: SettingsOf
) -> None:
    models = [str(place / f"models/{name}/model") for name in ("one", "two")]
    call = compare(place, *models, judges=(f"{place / 'judges.py'}:length",), more=("--max-new-tokens", "90"))
    code, said = heed_main(*call)
    assert code == 0, said
    (length,) = re.findall(r"--max-new-tokens 90 is reduced to (\d+): the longest", said)
    limits = [policy["sampling"]["max_new_tokens"] for policy in settings_of(place / "out")["policies"]]
    assert limits == [int(length)] * 2
    assert 0 < int(length) < 90
    long = json.dumps({"prompt": "The fox? " * 60})
    (place / "prompts.jsonl").write_text(long)
    code, said = heed_main(*call)
    assert (code, "leave no room for a response in its context of 96" in said) == (2, True), said


def test_a_folder_is_compared_in_by_one_at_a_time(place: Path, heed_main: Call, compare: Compare) -> None:
    aside = place / "out.sampling"
    aside.mkdir()
    policies = (str(place / "saved.jsonl"), f"again={place / 'saved.jsonl'}")
    with lock(aside):
        code, said = heed_main(*compare(place, *policies, judges=(f"{place / 'judges.py'}:length",)))
    assert (code, "is comparing here; wait for it, or run with another --out" in said) == (2, True)


def test_the_setting_in_which_a_finished_comparison_differs_is_named() -> None:
    def settings(policies: dict[str, int], prompts: str = "a") -> dict[str, Any]:
        return {
            "policies": [{"name": name, "sampling": {"seed": 0, "max_new_tokens": n}} for name, n in policies.items()],
            "prompts": {"source": prompts},
        }

    there = settings({"one": 12, "two": 12})
    refuse_other_settings(Path("out"), there, there)
    for now, words in (
        (settings({"one": 12, "two": 16}), "policies.two.sampling.max_new_tokens: 12 there, 16 now;"),
        (settings({"one": 12, "two": 12}, "b"), 'prompts.source: "a" there, "b" now;'),
        (settings({"one": 12}), 'policies.two.name: "two" there, absent now;'),
    ):
        with pytest.raises(ValueError, match=re.escape(f"out: holds a comparison with other settings: {words}")):
            refuse_other_settings(Path("out"), there, now)
