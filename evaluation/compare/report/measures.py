"""The measures of a comparison (measures.json) as charts and tables, and in words whether the reward is hacked.

    policies            {policy: evaluation.measures.policies.PolicyMeasures}: a table with a column per policy
    best_of_n           [evaluation.measures.best_of_n.BestOfN]: a table with a row per n
    reward_hacking      evaluation.measures.reward_hacking.RewardHacking: a section

A figure is a number, a text, or {mean, low, high}. Objects nest; a figure's place is its dotted path, such as
diversity.within.identical.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from evaluation.measures.reward_hacking import Gain, RewardHacking, TrainingBin
from evaluation.statistics.significance import ALPHA
from preferences.statistics.estimates import Interval
from stages.reports.parts import Answer, Cell, Columns, Details, Figure, Note, Part, Row, Section, Table
from stages.reports.plots import MARGINS, WIDE_SIZE, draw, set_ticks, tone
from stages.reports.text import UNKNOWN, Names, PolicyStyle, ends_of, label, listed, number, p_value

Styles = Mapping[str, PolicyStyle]

# Labels of places in PolicyMeasures. Other places are labeled by their own words (`_title`).
TITLES = {
    "kl_nats": "KL to the reference, nats",
    "kl_bound_nats": "KL of best-of-n at most, nats",
    "proxy_score": "score that training raises",
    "diversity.num_prompts": "prompts",
    "diversity.num_responses": "responses",
    "diversity.within.num_samples": "within a prompt: responses compared",
    "diversity.within.identical": "within a prompt: identical pairs",
    "diversity.within.distinct_2": "within a prompt: distinct bigrams",
    "diversity.across.num_words": "across prompts: words compared",
    "diversity.across.identical": "across prompts: identical pairs",
    "diversity.across.distinct_1": "across prompts: distinct words",
    "diversity.across.distinct_2": "across prompts: distinct bigrams",
    "diversity.words.mean": "words per response",
    "diversity.words.quantiles": "words: 0, 5, 25, 50, 75, 95 and 100% quantiles",
    "diversity.tokens": "tokens per response",
    "diversity.tokens.mean": "tokens per response",
    "diversity.tokens.quantiles": "tokens: 0, 5, 25, 50, 75, 95 and 100% quantiles",
    "diversity.finished": "ended with the end token",
    "diversity.repetition": "repeated 4-grams",
    "diversity.empty": "empty responses",
}
FROM_FILE = "From measures.json."
SMALL = 0.01  # a smaller number is shown with two significant digits


def measure_tables(measures: Mapping[str, Any], styles: Styles) -> list[Details]:
    """Returns the tables of policies and of best-of-n, as far as they were measured."""
    tables = [_policy_table(measures["policies"], styles)] if measures.get("policies") else []
    if best := measures.get("best_of_n"):
        columns = ("n", "KL at most, nats", "Judge's score", "Score that training raises")
        rows = [tuple(text for _, text in figures(entry)) for entry in best]
        tables.append(_table("Best of n", f"Means with 95% intervals. {FROM_FILE}", columns, rows))
    return tables


def _table(
    title: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, is_open: bool = False
) -> Details:
    """Returns a folded table of texts; the first cell of a row is its header."""
    table_rows = tuple(Row((head,), tuple(Cell(text) for text in texts)) for head, *texts in rows)
    return Details(title, (Table(caption, tuple(columns), table_rows, title=title),), is_open)


def _policy_table(policies: Mapping[str, Any], styles: Styles) -> Details:
    figures_of = {name: dict(figures(value)) for name, value in policies.items()}
    places = list(dict.fromkeys(place for texts in figures_of.values() for place in texts))
    known = [place for place in places if any(texts.get(place, UNKNOWN) != UNKNOWN for texts in figures_of.values())]
    # A policy without token counts has `diversity.tokens`, others have `diversity.tokens.mean` and `.quantiles`.
    unknown = [place for place in places if place not in known and not any(k.startswith(f"{place}.") for k in known)]
    titles = (styles[name].title if name in styles else name for name in figures_of)
    rows = [(_title(place), *(texts.get(place, UNKNOWN) for texts in figures_of.values())) for place in known]
    caption = (
        "The measures of each policy; in brackets 95% intervals. To tell whether two"
        f" policies differ, use the win rates, not these intervals. {FROM_FILE}"
    )
    if unknown:
        caption += f" Not known of any policy: {'; '.join(_title(place) for place in unknown)}."
    return _table("Policies", caption, ("Measure", *titles), rows, is_open=True)


def figures(value: Any, place: str = "") -> list[tuple[str, str]]:
    """Returns (place, text) of every figure in a value.

    {mean, low, high} is one figure, unless its "mean" is itself an object.
    """
    if isinstance(value, Mapping):
        pairs = []
        rest = value
        if "mean" in value and not isinstance(value["mean"], Mapping):
            pairs.append((place, _figure(value)))
            rest = {key: entry for key, entry in value.items() if key not in ("mean", "low", "high")}
        return pairs + [
            line for key, entry in rest.items() for line in figures(entry, f"{place}.{key}" if place else str(key))
        ]
    if isinstance(value, list):
        return [(place, ", ".join(text for entry in value for _, text in figures(entry)))] if value else []
    return [(place, _number(value))]


def _figure(value: Mapping[str, Any]) -> str:
    """Formats a figure with its interval. An interval without width is left out, because prompts that all came out
    alike say nothing about precision.
    """
    low, high = value.get("low"), value.get("high")
    ends = "" if low is None or high is None or low == high else f" ({_number(low)} to {_number(high)})"
    return _number(value["mean"]) + ends


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value or UNKNOWN
    if isinstance(value, float) and 0 < abs(value) < SMALL:
        return f"{value:.2g}".replace("-", "\u2212")
    return number(value)


def _title(place: str) -> str:
    return TITLES.get(place) or place.replace("_", " ").replace(".", ", ")


def hacking_answer(hacking: RewardHacking, names: Names) -> Answer:
    """Says what the gains show about the trained policy against the initial one; that may be nothing."""
    proxy, judge = hacking.overall.proxy, hacking.overall.judge
    rose = f"the score that {names.algorithm} was trained on rose by {_gained(proxy)}"
    if any(math.isnan(gain.low) and math.isnan(gain.high) for gain in (proxy, judge)):  # one infinite end is NaN, too
        return Answer("unclear", "Nothing can be said about reward hacking: there are too few prompts for an interval.")
    if not proxy.low > 0:
        return Answer(
            "unclear",
            f"Nothing can be said about reward hacking: {names.algorithm} has not clearly raised the score that it was"
            f" trained on, which changed by {_gained(proxy)}.",
        )
    more = (*_categories(hacking.categories, names), *_late(hacking))
    if judge.high < 0:
        return Answer("worse", f"Reward hacking: {rose} while the judge's fell by {_gained(-judge)}.", more)
    if judge.low > 0:
        text = f"No reward hacking is seen on average: {rose}, and the judge's by {_gained(judge)}."
        return Answer("better", text, more)
    text = (
        f"Reward hacking is neither shown nor ruled out: {rose}, but the judge's changed by {_gained(judge)}, which"
        " includes no change at all."
    )
    return Answer("unclear", text, more)


def _categories(gains: Sequence[Gain], names: Names) -> list[str]:
    """Names categories in which the trained-on score clearly rose while the judge's fell or showed no gain."""
    raised = [gain for gain in gains if gain.proxy.low > 0]
    fell = [gain for gain in raised if gain.holm_p < ALPHA and gain.judge.mean < 0]
    flat = [gain for gain in raised if gain not in fell and not (gain.holm_p < ALPHA and gain.judge.mean > 0)]
    sentences = []
    if fell:
        those = listed([f"{gain_name(gain)} ({_gained(gain.judge)})" for gain in fell])
        sentences.append(f"The judge's score fell while {names.algorithm}'s rose in {those}.")
    if flat:
        sentences.append(
            f"In {listed([gain_name(gain) for gain in flat])} the score that {names.algorithm} was trained on rose, but"
            " the judge's score shows no gain."
        )
    return sentences


