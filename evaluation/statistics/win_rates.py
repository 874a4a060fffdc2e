"""Win rates of two policies, whose verdicts come in prompts and from labelers. `won_V` below is policy a's.

Every prompt weighs the same, whatever the number of its verdicts: x_p is the mean of a prompt's preferences, the win
rate the mean of x_p.

Shape letters: V verdicts, P prompts (of this pair), L labelers, S resamples.
"""

import math

import numpy as np
import scipy

from evaluation.statistics.results import Counts, WinRate
from evaluation.verdicts import Comparisons
from intervals.bootstrap import bootstrap_ratio, percentiles
from intervals.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints, Z
from intervals.score import score_interval

NUM_RESAMPLES = 2_000

_RESAMPLES_PER_CHUNK = 200  # bounds the memory of resampling labelers


def pair_win_rate(pair: Comparisons, *, seed: int) -> WinRate:
    """Returns the win rate of a over b, from `Comparisons.between(a, b)`. Raises: ValueError for no verdicts."""
    if len(pair) == 0:
        raise ValueError("no verdicts; a win rate needs at least one")
    x_P = prompt_means(pair)
    low, high = score_interval(x_P)
    _, labeler_V = np.unique(pair.labeler_V, return_inverse=True)
    num_labelers = int(labeler_V.max()) + 1
    is_wilson = len(pair) == len(x_P) and bool(np.isin(pair.won_V, (0.0, 1.0)).all())
    return WinRate(
        mean=float(x_P.mean()),
        low=low,
        high=high,
        method="wilson" if is_wilson else "score",
        bootstrap=bootstrap_labelers(pair, seed=seed) if num_labelers > 1 else bootstrap_prompts(x_P, seed=seed),
        over_labelers=interval_over_labelers(pair) if num_labelers > 1 else UNKNOWN,
        num_prompts=len(x_P),
        num_verdicts=len(pair),
        num_labelers=num_labelers,
    )


def prompt_means(pair: Comparisons) -> Floats:
    """[P] the mean preference of each prompt that has verdicts, in the order of `Comparisons.prompts`."""
    _, place_V = np.unique(pair.prompt_V, return_inverse=True)
    return np.bincount(place_V, pair.won_V) / np.bincount(place_V)


def counts_of(preferences: Floats) -> Counts:
    """How many preferences are above ½, at ½ (to rounding), and below."""
    tied = np.isclose(preferences, 0.5, rtol=0, atol=1e-9)
    wins = int((~tied & (preferences > 0.5)).sum())
    return Counts(wins, int(tied.sum()), len(preferences) - wins - int(tied.sum()))


def bootstrap_prompts(x_P: Floats, *, seed: int) -> Interval:
    """The percentile bootstrap over prompts: both policies of a prompt are drawn together, so it is paired."""
    level = expanded_level(len(x_P))
    return Interval(*bootstrap_ratio(x_P, np.ones_like(x_P), seed=seed, num_resamples=NUM_RESAMPLES, level=level))


def expanded_level(num_clusters: int) -> float:
    """The level at which percentiles of a bootstrap over n clusters are about a 95% interval: 1 - 2·Φ(-t·√(n/(n-1))).

    A bootstrap's spread is √((n-1)/n) of what it should be, and knows nothing of Student's t with n - 1 degrees.
    Hesterberg 2015, What teachers should know about the bootstrap, American Statistician 69(4), "expanded percentile".
    """
    if num_clusters < 2:
        return LEVEL
    t = scipy.stats.t.ppf((1 + LEVEL) / 2, num_clusters - 1) * math.sqrt(num_clusters / (num_clusters - 1))
    # From two clusters it rounds to 1; the ends are then the extremes of the resamples.
    return min(1 - 2 * float(scipy.stats.norm.sf(t)), math.nextafter(1.0, 0.0))


