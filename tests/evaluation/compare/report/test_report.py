"""Reports of comparisons with a known truth: numbers follow from rows, and sentences claim no more than they show."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from evaluation.compare.comparing import results_table
from evaluation.compare.folder import read_comparison
from evaluation.compare.report.page import render, verdicts_disagree, write_comparison_report
from evaluation.statistics.summary import summarise
from evaluation.verdicts import read_verdicts, write_rows
from heed.cli import main
from stages.reports.parts import TEXT_CHARACTERS, UNFOLDED_CHARACTERS, evenly, folded
from stages.reports.text import p_value, percent, share_ends, styles_of

MakeFolder = Callable[..., Path]


def without_links(page: str) -> str:
    """Returns a page without its links to the glossary, which stand within sentences."""
    return re.sub(r'<a class="term"[^>]*>(.*?)</a>', r"\1", page)


def read(path: Path) -> Any:
    """Parses strict JSON: NaN and Infinity are errors."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{path} holds {name}"))


def test_a_win_rate_follows_from_the_rows(four_policies: Path) -> None:
    """Every prompt and each display order weighs the same, and failed verdicts are left out."""
    verdicts = read_verdicts(four_policies / "verdicts.parquet")
    for judge in read(four_policies / "report.json")["summary"]["judges"]:
        for pair in judge["pairs"]:
            by_order: dict[str, dict[str, list[float]]] = {}
            both, num_failed = {pair["policy_a"], pair["policy_b"]}, 0
            for row in verdicts:
                if row.judge == judge["judge"] and {row.policy_a, row.policy_b} == both:
                    num_failed += bool(row.failure)
                    won = row.preference_a if row.policy_a == pair["policy_a"] else 1 - row.preference_a
                    first = {"a": row.policy_a, "b": row.policy_b, "": ""}[row.first]
                    if not row.failure:
                        by_order.setdefault(first, {}).setdefault(row.prompt_id, []).append(won)
            means = [np.mean([np.mean(shares) for shares in of.values()]) for of in by_order.values()]
            assert pair["win_rate"]["mean"] == pytest.approx(np.mean(means))
            num_prompts = len({prompt for of in by_order.values() for prompt in of})
            assert (pair["win_rate"]["num_prompts"], pair["num_failed"]) == (num_prompts, num_failed)


def test_the_page_shows_the_numbers_of_the_summary(four_policies: Path) -> None:
    report, page = read(four_policies / "report.json"), (four_policies / "report.html").read_text(encoding="utf-8")
    for judge in report["summary"]["judges"]:
        for pair in judge["pairs"]:
            rate = pair["win_rate"]
            ends = f"{percent(rate['low']).removesuffix('%')} to {percent(rate['high'])}"
            assert f'<td class="value" role="cell">{percent(rate["mean"])} <span>{ends}</span></td>' in page
        for rating in judge["ratings"]["policies"]:
            assert f"{rating['value']:.2f}".replace("-", "\u2212") in page
    for text in (report["answer"]["text"], *report["answer"]["more"], *report["warnings"]):
        assert text.replace("'", "&#39;").replace("<", "&lt;") in without_links(page)
    for file, sha256 in report["files"].items():
        assert sha256 in page, file


def test_the_interval_holds_the_truth_that_was_planted(two_policies: Path) -> None:
    (judge,) = read(two_policies / "report.json")["summary"]["judges"]
    rate = judge["pairs"][0]["win_rate"]
    truth = 0.85 / (1 + math.exp(-1.3)) + 0.15 / 2
    assert rate["low"] < truth < rate["high"]
    assert (judge["pairs"][0]["policy_a"], judge["pairs"][0]["policy_b"]) == ("ppo", "sft")


def test_same_folder_same_bytes(four_policies: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(four_policies, tmp_path / "four"))
    for name in ("report.json", "report.html"):
        (copy / name).unlink()
    assert write_comparison_report(copy) == read(four_policies / "report.json")
    for name in ("report.json", "report.html"):
        assert (copy / name).read_bytes() == (four_policies / name).read_bytes()


