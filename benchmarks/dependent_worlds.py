"""Comparisons whose observations depend on each other: prompts made from templates, and training runs of an algorithm.

`benchmarks.compare_coverage` draws many such worlds (`templates`, `people`, `playground`, `seeds`). Both policies, or
both algorithms, have a known mean, so the intervals can be compared with the truth.

Shape letters: T templates, V verdicts (one per prompt), S runs of an algorithm, P prompts.
"""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
from scipy import special

from benchmarks.compare_worlds import Held, comparisons
from evaluation.statistics.algorithms import AlgorithmTest
from evaluation.statistics.ratings import rate
from evaluation.statistics.significance import EqualityTest
from evaluation.statistics.summary import position_bias
from evaluation.statistics.win_rates import length_controlled, pair_test
from evaluation.verdicts import Comparisons
from heed.worlds.answers import write_answer
from heed.worlds.gold import gold_score
from heed.worlds.instructions import kind_of
from heed.worlds.world import draw_prompts
from preferences.statistics.estimates import Floats, Ints
from preferences.statistics.intervals import clustered_mean

PROMPTS_PER_TEMPLATE = 5
NUM_PROMPTS = 100  # of a world with several runs
PROMPT_SD = 0.5  # of a prompt's effect on all verdicts; the verdicts' own noise has a standard deviation of 1
TEMPLATE_SD = 0.7
LOGNORMAL_SD = np.sqrt((np.e - 1) * np.e)  # of exp of a standard normal variable
FLAWS_APART = {"story": 0.2, "question": 0.3, "help": 0.4, "list": 0.5, "decline": 0.6, "brief": 0.7}


def templates(generator: np.random.Generator, num_templates: int) -> Iterator[Held]:
    """Prompts of templates whose win rates differ: Beta-distributed with mean w and intraclass correlation ρ.

    Beta(w·(1 - ρ)/ρ, (1 - w)·(1 - ρ)/ρ)   has mean w; two verdicts of a template have the correlation ρ
    """
    for win in (0.5, 0.8):
        for rho in (0.0, 0.1, 0.3, 0.5):
            template_V = np.repeat(np.arange(num_templates), PROMPTS_PER_TEMPLATE)
            won_V = verdicts_of(generator, template_V, win, rho)
            yield from both_intervals(f"win rate {win:g}, ρ = {rho:g}", won_V, template_V, win)
    template_V = np.repeat(np.arange(num_templates), generator.integers(1, 10, size=num_templates))
    won_V = verdicts_of(generator, template_V, 0.5, 0.3)
    yield from both_intervals("win rate 0.5, ρ = 0.3, 1 to 9 prompts each", won_V, template_V, 0.5)
    yield from _other_statistics(generator, np.repeat(np.arange(num_templates), PROMPTS_PER_TEMPLATE))


def verdicts_of(generator: np.random.Generator, template_V: Ints, win: float, rho: float) -> Floats:
    """Returns a verdict per prompt, 1 or 0, of templates with mean `win` and intraclass correlation `rho`."""
    num_templates = int(template_V.max()) + 1
    scale = (1 - rho) / rho if rho else np.inf
    win_T = generator.beta(win * scale, (1 - win) * scale, num_templates) if rho else np.full(num_templates, win)
    return (generator.random(len(template_V)) < win_T[template_V]).astype(np.float64)


def both_intervals(what: str, won_V: Floats, template_V: Ints, truth: float) -> Iterator[Held]:
    """Yields the interval over templates, and the one that takes every prompt for independent."""
    for how, cluster_V in (("clustered", template_V), ("as if independent", None)):
        pair = comparisons(won_V, np.arange(len(won_V)), cluster_V=cluster_V)
        yield Held(f"{what}: {how}", *pair_test(pair, seed=0).interval(), truth)


def people(generator: np.random.Generator, num_people: int) -> Iterator[Held]:
    """People in an arena, each with 4 conversations of 1 to 6 turns. A person's and a conversation's effect on the
    verdicts have standard deviations of 1 and .5 logits; over people both policies win equally often.
    """
    conversation_V = np.repeat(np.arange(4 * num_people), generator.integers(1, 7, size=4 * num_people))
    person_V = conversation_V // 4
    logit_V = generator.normal(size=num_people)[person_V] + 0.5 * generator.normal(size=4 * num_people)[conversation_V]
    won_V = (generator.random(len(person_V)) < special.expit(logit_V)).astype(np.float64)
    for how, cluster_V in (("people", person_V), ("conversations", conversation_V), ("prompts", None)):
        pair = comparisons(won_V, np.arange(len(won_V)), cluster_V=cluster_V)
        yield Held(f"win rate over {how}", *pair_test(pair, seed=0).interval(), 0.5)


