"""What PPO writes to results.json, and its part of a run's report: curves, how the answers to the same prompts change
during training, and other responses from training (samples.jsonl).

Shape letter: P prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan

import numpy as np
from pydantic import ValidationError

from ppo.alarm import Rang
from ppo.algorithm import TeacherConfig
from ppo.config import PPOConfig
from ppo.rollout_log import TrainingSample
from preferences.statistics.estimates import Interval
from preferences.statistics.intervals import clustered_mean
from reward.external import NoReward
from reward.verifiers.sandbox import FORGED, REFUSED
from reward.verifiers.verifier import UNCLEAR
from stages.reports.parts import (
    Cell,
    Columns,
    Details,
    Headline,
    Note,
    Part,
    Row,
    Samples,
    Section,
    ShownPrompt,
    ShownResponse,
    StageReport,
    StageReporter,
    Table,
    evenly,
    folded,
)
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import ROUTER_PANELS, Panel, Series, fields_under, metric_figures, stage_block
from stages.reports.text import (
    DEFAULT_NAMES,
    INITIAL_POLICY,
    UNKNOWN,
    Names,
    PolicyStyle,
    count,
    count_of,
    ends_of,
    kl_number,
    label,
    number,
    percent,
    styles_of,
)
from training.data import Overlong, SourceRows

SECTION = "ppo"  # of the job, and the name of its stage
MAX_DRAWN = 400  # responses drawn during training that a page shows
MAX_CHARACTERS = 1_500_000
MIN_STEPS_OF_KL, LEAST_KL_NATS = 5, 0.05  # below it after so many iterations, the report says that the KL stays at 0
NUM_OPEN = 1

SAMPLERS = {
    "heed": "Heed; a resumed run has the same samples, and `heed replay` shows any of them again",
    "vllm": "vLLM; a resumed run may have other samples",
}


@dataclass(frozen=True)
class PPOResults:
    """PPO's results. `score_scale_*` are the mean and standard deviation by which scores are normalised."""

    num_iterations: int
    final_kl_coef: float
    score_scale_mean: float
    score_scale_std: float
    overlong: Overlong | None = None  # of the prompts
    overlong_by_source: Mapping[str, Overlong] = field(default_factory=dict)  # if there are several sources
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
    num_prompts: Mapping[str, int] = field(default_factory=dict)  # by source, if there are several
    generator: str = "heed"
    alarm: Rang | None = None


def names_of(config: PPOConfig | None, *, starts_from_sft: bool) -> Names:
    """Returns what reports call the initial policy, the algorithm and the source of the scores of a run with this
    section, or without one.
    """
    initial = DEFAULT_NAMES.initial if starts_from_sft else INITIAL_POLICY
    if config is None:
        return Names(initial)
    reward = config.external_reward
    scorer = DEFAULT_NAMES.scorer if reward is None else reward.short_name
    if config.environment is not None and isinstance(reward, NoReward):
        scorer = f"the environment {config.environment.short_name}"
    return Names(initial, config.advantage.algorithm, scorer)


def _config_of(stage: StageFolder) -> PPOConfig | None:
    """Returns the job's section; None if it is another version's."""
    try:
        return PPOConfig.model_validate(stage.job.get(SECTION))
    except ValidationError:
        return None


def names_in(stage: StageFolder) -> Names:
    """Returns the names of the stage's job; those of the whole loop if its section is another version's."""
    first = stage.name == SECTION  # later rounds start from the previous round's policy
    config = _config_of(stage)
    if config is None:
        return DEFAULT_NAMES
    return names_of(config, starts_from_sft=first and "sft" in stage.job and not config.init_from)


def _ppo(field: str) -> tuple[Series, ...]:
    return (Series(field, "", "ppo"),)


def _panels(names: Names) -> tuple[Panel, ...]:
    return (
        Panel("Score", f"from {_with_article(names)}, higher is better", _ppo("score")),
        Panel(names.kl, "nats per response", _ppo("kl_nats")),
        Panel("KL from the teacher", "nats per response", _ppo("teacher_kl_nats")),
        *PANELS,
    )


