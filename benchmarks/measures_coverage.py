"""Do the intervals of measures have their nominal coverage? `python -m benchmarks.measures_coverage`.

Worlds with planted truths are drawn repeatedly. `tests/evaluation/measures/` runs some of them; docs/measures.md has
the table for 2,000.

Shape letters: K policies, P prompts.
"""

import argparse
import math
from collections.abc import Iterator

import numpy as np
from scipy.special import expit

from benchmarks.label_coverage import Covered
from evaluation.measures.kl import ResponseKLs, summarise_kl
from evaluation.measures.reward_model import ScoredPairs, accuracy_of, calibration
from preferences.statistics.estimates import Floats, Interval
from research.over_optimisation.curves import Curve, Kind
from research.over_optimisation.fits import fit_curve, gain_at

DISTANCES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)  # √KL of the planted policies
PLANTED = {"best_of_n": (0.9, 0.2), "rl": (0.8, 0.5)}  # α and β; optima at 2.25 and e^0.6 = 1.82


def planted_curve(
    kind: Kind, alpha: float, beta: float, *, num_prompts: int, noise: float, generator: np.random.Generator
) -> Curve:
    """A curve of the functional form with noise in KL (RL only), in scores, and in each prompt's gain.

    Prompts differ in difficulty, which all their scores share, and gain by factors around 1.
    """
    d_K = np.array(DISTANCES)
    shape = (len(d_K), num_prompts)
    spread = 0.0 if kind == "best_of_n" else 0.5
    # Gamma with mean 1, because a KL is never negative, and is skewed.
    kl_KP = d_K[:, None] ** 2 * (generator.gamma(1 / spread**2, spread**2, shape) if spread else np.ones(shape))
    gain_K = gain_at(kind, alpha, beta, d_K)
    factor_P = 1 + 0.3 * generator.normal(size=num_prompts)
    start_P = generator.normal(size=num_prompts)
    noise_KP = noise * generator.normal(size=shape)
    start_noise_P = noise / 4 * generator.normal(size=num_prompts)
    gold_KP = start_P + gain_K[:, None] * factor_P + noise_KP
    proxy_KP = start_P + d_K[:, None] + noise_KP
    names = tuple(f"d{d:g}" for d in d_K)
    return Curve(kind, names, kl_KP, gold_KP, proxy_KP, start_P + start_noise_P, start_P)


def gao_coverage(kind: Kind, *, num_worlds: int, num_prompts: int, seed: int) -> dict[str, Covered]:
    """Returns the coverage of every interval in the fits of `num_worlds` planted curves."""
    alpha, beta = PLANTED[kind]
    best = alpha / (2 * beta) if kind == "best_of_n" else math.exp(alpha / beta - 1)
    height = best * (alpha - beta * (best if kind == "best_of_n" else math.log(best)))

    def intervals() -> Iterator[tuple[str, Interval, float]]:
        for world in range(num_worlds):
            generator = np.random.default_rng([seed, world])
            curve = planted_curve(kind, alpha, beta, num_prompts=num_prompts, noise=0.5, generator=generator)
            found = fit_curve(curve, seed=world)
            yield "alpha", found.gold.alpha, alpha
            yield "beta", found.gold.beta, beta
            yield "optimum's d", found.optimum.d, best
            yield "gain at the optimum", found.optimum.gain, height

    return held(intervals())


# ---- KL ----

MEAN_KL = 2.0


def kl_coverage(*, num_worlds: int, num_prompts: int, num_samples: int, seed: int) -> dict[str, Covered]:
    """Returns the coverage of k1 and full. The prompts' KLs are Gamma, with mean 2 nats and standard deviation √2; k1
    also has the noise of the sampled tokens.
    """

    def intervals() -> Iterator[tuple[str, Interval, float]]:
        for world in range(num_worlds):
            generator = np.random.default_rng([seed, world])
            prompt_N = np.repeat(np.arange(num_prompts), num_samples)
            full_N = generator.gamma(2.0, MEAN_KL / 2, num_prompts)[prompt_N]
            k1_N = full_N + 1.5 * generator.normal(size=len(full_N))
            found = summarise_kl(ResponseKLs(k1_N, full_N, full_N), prompt_N)
            yield "full", found.full, MEAN_KL
            yield "k1", found.k1, MEAN_KL

    return held(intervals())


# ---- reward models ----

PAIRS_PER_PROMPT = 3
COPIED = 0.5  # share of a prompt's labels that share one random draw