def test_a_pair_turned_is_the_pair_judged_from_the_other_side(four_policies: Path) -> None:
    verdicts = [row for row in read_verdicts(four_policies / "verdicts.parquet") if row.judge == "gpt"]
    both = [row for row in verdicts if {row.policy_a, row.policy_b} == {"sft", "ppo"}]
    (one,), (other,) = (summarise(both, names, seed=3).judges[0].pairs for names in (("sft", "ppo"), ("ppo", "sft")))
    found = one.turned
    assert (found.policy_a, found.policy_b) == (other.policy_a, other.policy_b) == ("ppo", "sft")
    assert (found.verdicts, found.prompts) == (other.verdicts, other.prompts)
    for field in ("mean", "low", "high"):
        assert getattr(found.win_rate, field) == pytest.approx(getattr(other.win_rate, field), abs=1e-9)
        assert getattr(found.length_controlled, field) == pytest.approx(
            getattr(other.length_controlled, field), abs=0.02
        )
    assert found.length_controlled.length_effect.mean == pytest.approx(
        other.length_controlled.length_effect.mean, abs=0.02
    )
    assert found.turned.win_rate.mean == pytest.approx(one.win_rate.mean)


def test_a_winner_is_named_in_one_sentence(two_policies: Path) -> None:
    report = read(two_policies / "report.json")
    pair = report["summary"]["judges"][0]["pairs"][0]
    assert report["answer"]["tone"] == "better"
    assert report["answer"]["text"].startswith(
        f"ppo is preferred to sft {percent(pair['win_rate']['mean'])} of the time by the judge gold (95% interval "
    )
    assert f"; {p_value(pair['significance']['holm_p'])}; 120 prompts)." in report["answer"]["text"]


def test_a_win_rate_that_the_kl_rules_out_is_open(make_folder: MakeFolder) -> None:
    """A KL of at most .02 nats allows 10 points; that of greedy policies, or of one of the two, rules out nothing."""
    folder = make_folder(policies={"sft": 0.0, "ppo": 1.3}, num_prompts=60)
    settings, kl = read(folder / "compare.json"), {"kl_nats": {"mean": 0.01, "low": 0.0, "high": 0.02}}
    zero = {"kl_nats": {"mean": 0.0, "low": 0.0, "high": 0.0}}
    for temperature, policies, tone in (
        (1.0, {"sft": zero, "ppo": kl}, "unclear"),
        (0.0, {"sft": zero, "ppo": kl}, "better"),
        (1.0, {"ppo": kl}, "better"),
    ):  # fmt: skip
        for policy in settings["policies"]:
            policy["sampling"] = {"temperature": temperature}
        (folder / "compare.json").write_text(json.dumps(settings))
        (folder / "measures.json").write_text(json.dumps({"policies": policies}))
        answer = write_comparison_report(folder)["answer"]
        assert answer["tone"] == tone
        assert ("further from 50% than the 10 points that their KL allows" in answer["text"]) == (tone == "unclear")


def test_a_pair_that_the_kl_rules_out_differs_nowhere(make_folder: MakeFolder) -> None:
    folder = make_folder(policies={"sft": 0.0, "ppo": 1.3}, num_prompts=60)
    settings = read(folder / "compare.json")
    for policy in settings["policies"]:
        policy["sampling"] = {"temperature": 1.0}
    (folder / "compare.json").write_text(json.dumps(settings))
    kl = {"sft": {"kl_nats": {"high": 0.0}}, "ppo": {"kl_nats": {"high": 0.02}}}
    (folder / "measures.json").write_text(json.dumps({"policies": kl}))
    report = write_comparison_report(folder)
    (pair,) = report["summary"]["judges"][0]["pairs"]
    assert (pair["conclusion"]["kind"], pair["different"]) == ("none", False)
    (difference,) = results_table(report).columns[-1].cells
    assert str(difference).startswith("cannot tell: a win rate of ")
    assert ' clear"' not in (folder / "report.html").read_text(encoding="utf-8")


def test_no_difference_says_what_could_have_been_shown(make_folder: MakeFolder) -> None:
    report = write_comparison_report(make_folder(policies={"sft": 0.0, "ppo": 0.1}, num_prompts=30, seed=1))
    pair = report["summary"]["judges"][0]["pairs"][0]
    assert not pair["different"]
    assert report["answer"]["tone"] == "unclear"
    assert report["answer"]["text"].startswith("No difference between ")
    detectable = round(100 * pair["power"]["detectable"])
    assert f"would only detect a win rate {detectable} points or more from 50%" in report["answer"]["more"][0]
    assert any(text.startswith("Only 30 prompts") for text in report["warnings"])


