"""The loop on a run's page: labels, gains and reward models by round, and why it stopped or what it waits for.

The page is made from the run's folder at any time, so it grows while the loop runs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from files.records import read_record
from heed.loop.collect import RoundResults
from heed.loop.config import GAIN, LoopConfig, name_of_round
from heed.loop.gain import GainResults
from preferences.statistics.estimates import Interval
from reward.report import RewardResults
from stages.reports.parts import (
    Answer,
    Cell,
    Columns,
    Facts,
    Note,
    Part,
    Row,
    Section,
    StageReport,
    StageReporter,
    Table,
)
from stages.reports.plots import KLPoint, KLSeries, Measured, interval_figure, kl_figure
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import headline_of, stage_block
from stages.reports.text import UNKNOWN, count_of, duration, ends_of, kl_with_ends, label, number, percent

STATE = "loop.json"
STAGES = ("collect", "reward", "rejection", "dpo", "ppo", GAIN)  # of a round, if the job has them


@dataclass(frozen=True)
class LoopState:
    """The contents of loop.json: the round that runs, how many labels it waits for, why their store cannot be used now,
    and why the loop stopped; 0 and "" for what does not hold.
    """

    round: int
    waits_for: int = 0
    stopped: str = ""
    store_away: str = ""


@dataclass(frozen=True)
class RoundFiles:
    """What a round has written so far; None for what is not there yet."""

    number: int
    collected: RoundResults | None
    reward: RewardResults | None
    gain: GainResults | None
    seconds: float


def read_rounds(run_folder: Path, num_rounds: int) -> list[RoundFiles]:
    """Returns the rounds that have begun."""
    found = [_read_round(run_folder, number_) for number_ in range(1, num_rounds + 1)]
    return [one for one in found if one.collected is not None]


def _read_round(run_folder: Path, number_: int) -> RoundFiles:
    def result(stage: str, kind: type[Any]) -> Any:
        path = run_folder / name_of_round(stage, number_) / "results.json"
        return read_record(path, kind) if path.is_file() else None

    paths = [run_folder / name_of_round(stage, number_) / "lineage.json" for stage in STAGES]
    seconds = sum(json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in paths if path.is_file())
    return RoundFiles(
        number_, result("collect", RoundResults), result("reward", RewardResults), result(GAIN, GainResults), seconds
    )


def read_state(run_folder: Path) -> LoopState | None:
    """Returns what the loop does now; None if it has not begun."""
    path = run_folder / STATE
    return read_record(path, LoopState) if path.is_file() else None


def with_loop(reporter: StageReporter) -> StageReporter:
    """Returns the reporter of [compare], which also shows the loop, even before the comparison has run."""

    def report(stage: StageFolder) -> StageReport:
        own = reporter.report(stage) if stage.status != "not run" else StageReport()
        config = LoopConfig.model_validate(stage.job["loop"])
        run_folder = stage.path.parent
        rounds, state = read_rounds(run_folder, config.rounds), read_state(run_folder)
        answer = answer_of(rounds, state, config)
        more = (*answer.more, *((own.answer.text, *own.answer.more) if own.answer else ()))
        return replace(
            own,
            parts=(),
            sections=(loop_section(rounds, state, config, stage.job), *own.sections),
            answer=replace(answer, more=more),
        )

    return replace(reporter, report=report, is_always_shown=True)


def answer_of(rounds: Sequence[RoundFiles], state: LoopState | None, config: LoopConfig) -> Answer:
    """Says what the loop has gained so far, what it waits for, and why it stopped."""
    compared = [one.gain for one in rounds if one.gain is not None]
    num_labels = next((one.collected.num_labels for one in reversed(rounds) if one.collected is not None), 0)
    used = f"{number(num_labels)} of {count_of(config.labels, 'label')} used in {count_of(len(rounds), 'round')}."
    now = _now(state, config.store)
    if not compared:
        return Answer("unclear", "The loop has not compared a policy yet.", (used, now) if now else (used,))
    last = compared[-1]
    text = (
        f"Round {last.round}'s policy {_verb(last.gain)} the previous round's:"
        f" {_signed(last.gain)} {last.unit} with {count_of(last.num_new_labels, 'new label')}."
    )
    if len(compared) == 1:
        text = text.replace("the previous round's", "the model that it starts from")
    return Answer(_tone(last.gain), text, (used, now) if now else (used,))


def _tone(gain: Interval) -> Literal["better", "worse", "unclear"]:
    if gain.low > 0:
        return "better"
    return "worse" if gain.high < 0 else "unclear"


def _verb(gain: Interval) -> str:
    if gain.low > 0:
        return "is better than"
    return "is worse than" if gain.high < 0 else "is not shown to differ from"


def _now(state: LoopState | None, store: str) -> str:
    if state is None:
        return ""
    if state.stopped:
        return f"The loop has stopped: {state.stopped}"
    if state.store_away:
        return f"Round {state.round} waits for the label store: {state.store_away}"
    if state.waits_for:
        where = f" People give them where `heed label serve --store {store}` says." if store else ""
        return f"Round {state.round} waits for {count_of(state.waits_for, 'label')}.{where}"
    return f"Round {state.round} has not finished."  # whether it runs, only the status knows


def loop_section(
    rounds: Sequence[RoundFiles], state: LoopState | None, config: LoopConfig, job: Mapping[str, Any]
) -> Section:
    num_labels = next((one.collected.num_labels for one in reversed(rounds) if one.collected is not None), 0)
    num_open = next((one.collected.num_open_tasks for one in reversed(rounds) if one.collected is not None), 0)
    facts = Facts(
        (
            ("Labels used", f"{number(num_labels)} of {number(config.labels)}"),
            ("Rounds", f"{number(sum(one.gain is not None for one in rounds))} of {number(config.rounds)}"),
            ("Rule", config.choose),
            ("Labelers", "people" if config.store else "the world's"),
            *((("Waiting for", count_of(state.waits_for, "label")),) if state is not None and state.waits_for else ()),
            *((("Open tasks", number(num_open)),) if config.store and rounds else ()),
        ),
        in_a_row=True,
    )
    parts: list[Part] = [
        Note(
            "Each round asks for labels, trains the reward model on all labels so far and then the policy, and compares"
            " it with the previous round's policy on the same prompts. The loop stops when the interval of"
            f" a round's gain lies below {config.least_gain:g} per hundred labels, or the labels are used."
        ),
        facts,
    ]
    compared = [one.gain for one in rounds if one.gain is not None]
    if compared:
        parts.append(Columns(tuple(_figures(rounds, compared))))
    if rounds:
        parts.append(_table(rounds, job))
    else:
        parts.append(Note("No round has collected its labels yet.", "absent"))
    return Section("rounds", "The loop", tuple(parts))


def _figures(rounds: Sequence[RoundFiles], compared: Sequence[GainResults]) -> list[Part]:
    found: list[Part] = []
    labels = {one.number: one.collected.num_labels for one in rounds if one.collected is not None}
    scored = [one for one in compared if isfinite(one.score.mean)]
    if scored:
        first = scored[0]
        points = (
            KLPoint(first.before, 0.0, first.before_score),
            *(KLPoint(one.policy, float(labels[one.round]), one.score) for one in scored),
        )
        series = KLSeries("policies", "ppo", "o", points, is_joined=True, is_band=True)
        figure = kl_figure(
            [series], title="Score against labels", unit=f"{first.unit}, 95% intervals", name="loop-score",
            x_label="labels used",
        )  # fmt: skip
        found.append(replace(figure, keys=()))
    rows = [Measured(f"Round {one.round}", "ppo", "o", one.gain) for one in compared]
    if all(isfinite(row.mean.low) for row in rows):
        unit = f"{compared[-1].unit}, paired over prompts"
        found.append(interval_figure(rows, title="Gain of each round", unit=unit, name="loop-gain"))
    return found


def _table(rounds: Sequence[RoundFiles], job: Mapping[str, Any]) -> Table:
    columns = (
        "Round", "Labels", "Chosen by", "Effective tasks", "Reward model's accuracy", "KL, nats", "Gain",
        "Per hundred labels", "Score", "Time", "Stages",
    )  # fmt: skip
    return Table(
        "Labels are those of the round and, in small, all so far. Effective tasks: as many uniformly chosen tasks tell"
        " as much about the average task. Accuracy is on held-out pairs, with the world's gold in small. KL is the"
        " policy's from the first round's starting model.",
        columns,
        tuple(_row(one, job) for one in rounds),
        title="Rounds",
    )


def _row(one: RoundFiles, job: Mapping[str, Any]) -> Row:
    collected, reward, gain = one.collected, one.reward, one.gain
    assert collected is not None, "only rounds that have collected are shown"
    accuracy = Cell(UNKNOWN)
    if reward is not None:
        truth = reward.gold_accuracy
        gold = f"gold: {percent(truth.mean)}" if truth is not None and isfinite(truth.mean) else ""
        accuracy = Cell(percent(reward.heldout_accuracy.mean), gold)
    stages = [name for name in STAGES if name == GAIN or name in job]
    links = tuple((f"#{name_of_round(name, one.number)}", name) for name in stages)
    return Row(
        (str(one.number),),
        (
            Cell(number(collected.num_new_labels), number(collected.num_labels)),
            Cell(collected.rule, label(collected.policy)),
            Cell(number(collected.effective_tasks, 0), f"of {number(collected.num_tasks)}"),
            accuracy,
            Cell(UNKNOWN) if gain is None else Cell(*kl_with_ends(gain.kl_nats)),
            _cell(None if gain is None else gain.gain, 2, is_signed=True),
            _cell(None if gain is None else gain.per_hundred, 3, is_signed=True),
            _cell(None if gain is None else gain.score, 2),
            Cell(duration(one.seconds)),
            Cell("", links=links),
        ),
    )


def _cell(value: Interval | None, digits: int, *, is_signed: bool = False) -> Cell:
    if value is None or not isfinite(value.mean):
        return Cell(UNKNOWN)
    sign = "+" if is_signed and value.mean > 0 else ""
    tint = 0.0 if not is_signed else 0.6 if value.low > 0 else -0.6 if value.high < 0 else 0.0
    return Cell(f"{sign}{number(value.mean, digits)}", ends_of(value, digits), tint)


def _signed(value: Interval) -> str:
    return f"{'+' if value.mean > 0 else ''}{number(value.mean)} ({ends_of(value)})"


def _report_collected(stage: StageFolder) -> StageReport:
    found = stage.results(RoundResults)
    if found is None:
        return StageReport((stage_block(stage, (), ()),))
    facts = (
        ("Chosen by", found.rule + (f", by {', '.join(found.models)}" if found.models else "")),
        ("Sampled", f"{found.policy or 'nothing'} on {count_of(found.num_prompts, 'prompt')}"),
        ("Tasks", f"{number(found.num_tasks)}, worth {number(found.effective_tasks, 0)} chosen uniformly"),
        ("Labels so far", f"{number(found.num_labels)} of {number(found.num_asked)} asked for"),
        ("New labels", number(found.num_new_labels)),
        ("Open tasks", number(found.num_open_tasks)),
        ("Labelers agree", percent(found.agreement.mean) if isfinite(found.agreement.mean) else UNKNOWN),
        *((("Labelers, gold", percent(found.gold_accuracy.mean)),) if found.gold_accuracy is not None else ()),
        ("Labelers", ", ".join(label(name) for name in found.labelers)),
        *((("Prompts read", str(found.overlong)),) if found.overlong else ()),
        *(rows.fact for rows in found.sources),
    )
    return StageReport((stage_block(stage, facts, ()),))


def _report_gain(stage: StageFolder) -> StageReport:
    found = stage.results(GainResults)
    if found is None:
        return StageReport((stage_block(stage, (), ()),))
    facts = (
        ("Compared", f"{found.policy} with {found.before} on {count_of(found.num_prompts, 'prompt')}"),
        ("Judge", label(found.judge)),
        ("Gain", _signed(found.gain)),
        ("Per hundred labels", _cell(found.per_hundred, 3, is_signed=True).text),
        ("KL from the first model, nats", "{} (95% {})".format(*kl_with_ends(found.kl_nats))),
    )
    headline = headline_of(
        stage, "gain.mean", "Gain of the last round", found.gain.mean,
        f"{'+' if found.gain.mean > 0 else ''}{number(found.gain.mean)}",
        f"{found.unit}, 95% interval {ends_of(found.gain)}",
    )  # fmt: skip
    last = replace(headline, field="loop.gain")  # of several rounds' cards of one field, the page shows the last
    return StageReport((stage_block(stage, facts, ()),), headlines=(last,))


COLLECT_REPORTER = StageReporter(
    "Labels of a round", "A rule chooses what labelers rank among samples of the newest policy.", _report_collected
)
GAIN_REPORTER = StageReporter(
    "Gain of a round", "The round's policy compared with the previous round's, on the same prompts.", _report_gain
)
