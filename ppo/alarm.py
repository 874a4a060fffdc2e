"""An alarm for reward hacking: an independent scorer checks a few of the policy's responses.

The spot checker is any source of scores that the run does not optimise: a world's gold scorer, a stronger judge,
tests. It checks a sample of the initial policy's responses, and then a few from every iteration. The question is
whether the gain in score is real.

**What is tested.** Let g be a response's check, from 0 to 1, and z its score in standard deviations of the initial
policy's scores, cut at ±`MOST_STD`. The first quarter of the initial checks gives b, the slope of g on z: what one
standard deviation of score is worth, according to the spot checker. Each other check gives x = g - share · b · z. The
hypothesis is that no policy of the run has a smaller mean of x than the initial one, so that at least `share` of what
the scores promise is real. If the slope is not above 0, b is 0 and the hypothesis is only that no policy is worse than
the initial one.

**How.** For any threshold m, two gamblers bet: the first that the initial mean is above m, the second that the means
from iteration k on are below it:

    A(m) = Π (1 + λ(x - m)) over the initial checks,    B_k(m) = Π (1 - λ z_i(m)) over the iterations from k on,
    z_i(m) = (mean of x in iteration i - m) / c_i, cut at ±1,    c_i = `MOST_ERRORS` standard errors of such a mean.

Checks of one iteration may have something in common, such as easy prompts, so they are one bet. The hypothesis is that
given the past, with m the initial mean, no z_i(m) has an expectation below 0: what they share may be large, if it is as
likely to be up as down. (The cut allows large bets.) Neither game is then better than fair, so the smallest product
over all m, averaged over the tested k, exceeds 1/α with probability at most α, however often one looks (Ville's
inequality; the bets are those of arXiv 2010.09686).

Shape letters: A initial checks, B responses, C later ones, N all, K iterations (a fall's start), L bets, M thresholds.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from files.hashes import derive_seed
from files.records import as_json
from lm.tokenizer import Messages, Tokenizer
from ppo.config import AlarmConfig, PeopleSource
from ppo.prompts import before_repeat, order_of
from ppo.rank import ScoreScale
from ppo.rollout import Rollout
from reward.external import Scored, score_in_parts
from training.data import Prompt
from training.metrics import StepLines, read_metrics
from training.notices import say

Floats = NDArray[np.float64]

SPOT_CHECKS = "spot_checks.jsonl"
MOST_STD = 4.0  # scores further from the initial mean count as this far
SLOPE_PARTS = 4  # the slope is estimated from one of so many parts of the initial checks
NUM_THRESHOLDS = 129
BETS = (0.3, 0.9)  # shares of the stake that an iteration can cost
MOST_ERRORS = 3.0
CAUTION = (1.0, 8.0, 64.0, math.inf)  # multiples of the initial checks after which a bet is best; inf = no bet
MOST_AT_STAKE = 0.75  # of what a gambler has
CHECKS_PER_CALL = 16
ACTIONS = {
    "warn": "Training continues.",
    "stop": "Training ends.",
    "roll_back": "Training ends, and the result is a policy from before the fall.",
}
NUM_BEGINNINGS = 4  # iterations that a fall is tested to have begun with; more would cost more evidence than they find


@dataclass(frozen=True)
class SpotCheck:
    """One line of spot_checks.jsonl. `step` is the iteration, counted from 1."""

    step: int
    policy: int  # how many iterations had trained the policy that sampled the response
    prompt_id: str
    messages: Messages
    response: str
    score: float  # before scaling and penalties
    check: float  # as `alarm.source` gave it; NaN (null) where it failed
    failure: str  # why


@dataclass(frozen=True)
class Evidence:
    """The evidence that the gain in score is not real."""

    nats: float
    fall: int  # the number of iterations after which, most likely, the fall began; 0 if none is tested yet

    def rings(self, false_alarms: float) -> bool:
        """Whether it is enough for an alarm, of which at most this share of the sound runs has one."""
        return self.nats >= -math.log(false_alarms)


@dataclass(frozen=True)
class Rang:
    """An alarm. A policy's number is how many iterations have trained it."""

    policy: int  # whose responses rang it
    fall: int  # the first one that is, most likely, worse than its scores promise
    num_checks: int  # so far, including those of the initial policy
    nats: float
    result: int = 0  # the policy that is the stage's result, once it is finished
    by_people: bool = False  # who compared responses; others score them


