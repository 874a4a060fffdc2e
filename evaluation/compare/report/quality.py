"""How good a judge is, in words and tables: on the terminal, on the page of `heed judge-quality`, and on the page of
each comparison by that judge; and win rates that people's verdicts correct.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.judges.quality import QUALITY, Effect, JudgeQuality
from evaluation.statistics.corrected import CorrectedWinRate
from evaluation.statistics.results import PositionBias
from evaluation.statistics.summary import NO_ORDER
from files.atomic import write_json, write_text
from files.records import as_json, record_of
from preferences.statistics.estimates import Interval, Share
from stages.reports.page import Page, render
from stages.reports.parts import Answer, Cell, Note, Part, Row, Section, Table
from stages.reports.text import count_of, ends_of, number

Rows = list[tuple[str, str, str]]  # what, the figure with its interval, and what it is about

ALONE = "it scores each response alone: the order cannot move it"


def findings(quality: JudgeQuality) -> list[str]:
    """Says how often a judge agrees with people, what that shows, and each effect that is shown to move the judge."""
    share, bias = quality.agreement, quality.position
    shown = "opposite to people" if share.high < 0.5 else "not shown to differ from chance"
    shown = "more often than chance" if share.low > 0.5 else shown
    of = count_of(share.num_pairs, "judgment")
    said = [f"{quality.judge['name']} agrees with people in {_share(share)} of {of}: {shown}."]
    if bias.low > 0.5 or bias.high < 0.5:
        said.append(f"It prefers the response shown {'first' if bias.mean > 0.5 else 'second'}: {_share(bias)} first.")
    for effect, what in ((quality.length, "the longer response"), (quality.own, "its own responses")):
        if effect.difference.low > 0 or effect.difference.high < 0:
            more = "more" if effect.difference.mean > 0 else "less"
            said.append(f"It prefers {what} {more} than people do: {_effect(effect)}.")
    return said


def figure_rows(quality: JudgeQuality) -> Rows:
    """Returns all figures; unknown ones say why."""
    position, changed, decided, people = quality.position, quality.flips.changed, quality.decided, quality.people
    length, own = quality.length, quality.own
    no_order = ALONE if position.reason == NO_ORDER else position.reason
    alike = f"judgments, {decided.mean * decided.num_pairs:,.0f} alike"
    swapped = f"pairs in both orders; the winner in {_share(quality.flips.reversed)}"
    rows = [
        ("agrees with people", _share(quality.agreement), f"{quality.agreement.num_pairs:,} judgments; its ties: half"),
        ("without its ties", _share(decided), _about(decided.num_pairs, alike, "all tied")),
        ("two people agree", _share(people), _about(people.num_pairs, "pairs of judgments", "no pair has two")),
        ("highest agreement", _share(quality.ceiling), "that a judge can reach, as people disagree"),
        ("prefers the first shown", _share(position), _about(position.num_verdicts, "verdicts", no_order)),
        ("changes with the order", _share(changed), _about(changed.num_pairs, swapped, no_order)),
        ("prefers the longer", _effect(length), _about(length.num_pairs, "pairs", "no two responses differ in length")),
        ("prefers its own", _effect(own), _about(own.num_pairs, "pairs", "the files name this judge as no writer")),
    ]
    if len(quality.by_group) > 1:
        rows += [(name, _share(share), f"{share.num_pairs:,} judgments") for name, share in quality.by_group.items()]
    rows += _calibration_rows(quality)
    left_out = [f"{count:,} x {kind}" for kind, count in quality.warnings.items()]
    left_out += [f"{quality.num_tied:,} judgments are ties"] if quality.num_tied else []
    left_out += [f"{count_of(quality.num_failed, 'task')} without a verdict"] if quality.num_failed else []
    return [*rows, ("left out or unusual", "", "; ".join(left_out))] if left_out else rows


def _calibration_rows(quality: JudgeQuality) -> Rows:
    if (found := quality.calibration) is None:
        return []
    error = found.error
    about = ("mean confidence minus accuracy", "nats per pair", "factor on scores; below 1 the model is overconfident")
    values = {"overconfidence": found.overconfidence, "log-loss": found.log_loss, "best scale": found.scale}
    named = zip(values.items(), about, strict=True)
    rows = [(name, f"{number(value.mean, 3)} ({ends_of(value, 3)})", text) for (name, value), text in named]
    return [*rows, ("ECE", number(error.found, 3), f"{number(error.if_calibrated, 3)} if calibrated")]


def write_quality(folder: Path, quality: JudgeQuality) -> None:
    """Write quality.json and report.html."""
    share, (text, *more) = quality.agreement, findings(quality)
    page = Page(
        kicker="Heed judge quality",
        title=str(quality.judge["name"]),
        meta=(count_of(share.num_pairs, "judgment"), count_of(len(quality.files), "file")),
        answer=Answer("better" if share.low > 0.5 else "worse" if share.high < 0.5 else "unclear", text, tuple(more)),
        sections=(Section("figures", "Agreement, and what moves it", (_table(figure_rows(quality)),)),),
        skip_to=("figures", "the figures"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.html", render(page))
    write_json(folder / QUALITY, as_json(quality))


def quality_section(
    entries: Sequence[Mapping[str, Any]], corrected: Sequence[CorrectedWinRate]
) -> tuple[list[Section], list[str]]:
    """Returns a comparison's section on its judges, and its sentences: figures that compare.json's entries have, and
    win rates that people's verdicts correct. Without any of these there is no section.
    """
    known = [record_of(one["quality"], JudgeQuality, f"judge {one['name']!r}") for one in entries if "quality" in one]
    texts = [" ".join(findings(quality)) for quality in known] + [corrected_text(one) for one in corrected]
    parts: list[Part] = [*map(Note, texts), *(_table(figure_rows(quality)) for quality in known)]
    return [Section("judge-quality", "How good the judges are", tuple(parts))] if parts else [], texts


def corrected_text(one: CorrectedWinRate) -> str:
    """Says a corrected win rate, and what it shows."""
    low, high = one.win_rate.low, one.win_rate.high
    shown = "no difference shown" if low <= 0.5 <= high else f"{one.policy_a if low > 0.5 else one.policy_b} is better"
    return (
        f"{one.judge} corrected by {one.people} on {one.num_labelled:,} of {one.num_prompts:,} prompts:"
        f" {one.policy_a} over {one.policy_b} {_share(one.win_rate)}, {shown} (if these are a random sample)."
    )


def _table(rows: Rows) -> Table:
    cells = tuple(Row((what,), (Cell(figure), Cell(about))) for what, figure, about in rows)
    return Table("Intervals are 95% intervals over prompts.", ("", "Figure", ""), cells)


def _share(share: Interval | Share | PositionBias) -> str:
    """Formats a share in percent with its interval: "11.9% (7.4 to 18.6)"."""
    if math.isnan(share.mean):
        return "-"
    ends = "no interval" if math.isnan(share.low) else f"{100 * share.low:.1f} to {100 * share.high:.1f}"
    return f"{share.mean:.1%} ({ends})"


def _effect(effect: Effect) -> str:
    if not effect.num_pairs:
        return "-"
    d = effect.difference
    ends = "no interval" if math.isnan(d.low) else f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
    return f"{effect.judge:.1%}, people {effect.people:.1%}: {100 * d.mean:+.1f} points ({ends})"


def _about(num: int, what: str, reason: str) -> str:
    return f"{num:,} {what}" if num else reason
