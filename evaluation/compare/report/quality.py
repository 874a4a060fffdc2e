"""How good a judge is, in words and tables: on the terminal, on the page of `heed judge-quality`, and on the page of
each comparison by that judge; and win rates that people's verdicts correct.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from evaluation.judges.quality import QUALITY, Effect, JudgeQuality
from evaluation.statistics.corrected import CorrectedWinRate
from evaluation.statistics.summary import NO_ORDER
from files.atomic import write_json, write_text
from files.records import as_json, record_of
from preferences.statistics.estimates import Interval
from stages.reports.page import Page, render
from stages.reports.parts import Answer, Cell, Note, Part, Row, Section, Table
from stages.reports.text import count_of, number

Tone = Literal["better", "worse", "unclear"]
Rows = list[tuple[str, str, str]]  # what, the figure with its interval, and what it is about


def agreement_text(quality: JudgeQuality) -> str:
    """Says how often a judge agrees with people, and what that shows."""
    share = quality.agreement
    shown = "more often than chance"
    if share.high < 0.5:
        shown = "opposite to people"
    elif share.low <= 0.5:
        shown = "not shown to differ from chance"
    of = count_of(share.num_pairs, "judgment")
    return f"{quality.judge['name']} agrees with people in {_share(share)} of {of}: {shown}."


def findings(quality: JudgeQuality) -> list[str]:
    """Returns a sentence for each effect that is shown to move the judge: order, length and its own responses."""
    said, bias = [], quality.position
    if bias.low > 0.5 or bias.high < 0.5:
        said.append(f"It prefers the response shown {'first' if bias.mean > 0.5 else 'second'}: {_share(bias)} first.")
    for effect, what in ((quality.length, "the longer response"), (quality.own, "its own responses")):
        if effect.difference.low > 0 or effect.difference.high < 0:
            more = "more" if effect.difference.mean > 0 else "less"
            said.append(f"It prefers {what} {more} than people do: {_effect(effect)}.")
    return said


def figure_rows(quality: JudgeQuality) -> Rows:
    """Returns all figures but those by group and margin; unknown ones say why."""
    position, changed, decided, people = quality.position, quality.flips.changed, quality.decided, quality.people
    length, own = quality.length, quality.own
    alone = "it scores each response alone: the order cannot move it"
    no_order = alone if position.reason == NO_ORDER else position.reason
    num_right = round(decided.mean * decided.num_pairs) if decided.num_pairs else 0
    swapped = f"pairs in both orders; the winner in {_share(quality.flips.reversed)}"
    rows = [
        ("agrees with people", _share(quality.agreement), f"{quality.agreement.num_pairs:,} judgments; its ties: half"),
        ("without its ties", _share(decided), _about(decided.num_pairs, f"judgments, {num_right:,} alike", "all tied")),
        ("two people agree", _share(people), _about(people.num_pairs, "pairs of judgments", "no pair has two")),
        ("highest agreement", _share(quality.ceiling), "that a judge can reach, as people disagree"),
        ("prefers the first shown", _share(position), _about(position.num_verdicts, "verdicts", no_order)),
        ("changes with the order", _share(changed), _about(changed.num_pairs, swapped, no_order)),
        ("prefers the longer", _effect(length), _about(length.num_pairs, "pairs", "no two responses differ in length")),
        ("prefers its own", _effect(own), _about(own.num_pairs, "pairs", "the files name this judge as no writer")),
    ]
    calibrated = quality.calibration
    if calibrated is not None:
        error = calibrated.error
        rows += [
            ("overconfidence", _interval(calibrated.overconfidence), "mean confidence minus accuracy"),
            ("ECE", number(error.found, 3), f"{number(error.if_calibrated, 3)} if calibrated; p = {error.p_value:.3f}"),
            ("log-loss", _interval(calibrated.log_loss), "nats per pair"),
            ("best scale", _interval(calibrated.scale), "factor on the scores; below 1 the model is overconfident"),
        ]
    left_out = [f"{count:,} x {kind}" for kind, count in quality.warnings.items()]
    left_out += [f"{quality.num_tied:,} judgments are ties"] if quality.num_tied else []
    left_out += [f"{count_of(quality.num_failed, 'task')} without a verdict"] if quality.num_failed else []
    return [*rows, ("left out or unusual", "", "; ".join(left_out))] if left_out else rows


def group_rows(quality: JudgeQuality) -> Rows:
    """Returns the agreement by file and category, and a reward model's accuracy by the difference of its scores."""
    groups = quality.by_group.items() if len(quality.by_group) > 1 else ()
    rows = [(name, _share(share), f"{share.num_pairs:,} judgments") for name, share in groups]
    for margin in quality.calibration.bins if quality.calibration else ():
        ends = f"scores differ by {number(margin.low)} to {number(margin.high)}"
        about = f"{margin.accuracy.num_pairs:,} judgments; confidence {margin.confidence:.1%}"
        rows.append((ends, _share(margin.accuracy), about))
    return rows