def test_a_ranking_goes_as_far_as_its_rank_ranges(four_policies: Path) -> None:
    report = read(four_policies / "report.json")
    ratings = report["summary"]["judges"][0]["ratings"]["policies"]
    leaders = [rating for rating in ratings if rating["best_rank"] == 1]
    assert {rating["policy"] for rating in leaders} == {"ppo", "best_of_16"}  # planted 0.1 apart
    ranking = report["answer"]["more"][0]
    assert ranking.startswith("Which of 4 policies is the best is not settled by the judge gpt: ")
    for rating in leaders:
        ends = f"rank {rating['best_rank']} to {rating['worst_rank']}"
        assert f"{rating['policy']} ({ends})" in ranking


def test_many_policies_start_with_what_is_shown(four_policies: Path) -> None:
    """The headline names the shown differences, and a picture of every pair comes before anything else."""
    report, page = read(four_policies / "report.json"), (four_policies / "report.html").read_text(encoding="utf-8")
    pairs = report["summary"]["judges"][0]["pairs"]
    shown = sorted((pair for pair in pairs if pair["different"]), key=lambda pair: -pair["win_rate"]["mean"])
    assert 3 < len(shown) < len(pairs)
    first, second = shown[:2]
    assert report["answer"]["tone"] == "better"
    assert report["answer"]["text"].startswith(
        f"By the judge gpt, {first['policy_a']} is preferred to {first['policy_b']}"
        f" {percent(first['win_rate']['mean'])} of the time (95% interval "
    )
    assert f", {second['policy_a']} to {second['policy_b']} {percent(second['win_rate']['mean'])} (" in page
    assert report["answer"]["text"].endswith(f"; {len(shown) - 3} more pairs differ.")
    picture = page[page.index('<p class="verdict') : page.index('<ul class="more">')]
    assert picture.count(' clear"') == 2 * len(shown)
    assert picture.count("<td class=") == 2 * len(pairs)


def test_an_interval_names_its_level(make_folder: MakeFolder) -> None:
    """Holm's correction takes a difference back: that row has a wider interval, and no column calls all of them 95%."""
    comparison = read_comparison(make_folder(policies={"sft": 0.0, "ppo": 0.6, "dpo": 0.9}, num_prompts=60, seed=6))
    page, report = render(comparison)
    pairs = report["summary"]["judges"][0]["pairs"]
    (taken,) = (pair for pair in pairs if pair["significance"]["p"] < 0.05 <= pair["significance"]["holm_p"])
    level = 100 - 5 * taken["significance"]["p"] / taken["significance"]["holm_p"]
    rate = taken["win_rate"]
    ends = f"{share_ends(rate['low'], rate['high'])} ({level:.1f}%)"
    assert page.count(f"<span>{ends}</span>") == 2  # win rates, and those at equal length
    assert page.count(f"<small>{ends}</small>") == 2  # the matrix and the table of tests
    others = [pair["win_rate"] for pair in pairs if pair is not taken]
    assert all(f"<span>{share_ends(one['low'], one['high'])} (95%)</span>" in page for one in others)
    head = page[page.index('id="wins-0"') :].partition("</thead>")[0]
    assert ("Win rate (level)" in head, "(95%)" in head) == (True, False)


def test_a_best_policy_is_named_with_its_lead_over_the_next(make_folder: MakeFolder) -> None:
    report = write_comparison_report(
        make_folder(policies={"sft": 0.0, "ppo": 2.5, "base": -2.0}, num_prompts=80, failing={"gold": 0.01})
    )
    answer, pairs = report["answer"], report["summary"]["judges"][0]["pairs"]
    assert answer["tone"] == "better"
    assert answer["text"] == "ppo is the best of 3 policies by the judge gold, ahead of sft (rank 2) and base (rank 3)."
    lead = next(pair for pair in pairs if {pair["policy_a"], pair["policy_b"]} == {"ppo", "sft"})
    assert f"ppo to sft {percent(lead['win_rate']['mean'])} (" in answer["more"][0]
    assert answer["more"][1] == "All 3 pairs differ after Holm's correction."