def _other_statistics(generator: np.random.Generator, template_V: Ints) -> Iterator[Held]:
    """Yields the other statistics at ρ = 0.3, clustered and not."""
    num, prompt_V = len(template_V), np.arange(len(template_V))
    effect_V = np.sqrt(0.3) * generator.normal(size=int(template_V.max()) + 1)[template_V]
    value_V = effect_V + np.sqrt(0.7) * generator.normal(size=num)
    won_V = verdicts_of(generator, template_V, 0.5, 0.3)
    longer_V, first_V = generator.normal(size=num), generator.choice([-1, 1], size=num)
    # A template's effect on the order: both policies gain from being first in some templates.
    ordered_V = np.where(first_V > 0, won_V, 1 - won_V)
    # Three policies: each prompt has a verdict on every pair, and a template prefers one policy.
    pairs = np.array([(0, 1), (0, 2), (1, 2)])
    strength_T3 = generator.normal(size=(int(template_V.max()) + 1, 3))
    lead_V3 = strength_T3[template_V][:, pairs[:, 0]] - strength_T3[template_V][:, pairs[:, 1]]
    among_V = (generator.random((num, 3)) < special.expit(lead_V3)).astype(np.float64).ravel()
    for how, cluster_V in (("clustered", template_V), ("as if independent", prompt_V)):
        mean = clustered_mean(value_V, cluster_V)
        yield Held(f"mean score, ρ = 0.3: {how}", mean.low, mean.high, 0.0)
        fitted = length_controlled(comparisons(won_V, prompt_V, longer_V=longer_V, cluster_V=cluster_V))
        yield Held(f"win rate at equal length, ρ = 0.3: {how}", fitted.low, fitted.high, 0.5)
        bias = position_bias(comparisons(ordered_V, prompt_V, first_V=first_V, cluster_V=cluster_V))
        yield Held(f"position bias, ρ = 0.3: {how}", bias.low, bias.high, 0.5)
        several = comparisons(
            among_V,
            np.repeat(prompt_V, 3),
            pairs=(np.tile(pairs[:, 0], num), np.tile(pairs[:, 1], num)),
            cluster_V=np.repeat(cluster_V, 3),
        )
        rated = _rating(several)
        yield Held(f"rating of three policies: {how}", rated[0], rated[1], 0.0)


def _rating(several: Comparisons) -> tuple[float, float]:
    found = rate(several, anchor="p0", seed=0).policies[1]
    return found.low, found.high


def playground(generator: np.random.Generator, num_prompts: int) -> Iterator[Held]:
    """The playground's prompts, which are drawn independently, of six kinds, answered by two writers with flaws.

    One writer's flaws are equally frequent in every kind of prompt, the other's differ by kind. The truth is over all
    prompts of the world.
    """
    for how in ("alike", "apart"):
        won_P, kind_P = _written(random.Random(int(generator.integers(2**31))), how, num_prompts)
        _, cluster_P = np.unique(kind_P, return_inverse=True)
        truth, correlation = _playground_truth(how)
        what = f"kinds {how}, intraclass correlation {correlation:.2f}"
        yield Held(f"{what}: as if independent", *EqualityTest(won_P, seed=0).interval(), truth)
        yield Held(f"{what}: clustered by kind", *EqualityTest(won_P, cluster_P, seed=0).interval(), truth)


def _written(rng: random.Random, how: str, num_prompts: int) -> tuple[Floats, list[str]]:
    """Returns the first writer's wins by gold score over one with flaws in 75% of answers, and the prompts' kinds."""
    won, kinds = [], []
    for prompt, request in draw_prompts(num_prompts, rng, set()):
        flaw_rate = FLAWS_APART[kind_of(request)] if how == "apart" else 0.4
        ours, theirs = (
            gold_score(prompt, write_answer(request, rng, *rates)) for rates in ((flaw_rate, 0.1), (0.75, 0.25))
        )
        won.append(0.5 if ours == theirs else float(ours > theirs))
        kinds.append(kind_of(request))
    return np.array(won), kinds


@cache
def _playground_truth(how: str) -> tuple[float, float]:
    """Returns the mean and the intraclass correlation by kind (one-way analysis of variance) of 15,000 prompts."""
    won_P, kinds = _written(random.Random(0), how, 15_000)
    _, kind_P = np.unique(kinds, return_inverse=True)
    size_K = np.bincount(kind_P)
    mean_K = np.bincount(kind_P, won_P) / size_K
    between = float((size_K * (mean_K - won_P.mean()) ** 2).sum()) / (len(size_K) - 1)
    within = float(((won_P - mean_K[kind_P]) ** 2).sum()) / (len(won_P) - len(size_K))
    size = (len(won_P) - float((size_K**2).sum()) / len(won_P)) / (len(size_K) - 1)
    return float(won_P.mean()), max(0.0, (between - within) / (between + (size - 1) * within))


def seeds(generator: np.random.Generator, num_runs: int) -> Iterator[Held]:
    """Two algorithms with S runs each on the same prompts, equal or not, by preferences and by right answers.

        run i of A is preferred to run j of B on prompt p if  μ + a_i + a_ip + g_p > b_j + b_jp

    a_i and b_j are a run's effect, with the standard deviation σ; a_ip and b_jp have ½ of the variance 1 of a verdict's
    noise each; g_p is the prompt's effect, which may have a template's in it.
    """
    for sigma in (0.0, 0.1, 0.3, 0.6):
        for mu in (0.0, 0.8):
            yield from preferences(generator, num_runs, sigma, mu, num_templates=0)
    yield from preferences(generator, num_runs, 0.3, 0.0, num_templates=20)
    for sigma in (0.0, 0.3):
        yield from _right_answers(generator, num_runs, sigma)