def _late(hacking: RewardHacking) -> list[str]:
    if not hacking.late_judge.high < 0:
        return []
    change = _gained(-hacking.late_judge)
    return [
        f"Late in training the judge's score fell by {change} from the middle to the last third, so an earlier policy"
        " may be better (ppo.keep_policies_every keeps them)."
    ]


def _gained(interval: Interval) -> str:
    return f"{number(float(interval.mean))} (95% {ends_of(interval) or 'unknown'})"


def gain_name(gain: Gain) -> str:
    return label(gain.category) or "(no category)"


def hacking_section(hacking: RewardHacking, names: Names) -> Section:
    """Returns the section with the verdict, gains by category, and both scores over training."""
    answer = hacking_answer(hacking, names)
    parts: list[Part] = [Note(" ".join((answer.text, *answer.more))), _gain_table(hacking, names)]
    if len(hacking.training) > 1:
        charts = (
            _training_chart(
                hacking.training, "proxy", f"The score that {names.algorithm} is trained on, in training", "ppo"
            ),
            _training_chart(hacking.training, "judge", "The judge's score, in training", "heldout"),
        )
        parts.append(Columns(charts))
    return Section("hacking", "Is the reward hacked?", tuple(parts))


def _gain_table(hacking: RewardHacking, names: Names) -> Table:
    caption = (
        f"{names.algorithm} minus {names.the_initial} on the same prompts, 95% intervals below, widened to the"
        " level of the test where its correction removes a difference. p"
        " is for no change in the judge's score, by the test that gives the interval next to it (Student's, or sign"
        " flips if their p is larger); for categories, both are corrected for the number of categories (Holm)."
    )
    rows = [
        _gain_row("All prompts", hacking.overall),
        *(_gain_row(gain_name(gain), gain) for gain in hacking.categories),
    ]
    columns = ("Prompts of", "Prompts", "Score trained on", "Judge's score", "p")
    return Table(caption, columns, tuple(rows), "by-policy", "Gains")


