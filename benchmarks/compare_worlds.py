"""Verdicts with planted effects, and the intervals of a comparison next to the exact truth.

    latent = √ρ·z_prompt + √λ·z_labeler + √(1-ρ-λ)·noise,  all standard normal; a wins if Φ(latent) < w, ties if < w + t

A verdict is a win with probability w and a tie with probability t, however strong the correlation within prompts and
labelers. `benchmarks.compare_coverage` draws many such worlds.

Shape letters: V verdicts, P prompts, M policies.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import special

from evaluation.statistics.ratings import rate
from evaluation.statistics.significance import EqualityTest, GainTest
from evaluation.statistics.summary import flips, labelers_agree, position_bias
from evaluation.statistics.win_rates import length_controlled, lengths_controlled, pair_win_rate, prompt_means
from evaluation.verdicts import Comparisons, Verdict
from preferences.statistics.estimates import Floats, Ints
from preferences.statistics.intervals import clustered_mean, percentiles, resampled_sums

DIFFICULTY_SD = 1.2  # of prompts, in log-odds


class Held(NamedTuple):
    """An interval and the truth. An unknown end is NaN and counts as neither covering nor not covering."""

    what: str
    low: float
    high: float
    truth: float


# ---- worlds ----


def latent(generator: np.random.Generator, prompt_V: Ints, labeler_V: Ints, rho: float, lam: float) -> Floats:
    """Returns uniform numbers [V], correlated within a prompt (ρ) and within a labeler (λ)."""
    by_prompt = generator.normal(size=int(prompt_V.max()) + 1)[prompt_V]
    by_labeler = generator.normal(size=int(labeler_V.max()) + 1)[labeler_V]
    noise = generator.normal(size=len(prompt_V))
    together = np.sqrt(rho) * by_prompt + np.sqrt(lam) * by_labeler + np.sqrt(1 - rho - lam) * noise
    return np.asarray(special.ndtr(together))


def outcome(u_V: Floats, win: Floats | float, tie: Floats | float) -> Floats:
    """Returns 1 for a win, ½ for a tie, 0 for a loss."""
    return np.where(u_V < win, 1.0, np.where(u_V < win + tie, 0.5, 0.0))


def equality(x_P: Floats) -> EqualityTest:
    """The test whose interval is compared with the truth; its draws are the same in every world."""
    return EqualityTest(x_P, seed=0)


def comparisons(
    won_V: Floats,
    prompt_V: Ints,
    *,
    labeler_V: Ints | None = None,
    pairs: tuple[Ints, Ints] | None = None,
    first_V: Ints | None = None,
    longer_V: Floats | None = None,
    cluster_V: Ints | None = None,
) -> Comparisons:
    """Returns columns of verdicts; by default on policies 0 and 1, by one labeler, order unknown, equal lengths."""
    none_V = np.zeros(len(won_V), dtype=np.int64)
    a_V, b_V = pairs if pairs is not None else (none_V, none_V + 1)
    labeler_V = none_V if labeler_V is None else labeler_V
    return Comparisons(
        policies=tuple(f"p{number}" for number in range(int(max(a_V.max(), b_V.max())) + 1)),
        prompts=tuple(map(str, range(int(prompt_V.max()) + 1))),
        labelers=tuple(map(str, range(int(labeler_V.max()) + 1))),
        categories=("",),
        a_V=a_V,
        b_V=b_V,
        prompt_V=prompt_V,
        cluster_V=prompt_V if cluster_V is None else cluster_V,
        labeler_V=labeler_V,
        category_V=none_V,
        won_V=won_V,
        first_V=none_V if first_V is None else first_V,
        longer_V=none_V.astype(np.float64) if longer_V is None else longer_V,
    )


# ---- what is compared with the truth ----


def win_rates(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """One verdict per prompt with and without ties, several verdicts, and soft ones."""
    once_V = np.arange(num_prompts)
    for win in (0.5, 0.75, 0.9, 0.95):
        yield from _win_rate(f"{win:.2f}, no ties", generator, once_V, win, 0.0, win)
    win = float(generator.uniform(0.5, 0.95))
    yield from _win_rate("drawn from 0.5 to 0.95, no ties", generator, once_V, win, 0.0, win)
    for win, tie in ((0.35, 0.3), (0.3, 0.6), (0.12, 0.8), (0.8, 0.2)):
        yield from _win_rate(f"{win + tie / 2:.2f}, {tie:.0%} ties", generator, once_V, win, tie, win + tie / 2)
    times_P = generator.integers(1, 6, size=num_prompts)
    several_V = np.repeat(once_V, times_P)
    for win, tie in ((0.45, 0.1), (0.85, 0.1)):
        what = f"{win + tie / 2:.2f}, {tie:.0%} ties, 1 to 5 verdicts per prompt"
        yield from _win_rate(what, generator, several_V, win, tie, win + tie / 2)
    for a, b in ((2.0, 2.0), (2.0, 0.5), (0.5, 0.05)):
        x_P = generator.beta(a, b, size=num_prompts)
        yield Held(f"{a / (a + b):.2f}, soft, Beta({a:g}, {b:g})", *equality(x_P).interval(), a / (a + b))


def _win_rate(
    what: str, generator: np.random.Generator, prompt_V: Ints, win: float, tie: float, truth: float
) -> Iterator[Held]:
    u_V = latent(generator, prompt_V, np.zeros_like(prompt_V), 0.5, 0.0)
    x_P = prompt_means(comparisons(outcome(u_V, win, tie), prompt_V))
    yield Held(what, *equality(x_P).interval(), truth)


def skewed(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """Gains whose mean is 0: normal, lognormal, and -.05 but for an event on 5% of prompts; by Student's test, too."""
    gains = {
        "normal": generator.normal(size=num_prompts),
        "lognormal": np.exp(generator.normal(size=num_prompts)) - np.exp(0.5),
        "rare events": (generator.random(num_prompts) < 0.05) - 0.05,
    }
    for what, x_P in gains.items():
        for how, found in (
            ("ours", GainTest(x_P, seed=0).interval()),
            ("Student", clustered_mean(x_P, np.arange(num_prompts))),
        ):
            yield Held(f"{what}: {how}", found.low, found.high, 0.0)


