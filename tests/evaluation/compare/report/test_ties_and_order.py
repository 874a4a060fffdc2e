"""If there are only ties, a win rate of exactly one half, or no display order, the page makes no claim and draws no odd
figure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.compare.report.answer import WEIGHTS_ONLY
from evaluation.compare.report.page import write_comparison_report
from evaluation.verdicts import Verdict, read_verdicts, write_rows
from stages.reports.text import percent

MakeFolder = Callable[..., Path]


def rewrite(folder: Path, change: Callable[[int, Verdict], Verdict]) -> tuple[dict[str, Any], str]:
    """Returns the report and the page of a folder after its verdicts are changed; each is given with its place in its
    pair."""
    seen: dict[tuple[str, str, str], int] = {}
    rows = []
    for row in read_verdicts(folder / "verdicts.parquet"):
        key = (row.judge, row.policy_a, row.policy_b)
        seen[key] = seen.get(key, -1) + 1
        rows.append(change(seen[key], row))
    write_rows(folder / "verdicts.parquet", rows)
    return write_comparison_report(folder), (folder / "report.html").read_text(encoding="utf-8")


def tied(_: int, row: Verdict) -> Verdict:
    return replace(row, preference_a=0.5)


def halved(place: int, row: Verdict) -> Verdict:
    """Both orders of a prompt favour the same policy; the favoured policy alternates between prompts."""
    return replace(row, preference_a=float(place // 2 % 2))


def titles(page: str) -> Sequence[str]:
    return [part.split(">", 1)[1].split("</h3>")[0] for part in page.split("<h3 id=")[1:]]


def test_ties_alone_are_reported_as_ties(make_folder: MakeFolder) -> None:
    report, page = rewrite(make_folder(num_prompts=60), tied)
    assert report["answer"]["text"].startswith(
        "No difference between sft and ppo is shown by the judge gold: every verdict is a tie (95% interval 47 to 53%,"
    )
    assert report["answer"]["more"] == [
        "With 60 prompts, all of them ties, no difference could have been shown.",
        WEIGHTS_ONLY,
    ]
    (judge,) = report["summary"]["judges"]
    assert judge["ratings"]["policies"] == []
    assert "No Bradley–Terry ratings: every verdict is a tie; ties alone say nothing about strengths" in page
    assert not any(title.startswith("Ratings") for title in titles(page))
    assert judge["pairs"][0]["length_controlled"]["low"] is None
    assert "No win rate at equal length: all prompts came out alike, so the fit" in page
    assert "Length" not in titles(page)
    assert "50 to 50%" not in page
    assert "0.00 to 0.00" not in page


def test_ties_alone_give_no_ranking(make_folder: MakeFolder) -> None:
    report, _ = rewrite(make_folder(policies={"sft": 0.0, "ppo": 1.0, "base": 0.0}), tied)
    assert report["answer"]["tone"] == "unclear"
    assert report["answer"]["text"].startswith("There is no ranking by the judge gold: every verdict is a tie;")


def test_a_few_prompts_without_a_tie_are_counted(make_folder: MakeFolder) -> None:
    def change(place: int, row: Verdict) -> Verdict:
        return tied(place, row) if place >= 6 else replace(row, preference_a=0.0)

    report, _ = rewrite(make_folder(num_prompts=30), change)
    assert report["answer"]["more"][0] == (
        "With 30 prompts, only 3 of them without a tie, no difference could have been shown."
    )


def test_exactly_half_is_no_lead(make_folder: MakeFolder) -> None:
    judges = {"gold": ["gold"], "second": ["second"]}
    report, _ = rewrite(make_folder(judges=judges, num_prompts=40), halved)
    said = "each of the two is preferred half of the time (95% interval 35 to 65%, "
    assert report["answer"]["text"].startswith(f"No difference between sft and ppo is shown by the judge gold: {said}")
    assert report["answer"]["more"][-2].startswith(f"The judge second shows no difference: {said}")


def test_a_lead_of_exactly_half_is_none(make_folder: MakeFolder) -> None:
    """Two policies beat a third equally often, and each other half of the time."""

    def change(place: int, row: Verdict) -> Verdict:
        return replace(row, preference_a=1.0) if row.policy_b == "base" else halved(place, row)

    report, _ = rewrite(make_folder(policies={"sft": 0.0, "ppo": 0.0, "base": -1.0}, num_prompts=40), change)
    assert "sft is preferred to base" in report["answer"]["text"]
    assert "sft to ppo" not in report["answer"]["text"]
    assert "ppo to sft" not in report["answer"]["text"]


def test_only_a_true_half_shows_as_50_percent() -> None:
    assert [percent(share) for share in (0.5, 0.502, 0.4999, 0.508, 0.004, 0.99996, 0.0, 1, 0.555)] == [
        "50%", "50.2%", "49.99%", "51%", "0.4%", "100.00%", "0%", "100%", "56%"
    ]  # fmt: skip


def test_the_order_is_shown_where_verdicts_have_one(make_folder: MakeFolder) -> None:
    judges = {"gold": ["scorer"], "people": ["ada"]}

    def change(_: int, row: Verdict) -> Verdict:
        return replace(row, first="") if row.judge == "gold" else row

    report, page = rewrite(make_folder(judges=judges, num_prompts=30), change)
    assert [judge["position_bias"]["num_verdicts"] for judge in report["summary"]["judges"]] == [0, 30]
    assert titles(page).count("The order shown") == 1
    assert 'id="order-1"' in page
    assert "The response shown first is preferred" in page
    assert "The verdict changes with the order" not in page  # no labeler judged both orders


def test_an_order_that_never_changed_tells_no_bias(make_folder: MakeFolder) -> None:
    _, page = rewrite(make_folder(judges={"people": ["ada"]}), lambda _, row: replace(row, first="a"))
    assert "no two policies were shown in both orders, so position bias cannot be separated from strength" in page
    assert "The verdict changes with the order" not in page