def wide_seeds(generator: np.random.Generator, num_runs: int) -> Iterator[Held]:
    """Equal algorithms whose runs differ as much as verdicts do (σ = 1): both of them, or one."""
    for what, sigma in (("both vary", 1.0), ("one varies", 0.0)):
        g_P = PROMPT_SD * generator.normal(size=NUM_PROMPTS)
        a_AP, b_BP = (_run_effects(generator, num_runs, own) for own in (1.0, sigma))
        right_ABP = 1.0 * (g_P + a_AP > 0)[:, None] - (g_P + b_BP > 0)[None]
        won_ABP = (g_P + a_AP[:, None] > b_BP[None]).astype(np.float64)
        for of, x_ABP in (("win rate", won_ABP), ("right", np.asarray(1 + right_ABP, dtype=np.float64) / 2)):
            found = AlgorithmTest.of_preferences(x_ABP, np.arange(NUM_PROMPTS), seed=0).interval()
            yield Held(f"{of}, {what}", found.low, found.high, 0.5)


def skewed_seeds(generator: np.random.Generator, num_runs: int) -> Iterator[Held]:
    """Equal algorithms by scores, whose runs' effects are normal or lognormal with a standard deviation of 1, in both
    algorithms or in one.
    """
    g_P = PROMPT_SD * generator.normal(size=NUM_PROMPTS)
    for what in ("normal", "lognormal"):
        for how, num_varying in (("both vary", 2), ("one varies", 1)):
            values: list[Floats] = []
            for place in range(2):
                normal_S = generator.normal(size=num_runs)
                effect_S = normal_S if what == "normal" else (np.exp(normal_S) - np.exp(0.5)) / LOGNORMAL_SD
                own_SP = _run_effects(generator, num_runs, 0.0)
                values.append(g_P + own_SP + effect_S[:, None] * (place < num_varying))
            found = AlgorithmTest.of_values(values[0], values[1], np.arange(NUM_PROMPTS), seed=0).interval()
            yield Held(f"{what}, {how}", found.low, found.high, 0.0)


def preferences(
    generator: np.random.Generator, num_runs: int, sigma: float, mu: float, *, num_templates: int
) -> Iterator[Held]:
    """Yields the interval over runs and prompts, and the one over prompts alone of the first run of each."""
    cluster_P = np.arange(NUM_PROMPTS) % (num_templates or NUM_PROMPTS)
    g_P = PROMPT_SD * generator.normal(size=NUM_PROMPTS)
    variance = 1 + PROMPT_SD**2 + 2 * sigma**2
    if num_templates:
        g_P, variance = g_P + TEMPLATE_SD * generator.normal(size=num_templates)[cluster_P], variance + TEMPLATE_SD**2
    a_SP, b_SP = (_run_effects(generator, num_runs, sigma) for _ in "ab")
    x_ABP = (mu + g_P + a_SP[:, None] > b_SP[None]).astype(np.float64)
    what = f"win rate, σ = {sigma:g}, μ = {mu:g}{f', {num_templates} templates' if num_templates else ''}"
    truth = float(special.ndtr(mu / np.sqrt(variance)))
    found = AlgorithmTest.of_preferences(x_ABP, cluster_P, seed=0).interval()
    yield Held(what, found.low, found.high, truth)
    one = comparisons(x_ABP[0, 0], np.arange(NUM_PROMPTS), cluster_V=cluster_P)
    yield Held(f"{what}: one run of each, over prompts", *pair_test(one, seed=0).interval(), truth)


def _right_answers(generator: np.random.Generator, num_runs: int, sigma: float) -> Iterator[Held]:
    """The difference in the share of right answers, between two algorithms that are right 69% and 50% of the time."""
    g_P, variance = PROMPT_SD * generator.normal(size=NUM_PROMPTS), 0.5 + PROMPT_SD**2 + sigma**2
    right_AP = (0.45 + g_P + _run_effects(generator, num_runs, sigma) > 0).astype(np.float64)
    right_BP = (g_P + _run_effects(generator, num_runs, sigma) > 0).astype(np.float64)
    found = AlgorithmTest.of_values(right_AP, right_BP, np.arange(NUM_PROMPTS), seed=0).interval()
    truth = float(special.ndtr(0.45 / np.sqrt(variance))) - 0.5
    yield Held(f"right answers, σ = {sigma:g}", found.low, found.high, truth)


def _run_effects(generator: np.random.Generator, num_runs: int, sigma: float) -> Floats:
    """Returns a run's effect plus its own noise on every prompt [S, P]."""
    of_run = sigma * generator.normal(size=num_runs)[:, None]
    return np.asarray(of_run + np.sqrt(0.5) * generator.normal(size=(num_runs, NUM_PROMPTS)))