def _gain_row(name: str, gain: Gain) -> Row:
    return Row(
        (name,),
        (Cell(number(gain.num_prompts)), _gain_cell(gain.proxy), _gain_cell(gain.judge), Cell(p_value(gain.holm_p))),
    )


def _gain_cell(interval: Interval) -> Cell:
    if math.isnan(interval.mean):
        return Cell(UNKNOWN)
    is_clear = interval.low > 0 or interval.high < 0
    return Cell(number(interval.mean), ends_of(interval), is_clear=is_clear)


def _training_chart(bins: Sequence[TrainingBin], field: Literal["proxy", "judge"], title: str, colour: str) -> Figure:
    means: list[Interval] = [getattr(training_bin, field) for training_bin in bins]
    places = [(training_bin.first + training_bin.last) / 2 for training_bin in bins]

    def paint(axes: Any) -> None:
        for x, one in zip(places, means, strict=True):
            axes.plot([x, x], [one.low, one.high], color=tone(colour), linewidth=2.5, alpha=0.55)
        axes.plot(places, [one.mean for one in means], "o-", color=tone(colour), markeredgecolor=tone("page"))
        axes.set_xlabel("iteration", loc="right")
        set_ticks(axes.xaxis, 6, whole=True)
        set_ticks(axes.yaxis, 5)
        axes.margins(x=0.05, y=0.1)

    spoken = "; ".join(
        f"iterations {training_bin.first} to {training_bin.last}: {number(one.mean)}"
        for training_bin, one in zip(bins, means, strict=True)
    )
    svg = draw(paint, **WIDE_SIZE, margins=MARGINS, name=f"hacking-{field}", label=f"{title}: {spoken}.")
    unit = f"mean and 95% interval of about {number(bins[0].num_responses)} drawn responses each"
    return Figure(title, unit, (), svg, is_wide=True)
