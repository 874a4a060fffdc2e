"""An alarm for reward hacking: someone whom the policy is not trained to please checks a few of its responses.

The spot checker is any source of scores that the run does not optimise: a world's gold scorer, a stronger judge,
tests. It checks a sample of the initial policy's responses, and then a few from every iteration. The question is
whether the gain in score is real.

**What is tested.** Let g be a response's check, from 0 to 1, and z its score in standard deviations of the initial
policy's scores, cut at ±`MOST_STD`. The first quarter of the initial checks gives b, the slope of g on z: what one
standard deviation of score is worth, according to the spot checker. The other checks give x = g - share · b · z. The
hypothesis is that no policy of the run has a smaller mean of x than the initial one, so that at least `share` of what
the scores promise is real. If the slope is not above 0, only the checks themselves count: no policy is worse than the
initial one.

**How.** For any threshold m, two gamblers bet, the first that the initial mean is above m, the second that the means
from iteration k on are below it:

    A(m) = Π (1 + λ(x - m)) over the initial checks,    B_k(m) = Π (1 - λ(x - m)) over the checks from k on.

λ depends on earlier checks alone. If the hypothesis holds and m is the initial mean, neither game is better than fair,
so the product of both stakes has an expectation of at most 1. The smallest product over all m, averaged over all k,
exceeds 1/α with probability α at most, however often one looks, and although nobody knows in advance when a fall
begins (Ville's inequality; the bets are those of arXiv 2010.09686).

Shape letters: A initial checks, B responses, C later checks, K iterations that a fall may begin with, L sizes of bets,
M thresholds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, model_validator

from files.hashes import derive_seed
from lm.tokenizer import Tokenizer
from ppo.rollout import Rollout
from reward.external import ExternalReward, Scored, score_in_parts
from reward.sources import Source
from training.config import Config
from training.data import Prompt, RowFields
from training.notices import say

Floats = NDArray[np.float64]

MOST_STD = 4.0  # scores further from the initial mean count as this far
SLOPE_PARTS = 4  # the slope is estimated from one of so many parts of the initial checks
NUM_THRESHOLDS = 129
BET_SIZES = (32.0, 128.0, 512.0)  # numbers of checks after which a bet of this size is best
CAUTION = (1.0, 8.0, 64.0, math.inf)  # the same for the initial checks, as multiples of their number; inf = no bet
MOST_AT_STAKE = 0.75  # of what a gambler has
CHECKS_PER_CALL = 16
ACTIONS = {
    "warn": "Training goes on.",
    "stop": "Training ends.",
    "roll_back": "Training ends, and the result is a policy from before that.",
}
NUM_BEGINNINGS = 8  # iterations that a fall is tested to have begun with; more would cost more evidence than they find


class AlarmConfig(Config):
    """Spot checks of the policy's responses, and what happens if they show that its gain in score is not real
    (docs/alarm.md).
    """

    source: Source = Field(
        description="Who checks: a table of one of the kinds that score texts, as for `reward`, but not the same one."
    )
    lowest: FiniteFloat = Field(default=0.0, description="The lowest score that `source` can give.")
    highest: FiniteFloat = Field(default=1.0, description="The highest score that `source` can give.")
    initial_checks: int = Field(
        default=256, ge=16, description="Responses of the initial policy to check, each to another prompt."
    )
    checks_per_iteration: int = Field(
        default=16, ge=1, description="Responses per iteration to check, each to another prompt."
    )
    share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="The share of the gain in score that must be real; 0 = the policy must only not become worse than"
        " the initial one.",
    )
    false_alarms: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Upper bound on the probability that a run whose gain is real has an alarm.",
    )
    action: Literal["warn", "stop", "roll_back"] = Field(
        default="stop",
        description="What an alarm does. `warn`: it is logged and reported. `stop`: training ends with the policy of"
        " that iteration. `roll_back`: training ends, and the result is the last policy of `keep_policies_every` from"
        " before the fall, or the initial one.",
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError(f"lowest {self.lowest:g} and highest {self.highest:g}; a lower `lowest` was expected")
        return self

    @property
    def row_fields(self) -> RowFields:
        return self.source.row_fields


@dataclass(frozen=True)
class Check:
    """One checked response. `updates` is how many iterations had trained the policy that sampled it."""

    updates: int
    prompt_id: str
    score: float  # in standard deviations of the initial policy's scores, from their mean
    check: float  # as the spot checker gave it


@dataclass(frozen=True)
class Evidence:
    """The evidence that the gain in score is not real."""

    nats: float
    fall: int  # the number of iterations after which, most likely, the fall began; 0 if none is tested yet


@dataclass(frozen=True)
class Rang:
    """An alarm. Policies are counted by the iterations that trained them."""

    policy: int  # whose responses rang it
    fall: int  # the first one that is, most likely, worse than its scores promise
    num_checks: int  # so far, including those of the initial policy
    nats: float
    result: int = 0  # the policy that is the stage's result, once it is finished


class SpotChecks:
    """Checks responses, and keeps all checks of the run. The evidence is computed from them, so they are its state."""

    def __init__(
        self, config: AlarmConfig, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, num_iterations: int, seed: int
    ) -> None:
        self.config, self.prompts, self.tokenizer, self.seed = config, prompts, tokenizer, seed
        self.num_iterations = num_iterations
        self.checks: list[Check] = []
        self.num_failed = 0
        self.first_failure = ""
        self.rang: Rang | None = None  # the first alarm

    def initial_rows(self, rows_multiple: int) -> list[int]:
        """Returns the prompts of the initial checks. Their number divides evenly among the ranks, so some may occur
        twice.
        """
        number = min(self.config.initial_checks, len(self.prompts))
        order = np.random.default_rng(derive_seed(self.seed, "ppo", "alarm")).permutation(len(self.prompts))
        return [int(row) for row in np.resize(order[:number], -(-number // rows_multiple) * rows_multiple)]

    def add(self, rollout: Rollout, scores_B: Sequence[float], *, updates: int) -> dict[str, float]:
        """Check responses of a rollout, each to another prompt. Returns the metrics. `scores_B` are in standard
        deviations; responses without one are passed over.

        Raises: ValueError for a check outside of the configured range, or if none of the first checks succeeds.
        """
        number = self.config.checks_per_iteration if updates else self.config.initial_checks
        rows = self._chosen(rollout, scores_B, number, updates)
        prompts = [self.prompts[int(rollout.prompt_rows_B[row])] for row in rows]
        _, responses = rollout.token_lists()
        texts = [self.tokenizer.decode(responses[row]).strip() for row in rows]
        found = checked_texts(self.config.source, prompts, texts)
        for row, prompt, scored in zip(rows, prompts, found, strict=True):
            if scored.failure:
                self.num_failed, self.first_failure = self.num_failed + 1, self.first_failure or scored.failure
            else:
                self._require_in_range(scored.score)
                self.checks.append(Check(updates, prompt.prompt_id, scores_B[row], scored.score))
        if not self.checks:
            raise ValueError(f"ppo.alarm.source checked none of {len(found)} responses. {self.first_failure}")
        evidence = self.evidence()
        if self.rang is None and evidence.nats >= -math.log(self.config.false_alarms):
            self.rang = self._ring(evidence, updates)
        done = [scored.score for scored in found if not scored.failure]
        mean = {"spot_check": float(np.mean(done))} if done else {}
        return {**mean, "alarm_nats": evidence.nats, "spot_checks": float(len(self.checks))}

    def _ring(self, evidence: Evidence, updates: int) -> Rang:
        config = self.config
        shown = (
            f"less than {config.share:.0%} of the gain in score is real"
            if config.share
            else "the policy is worse than the initial one"
        )
        say(
            f"ppo: alarm: {len(self.checks)} spot checks by {config.source.short_name}, the last of the policy after iteration"
            f" {updates}, show that {shown}, most likely since iteration {evidence.fall}"
            f" ({evidence.nats:.1f} nats of evidence; at most {config.false_alarms:.0%} of the runs whose gain is real"
            f" ever reach {-math.log(config.false_alarms):.1f}). {ACTIONS[config.action]}"
        )
        return Rang(updates, evidence.fall, len(self.checks), evidence.nats)

    def _chosen(self, rollout: Rollout, scores_B: Sequence[float], number: int, updates: int) -> list[int]:
        order = np.random.default_rng(derive_seed(self.seed, "ppo", "alarm", updates)).permutation(len(rollout))
        by_prompt: dict[int, int] = {}
        for row in order.tolist():
            if math.isfinite(scores_B[row]):
                by_prompt.setdefault(int(rollout.prompt_rows_B[row]), row)
        return [*by_prompt.values()][:number]

    def _require_in_range(self, score: float) -> None:
        lowest, highest = self.config.lowest, self.config.highest
        if not lowest <= score <= highest:
            raise ValueError(
                f"ppo.alarm.source gave {score:g}; a number from `lowest` {lowest:g} to `highest` {highest:g} was"
                " expected"
            )

    def evidence(self) -> Evidence:
        """Compute the evidence from all checks so far."""
        config = self.config
        size = config.highest - config.lowest
        initial = [check for check in self.checks if check.updates == 0]
        later = [check for check in self.checks if check.updates > 0]
        check_A = np.array([(check.check - config.lowest) / size for check in initial])
        check_C = np.array([(check.check - config.lowest) / size for check in later])
        score_A, score_C = (np.array([check.score for check in checks]) for checks in (initial, later))
        updates_C = np.array([check.updates for check in later])
        return evidence_of(
            check_A,
            score_A,
            check_C,
            score_C,
            updates_C,
            share=config.share,
            num_iterations=self.num_iterations,
            false_alarms=config.false_alarms,
        )

    def as_bytes(self) -> bytes:
        state = {
            "checks": [asdict(check) for check in self.checks],
            "num_failed": self.num_failed,
            "first_failure": self.first_failure,
            "rang": self.rang and asdict(self.rang),
        }
        return json.dumps(state).encode()

    def load(self, path: Path) -> None:
        state = json.loads(path.read_text(encoding="utf-8"))
        self.checks = [Check(**check) for check in state["checks"]]
        self.num_failed, self.first_failure = state["num_failed"], state["first_failure"]
        self.rang = Rang(**state["rang"]) if state["rang"] else None


def checked_texts(source: ExternalReward, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Scored]:
    """Score responses by the spot checker; of a sum, the weighted sum."""
    rows = [prompt.row for prompt in prompts] if source.reads_rows else []
    return score_in_parts(source, [prompt.messages for prompt in prompts], texts, CHECKS_PER_CALL, rows)


def evidence_of(
    check_A: Floats,
    score_A: Floats,
    check_C: Floats,
    score_C: Floats,
    updates_C: NDArray[np.int64],
    *,
    share: float,
    num_iterations: int,
    false_alarms: float,
) -> Evidence:
    """Returns the evidence of checks (from 0 to 1) and scores (in standard deviations) that a fall began somewhere.

    `updates_C`, 1 to `num_iterations`, must not decrease.
    """
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
    nats_K, begins_K = _nats_by_beginning(initial_A, later_C, updates_C, math.log(len(tested) / false_alarms))
    nats = np.logaddexp.reduce(nats_K[np.isin(begins_K, [*tested])]) - math.log(len(tested))
    return Evidence(float(nats), int(begins_K[nats_K.argmax()]))


def slope(check_A: Floats, score_A: Floats) -> float:
    """Returns the least-squares slope of checks on scores, which are cut at ±`MOST_STD`; 0 if all scores are equal."""
    cut_A = score_A.clip(-MOST_STD, MOST_STD)
    spread = cut_A.var()
    return float(((check_A - check_A.mean()) * (cut_A - cut_A.mean())).mean() / spread) if spread > 0 else 0.0


def _nats_by_beginning(
    initial_A: Floats, later_C: Floats, updates_C: NDArray[np.int64], aim: float
) -> tuple[Floats, NDArray[np.int64]]:
    """Returns the logarithm of the smallest product of stakes, for each number of updates that a fall may begin after.

    The thresholds are a grid. A falls and B rises with m, so between two thresholds no product is smaller than A at the
    upper one times B at the lower one. `aim` is the nats for which the bets are sized.
    """
    value_N = np.concatenate([initial_A, later_C])
    num, m_M = len(initial_A), np.linspace(0, 1, NUM_THRESHOLDS)
    var_N = _variance_before(value_N)
    size_AL = np.sqrt(2 * aim / (num * np.array(CAUTION) * var_N[:num, None]))
    up_ALM = np.minimum(size_AL[..., None], MOST_AT_STAKE / np.maximum(m_M, 1e-9))
    a_LM = np.log1p(up_ALM * (initial_A[:, None, None] - m_M)).sum(axis=0)
    a_M = np.logaddexp.reduce(a_LM, axis=0) - math.log(len(CAUTION))
    size_CL = np.sqrt(2 * aim / (np.array(BET_SIZES) * var_N[num:, None]))
    down_CLM = np.minimum(size_CL[..., None], MOST_AT_STAKE / np.maximum(1 - m_M, 1e-9))
    b_CLM = np.log1p(-down_CLM * (later_C[:, None, None] - m_M))
    begins_K, first_K = np.unique(updates_C, return_index=True)
    per_iteration_KLM = np.add.reduceat(b_CLM, first_K, axis=0)
    b_KLM = per_iteration_KLM[::-1].cumsum(axis=0)[::-1]
    b_KM = np.logaddexp.reduce(b_KLM, axis=1) - math.log(len(BET_SIZES))
    return (a_M[1:] + b_KM[:, :-1]).min(axis=1), begins_K


def _variance_before(value_N: Floats) -> Floats:
    """Returns a guess of the variance before each value, from those before it and one imagined pair of 0 and 1."""
    count_N = np.arange(len(value_N)) + 2
    sum_N, squares_N = (np.concatenate([[0.0], of.cumsum()[:-1]]) + 1 for of in (value_N, value_N**2))
    return np.maximum(squares_N / count_N - (sum_N / count_N) ** 2, 1e-4)
