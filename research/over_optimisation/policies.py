"""Policies along an RL run, and best-of-n by its reward model: proxy and gold score against KL distance.

Shape letters: P prompts, N samples of the reference's pool, S samples of a policy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.measures.kl import KL, Drawn, Policy, draw, require_same_vocabulary, response_kls, summarise_kl
from lm.tokenizer import Messages
from preferences.statistics.estimates import Floats
from research.over_optimisation.curves import Curve, Point, best_of_n_curve, points
from research.over_optimisation.fits import MIN_POLICIES, Overoptimised, fit_curve
from reward.scoring import RewardModel
from training.data import Prompt

# Maps conversations and responses to one score each, higher is better, NaN if scoring fails.
Gold = Callable[[Sequence[Messages], Sequence[str]], Sequence[float]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """How many responses per prompt to draw from each policy, and from the reference for best-of-n; and how."""

    num_samples: int
    pool_samples: int
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class OverOptimisation:
    """Everything in the plot of scores against √KL. Scores are gains over the reference's.

    A fit is None if there are fewer than three policies to fit. The KL of best-of-n is its upper bound
    log n - (n - 1)/n. Prompts with a failed score are left out of everything;
    `num_dropped` counts them, and `first_failure` describes the first.
    """

    rl_points: tuple[Point, ...]
    best_of_n_points: tuple[Point, ...]
    rl_kl: Mapping[str, KL]
    rl: Overoptimised | None
    best_of_n: Overoptimised | None
    num_prompts: int
    num_dropped: int
    first_failure: str


@dataclass(frozen=True)
class Scores:
    """Scores of one policy's responses, [P, S]; NaN if a scorer failed."""

    gold_PS: Floats
    proxy_PS: Floats


def over_optimisation(
    policies: Mapping[str, Path],
    reference: Path,
    proxy: Path,
    gold: Gold,
    prompts: Sequence[Prompt],
    spec: Spec,
    progress: Progress = lambda _what: None,
    weights: Mapping[str, float] | None = None,
) -> OverOptimisation:
    """Samples policies (by name, in training order) and reference, and measures, fits and compares them.

    `proxy` is the reward model that training optimised, `gold` a scorer that training never used; both score the same
    prompts. `weights` apply to a proxy with several objectives. One policy is in memory at a time. Raises: ValueError
    for no policies, fewer than two prompts, differing vocabularies, or if scores failed on all prompts but one.
    """
    if not policies or len(prompts) < 2:
        raise ValueError(f"{len(policies)} policies, {len(prompts)} prompts; at least one and two were expected")
    start, judge = Policy.load(reference), RewardModel.load(proxy, weights)
    progress("the reference")
    pool = _scores(start, judge, gold, _draw(start, prompts, spec, spec.pool_samples))
    scores: dict[str, Scores] = {}
    kls: dict[str, KL] = {}
    full: dict[str, Floats] = {}
    for name, folder in policies.items():
        progress(name)
        policy = Policy.load(folder)
        require_same_vocabulary(policy, start)
        drawn = _draw(policy, prompts, spec, spec.num_samples)
        response_kl = response_kls(policy.model, start.model, drawn.queries, drawn.responses, spec.temperature)
        kls[name] = summarise_kl(response_kl, np.arange(len(drawn.responses)) // spec.num_samples)
        full[name] = response_kl.full_N.reshape(len(prompts), -1).mean(axis=1)
        scores[name] = _scores(policy, judge, gold, drawn)
    progress("fits")
    return summarise(scores, full, kls, pool, seed=spec.seed)


def _draw(policy: Policy, prompts: Sequence[Prompt], spec: Spec, num_samples: int) -> Drawn:
    return draw(
        policy,
        prompts,
        num_samples=num_samples,
        max_new_tokens=spec.max_new_tokens,
        temperature=spec.temperature,
        seed=spec.seed,
    )


def _scores(policy: Policy, judge: RewardModel, gold: Gold, drawn: Drawn) -> Scores:
    proxy = judge.score(policy.tokenizer, drawn.conversations, drawn.queries, drawn.responses)
    shape = (-1, drawn.num_samples)
    values = np.asarray(gold(drawn.conversations, drawn.texts), dtype=np.float64)
    return Scores(values.reshape(shape), np.asarray(proxy, dtype=np.float64).reshape(shape))


def summarise(
    scores: Mapping[str, Scores],
    kl_P: Mapping[str, Floats],
    kls: Mapping[str, KL],
    pool: Scores,
    *,
    seed: int,
) -> OverOptimisation:
    """Computes the measures from samples; `kl_P` is each policy's mean KL per prompt.

    Raises: ValueError as `over_optimisation` does.
    """
    sound_P = np.ones(len(pool.gold_PS), dtype=bool)
    first_failure = ""
    for name, of_policy in {"the reference": pool, **scores}.items():
        for what, values_PS in (("gold", of_policy.gold_PS), ("proxy", of_policy.proxy_PS)):
            failed_P = ~np.isfinite(values_PS).all(axis=1)
            if failed_P.any() and not first_failure:
                first_failure = f"the {what} score of {name} on prompt {int(np.argmax(failed_P))} is not a number"
            sound_P &= ~failed_P
    if sound_P.sum() < 2:
        raise ValueError(
            f"scores failed on {int((~sound_P).sum())} of {len(sound_P)} prompts; at least two prompts must remain."
            f" First, {first_failure}"
        )
    best = best_of_n_curve(pool.gold_PS[sound_P], pool.proxy_PS[sound_P])
    rl = Curve(
        kind="rl",
        names=tuple(scores),
        kl_KP=np.stack([kl_P[name][sound_P] for name in scores]),
        gold_KP=np.stack([of_policy.gold_PS[sound_P].mean(axis=1) for of_policy in scores.values()]),
        proxy_KP=np.stack([of_policy.proxy_PS[sound_P].mean(axis=1) for of_policy in scores.values()]),
        start_gold_P=best.start_gold_P,
        start_proxy_P=best.start_proxy_P,
    )
    return OverOptimisation(
        rl_points=points(rl),
        best_of_n_points=points(best),
        rl_kl=kls,
        rl=_fit_if_enough(rl, seed),
        best_of_n=_fit_if_enough(best, seed),
        num_prompts=int(sound_P.sum()),
        num_dropped=int((~sound_P).sum()),
        first_failure=first_failure,
    )


def _fit_if_enough(curve: Curve, seed: int) -> Overoptimised | None:
    distances = np.unique(curve.d_K[curve.d_K > 0])
    return fit_curve(curve, seed=seed) if len(distances) >= MIN_POLICIES else None


def gold_of_texts(score: Callable[[Sequence[str], Sequence[str]], Sequence[float]]) -> Gold:
    """Adapts a world's gold scorer, which reads the text of the last turn, to `Gold`."""

    def gold(conversations: Sequence[Messages], responses: Sequence[str]) -> list[float]:
        scores = score([messages[-1]["content"] for messages in conversations], responses)
        return [value if math.isfinite(value) else math.nan for value in scores]

    return gold
