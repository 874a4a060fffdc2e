"""The page of an evaluation. It depends on the folder alone, so the same folder gives the same page, byte for byte."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from evaluation.evaluate.folder import (
    ANSWERS,
    REPORT,
    VALUES,
    Contamination,
    EvaluationFolder,
    EvaluationReport,
    ReportedMeasure,
    SuiteReport,
    read_evaluation,
)
from evaluation.evaluate.statistics import Difference, Value
from evaluation.suites.suite import Item
from files.atomic import write_text
from preferences.statistics.estimates import Interval
from stages.reports.page import Page, render
from stages.reports.parts import (
    Answer,
    Cell,
    Details,
    Dot,
    Forest,
    ForestRow,
    Head,
    Note,
    Part,
    Row,
    Samples,
    Section,
    ShownPrompt,
    ShownResponse,
    Table,
    axis,
    evenly,
    folded,
)
from stages.reports.text import (
    UNKNOWN,
    PolicyStyle,
    count_of,
    ends_of,
    listed,
    number,
    p_value,
    percent,
    share_ends,
    styles_of,
)

Styles = Mapping[str, PolicyStyle]

NUM_SAMPLES = 12  # items per suite
MAX_CHARACTERS = 1_000_000  # of their texts
MAX_FAILURES = 20  # reasons per suite
MAX_GROUPS = 60
MAX_DIFFERENCES = 200  # rows per suite
DIFFERENCE_COLUMNS = ("Measure", "Difference (interval)", "p (Holm)", "Items", "Which is better")
WIDENED = "Intervals are 95% intervals, or wider where the correction removes a difference: at the level of that test."
TWO_MODELS = (
    "A difference is one between two sets of weights: another seed of the same algorithm may do better or worse, and"
    " these intervals do not cover that."
)
ALGORITHMS = (
    "The sentences on algorithms hold for other seeds and other items. The rest is about these weights only: another"
    " seed of the same algorithm may do better or worse."
)
MAX_SENTENCES = 5  # after the first one, at the top of the page
INTERVALS = (
    "Intervals are 95% intervals for other items of the same kind; items of one cluster count as one observation. To"
    " tell whether two models differ, use the differences below, not the overlap of two intervals."
)


def write_evaluation_report(folder: Path, name: str = "") -> None:
    """Write report.html into an evaluation's folder, which is called `name` (default: the folder's own name).

    Raises: ValueError naming a file that is absent or malformed.
    """
    evaluation = read_evaluation(folder, name or folder.resolve().name)
    write_text(folder / "report.html", page_of(evaluation))


def page_of(evaluation: EvaluationFolder) -> str:
    """Returns the page as HTML."""
    report = evaluation.report
    styles = styles_of(report.models)
    num_items = sum(suite.statistics.num_items for suite in report.suites)
    samples = _samples(evaluation, styles)
    page = Page(
        kicker="Heed evaluation",
        title=evaluation.name,
        meta=(
            count_of(len(report.models), "model"),
            count_of(len(report.suites), "suite"),
            count_of(num_items, "item"),
        ),
        answer=_answer(report.suites),
        sections=(
            *(_section(suite, styles) for suite in report.suites),
            Section("samples", "Answers", (_about_samples(samples), samples)),
            _made(evaluation),
        ),
        skip_to=("samples", "the answers"),
        styles=tuple(styles.values()),
        warnings=tuple(_warnings(report)),
    )
    return render(page)


def _answer(suites: Sequence[SuiteReport]) -> Answer:
    """Says what the evaluation shows. Sentences on algorithms come first, and those that show a difference before
    those that show none, so that the first one agrees with the answer's tone.
    """
    algorithms = [conclusion for suite in suites for conclusion in algorithm_conclusions(suite)]
    weights = [conclusion for suite in suites for conclusion in conclusions(suite)]
    sentences = [
        text for group in (algorithms, weights) for _, text in sorted(group, key=lambda conclusion: not conclusion[0])
    ]
    is_shown = any(is_clear for is_clear, _ in algorithms or weights)
    num_more = len(sentences) - 1 - MAX_SENTENCES
    more = (f"{count_of(num_more, 'more sentence')} like these: see the sections.",) if num_more > 0 else ()
    has_differences = any(primary(suite.statistics.differences, suite) for suite in suites)
    caveat = (ALGORITHMS,) if algorithms else (TWO_MODELS,) if has_differences else ()
    sentences += [text for suite in suites for text in other_conclusions(suite)]
    return Answer(
        "better" if is_shown else "unclear", sentences[0], (*sentences[1 : 1 + MAX_SENTENCES], *more, *caveat)
    )


def primary(rows: Sequence[Difference], suite: SuiteReport, measure: str = "") -> list[Difference]:
    """Returns the differences in a measure, by default the first, that are known or withheld; empty if none is."""
    found = _by_measure(rows, suite)
    return found.get(measure or next(iter(found), ""), [])


def _by_measure(rows: Sequence[Difference], suite: SuiteReport) -> dict[str, list[Difference]]:
    """Returns the differences that are known or withheld, by measure in the suite's order."""
    found: dict[str, list[Difference]] = {measure.name: [] for measure in suite.measures}
    for row in rows:
        if math.isfinite(row.difference.mean) or row.conclusion.kind == "none":
            found[row.measure].append(row.ahead_first)
    return {measure: of_measure for measure, of_measure in found.items() if of_measure}


