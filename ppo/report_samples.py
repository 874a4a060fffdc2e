"""How the answers to the same prompts change during training, and other responses of training: a run's samples.jsonl.

Shape letter: P prompts.
"""

from collections.abc import Sequence

import numpy as np

from ppo.samples import TrainingSample
from preferences.statistics.estimates import Interval
from preferences.statistics.intervals import clustered_mean
from stages.reports.parts import Cell, Details, Note, Part, Row, Section, Table
from stages.reports.samples import Samples, ShownPrompt, ShownResponse, anchor_of, evenly, folded, start_of
from stages.reports.text import UNKNOWN, PolicyStyle, count_of, ends_of, number, percent

MAX_DRAWN = 400  # responses of training on a page
MAX_CHARACTERS = 1_500_000
NUM_OPEN = 1


def followed_part(samples: Sequence[TrainingSample]) -> tuple[Part, ...]:
    """A table of the followed prompts: what their responses come to, iteration by iteration."""
    by_step = _by_step(samples)
    if len(by_step) < 2:
        return ()
    first = min(by_step)
    rows = tuple(_step_row(step, by_step[step], by_step[first]) for step in sorted(by_step))
    num = len(by_step[first])
    caption = (
        f"The same {count_of(num, 'prompt')}, answered once before the updates of these iterations; 95% intervals over"
        " prompts below. The change is from the first of them, prompt by prompt."
    )
    columns = ("Iteration", "Score", "Change", "KL, nats", "Tokens", "End")
    return (Table(caption, columns, rows, "by-policy", "The same prompts during training"),)


def _by_step(samples: Sequence[TrainingSample]) -> dict[int, dict[str, TrainingSample]]:
    found: dict[int, dict[str, TrainingSample]] = {}
    for sample in samples:
        if sample.kind == "followed":
            found.setdefault(sample.step, {})[sample.prompt_id] = sample
    return found


def _step_row(step: int, own: dict[str, TrainingSample], first: dict[str, TrainingSample]) -> Row:
    scores = {name: sample.score for name, sample in own.items()}
    changes = [score - first[name].score for name, score in scores.items() if name in first]
    lengths = [sample.num_tokens for sample in own.values()]
    return Row(
        (number(step),),
        (
            _cell(mean_over_prompts(list(scores.values()))),
            Cell(UNKNOWN) if own is first else _cell(mean_over_prompts(changes)),
            _cell(mean_over_prompts([sample.kl_nats for sample in own.values()])),
            Cell(number(sum(lengths) / len(lengths), 0)),
            Cell(percent(sum(sample.finished for sample in own.values()) / len(own))),
        ),
    )


def mean_over_prompts(values: Sequence[float]) -> Interval:
    """The mean of one value per prompt with Student's interval; values that are not finite are left out."""
    value_P = np.array([value for value in values if np.isfinite(value)], dtype=np.float64)
    return clustered_mean(value_P, np.arange(len(value_P)))


def _cell(found: Interval) -> Cell:
    return Cell(number(found.mean), ends_of(found)) if np.isfinite(found.mean) else Cell(UNKNOWN)


def samples_section(samples: Sequence[TrainingSample]) -> tuple[Section, ...]:
    """The responses themselves, searchable."""
    if not samples:
        return ()
    steps = sorted(_by_step(samples))
    followed = _followed(samples)
    drawn = [sample for sample in samples if sample.kind == "drawn"]
    parts: list[Part] = []
    if followed:
        parts.append(
            Note(
                f"{count_of(len(followed), 'prompt')}, drawn before training, each answered in"
                f" {count_of(len(steps), 'iteration')} by the policy as it was then."
                + (" The first is still the initial policy's." if steps[0] == 1 else "")
            )
        )
        parts.append(_browser(followed))
    if drawn:
        shown = _drawn(drawn)
        parts.append(Details("Responses that iterations learned from, drawn at random", (_browser(shown, len(drawn)),)))
    return (Section("training-samples", "Samples during training", tuple(parts)),)


def _browser(prompts: tuple[ShownPrompt, ...], num_prompts: int = 0) -> Samples:
    categories = tuple(sorted({prompt.category for prompt in prompts}))
    return Samples(prompts, max(num_prompts, len(prompts)), categories=categories)


def _followed(samples: Sequence[TrainingSample]) -> tuple[ShownPrompt, ...]:
    by_prompt: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        if sample.kind == "followed":
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
    categories = sorted({own[0].category for own in by_prompt.values()})
    return tuple(
        _shown(prompt_id, sorted(own, key=lambda sample: sample.step), categories, is_open=place < NUM_OPEN)
        for place, (prompt_id, own) in enumerate(by_prompt.items())
    )


def _drawn(drawn: Sequence[TrainingSample]) -> tuple[ShownPrompt, ...]:
    places = evenly([len(sample.response) for sample in drawn], MAX_DRAWN, MAX_CHARACTERS)
    chosen = [drawn[place] for place in places]
    categories = sorted({sample.category for sample in chosen})
    return tuple(
        _shown(f"{sample.step}-{place}", [sample], categories, is_open=False) for place, sample in enumerate(chosen)
    )


def _shown(name: str, own: Sequence[TrainingSample], categories: Sequence[str], *, is_open: bool) -> ShownPrompt:
    """A prompt with its responses in the order of training."""
    messages = tuple((turn["role"], turn["content"]) for turn in own[0].messages)
    return ShownPrompt(
        anchor=anchor_of(f"training-{name}"),
        prompt_id=own[0].prompt_id,
        category=own[0].category,
        start=start_of(messages),
        messages=tuple((role, folded(text)) for role, text in messages),
        responses=tuple(
            (_style(sample.step), (ShownResponse(0, folded(sample.response), _about(sample)),)) for sample in own
        ),
        is_open=is_open,
        note=_note(own),
        category_place=categories.index(own[0].category),
    )


def _style(step: int) -> PolicyStyle:
    return PolicyStyle(f"iteration {step}", f"Iteration {step:,}", "ppo", "^")


def _about(sample: TrainingSample) -> str:
    length = count_of(sample.num_tokens, "token") + ("" if sample.finished else ", cut off")
    return f"score {number(sample.score)}, KL {number(sample.kl_nats, 1)} nats, {length}"


def _note(own: Sequence[TrainingSample]) -> str:
    if len(own) == 1:
        return f"iteration {own[0].step:,}, score {number(own[0].score)}"
    return f"score {number(own[0].score)} → {number(own[-1].score)}"