def planted_pairs(sharpness: float, *, num_prompts: int, generator: np.random.Generator) -> ScoredPairs:
    """Score differences N(0, 1.5²); σ(sharpness Δ) is the true probability that the first is preferred.

    At 1 the scores are calibrated; below 1 they are overconfident. Labels of one prompt are correlated.
    """
    shape = (num_prompts, PAIRS_PER_PROMPT)
    difference = SPREAD * generator.normal(size=shape)
    fresh, shared = generator.random(shape), generator.random((num_prompts, 1))
    chance = np.where(generator.random(shape) < COPIED, shared, fresh)
    lead = np.where(chance < expit(sharpness * difference), difference, -difference).ravel()
    place = np.repeat(np.arange(num_prompts), PAIRS_PER_PROMPT)
    ones = np.ones(len(place), dtype=np.int64)
    return ScoredPairs(lead, place, place, 3 * ones, ones, 0 * ones, ("all",))


SPREAD = 1.5


def calibration_coverage(
    sharpness: float, *, num_worlds: int, num_prompts: int, seed: int
) -> tuple[dict[str, Covered], float]:
    """Returns every interval's coverage over `num_worlds` reward models, and the share whose ECE is rejected at 5%."""
    grid = np.linspace(-8, 8, 20_001)
    weight = np.exp(-(grid**2) / 2)
    weight /= weight.sum()
    difference = SPREAD * grid
    true, said = expit(sharpness * np.abs(difference)), expit(np.abs(difference))
    accuracy = float(weight @ true)
    chance = expit(sharpness * difference)
    log_loss = float(weight @ -(chance * np.log(expit(difference)) + (1 - chance) * np.log(expit(-difference))))
    rejected = []

    def intervals() -> Iterator[tuple[str, Interval, float]]:
        for world in range(num_worlds):
            generator = np.random.default_rng([seed, world])
            pairs = planted_pairs(sharpness, num_prompts=num_prompts, generator=generator)
            found = calibration(pairs, seed=world)
            share = accuracy_of(pairs, np.ones(len(pairs), dtype=bool))
            yield "accuracy", Interval(share.mean, share.low, share.high), accuracy
            yield "overconfidence", found.overconfidence, float(weight @ said) - accuracy
            yield "log-loss", found.log_loss, log_loss
            yield "scale", found.scale, sharpness
            rejected.append(found.error.p_value <= 0.05)

    covered = held(intervals())
    return covered, float(np.mean(rejected))


def held(intervals: Iterator[tuple[str, Interval, float]]) -> dict[str, Covered]:
    """Counts how often each kind of interval (what, interval, truth) contained the truth; a NaN end is unbounded."""
    rows: dict[str, list[tuple[bool, float, float]]] = {}
    for what, found, truth in intervals:
        misses = truth < found.low or truth > found.high
        rows.setdefault(what, []).append((not misses, found.mean - truth, found.high - found.low))
    columns: dict[str, Floats] = {what: np.array(found, dtype=np.float64) for what, found in rows.items()}
    return {
        what: Covered(int(c[:, 0].sum()), len(c), float(np.nanmean(c[:, 1])), float(np.nanmean(c[:, 2])))
        for what, c in columns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    how = {"num_worlds": arguments.worlds, "seed": arguments.seed}
    print("| interval | prompts | worlds | covers the truth | bias | mean width |\n|---|---|---|---|---|---|")
    for num_prompts in (20, 50, 300):
        for what, covered in kl_coverage(num_prompts=num_prompts, num_samples=4, **how).items():
            print_row(f"KL: {what}", num_prompts, covered)
    for num_prompts in (50, 300):
        for kind in ("best_of_n", "rl"):
            found = gao_coverage(kind, num_prompts=num_prompts, **how)
            for what, covered in found.items():
                print_row(f"{kind}: {what}", num_prompts, covered)

    for num_prompts in (50, 300):
        for sharpness in (1.0, 0.5):
            pairs, rejected = calibration_coverage(sharpness, num_prompts=num_prompts, **how)
            for what, covered in pairs.items():
                print_row(f"reward model, sharpness {sharpness}: {what}", num_prompts, covered)
            print(f"ECE rejected at 5%, sharpness {sharpness}, {num_prompts} prompts: {100 * rejected:.1f}%")


def print_row(what: str, num_prompts: int, covered: Covered) -> None:
    share = f"{100 * covered.share:.1f}%"
    print(f"| {what} | {num_prompts} | {covered.num_counted} | {share} | {covered.bias:.3g} | {covered.width:.3g} |")


if __name__ == "__main__":
    main()