def conclusions(suite: SuiteReport) -> list[tuple[bool, str]]:
    """Says in words what the most important measure shows of the weights: which models differ, or the only model's
    value. Each sentence comes with whether it shows a difference.
    """
    rows = primary(suite.statistics.differences, suite)
    clear = [row for row in rows if row.better]
    open_rows = [row for row in rows if row.conclusion.kind == "undecided"]
    apart = [row for row in rows if row.conclusion.reason and not row.better]
    sentences = [(True, f"{suite.suite}: {in_words(row, suite)}") for row in clear]
    if open_rows and not clear:
        which = f"any of {number(len(open_rows))} pairs of models"
        none = f"no difference in {rows[0].measure} is shown between {which}."
        sentences.append((False, f"{suite.suite}: {in_words(rows[0], suite) if len(rows) == 1 else none}"))
    sentences += [(False, f"{suite.suite}: {in_words(row, suite)}") for row in apart]
    sentences += [
        (False, f"{suite.suite}: {a} and {b} gave the same answers: they are one model, and there is no comparison.")
        for a, b in suite.statistics.same_answers
    ]
    if sentences:
        return sentences
    measure = _first_known(suite)
    values = [v for v in suite.statistics.values if v.measure == measure.name and not v.group and _is_known(v)]
    texts = [f"{value.model} {value_text(value)}{_in_brackets(interval_text(value))}" for value in values]
    if not texts:
        return [(False, f"{suite.suite}: no measure could be computed for any model; the failures say why.")]
    return [(False, f"{suite.suite}: {measure.name} of {'; '.join(texts)}.")]


def algorithm_conclusions(suite: SuiteReport) -> list[tuple[bool, str]]:
    """Says in words what the most important measure shows of algorithms with several runs, as `conclusions` does."""
    rows = primary(suite.statistics.algorithms, suite)
    return [(bool(row.better), f"{suite.suite}: {in_words(row, suite)}") for row in rows]


def other_conclusions(suite: SuiteReport) -> list[str]:
    """Says what measures other than the most important one show, each corrected for its own pairs only."""
    by_measure = _by_measure(suite.statistics.algorithms or suite.statistics.differences, suite)
    others = {measure: by_measure[measure] for measure in list(by_measure)[1:]}
    told = [row for rows in others.values() for row in rows if row.better or row.conclusion.reason]
    open_rows = [rows[0] for rows in others.values() if not any(row in told for row in rows)]
    sentences = [f"{suite.suite}: {in_words(row, suite)}" for row in told]
    if open_rows:
        which = f"{listed([row.measure for row in open_rows])} is shown{_on_clean_items(open_rows[0])}"
        sentences.append(f"{suite.suite}: no difference in {which}.")
    return sentences


def _first_known(suite: SuiteReport) -> ReportedMeasure:
    """Returns the first measure that a model has a value of; the first of all if there is none."""
    known = {value.measure for value in suite.statistics.values if not value.group and _is_known(value)}
    return next((measure for measure in suite.measures if measure.name in known), suite.measures[0])