def over_labelers(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """Three labelers per prompt out of 3, 5 or 10; the truth is over other prompts and other labelers."""
    for num_labelers in (3, 5, 10):
        chosen = [generator.permutation(num_labelers)[:3] for _ in range(num_prompts)]
        prompt_V, labeler_V = np.repeat(np.arange(num_prompts), 3), np.concatenate(chosen)
        for lam in (0.0, 0.05, 0.2):
            u_V = latent(generator, prompt_V, labeler_V, 0.3, lam)
            pair = comparisons(outcome(u_V, 0.55, 0.1), prompt_V, labeler_V=labeler_V)
            found = pair_win_rate(pair, equality(prompt_means(pair)))
            what = f"{num_labelers} labelers, λ = {lam:g}"
            yield Held(what, found.over_labelers.low, found.over_labelers.high, 0.6)
            yield Held(f"{what}: prompts only", found.low, found.high, 0.6)


def ratings(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """Four policies, all pairs on every prompt twice. Differences from the first."""
    theta_M = np.array([0.0, 0.4, 1.0, -0.5])
    places = np.array(list(combinations(range(4), 2)))
    prompt_V = np.repeat(np.arange(num_prompts), 2 * len(places))
    pairs = np.tile(np.repeat(places, 2, axis=0), (num_prompts, 1))
    pi_M = np.exp(theta_M)
    one_V, other_V = pi_M[pairs[:, 0]], pi_M[pairs[:, 1]]
    u_V = latent(generator, prompt_V, np.zeros_like(prompt_V), 0.3, 0.0)
    seen = comparisons(outcome(u_V, one_V / (one_V + other_V), 0.0), prompt_V, pairs=(pairs[:, 0], pairs[:, 1]))
    found = rate(seen, anchor="p0", seed=int(generator.integers(2**31)))
    for rating, truth in list(zip(found.policies, theta_M, strict=True))[1:]:
        yield Held("sandwich", rating.low, rating.high, float(truth))
    ranks = [1 + sum(other > theta for other in theta_M) for theta in theta_M]
    all_held = all(r.best_rank <= rank <= r.worst_rank for r, rank in zip(found.policies, ranks, strict=True))
    yield Held("all rank ranges at once", 0.0, 1.0, 0.5 if all_held else 2.0)


def two_policies(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """Two policies far apart: one wins 0.9 of all verdicts."""
    apart = comparisons(outcome(generator.random(num_prompts), 0.9, 0.0), np.arange(num_prompts))
    found = rate(apart, anchor="p0", seed=0).policies[1]
    yield Held("two policies far apart", found.low, found.high, float(special.logit(0.1)))


def lengths(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """a's responses are 0.5 standard deviations longer, and length does or does not sway the judge; two verdicts per
    prompt.
    """
    prompt_V = np.repeat(np.arange(num_prompts), 2)
    for theta, phi in ((0.0, 0.0), (0.0, 1.5), (1.0, 1.5), (2.0, 1.0)):
        longer_V = 100.0 * (0.5 + generator.normal(size=len(prompt_V)))
        p_V = special.expit(theta + phi * np.tanh(longer_V / (100.0 * np.sqrt(1.25))))
        u_V = latent(generator, prompt_V, np.zeros_like(prompt_V), 0.3, 0.0)
        found = length_controlled(comparisons(outcome(u_V, p_V, 0.0), prompt_V, longer_V=longer_V))
        yield Held(f"θ = {theta:g}, φ = {phi:g}", found.low, found.high, float(special.expit(theta)))
        yield Held("φ itself", found.length_effect.low, found.length_effect.high, phi)


def against_baseline(
    generator: np.random.Generator, num_prompts: int, leads: Sequence[float], with_difficulty: float
) -> list[Comparisons]:
    """Returns models' verdicts against one baseline. Their answers are longer, by more on easy prompts if
    `with_difficulty` is above 0; every second model has soft verdicts.

        P(model m is preferred) = expit(lead_m + 1.5·tanh(Δ/σ) + difficulty),   difficulty ~ N(0, DIFFICULTY_SD²)
    """
    difficulty_P, prompt_P = DIFFICULTY_SD * generator.normal(size=num_prompts), np.arange(num_prompts)
    models = []
    for place, lead in enumerate(leads):
        longer_P = 100.0 * (0.6 + generator.normal(size=num_prompts) + with_difficulty * difficulty_P)
        won_P = special.expit(lead + 1.5 * np.tanh(longer_P / np.sqrt((longer_P**2).mean())) + difficulty_P)
        won_P = won_P if place % 2 else outcome(generator.random(num_prompts), won_P, 0.0)
        pairs = (np.full(num_prompts, place), np.full(num_prompts, len(leads)))
        models.append(comparisons(won_P, prompt_P, pairs=pairs, longer_V=longer_P))
    return models


def joint_lengths(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """Three or eight models against one baseline, fitted jointly and each alone."""
    normal = DIFFICULTY_SD * special.ndtri((np.arange(2_000) + 0.5) / 2_000)
    for with_difficulty in (0.0, 0.3):
        for num_models in (3, 8):
            leads = np.linspace(-0.6, 0.6, num_models).tolist()
            models = against_baseline(generator, num_prompts, leads, with_difficulty)
            for how, fits in (("joint", lengths_controlled(models)), ("alone", map(length_controlled, models))):
                for lead, found in zip(leads, fits, strict=True):
                    truth = float(special.expit(lead + normal).mean())
                    what = f"{num_models} models, {with_difficulty:g} of difficulty: {how}"
                    yield Held(what, found.low, found.high, truth)


def positions(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """a wins 0.7 ± bias, + if shown first; both orders on every prompt, or one at random, or one order rarely."""
    for bias in (0.0, 0.1, 0.25):
        both_V = np.repeat(np.arange(num_prompts), 2)
        yield from _position(f"bias {bias:g}, both orders", generator, both_V, np.tile([1, -1], num_prompts), bias)
        once_V = np.arange(num_prompts)
        for share in (0.5, 0.8):
            first_V = np.where(generator.random(num_prompts) < share, 1, -1)
            yield from _position(f"bias {bias:g}, one order, {share:.0%} a first", generator, once_V, first_V, bias)


def _position(what: str, generator: np.random.Generator, prompt_V: Ints, first_V: Ints, bias: float) -> Iterator[Held]:
    u_V = latent(generator, prompt_V, np.zeros_like(prompt_V), 0.5, 0.0)
    won_V = outcome(u_V, 0.65 + bias * first_V.astype(np.float64), 0.1)
    found = position_bias(comparisons(won_V, prompt_V, first_V=first_V))
    yield Held(what, found.low, found.high, 0.5 + bias)


def flipped(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """A judge that follows the order on some prompts, and labelers who each report the truth with some probability."""
    for share in (0.05, 0.2, 0.5):
        follows = generator.random(num_prompts) < share
        rows = [
            Verdict(str(prompt), "p0", "p1", 0, 0, "j", "j", float(first == "a" if follows[prompt] else better), first)
            for prompt, better in enumerate(generator.random(num_prompts) < 0.6)
            for first in ("a", "b")
        ]
        found = flips(rows).changed
        yield Held(f"flip rate {share:g}", found.low, found.high, share)
    for right in (0.75, 0.95):
        rows = [
            Verdict(str(prompt), "p0", "p1", 0, 0, "j", str(labeler), float(is_right))
            for prompt in range(num_prompts)
            for labeler, is_right in enumerate(generator.random(3) < right)
        ]
        agreement = labelers_agree(rows, "j").share
        truth = right**2 + (1 - right) ** 2
        yield Held(f"agreement {truth:.2f} of 3 labelers", agreement.low, agreement.high, truth)


def rows_or_prompts(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """Resampling rows compared with resampling prompts: two games per prompt, and three rows for a strong verdict."""
    prompt_V = np.repeat(np.arange(num_prompts), 2)
    u_V = latent(generator, prompt_V, np.zeros_like(prompt_V), 0.7, 0.0)
    won_V = outcome(u_V, 0.5, 0.1)
    times_V = np.where((u_V < 0.3) | (u_V > 0.8), 3, 1)
    truth = (3 * 0.3 + 0.2 + 0.05) / (3 * 0.3 + 0.3 + 3 * 0.2 + 0.2)
    rows = np.repeat(won_V, times_V)
    seed = int(generator.integers(2**31))
    row_table = np.stack([rows, np.ones_like(rows)], axis=1)
    sums_P = np.stack([np.bincount(prompt_V, won_V * times_V), np.bincount(prompt_V, times_V)], axis=1)
    for what, table in (("rows", row_table), ("prompts", sums_P.astype(np.float64))):
        sums_RS = resampled_sums(table, seed=seed, num_resamples=1_000)
        yield Held(
            f"three rows per strong verdict, {what} resampled", *percentiles(sums_RS[:, 0] / sums_RS[:, 1], 0.95), truth
        )
    yield Held(
        "the same games, one value per prompt (ours)",
        *equality(prompt_means(comparisons(won_V, prompt_V))).interval(),
        0.55,
    )