def bootstrap_labelers(pair: Comparisons, *, seed: int) -> Interval:
    """The pigeonhole bootstrap: prompts and labelers are drawn, and a verdict counts as often as both were.

    Owen 2007, The pigeonhole bootstrap, Annals of Applied Statistics 1(2): its variance is at least the true one. In a
    resample a prompt without drawn labelers is left out. Unknown from a single prompt.
    """
    won_PL, num_PL = _table(pair)
    num_prompts, num_labelers = won_PL.shape
    mean = float((won_PL.sum(axis=1) / num_PL.sum(axis=1)).mean())
    if num_prompts == 1:
        return Interval(mean, math.nan, math.nan)
    generator = np.random.default_rng(seed)
    rates = []
    for _ in range(0, NUM_RESAMPLES, _RESAMPLES_PER_CHUNK):
        times_SL = _times_drawn(generator, _RESAMPLES_PER_CHUNK, num_labelers)
        times_SP = _times_drawn(generator, _RESAMPLES_PER_CHUNK, num_prompts)
        num_SP = times_SL @ num_PL.T
        x_SP = (times_SL @ won_PL.T) / np.maximum(num_SP, 1)
        weight_SP = times_SP * (num_SP > 0)
        total_S = weight_SP.sum(axis=1)
        rates.append((weight_SP * x_SP).sum(axis=1)[total_S > 0] / total_S[total_S > 0])
    return Interval(mean, *percentiles(np.concatenate(rates), LEVEL))


def interval_over_labelers(pair: Comparisons) -> Interval:
    """The win rate for other prompts and other labelers: the score interval with a two-way clustered variance.

        v = v_P + v_L - v_PL,   v_P = P/(P-1) Σ_p e_p²,  v_L = L/(L-1) Σ_l e_l²,  v_PL = Σ_pl e_pl²

    e_pl is a verdict's share in the win rate's residual, e_p and e_l its sums (Cameron, Gelbach & Miller 2011, Journal
    of Business & Economic Statistics 29(2)). v, at least v_P, over v_P inflates the variance. Where labelers add to it,
    z becomes Student's quantile with min(P, L) - 1 degrees, as they advise: few labelers who differ give wide
    intervals. (Satterthwaite's degrees would be too many: v_L is small when it happens to be.)
    """
    won_PL, num_PL = _table(pair)
    num_prompts, num_labelers = won_PL.shape
    num_P = num_PL.sum(axis=1)
    x_P = won_PL.sum(axis=1) / num_P
    mean = float(x_P.mean())
    e_PL = (won_PL - mean * num_PL) / num_P[:, None] / num_prompts
    by_prompt, by_labeler = e_PL.sum(axis=1), e_PL.sum(axis=0)
    v_P = num_prompts / max(num_prompts - 1, 1) * float((by_prompt**2).sum())
    v_L = num_labelers / (num_labelers - 1) * float((by_labeler**2).sum())
    extra = max(0.0, v_L - float((e_PL**2).sum()))
    if v_P == 0 or num_prompts == 1:
        return Interval(mean, *score_interval(x_P))
    # Without a part that labelers add, this is the interval over prompts.
    quantile = float(scipy.stats.t.ppf((1 + LEVEL) / 2, min(num_prompts, num_labelers) - 1)) if extra > 0 else Z
    return Interval(mean, *score_interval(x_P, quantile=quantile, inflation=1 + extra / v_P))


def _table(pair: Comparisons) -> tuple[Floats, Floats]:
    """[P, L] the sum of each labeler's preferences on each prompt, and how many there are."""
    prompts, prompt_V = np.unique(pair.prompt_V, return_inverse=True)
    labelers, labeler_V = np.unique(pair.labeler_V, return_inverse=True)
    shape = (len(prompts), len(labelers))
    cell_V = prompt_V * shape[1] + labeler_V
    num = np.bincount(cell_V, minlength=shape[0] * shape[1]).astype(np.float64)
    won = np.bincount(cell_V, pair.won_V, shape[0] * shape[1]).astype(np.float64)
    return won.reshape(shape), num.reshape(shape)


def _times_drawn(generator: np.random.Generator, num_resamples: int, num: int) -> Floats:
    """[S, num] how often each of `num` comes up in as many draws with replacement."""
    drawn: Ints = generator.multinomial(num, np.full(num, 1 / num), size=num_resamples)
    return drawn.astype(np.float64)