def _is_known(value: Value) -> bool:
    return math.isfinite(value.value.mean)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def in_words(row: Difference, suite: SuiteReport) -> str:
    """Says which of two models or algorithms is better, by how much, and how sure that is; or why that is not said. The
    row is `ahead_first`.
    """
    is_algorithm, reason = row.num_runs_a > 1, row.conclusion.reason
    who = f"{'the algorithms ' if is_algorithm else ''}{row.a} and {row.b}"
    if row.conclusion.kind == "none":
        return f"no verdict on {who} in {row.measure}: {reason or 'the measure has no interval'}."
    runs = f", over {number(row.num_runs_a)} and {number(row.num_runs_b)} runs" if is_algorithm else ""
    runs += _on_clean_items(row)
    if not row.better:
        size = difference_text(row.difference, row.measure, suite)
        extremes = f", with what is missing counted as worst and as best: {reason}" if reason else ""
        few = " Two runs can hardly show one: use three." if min(row.num_runs_a, row.num_runs_b) == 2 else ""
        return f"no difference in {row.measure} is shown between {who}{runs}{extremes} ({size}).{few}"
    if reason:
        runs += ", whatever the missing answers are worth"
    return (
        f"{'as algorithms, ' if is_algorithm else ''}{row.a} is better than {row.b} in {row.measure}"
        f"{_direction(row.measure, suite)}{runs}: {difference_text(row.difference, row.measure, suite)},"
        f" {p_value(row.holm_p)}{_in_brackets(reason)}. {row.conclusion.caution}".rstrip()
    )


def _on_clean_items(row: Difference) -> str:
    return f", on the {count_of(row.num_items, 'item')} outside the training data" if row.num_items_seen else ""


def is_share(measure: str, suite: SuiteReport) -> bool:
    """Returns whether a suite's measure is a share, from 0 to 1."""
    return any(value.unit == "share" for value in suite.statistics.values if value.measure == measure)


def _direction(measure: str, suite: SuiteReport) -> str:
    is_higher = next(reported.higher_is_better for reported in suite.measures if reported.name == measure)
    return "" if is_higher else ", where lower is better"


def difference_text(difference: Interval, measure: str, suite: SuiteReport) -> str:
    """Formats a difference in a measure with its interval, in percentage points for shares."""
    if not is_share(measure, suite):
        return f"{_signed(number(difference.mean))}{_in_brackets(ends_of(difference))}"
    texts = [_signed_points(value) for value in (difference.low, difference.high)]
    ends = f" ({texts[0]} to {texts[1]})" if UNKNOWN not in texts else ""
    return f"{_signed_points(difference.mean)} points{ends}"


def _signed(text: str) -> str:
    return text if text.startswith("\u2212") or text == UNKNOWN else f"+{text}"


def _signed_points(value: float) -> str:
    if not math.isfinite(value):
        return UNKNOWN
    return f"{100 * value:+z.1f}".replace("-", "\u2212")


def value_text(value: Value | None) -> str:
    if value is None:
        return UNKNOWN
    return percent(value.value.mean, 1) if value.unit == "share" else number(value.value.mean)


def interval_text(value: Value | None) -> str:
    if value is None or not math.isfinite(value.value.low):
        return ""
    interval = value.value
    return share_ends(interval.low, interval.high, 1) if value.unit == "share" else ends_of(interval)


def _warnings(report: EvaluationReport) -> list[str]:
    """What readers of the numbers must know: answers that could not be scored, saved answers that are unused, items
    seen in training, and models that are the only run of their algorithm.
    """
    warnings = [
        f"{suite}: {count_of(num, 'row')} of {model}'s file answer no item that was asked and are unused."
        for suite, models in report.settings.get("unused_rows", {}).items()
        for model, num in models.items()
    ]
    runs = [run for names in report.settings.get("algorithms", {}).values() for run in names]
    single = [model for model in report.models if model not in runs]
    if runs and single:
        warnings.append(
            f"There is only one run of {', '.join(single)}: a sentence on an algorithm takes several runs (seeds) of"
            " it."
        )
    for suite in report.suites:
        num_failed = {model: _num_failed(suite, model) for model in suite.statistics.models}
        by_model = ", ".join(f"{model} {number(num)}" for model, num in num_failed.items() if num)
        if by_model:
            warnings.append(
                f"{suite.suite}: some of {count_of(suite.statistics.num_items, 'item')} have no value (by model:"
                f" {by_model}); means leave them out."
            )
        for row in suite.contamination:
            if row.item_ids:
                share = percent(len(row.item_ids) / row.num_items)
                warnings.append(
                    f"{suite.suite}: {share} of the items share words with the training data of {row.model};"
                    " verdicts on it are on the other items."
                )
    return warnings