def _with_article(names: Names) -> str:
    return f"the {names.scorer}" if names.scorer == DEFAULT_NAMES.scorer else names.scorer


PANELS = (
    Panel("Spot checks", "mean score of the checked responses, by the alarm's source", _ppo("spot_check")),
    Panel("Evidence for the alarm", "nats", _ppo("alarm_nats")),
    Panel("Judge minus gold", "mean scores; a rise says that the judge is gamed", _ppo("judge_minus_gold")),
    Panel("Gold score", "of the responses that the judge graded", _ppo("gold")),
    Panel("Responses that end", "before the length limit", _ppo("eos_rate"), is_share=True),
    Panel("Response length", "tokens", _ppo("response_tokens")),
    Panel("Entropy", "nats per token, estimated", _ppo("entropy_estimate")),
    Panel("Turns", "of the policy, per conversation", _ppo("turns")),
    Panel("Replies", "tokens that the environment wrote, per conversation", _ppo("environment_tokens")),
    Panel("Informative groups", "prompts whose responses' scores differ", _ppo("informative_share"), is_share=True),
)
# These show whether the updates are healthy, whatever score they reach.
DIAGNOSTICS = (
    Panel("Clip fraction", "tokens whose ratio is clipped", _ppo("clip_share"), is_share=True),
    Panel("Approximate KL", "of an iteration's updates, nats per token", _ppo("approx_kl")),
    Panel("Explained variance", "of the returns by the values, 1 is best", _ppo("value_explained")),
    Panel(
        "Informative groups, sampled",
        "before choosing which prompts to keep",
        _ppo("sampled_informative_share"),
        is_share=True,
    ),
    Panel("Groups of equal scores", "per iteration; their scores have no gradient", _ppo("zero_variance_groups")),
    Panel("Policy loss", "", _ppo("policy_loss")),
    Panel("KL loss", "half the square of each response's log ratio", _ppo("kl_loss")),
    Panel("Value loss", "", _ppo("value_loss")),
    Panel(
        "Gradient norms",
        "before clipping",
        (Series("policy_gradient_norm", "policy", "ppo"), Series("value_gradient_norm", "values", "heldout")),
    ),
    Panel(
        "Learning rates",
        "",
        (Series("learning_rate", "policy", "ppo"), Series("value_learning_rate", "values", "heldout")),
    ),
    *ROUTER_PANELS,
    Panel("KL coefficient", "per nat", _ppo("kl_coef")),
    Panel(
        "Sampler against learner",
        "difference of their log-probs, nats per token",
        (
            Series("sampler_difference", "as trained", "ppo"),
            Series("sampler_difference_unreplayed", "without router replay", "heldout"),
        ),
    ),
    Panel("Routes that replay changes", "share, in the worst layer", _ppo("routes_changed_worst_layer")),
    Panel(
        "Age of tokens",
        "iterations between the weights that sampled and those that learn",
        (Series("token_age", "mean", "ppo"), Series("token_age_max", "oldest", "heldout")),
    ),
    Panel("Continued responses", "with tokens of several weights", _ppo("continued_share"), is_share=True),
    Panel("Rows in use", "of generators; the others had ended within a round", _ppo("rows_in_use"), is_share=True),
    Panel("Tokens read again", "with newer weights, per iteration", _ppo("reread_tokens")),
    Panel(
        "Time per phase",
        "seconds per iteration",
        (
            Series("sampling_seconds", "sampling", "other-1"),
            Series("scoring_seconds", "scoring", "best-of-n"),
            Series("policy_updates_seconds", "policy", "ppo"),
            Series("value_updates_seconds", "values", "heldout"),
            Series("checkpoint_seconds", "checkpoints", "train"),
            Series("generators_waited_seconds", "generators wait", "other-2"),
        ),
    ),
)