def write_quality(folder: Path, quality: JudgeQuality) -> None:
    """Write quality.json and report.html."""
    text, found = agreement_text(quality), findings(quality)
    tone: Tone = "better" if quality.agreement.low > 0.5 else "worse" if quality.agreement.high < 0.5 else "unclear"
    tables: list[Part] = [_table("Agreement and effects", figure_rows(quality))]
    tables += [_table("By group", group_rows(quality))] if group_rows(quality) else []
    made = [(name, str(value), "") for name, value in {**quality.judge, **quality.files}.items()]
    page = Page(
        kicker="Heed judge quality",
        title=str(quality.judge["name"]),
        meta=(count_of(quality.agreement.num_pairs, "judgment"), count_of(len(quality.files), "file")),
        answer=Answer(tone, text, tuple(found)),
        sections=(
            Section("figures", "How far it agrees with people, and what moves it", tuple(tables)),
            Section("made", "The judge, and the files by SHA-256", (_table("Origins", made),)),
        ),
        skip_to=("figures", "the figures"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.html", render(page))
    write_json(folder / QUALITY, as_json(quality))


def quality_section(entries: Sequence[Mapping[str, Any]], corrected: Sequence[CorrectedWinRate]) -> list[Section]:
    """Returns what a comparison's page says of its judges: figures from compare.json's entries, and win rates that
    people's verdicts correct.
    """
    parts: list[Part] = [Note(text) for text in quality_texts(entries, corrected)]
    parts += [_table(f"Of {quality.judge['name']}", figure_rows(quality)) for quality in _known(entries)]
    parts += [Note(ABOUT_CORRECTED, "aside")] if corrected else []
    return [Section("judge-quality", "How good the judges are", tuple(parts))] if parts else []


ABOUT_CORRECTED = (
    "People judged some of the prompts too, which corrects a judge's win rates (prediction-powered inference, arXiv"
    " 2301.09633), if these are a random sample. The intervals are 95% intervals without Holm's correction."
)


def quality_texts(entries: Sequence[Mapping[str, Any]], corrected: Sequence[CorrectedWinRate]) -> list[str]:
    """Returns a text per judge with known figures, and one per corrected win rate."""
    texts = [" ".join([agreement_text(quality), *findings(quality)]) for quality in _known(entries)]
    return texts + [corrected_text(one) for one in corrected]


def _known(entries: Sequence[Mapping[str, Any]]) -> list[JudgeQuality]:
    return [record_of(one["quality"], JudgeQuality, f"judge {one['name']!r}") for one in entries if "quality" in one]


def corrected_text(one: CorrectedWinRate) -> str:
    """Says a corrected win rate, and what it shows."""
    low, high = one.win_rate.low, one.win_rate.high
    shown = "no difference shown" if low <= 0.5 <= high else f"{one.policy_a if low > 0.5 else one.policy_b} is better"
    return (
        f"{one.judge} corrected by {one.people} on {one.num_labelled:,} of {one.num_prompts:,} prompts:"
        f" {one.policy_a} over {one.policy_b} {_share(one.win_rate)}, {shown} (weight of the judge {one.weight:.2f})."
    )


def _table(title: str, rows: Rows) -> Table:
    cells = tuple(Row((what,), (Cell(figure), Cell(about))) for what, figure, about in rows)
    return Table("95% intervals over prompts.", ("", "Figure", ""), cells, title=title)


def _share(share: Any) -> str:
    """Formats a share in percent with its interval: "11.9% (7.4 to 18.6)"."""
    if math.isnan(share.mean):
        return "-"
    ends = "no interval" if math.isnan(share.low) else f"{100 * share.low:.1f} to {100 * share.high:.1f}"
    return f"{share.mean:.1%} ({ends})"


def _interval(value: Interval) -> str:
    return f"{number(value.mean, 3)} ({number(value.low, 3)} to {number(value.high, 3)})"


def _effect(effect: Effect) -> str:
    if not effect.num_pairs:
        return "-"
    d = effect.difference
    ends = "no interval" if math.isnan(d.low) else f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
    return f"{effect.judge:.1%}, people {effect.people:.1%}: {100 * d.mean:+.1f} points ({ends})"


def _about(num: int, what: str, reason: str) -> str:
    return f"{num:,} {what}" if num else reason