def _num_failed(suite: SuiteReport, model: str) -> int:
    values = [value for value in suite.statistics.values if value.model == model and not value.group]
    return max((value.num_failed for value in values), default=0)


def _section(suite: SuiteReport, styles: Styles) -> Section:
    statistics = suite.statistics
    groups = list(dict.fromkeys(value.group for value in statistics.values if value.group))
    parts: list[Part] = [
        Note(f"{suite.title}. {count_of(statistics.num_items, 'item')} from {suite.source}. {INTERVALS}"),
        _values(suite, styles),
        _forest(suite, styles),
    ]
    if statistics.algorithms:
        parts.append(_algorithms(suite))
    if statistics.differences:
        parts.append(_differences(suite, styles))
    if groups:
        tables = tuple(_group_table(suite, measure, groups, styles) for measure in suite.measures)
        parts.append(Details("By group", tables))
    if statistics.failures:
        parts.append(Details("Items without a value", (_failures(suite, styles),), is_open=True))
    parts += [_contamination(suite, row, styles) for row in suite.contamination]
    definitions = [
        Row((m.name,), (Cell(m.description), Cell("higher" if m.higher_is_better else "lower"))) for m in suite.measures
    ]
    columns = ("Measure", "What it is", "Better is")
    parts.append(Details("Measures", (Table("As the suite defines them.", columns, tuple(definitions)),)))
    return Section(f"suite-{suite.suite}", suite.suite, tuple(parts))


def _cell(value: Value | None) -> Cell:
    return Cell(value_text(value), "; ".join(filter(None, (interval_text(value), without_value(value)))))


def without_value(value: Value | None) -> str:
    """Says how many items have no value, because they failed or are missing; "" if all have one."""
    return f"{number(value.num_failed)} without a value" if value is not None and value.num_failed else ""


def _values(suite: SuiteReport, styles: Styles) -> Table:
    """Returns the table of models and measures: a row per model, since there are more models than measures."""
    rows = [
        Row((styles[model],), tuple(_cell(suite.statistics.of(model, measure.name)) for measure in suite.measures))
        for model in suite.statistics.models
    ]
    caption = f"Each measure with its 95% interval. From {VALUES}."
    return Table(caption, ("Model", *(measure.name for measure in suite.measures)), tuple(rows), title="All measures")


def _forest(suite: SuiteReport, styles: Styles) -> Forest:
    """Returns the first measure of all models on a common axis."""
    measure = _first_known(suite)
    values = [
        value for model in suite.statistics.models if (value := suite.statistics.of(model, measure.name)) is not None
    ]
    are_shares = all(value.unit == "share" for value in values)
    numbers = [end for v in values for end in (v.value.mean, v.value.low, v.value.high) if math.isfinite(end)]
    start, end, ticks = (0.0, 1.0, ()) if are_shares else axis(min(numbers, default=0.0), max(numbers, default=1.0))
    rows = []
    for value in values:
        cells = number(value.num_items), number(value.num_clusters)
        dots = (_dot(value.value, start, end),) if _is_known(value) else ()
        text, ends = value_text(value), interval_text(value) or "unknown"
        rows.append(ForestRow((styles[value.model],), dots, text, ends, cells))
    shared = {} if are_shares else {"ticks": tuple(((t - start) / (end - start), number(t)) for t in ticks)}
    return Forest(
        name=f"values-{suite.suite}",
        title=measure.name,
        caption=measure.description,
        corner="Model",
        value=measure.name,
        columns=("items", "clusters"),
        rows=tuple(rows),
        rows_from=f"From {VALUES}: rows of suite {suite.suite} and measure {measure.name}.",
        mark=None,
        **shared,
    )