WRONG = {  # kinds of failure with score 0: the panel's title, and which responses they are
    UNCLEAR: ("Unclear answers", "without a clear number or choice"),
    FORGED: ("Forged results of tests", "whose code tried to forge the result of its tests"),
    REFUSED: ("Refused tests", "whose code or tests used an object that the sandbox refuses"),
}

# Charts for each source of prompts, if there are several: metric, title, unit, and whether it is a share.
SOURCE_DIAGNOSTICS = (
    ("eos_rate", "Responses that end", "before the length limit", True),
    ("tokens", "Response length", "tokens", False),
    ("informative_share", "Informative groups", "prompts whose responses' scores differ", True),
)


def report(stage: StageFolder) -> StageReport:
    names = names_in(stage)
    config = _config_of(stage)
    teachers = () if config is None else config.teachers
    objectives = [
        Panel(f"Score, {label(name)}", "of this objective alone", _ppo(f"score/{name}"))
        for name in fields_under(stage, "score")
    ]
    objectives += [
        Panel(f"KL from the teacher {label(name)}", "nats per response", _ppo(f"teacher_kl_nats/{name}"))
        for name in fields_under(stage, "teacher_kl_nats")
    ]
    sources = fields_under(stage, "source_share")
    objectives += [
        Panel(f"Score, {label(name)}", "mean over the responses to this source's prompts", _ppo(f"source_score/{name}"))
        for name in sources
    ]
    figures = metric_figures(stage, _named((*_panels(names), *objectives), names), "iteration")
    failures = tuple(
        Panel(title, f"responses per iteration {words}".strip(), _ppo(f"failures/{kind}"))
        for kind in fields_under(stage, "failures")
        for title, words in [WRONG.get(kind, (f"No score: {label(kind)}", ""))]
    )
    of_sources = tuple(
        Panel(f"{title}, {label(name)}", unit, _ppo(f"source_{metric}/{name}"), is_share=is_share)
        for metric, title, unit, is_share in SOURCE_DIAGNOSTICS
        for name in sources
    )
    panels = _named((*DIAGNOSTICS, *of_sources, *failures), names)
    diagnostics = metric_figures(stage, panels, "iteration", "diagnostics")
    results, samples = stage.results(PPOResults), stage.samples_as(TrainingSample)
    parts = (
        stage_block(stage, () if results is None else _facts(stage, results, teachers), figures),
        *(Note(text, "aside") for text in _kl_notes(stage, names)),
        *_sources_part(stage, sources, {} if results is None else results.num_prompts),
        *((Details("Diagnostics", (Columns(tuple(diagnostics), "grid"),)),) if diagnostics else ()),
        *followed_part(samples),
    )
    return StageReport(
        parts,
        sections=samples_section(samples),
        headlines=_headlines(stage, names) if results is not None else (),
        sentence=_sentence(stage, names),
        warning=_alarm_sentence(stage),
        styles=tuple(styles_of(["ppo"], {"ppo": names.algorithm}).values()) if samples else (),
    )


def _facts(stage: StageFolder, results: PPOResults, teachers: Sequence[TeacherConfig]) -> tuple[tuple[str, str], ...]:
    """Returns titles and texts of what is known at the end."""
    return (
        ("Iterations", count(results.num_iterations)),
        ("Final KL coefficient", number(results.final_kl_coef, 4)),
        ("Sampled by", SAMPLERS[results.generator]),
        *(("Teacher", f"{of.model}, weight {number(of.weight)}, kind {of.kind}") for of in teachers),
        *((("Prompts read", str(results.overlong)),) if results.overlong else ()),
        *((f"Prompts read, {label(name)}", str(found)) for name, found in results.overlong_by_source.items()),
        *(rows.fact for rows in results.sources),
        *((("Alarm", _alarm(results.alarm)),) if results.alarm else ()),
        *_counted(stage),
    )