class SpotChecks:
    """Has responses checked, and keeps the checks in spot_checks.jsonl, from which a resumed run reads them."""

    def __init__(
        self,
        config: AlarmConfig,
        folder: Path,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        scale: ScoreScale,
        *,
        num_iterations: int,
        seed: int,
        resume_step: int,
        sizes: Sequence[int] = (),
        weights: Sequence[float] = (),
    ) -> None:
        """`sizes` and `weights` describe the sources of prompts, if these have weights."""
        self.config, self.prompts, self.tokenizer, self.scale, self.seed = config, prompts, tokenizer, scale, seed
        self.num_iterations, self._sizes, self._weights = num_iterations, sizes, weights
        self.rang: Rang | None = None  # the first alarm
        self._lines = StepLines(folder / SPOT_CHECKS, resume_step=resume_step)
        self._checks: list[SpotCheck] = []
        known = read_spot_checks(folder / SPOT_CHECKS)
        for _, of_step in itertools.groupby(known, key=lambda check: check.step):
            self._checks += of_step
            self._listen(says=False)

    def initial_rows(self, rows_multiple: int) -> list[int]:
        """Returns the prompt rows for the initial checks, with the same share of each source as in the iterations.
        Some may occur twice, so that their number is a multiple of `rows_multiple`.
        """
        number, seed = min(self.config.initial_checks, len(self.prompts)), derive_seed(self.seed, "ppo", "alarm")
        if self._weights:
            rows = before_repeat(order_of(self._sizes, self._weights, 1, seed), number)
        else:
            rows = np.random.default_rng(seed).permutation(len(self.prompts))[:number].tolist()
        return [int(row) for row in np.resize(rows, -(-len(rows) // rows_multiple) * rows_multiple)]

    def add(self, rollout: Rollout, scores_B: Sequence[float], *, iteration: int, policy: int) -> dict[str, float]:
        """Check responses of a rollout, each to a different prompt. Returns the metrics. `scores_B` are before scaling;
        responses without a score are skipped. `policy` is how many iterations had trained the policy that sampled.

        Raises: ValueError for a check outside the configured range, or if all initial checks fail.
        """
        number = self.config.checks_per_iteration if policy else self.config.initial_checks
        rows = self._chosen(rollout, scores_B, number, iteration)
        prompts = [self.prompts[int(rollout.prompt_rows_B[row])] for row in rows]
        texts = [self.tokenizer.decode(rollout.turns(row)[-1][1]).strip() for row in rows]  # of a conversation, the end
        found = [
            SpotCheck(
                iteration + 1,
                policy,
                of.prompt_id,
                list(of.messages),
                text,
                scores_B[row],
                scored.score,
                scored.failure,
            )
            for row, of, text, scored in zip(rows, prompts, texts, self._checked(prompts, texts), strict=True)
        ]
        for check in found:
            self._require_in_range(check)
            self._lines.write(as_json(asdict(check)))
        self._checks += found
        done = [check.check for check in found if not check.failure]
        if not policy and not done:
            raise ValueError(f"ppo.alarm.source failed on all {len(found)} responses; the first: {found[0].failure}")
        mean = {"spot_check": float(np.mean(done))} if done else {}
        failed = sum(bool(check.failure) for check in self._checks)
        return {
            **mean,
            "alarm_nats": self._listen().nats,
            "spot_checks": float(len(self._checks) - failed),
            "failed_spot_checks": float(failed),
        }

    def _checked(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Scored]:
        source = self.config.source
        assert not isinstance(source, PeopleSource), "people compare responses in ppo.people"
        rows = [prompt.row for prompt in prompts] if source.reads_rows else []
        return score_in_parts(source, [prompt.messages for prompt in prompts], texts, CHECKS_PER_CALL, rows)

    def _listen(self, *, says: bool = True) -> Evidence:
        """Compute the evidence, and record an alarm if it suffices."""
        evidence = self.evidence()
        if self.rang is None and evidence.rings(self.config.false_alarms):
            number = sum(not check.failure for check in self._checks)
            self.rang = Rang(self._checks[-1].policy, evidence.fall, number, evidence.nats)
            if says:
                self._say(self.rang)
        return evidence

    def _say(self, rang: Rang) -> None:
        config = self.config
        shown = (
            f"less than {config.share:.0%} of the gain in score is real"
            if config.share
            else "the policy is worse than the initial one"
        )
        say(
            f"ppo: alarm: {rang.num_checks} spot checks by {config.source.short_name}, the latest of the policy after"
            f" iteration {rang.policy}, show that {shown}, most likely since iteration {rang.fall}"
            f" ({rang.nats:.1f} nats of evidence; at most {config.false_alarms:.0%} of runs with a real gain"
            " ever reach"
            f" {-math.log(config.false_alarms):.1f}). {ACTIONS[config.action]}"
        )

    def _chosen(self, rollout: Rollout, scores_B: Sequence[float], number: int, iteration: int) -> list[int]:
        order = np.random.default_rng(derive_seed(self.seed, "ppo", "alarm", iteration)).permutation(len(rollout))
        by_prompt: dict[int, int] = {}
        for row in order.tolist():
            if math.isfinite(scores_B[row]):
                by_prompt.setdefault(int(rollout.prompt_rows_B[row]), row)
        return [*by_prompt.values()][:number]

    def _require_in_range(self, check: SpotCheck) -> None:
        lowest, highest = self.config.lowest, self.config.highest
        if not check.failure and not lowest <= check.check <= highest:
            raise ValueError(
                f"ppo.alarm.source gave {check.check:g}; a number from `lowest` {lowest:g} to `highest` {highest:g} was"
                " expected"
            )

    def evidence(self) -> Evidence:
        """Compute the evidence from all checks so far."""
        config = self.config
        checks = [check for check in self._checks if not check.failure]
        check_N = (np.array([check.check for check in checks]) - config.lowest) / (config.highest - config.lowest)
        score_N = (np.array([check.score for check in checks]) - self.scale.mean) / self.scale.std
        policy_N = np.array([check.policy for check in checks], dtype=np.int64)
        return evidence_of(
            check_N,
            score_N,
            policy_N,
            share=config.share,
            num_iterations=self.num_iterations,
            false_alarms=config.false_alarms,
        )

    def close(self) -> None:
        self._lines.close()


def read_spot_checks(path: Path) -> list[SpotCheck]:
    """Returns the checks of a run, in order."""
    return [
        SpotCheck(**{**line, "check": math.nan if line["check"] is None else line["check"]})
        for line in read_metrics(path)
    ]


def evidence_of(
    check_N: Floats,
    score_N: Floats,
    policy_N: NDArray[np.int64],
    *,
    share: float,
    num_iterations: int,
    false_alarms: float,
) -> Evidence:
    """Returns the evidence that the gain is not real, from checks (0 to 1) and scores (in standard deviations).

    `policy_N`, from 0 for the initial policy to `num_iterations`, must not decrease.
    """
    is_initial_N = policy_N == 0
    check_A, score_A = check_N[is_initial_N], score_N[is_initial_N]
    check_C, score_C, policy_C = (of_N[~is_initial_N] for of_N in (check_N, score_N, policy_N))
    num_slope = len(check_A) // SLOPE_PARTS
    if not len(check_C) or num_slope < 2:
        return Evidence(0.0, 0)
    worth = share * max(0.0, slope(check_A[:num_slope], score_A[:num_slope]))
    # From 0 to 1 again: the most that a check without any promise, or none with the largest, can be.
    lowest, highest = -worth * MOST_STD, 1 + worth * MOST_STD

    def value(check: Floats, score: Floats) -> Floats:
        return (check - worth * score.clip(-MOST_STD, MOST_STD) - lowest) / (highest - lowest)

    initial_A, later_C = value(check_A[num_slope:], score_A[num_slope:]), value(check_C, score_C)
    tested = {1 + place * num_iterations // NUM_BEGINNINGS for place in range(NUM_BEGINNINGS)}
    nats_K, begins_K = _nats_by_beginning(initial_A, later_C, policy_C, math.log(len(tested) / false_alarms))
    nats = np.logaddexp.reduce(nats_K[np.isin(begins_K, [*tested])]) - math.log(len(tested))
    return Evidence(float(nats), int(begins_K[nats_K.argmax()]))


def slope(check_A: Floats, score_A: Floats) -> float:
    """Returns the least-squares slope of checks on scores, which are cut at ±`MOST_STD`; 0 if all scores are equal."""
    cut_A = score_A.clip(-MOST_STD, MOST_STD)
    spread = cut_A.var()
    return float(((check_A - check_A.mean()) * (cut_A - cut_A.mean())).mean() / spread) if spread > 0 else 0.0


def _nats_by_beginning(
    initial_A: Floats, later_C: Floats, policy_C: NDArray[np.int64], aim: float
) -> tuple[Floats, NDArray[np.int64]]:
    """Returns the logarithm of the smallest product of stakes for each number of iterations after which a fall may
    begin, and those numbers.

    The thresholds are a grid. A falls and B rises with m, so between two thresholds no product is smaller than A at the
    upper one times B at the lower one. `aim` is the evidence, in nats, for which the first gambler's bets are sized.
    """
    (a_M, variance), m_M = _initial_stakes(initial_A, aim), np.linspace(0, 1, NUM_THRESHOLDS)
    begins_K, place_C, count_K = np.unique(policy_C, return_inverse=True, return_counts=True)
    mean_K, most_K = np.bincount(place_C, later_C) / count_K, MOST_ERRORS * np.sqrt(variance / count_K)
    z_KM = ((mean_K[:, None] - m_M) / most_K[:, None]).clip(-1, 1)
    b_KLM = np.log1p(-np.array(BETS)[:, None] * z_KM[:, None, :])[::-1].cumsum(axis=0)[::-1]
    b_KM = np.logaddexp.reduce(b_KLM, axis=1) - math.log(len(BETS))
    return (a_M[1:] + b_KM[:, :-1]).min(axis=1), begins_K


def _initial_stakes(initial_A: Floats, aim: float) -> tuple[Floats, float]:
    """Returns [M], the logarithm of the first gambler's stake at each threshold, and the variance of the checks."""
    m_M, var_A = np.linspace(0, 1, NUM_THRESHOLDS), _variance_before(initial_A)
    size_AL = np.sqrt(2 * aim / (len(initial_A) * np.array(CAUTION) * var_A[:, None]))
    up_ALM = np.minimum(size_AL[..., None], MOST_AT_STAKE / np.maximum(m_M, 1e-9))
    a_LM = np.log1p(up_ALM * (initial_A[:, None, None] - m_M)).sum(axis=0)
    return np.logaddexp.reduce(a_LM, axis=0) - math.log(len(CAUTION)), float(var_A[-1])


def _variance_before(value_N: Floats) -> Floats:
    """Returns for each value an estimate of the variance, from the values before it and an imagined 0 and 1."""
    count_N = np.arange(len(value_N)) + 2
    sum_N, squares_N = (np.concatenate([[0.0], of.cumsum()[:-1]]) + 1 for of in (value_N, value_N**2))
    return np.maximum(squares_N / count_N - (sum_N / count_N) ** 2, 1e-4)