def _dot(interval: Interval, start: float, end: float) -> Dot:
    def place(value: float) -> float | None:
        return (value - start) / (end - start) if math.isfinite(value) else None

    mean = place(interval.mean)
    assert mean is not None, interval
    return Dot(mean, place(interval.low), place(interval.high))


def _differences(suite: SuiteReport, styles: Styles) -> Table:
    differences = [row for rows in _by_measure(suite.statistics.differences, suite).values() for row in rows]
    rows = [_difference_row((styles[row.a], styles[row.b]), row, suite) for row in differences[:MAX_DIFFERENCES]]
    rest = f" The first {number(len(rows))} of {number(len(differences))}." if len(rows) < len(differences) else ""
    caption = (
        "The first model minus the second, on the items that both have, paired. p is two-sided and corrected for all"
        " pairs of models (Holm); the interval excludes 0 exactly if it is below 5%. "
        f"{WIDENED} {TWO_MODELS}{rest} From {REPORT}."
    )
    return Table(caption, ("Models", *DIFFERENCE_COLUMNS), tuple(rows), title="Differences")


def _algorithms(suite: SuiteReport) -> Table:
    rows = [
        _difference_row((f"{row.a} and {row.b}",), row, suite)
        for rows in _by_measure(suite.statistics.algorithms, suite).values()
        for row in rows
    ]
    caption = (
        "The first algorithm minus the second, over all of their runs, on the items that all runs have. Intervals and p"
        " are over seeds and items, so they are about the algorithms; p is corrected for all pairs of algorithms"
        f" (Holm). {WIDENED} All other tables are about single sets of weights. From {REPORT}."
    )
    return Table(caption, ("Algorithms", *DIFFERENCE_COLUMNS), tuple(rows), title="Algorithms, over seeds")


def _difference_row(heads: tuple[Head, ...], row: Difference, suite: SuiteReport) -> Row:
    num_left_out = row.num_items_missing + row.num_items_seen
    missing = f"{number(num_left_out)} left out" if num_left_out else ""
    verdict = {"undecided": "not shown", "none": "no verdict", "bound": "not shown by the bound"}
    cells = (
        Cell(row.measure, f"{number(row.num_runs_a)} and {number(row.num_runs_b)} runs" if row.num_runs_a > 1 else ""),
        Cell(difference_text(row.difference, row.measure, suite)),
        Cell(p_value(row.holm_p)),
        Cell(number(row.num_items), missing),
        Cell(
            f"{row.better} is better" if row.better else verdict[row.conclusion.kind],
            row.conclusion.reason or (row.conclusion.caution if row.better else ""),
            is_clear=bool(row.better),
        ),
    )
    return Row(heads, cells, is_strong=bool(row.better))


def _group_table(suite: SuiteReport, measure: ReportedMeasure, groups: Sequence[str], styles: Styles) -> Table:
    rows = []
    for group in groups[:MAX_GROUPS]:
        values = [suite.statistics.of(model, measure.name, group) for model in suite.statistics.models]
        num_items = max((value.num_items for value in values if value is not None), default=0)
        rows.append(Row((group,), (Cell(number(num_items)), *(_cell(value) for value in values))))
    columns: tuple[Head, ...] = ("Group", "Items", *(styles[model] for model in suite.statistics.models))
    cut = f" The first {number(MAX_GROUPS)} of {number(len(groups))} groups." if len(groups) > MAX_GROUPS else ""
    caption = f"{measure.name} by group, each with its 95% interval, not corrected for the number of groups.{cut}"
    return Table(caption, columns, tuple(rows), title=measure.name)