def _sources_part(stage: StageFolder, names: Sequence[str], num_prompts: Mapping[str, int]) -> tuple[Part, ...]:
    """Returns a table of the sources of prompts, with means over the first and the last fifth of the iterations."""
    if not names:
        return ()
    fifth = max(1, len(stage.metrics) // 5)
    ends = (stage.metrics[:fifth], stage.metrics[-fifth:])

    def means(metric: str, name: str) -> list[float]:
        values = [[line.get(f"source_{metric}/{name}") for line in lines] for lines in ends]
        known = [[value for value in of if isinstance(value, float)] for of in values]
        return [sum(of) / len(of) if of else nan for of in known]

    def change(values: Sequence[float], shown: Callable[[float], str]) -> Cell:
        return Cell(" → ".join(shown(value) if isfinite(value) else UNKNOWN for value in values))

    rows = tuple(
        Row(
            (label(name),),
            (
                Cell(count(num_prompts[name]) if name in num_prompts else UNKNOWN),
                change(means("share", name)[1:], percent),
                change(means("score", name), number),
                change(means("tokens", name), partial(number, digits=0)),
                change(means("eos_rate", name), percent),
            ),
        )
        for name in names
    )
    caption = (
        f"Means over the first → the last {count_of(fifth, 'iteration')}. Scores of two sources are comparable only if"
        " the same reward gave both."
    )
    columns = ("Source", "Prompts", "Share of responses", "Score", "Tokens", "End")
    return (Table(caption, columns, rows, "by-policy", "Sources of prompts"),)


def _counted(stage: StageFolder) -> Iterator[tuple[str, str]]:
    """Yields how many responses of the run were wrong in each way that is counted, if any were."""
    for kind, (_, words) in WRONG.items():
        if num_found := sum(line.get(f"failures/{kind}") or 0 for line in stage.metrics):
            yield f"Responses {words}", count(int(num_found))


def _alarm(rang: Rang) -> str:
    shown = "people prefer the initial policy" if rang.by_people else "less of the gain is real than scores promise"
    return (
        f"after iteration {rang.policy:,} and {count_of(rang.num_checks, 'spot check')}: {shown},"
        f" most likely since iteration {rang.fall:,}. The result is the policy after iteration {rang.result:,}"
    )


def _kl_notes(stage: StageFolder, names: Names) -> tuple[str, ...]:
    """Returns sentences about a KL that stays at 0, and about one below 0, if the run has them."""
    kls = [kl for line in stage.metrics if isinstance(kl := line.get("kl_nats"), float) and isfinite(kl)]
    said = []
    if len(kls) >= MIN_STEPS_OF_KL and max(map(abs, kls)) < LEAST_KL_NATS:
        said.append(
            f"The {names.kl} stayed at 0, so the policy still answers as it did at the start: check that the responses"
            " to a prompt have different rewards, then raise the learning rate, lower kl_coef or run more iterations"
            ' (docs/troubleshooting.md, "The KL stays at 0").'
        )
    if any(kl < 0 for kl in kls):
        said.append(
            "The KL is estimated from samples, so a value below 0 means that it is too small to tell from 0 there"
            ' (docs/glossary.md, "KL from SFT").'
        )
    return tuple(said)


def _named(panels: Sequence[Panel], names: Names) -> tuple[Panel, ...]:
    """Returns the panels, with the algorithm's name for the series that have none of their own."""

    def named(series: Series) -> Series:
        return series if series.name else replace(series, name=names.algorithm)

    return tuple(replace(panel, series=tuple(map(named, panel.series))) for panel in panels)


def _sentence(stage: StageFolder, names: Names) -> str:
    """Returns the summary of a run without a comparison. It must not claim much: a rise of the score that PPO trains on
    shows only that PPO trained.
    """
    kls = [line["teacher_kl_nats"] for line in stage.metrics if isinstance(line.get("teacher_kl_nats"), float)]
    change = f"from {number(kls[0])} to {number(kls[-1])} nats per response" if kls else ""
    distilled = f"In {names.algorithm} the policy's KL from its teacher went {change}." if kls else ""
    scores = [line["score"] for line in stage.metrics if isinstance(line.get("score"), float)]
    if not scores:
        return distilled
    went = f"{distilled} In {names.algorithm} the {names.score} went from {number(scores[0])} to {number(scores[-1])}."
    if any("spot_check" in line for line in stage.metrics):  # which `_alarm_sentence` is about
        return went.lstrip()
    return (
        f"{went} No other judge has read the responses, so this does not show whether they got better or only exploit"
        " the score (reward hacking). Read the samples, or let another judge compare the policies."
    ).lstrip()


def _alarm_sentence(stage: StageFolder) -> str:
    """Returns whether the alarm rang; "" in a run without spot checks, and before the run's end."""
    results, checks = stage.results(PPOResults), [line["spot_check"] for line in stage.metrics if "spot_check" in line]
    if results is None:
        return ""
    if results.alarm is not None:
        return f"Spot checks rang the alarm {_alarm(results.alarm)}."
    if checks:
        return (
            f"Spot checks in {count_of(len(checks), 'iteration')} went from {number(checks[0])} to"
            f" {number(checks[-1])} and never rang the alarm, which does not show that there is nothing to find: read"
            " the samples, or let another judge compare the policies."
        )
    return ""


def _headlines(stage: StageFolder, names: Names) -> tuple[Headline, ...]:
    """Returns the KL of the last iteration as a headline; a comparison's KL replaces it."""
    kl = stage.metrics[-1].get("kl_nats") if stage.metrics else None
    if not isinstance(kl, float) or not isfinite(kl):
        return ()
    file, field, detail = f"{stage.name}/metrics.jsonl", "kl_nats of the last line", "last iteration of training"
    return (Headline(f"{stage.name}.kl_nats", file, field, kl, names.kl, f"{kl_number(kl)} nats", detail),)


def followed_part(samples: Sequence[TrainingSample]) -> tuple[Part, ...]:
    """Returns a table of the followed prompts' responses per iteration: mean score, its change, KL, length, ends."""
    by_step = _by_step(samples)
    if len(by_step) < 2:
        return ()
    first = min(by_step)
    rows = tuple(_step_row(step, by_step[step], by_step[first]) for step in sorted(by_step))
    num = len(by_step[first])
    caption = (
        f"Responses to the same {count_of(num, 'prompt')}, sampled before the updates of these iterations, with 95%"
        " intervals over prompts. Changes are per prompt, from the first of these iterations."
    )
    columns = ("Iteration", "Score", "Change", "KL, nats", "Tokens", "End")
    return (Table(caption, columns, rows, "by-policy", "The same prompts during training"),)


def _by_step(samples: Sequence[TrainingSample]) -> dict[int, dict[str, TrainingSample]]:
    by_step: dict[int, dict[str, TrainingSample]] = {}
    for sample in samples:
        if sample.kind == "followed":
            by_step.setdefault(sample.step, {})[sample.prompt_id] = sample
    return by_step


def _step_row(step: int, samples: dict[str, TrainingSample], first: dict[str, TrainingSample]) -> Row:
    scores = {name: sample.score for name, sample in samples.items()}
    changes = [score - first[name].score for name, score in scores.items() if name in first]
    lengths = [sample.num_tokens for sample in samples.values()]
    return Row(
        (number(step),),
        (
            _cell(mean_over_prompts(list(scores.values()))),
            Cell(UNKNOWN) if samples is first else _cell(mean_over_prompts(changes)),
            _cell(mean_over_prompts([sample.kl_nats for sample in samples.values()])),
            Cell(number(sum(lengths) / len(lengths), 0)),
            Cell(percent(sum(sample.finished for sample in samples.values()) / len(samples))),
        ),
    )


def mean_over_prompts(values: Sequence[float]) -> Interval:
    """Returns the mean of one value per prompt, with Student's interval; values that are not finite are left out."""
    value_P = np.array([value for value in values if np.isfinite(value)], dtype=np.float64)
    return clustered_mean(value_P, np.arange(len(value_P)))


def _cell(interval: Interval) -> Cell:
    return Cell(number(interval.mean), ends_of(interval)) if np.isfinite(interval.mean) else Cell(UNKNOWN)


def samples_section(samples: Sequence[TrainingSample]) -> tuple[Section, ...]:
    """Returns the searchable section of responses."""
    if not samples:
        return ()
    steps = sorted(_by_step(samples))
    followed = _followed(samples)
    drawn = [sample for sample in samples if sample.kind == "drawn"]
    parts: list[Part] = []
    if followed:
        parts.append(
            Note(
                f"{count_of(len(followed), 'prompt')}, drawn before training. The policy answered each of them in"
                f" {count_of(len(steps), 'iteration')}."
                + (" The first response is the initial policy's." if steps[0] == 1 else "")
            )
        )
        parts.append(_browser(followed))
    if drawn:
        prompts = _drawn(drawn)
        parts.append(Details("Random responses that the policy learned from", (_browser(prompts, len(drawn)),)))
    return (Section("training-samples", "Samples during training", tuple(parts)),)


def _browser(prompts: tuple[ShownPrompt, ...], num_prompts: int = 0) -> Samples:
    categories = tuple(sorted({prompt.category for prompt in prompts}))
    return Samples(prompts, max(num_prompts, len(prompts)), categories=categories)


def _followed(samples: Sequence[TrainingSample]) -> tuple[ShownPrompt, ...]:
    by_prompt: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        if sample.kind == "followed":
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
    categories = sorted({samples_of_prompt[0].category for samples_of_prompt in by_prompt.values()})
    return tuple(
        _shown(
            prompt_id, sorted(samples_of_prompt, key=lambda sample: sample.step), categories, is_open=place < NUM_OPEN
        )
        for place, (prompt_id, samples_of_prompt) in enumerate(by_prompt.items())
    )


def _drawn(drawn: Sequence[TrainingSample]) -> tuple[ShownPrompt, ...]:
    places = evenly([len(sample.response) for sample in drawn], MAX_DRAWN, MAX_CHARACTERS)
    chosen = [drawn[place] for place in places]
    categories = sorted({sample.category for sample in chosen})
    return tuple(
        _shown(f"{sample.step}-{place}", [sample], categories, is_open=False) for place, sample in enumerate(chosen)
    )


def _shown(name: str, samples: Sequence[TrainingSample], categories: Sequence[str], *, is_open: bool) -> ShownPrompt:
    """Returns a prompt with its responses, in the order of training."""
    return ShownPrompt(
        prompt_id=samples[0].prompt_id,
        category=samples[0].category,
        messages=samples[0].messages,
        responses=tuple(
            (_style(sample.step), (ShownResponse(0, folded(sample.response), _about(sample)),)) for sample in samples
        ),
        is_open=is_open,
        name=f"training-{name}",
        note=_note(samples),
        category_place=categories.index(samples[0].category),
    )


def _style(step: int) -> PolicyStyle:
    return PolicyStyle(f"iteration {step}", f"Iteration {step:,}", "ppo", "^")


def _about(sample: TrainingSample) -> str:
    length = count_of(sample.num_tokens, "token") + ("" if sample.finished else ", cut off")
    return f"score {number(sample.score)}, KL {number(sample.kl_nats, 1)} nats, {length}"


def _note(samples: Sequence[TrainingSample]) -> str:
    if len(samples) == 1:
        return f"iteration {samples[0].step:,}, score {number(samples[0].score)}"
    return f"score {number(samples[0].score)} → {number(samples[-1].score)}"


def _head(stage: StageFolder) -> tuple[str, str]:
    names = names_in(stage)
    config, goals = _config_of(stage), [f"raise the {names.score}"]
    if config is not None and config.teachers:
        has_score = config.score_coef > 0 and config.has_score
        goals = ["write what its teacher finds likely", *(goals if has_score else [])]
    near = f", held near {names.the_initial} by a KL penalty" if config is None or config.kl.coef > 0 else ""
    return names.algorithm, f"The policy is trained to {' and to '.join(goals)}{near}."


REPORTER = StageReporter("Policy gradients", "The policy is trained to raise a score.", report, _head)