def test_policies_that_were_shown_in_one_order_only_have_no_best(make_folder: MakeFolder) -> None:
    folder = make_folder(policies={"sft": 0.0, "ppo": 2.5, "base": -2.0}, num_prompts=80)
    verdicts = read_verdicts(folder / "verdicts.parquet")
    write_rows(folder / "verdicts.parquet", [row for row in verdicts if row.first == "a"])
    answer = write_comparison_report(folder)["answer"]
    assert answer["tone"] == "unclear"
    assert "is the best" not in " ".join([answer["text"], *answer["more"]])


def test_islands_are_named(make_folder: MakeFolder) -> None:
    folder = make_folder(policies={"sft": 0.0, "ppo": 1.0, "base": 0.0, "other": 0.5})
    verdicts = read_verdicts(folder / "verdicts.parquet")
    islands = ({"sft", "ppo"}, {"base", "other"})
    write_rows(folder / "verdicts.parquet", [row for row in verdicts if {row.policy_a, row.policy_b} in islands])
    answer = write_comparison_report(folder)["answer"]
    assert answer["tone"] == "unclear"
    assert answer["text"] == (
        "There is no ranking of all policies by the judge gold: no verdict connects sft and ppo with base and other."
    )
    assert "No Bradley–Terry ratings" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_judge_that_failed_on_all_is_no_answer(make_folder: MakeFolder) -> None:
    folder = make_folder(failing={"gold": 1.1})
    report = write_comparison_report(folder)
    assert report["answer"]["text"] == "There is no result: no verdict succeeded."
    assert report["summary"]["failures"][0]["num_verdicts"] == 24


@pytest.mark.parametrize("num_prompts", [1, 2, 4, 12, 20])
def test_few_prompts_are_no_error(make_folder: MakeFolder, num_prompts: int) -> None:
    """It also works if resamples hold ties but no loss, or if a category has two prompts."""
    judges = {"gold": ["gold"], "people": ["ada", "bo"]}
    report = write_comparison_report(
        make_folder(policies={"sft": 0.0, "ppo": 2.5}, judges=judges, num_prompts=num_prompts)
    )
    pair = report["summary"]["judges"][0]["pairs"][0]
    assert pair["win_rate"]["num_prompts"] == num_prompts
    assert pair["different"] == (num_prompts >= 12)
    assert report["answer"]["tone"] == ("better" if num_prompts >= 12 else "unclear")


def test_warnings_say_what_the_numbers_hide(four_policies: Path, two_policies: Path, make_folder: MakeFolder) -> None:
    found = " ".join(read(four_policies / "report.json")["warnings"])
    num_failed = read(four_policies / "report.json")["summary"]["judges"][0]["num_failed"]
    assert f"{num_failed} verdicts of the judge gpt failed" in found
    assert "The judge gpt prefers the response shown first" in found
    assert "The labelers of the judge people agree little" in found
    assert "judge people prefers" not in found  # shown in random order, no bias planted
    calm = read(two_policies / "report.json")["warnings"]
    assert calm[0] == "gold is the only judge: no interval here accounts for its errors."
    assert not any("Only" in text or "failed" in text for text in calm)
    folder = make_folder(judges={"people": ["ada"]}, num_prompts=12, ties=0.0)
    responses = parquet.read_table(folder / "responses.parquet").to_pylist()
    verdicts = [row for row in read_verdicts(folder / "verdicts.parquet") if row.prompt_id != "p-0003"]
    write_rows(folder / "verdicts.parquet", verdicts)
    kept = [row for row in read_comparison(folder).responses if (row.policy, row.prompt_id) != ("ppo", "p-0003")]
    assert len(kept) == len(responses) - 1
    write_rows(folder / "responses.parquet", kept)
    warnings = write_comparison_report(folder)["warnings"]
    assert "All verdicts of the judge people are by one labeler; another may judge differently." in warnings
    assert "Responses to some of 12 prompts are missing: ppo lacks 1." in warnings