def _failures(suite: SuiteReport, styles: Styles) -> Table:
    failures = suite.statistics.failures
    rows = [
        Row(
            (styles[row.model],),
            (
                Cell(", ".join(row.measures)),
                Cell(number(row.num_items)),
                Cell(row.reason[:300]),
                Cell(row.item_id, is_code=True),
            ),
        )
        for row in failures[:MAX_FAILURES]
    ]
    rest = (
        f" The {number(MAX_FAILURES)} most frequent of {number(len(failures))}." if len(failures) > MAX_FAILURES else ""
    )
    caption = f"Items without a value of a measure; they are in no mean.{rest} From {VALUES}."
    return Table(
        caption,
        ("Model", "Measures", "Items", "Reason, of the first item", "First item"),
        tuple(rows),
        title="Items without a value",
    )


def _contamination(suite: SuiteReport, row: Contamination, styles: Styles) -> Part:
    files = ", ".join(f"{file} ({count_of(num_rows, 'row')})" for file, num_rows in row.files.items())
    share = percent(len(row.item_ids) / row.num_items)
    about = (
        f"{number(len(row.item_ids))} of {count_of(row.num_items, 'item')} ({share}) share 13 words in a row, or their"
        f" whole text, with the training data: {files or 'none could be read'}."
    )
    unread = f" Recorded by the run, but not read: {', '.join(row.unread)}." if row.unread else ""
    clean = {value.measure: value for value in row.clean}
    rows = [
        Row((m.name,), (_cell(suite.statistics.of(row.model, m.name)), _cell(clean.get(m.name))))
        for m in suite.measures
    ]
    columns = ("Measure", "All items", "Items without overlap")
    table = Table(f"{row.model}, each with its 95% interval.", columns, tuple(rows), title="Overlap")
    title = f"Overlap with the training data of {styles[row.model].title}: {share} of the items"
    return Details(title, (Note(about + unread), table), is_open=bool(row.item_ids))


def _about_samples(samples: Samples) -> Note:
    return Note(
        f"This page holds {number(len(samples.prompts))} of {count_of(samples.num_prompts, 'item')}, evenly spread over"
        f" each suite, with the values of each answer; {ANSWERS} and {VALUES} have all."
    )


def _samples(evaluation: EvaluationFolder, styles: Styles) -> Samples:
    suites = [suite.suite for suite in evaluation.report.suites]
    shown_prompts: list[ShownPrompt] = []
    for place, suite in enumerate(suites):
        items = [item for item_suite, item in evaluation.items if item_suite == suite]
        sizes = [sum(len(message["content"]) for message in item.messages) for item in items]
        for index in evenly(sizes, NUM_SAMPLES, MAX_CHARACTERS):
            shown_prompts.append(_sample(evaluation, suite, place, items[index], styles, is_open=not shown_prompts))
    return Samples(
        tuple(shown_prompts), len(evaluation.items), policies=tuple(styles.values()), categories=tuple(suites)
    )


def _sample(
    evaluation: EvaluationFolder, suite: str, place: int, item: Item, styles: Styles, *, is_open: bool
) -> ShownPrompt:
    reference = item.data.get("reference", "")
    responses = []
    for model in evaluation.report.models:
        key = (suite, model, item.item_id)
        if key in evaluation.answers:
            about = "; ".join(f"{name}: {_valued(value)}" for name, value in evaluation.values.get(key, {}).items())
            responses.append((styles[model], (ShownResponse(0, folded(evaluation.answers[key]), about),)))
    return ShownPrompt(
        prompt_id=item.item_id,
        category=f"{suite}, {item.group}" if item.group else suite,
        messages=item.messages,
        responses=tuple(responses),
        is_open=is_open,
        name=f"{suite}-{item.item_id}",
        note=f"reference: {reference}" if isinstance(reference, str | int | float) and reference != "" else "",
        category_place=place,
    )


def _valued(value: float | str) -> str:
    if isinstance(value, str):
        return f"failed ({value[:120]})"
    return number(int(value)) if float(value).is_integer() else number(value)


def _made(folder: EvaluationFolder) -> Section:
    from evaluation.compare.report.page import flat

    rows = tuple(Row((path,), (Cell(text),)) for path, text in flat(dict(folder.report.settings)))
    about = Note(
        f"report.json holds every number in full precision; {VALUES} has a row per model, item and measure, and"
        f" {ANSWERS} every answer."
    )
    table = Table("evaluate.json, as resolved.", (), rows, title="Settings")
    return Section("made", "How it was made", (about, Details("Settings", (table,))))