def test_a_difference_of_length_alone_is_warned_of(make_folder: MakeFolder) -> None:
    """A judge that always prefers the longer response, and a policy that writes longer ones."""
    folder = make_folder(policies={"sft": 0.0, "ppo": 0.0}, num_prompts=200, ties=0.0)
    generator = np.random.default_rng(0)
    rows = []
    for row in read_verdicts(folder / "verdicts.parquet"):
        longer = float(generator.normal(60, 80))
        won = float(generator.random() < 1 / (1 + math.exp(longer / 40)))  # a is SFT
        rows.append(replace(row, length_a=400, length_b=max(0, 400 + round(longer)), preference_a=won))
    write_rows(folder / "verdicts.parquet", rows)
    report = write_comparison_report(folder)
    assert report["answer"]["text"].startswith("ppo is preferred to sft")
    assert any(text.startswith("At equal length the judge gold shows no preference") for text in report["warnings"])


def test_the_page_says_how_many_prompts_it_holds(make_folder: MakeFolder) -> None:
    comparison = read_comparison(make_folder(num_prompts=12))
    page, report = render(comparison, max_prompts=5)
    assert "This page holds 5 of 12 prompts, evenly spread over all; the files hold the rest." in page
    assert report["samples"] == {
        "num_shown": 5, "num_prompts": 12, "prompt_ids": ["p-0000", "p-0002", "p-0004", "p-0007", "p-0009"]
    }  # fmt: skip
    assert page.count('<details class="sample"') == 5
    assert "All 12 prompts, with every response and every verdict." in render(comparison)[0]


def test_prompts_are_taken_evenly_within_both_bounds() -> None:
    assert evenly([10] * 4, 9, 1000) == [0, 1, 2, 3]
    assert evenly([10] * 100, 4, 1000) == [0, 25, 50, 75]
    assert evenly([10] * 100, 100, 55) == [0, 20, 40, 60, 80]
    assert evenly([10_000, 1], 2, 100) == [0]


def test_long_texts_are_folded_and_cut_in_words() -> None:
    assert (folded("short").text, folded("short").rest, folded("short").num_left) == ("short", "", 0)
    text = "word " * 10_000
    found = folded(text)
    assert len(found.text) <= UNFOLDED_CHARACTERS
    assert found.text + found.rest == text[:TEXT_CHARACTERS]
    assert found.rest.startswith(" ")
    assert found.num_left == len(text) - TEXT_CHARACTERS
    assert folded("x" * 5_000).text == "x" * UNFOLDED_CHARACTERS


def test_verdicts_disagree_on_the_same_two_responses_alone(two_policies: Path) -> None:
    row = read_verdicts(two_policies / "verdicts.parquet")[0]
    won, tied = replace(row, preference_a=1.0), replace(row, preference_a=0.5)
    turned_round = replace(won, policy_a=won.policy_b, policy_b=won.policy_a)
    assert verdicts_disagree([won, replace(won, preference_a=0.2)])
    assert verdicts_disagree([won, turned_round])
    assert not verdicts_disagree([won, tied])
    assert not verdicts_disagree([won, replace(turned_round, preference_a=0.0)])
    assert not verdicts_disagree([won, replace(won, index_a=1, preference_a=0.0)])


def test_looks_stay_apart_and_names_that_shorten_alike_are_whole() -> None:
    names = ["ppo", *(f"a-very-long-name-of-a-policy-{number}" for number in range(3)), "best_of_4"]
    looks = styles_of(names)
    assert list(looks) == names
    assert len({(look.tone, look.marker) for look in looks.values()}) == 5
    assert (looks["ppo"].title, looks["best_of_4"].title) == ("ppo", "best_of_4"), "as their user called them"
    assert len({look.title for look in looks.values()}) == 5


def test_p_values_as_people_read_them() -> None:
    assert [p_value(p) for p in (0.0001, 0.0123, 0.4567, 1.0, math.nan)] == [
        "p < .001", "p = .012", "p = .46", "p = 1.00", "p unknown"
    ]  # fmt: skip


def test_heed_report_knows_a_comparison(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder()
    monkeypatch.setattr("sys.argv", ["heed", "report", str(folder)])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert read(folder / "report.json")["comparison"] == "made"
