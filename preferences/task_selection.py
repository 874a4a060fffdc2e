"""Selecting which prompts and responses become tasks: at random, or by a rule that reads the scores of reward models.

Selecting by score gives a biased sample of the candidates. So every task records the probability with which it was
selected (`details["propensity"]`), and `uniform_mean` uses it to correct for the selection. Some prompts, drawn before
any score is read, get uniformly selected tasks for evaluation (`details["slice"]`).

Shape letters: E reward models, N candidates of a prompt, P pairs of candidates, S sets of candidates.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np

from preferences.records import MAX_RESPONSES, MIN_RESPONSES, Message, Task
from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import NUM_RESAMPLES, between_quantiles, prompt_numbers, studentised_ratios

MAX_SETS = 5_000  # sets of responses per prompt; each has its own probability
NEAR_TIE_POWER = 8
UNIFORM_SHARE = 0.1  # the uniform part of every rule's probabilities, which keeps weights at ten or less


@dataclass(frozen=True)
class Candidate:
    """A response that labelers could judge, who wrote it, and the score that each reward model gives it."""

    response: str
    source: str
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class PromptCandidates:
    """All candidates of one prompt."""

    prompt_id: str
    prompt: tuple[Message, ...]
    candidates: tuple[Candidate, ...]


class Rule(ABC):
    """Says which sets of a prompt's candidates are worth labeling, from the scores of reward models.

    Several models are an ensemble: their differences show what the labels so far leave open.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # completes "chooses ..."
    num_models: ClassVar[int]  # at least

    @abstractmethod
    def weights(self, scores_NE: Floats, sets: Sequence[tuple[int, ...]]) -> Floats:
        """Returns each set's weight [S], 0 or more, in proportion to which it is chosen."""


class Uniform(Rule):
    name, summary, num_models = "uniform", "all sets alike", 0

    def weights(self, scores_NE: Floats, sets: Sequence[tuple[int, ...]]) -> Floats:  # noqa: ARG002
        return np.ones(len(sets))


class PairRule(Rule):
    """A rule that weighs pairs; a larger set has the mean weight of its pairs."""

    @abstractmethod
    def pair_weights(self, gap_PE: Floats) -> Floats:
        """Returns each pair's weight [P] from the differences of its scores."""

    def weights(self, scores_NE: Floats, sets: Sequence[tuple[int, ...]]) -> Floats:
        pairs = list(combinations(range(len(scores_NE)), 2))
        gap_PE = np.array([scores_NE[one] - scores_NE[other] for one, other in pairs])
        by_pair = dict(zip(pairs, self.pair_weights(gap_PE).tolist(), strict=True))
        return np.array([np.mean([by_pair[pair] for pair in combinations(members, 2)]) for members in sets])


class NearTie(PairRule):
    """By Bradley-Terry, a model with scores s prefers the first of a pair with probability p = σ(s_i - s_j). With p̄ the
    mean over models, the weight is (4·p̄(1 - p̄))⁸: the variance of the predicted answer, scaled to at most 1, to a power
    that halves it at a gap of .6 (p̄ = .64). It is high if scores are close and if models contradict each other.

    Without the power, most pairs weigh nearly the same while a reward model has seen few labels, and hardly more near
    ties are chosen than at random (docs/findings.md).
    """

    name, summary, num_models = "near-tie", "pairs whose answer the reward models cannot predict", 1

    def pair_weights(self, gap_PE: Floats) -> Floats:
        mean_P = _sigmoid(gap_PE).mean(axis=1)
        return np.asarray((4 * mean_P * (1 - mean_P)) ** NEAR_TIE_POWER)


class Disagreement(PairRule):
    """The mutual information of a pair's answer and the model: H(p̄) minus the mean H(p), in nats (arXiv 1112.5745). It
    is high if models are sure of opposite answers, and 0 if all of them cannot decide.
    """

    name, summary, num_models = "disagreement", "pairs about which the reward models contradict each other", 2

    def pair_weights(self, gap_PE: Floats) -> Floats:
        chance_PE = _sigmoid(gap_PE)
        return np.maximum(0.0, _entropy(chance_PE.mean(axis=1)) - _entropy(chance_PE).mean(axis=1))


class Information(PairRule):
    """The Fisher information that a pair's answer adds, p̄(1 - p̄)·x' H⁻¹ x for features x of the pair under a linear
    head: the variance of the models' differences stands for x' H⁻¹ x (D-optimal design; arXiv 2502.04354).
    """

    name, summary, num_models = "information", "pairs that tell most about the reward models' weights", 2

    def pair_weights(self, gap_PE: Floats) -> Floats:
        mean_P = _sigmoid(gap_PE).mean(axis=1)
        return np.asarray(mean_P * (1 - mean_P) * gap_PE.var(axis=1))


class LargeGap(Rule):
    """Double reverse Thompson sampling (arXiv 2603.09692): one model, drawn from the ensemble, names the best
    candidate, and another the worst. A set's weight is the probability that it has both, over all pairs of models; a
    pair that names one candidate twice counts for no set.
    """

    name, summary, num_models = "large-gap", "the best response by one reward model with the worst by another", 1

    def weights(self, scores_NE: Floats, sets: Sequence[tuple[int, ...]]) -> Floats:
        best_E, worst_E = scores_NE.argmax(axis=0), scores_NE.argmin(axis=0)
        named = [{int(best), int(worst)} for best in best_E for worst in worst_E if best != worst]
        return np.array([sum(both <= {*members} for both in named) for members in sets]) / max(1, len(named))


RULES: Mapping[str, Rule] = {
    rule.name: rule for rule in (Uniform(), NearTie(), LargeGap(), Disagreement(), Information())
}


@dataclass(frozen=True)
class _Weighed:
    """A prompt's sets with the weights of the rule that chooses among them."""

    place: int  # of the prompt among all
    prompt: PromptCandidates
    candidates: Sequence[Candidate]
    sets: Sequence[tuple[int, ...]]
    weights: Floats
    rule: str
    is_evaluation: bool

    @property
    def slice(self) -> str:
        return "evaluation" if self.is_evaluation else "training"

    def task(self, index: int, propensity: float, batch: str) -> Task:
        members = [self.candidates[number] for number in self.sets[index]]
        return Task(
            task_id=f"{batch}/{self.prompt.prompt_id}/{'-'.join(map(str, self.sets[index]))}",
            prompt=self.prompt.prompt,
            responses=tuple(member.response for member in members),
            sources=tuple(member.source for member in members),
            details={
                "method": self.rule,
                "slice": self.slice,
                "propensity": float(propensity),
                "num_sets": len(self.sets),
            },
        )


def choose_tasks(
    prompts: Sequence[PromptCandidates],
    *,
    batch: str,
    rule: Rule,
    responses_per_task: int,
    tasks_per_prompt: int,
    evaluation_share: float,
    seed: int,
    num_tasks: int = 0,
    uniform_share: float = UNIFORM_SHARE,
) -> list[Task]:
    """Returns tasks of `responses_per_task` distinct responses each, up to `tasks_per_prompt` per prompt.

    With `num_tasks`, prompts compete for that many tasks in all: their sets have the rule's weights, and a prompt whose
    sets have little weight gets none. Without it, every prompt gets `tasks_per_prompt`. `uniform_share` of the
    probability is shared by all sets alike.

    Responses that differ only in white space at their ends are duplicates; the first one is kept. A prompt with too few
    distinct responses gets no task. A task's `details` are: `method`, the rule by which it was drawn; `slice`
    ("evaluation" for a share of the prompts, whose tasks are always drawn uniformly, else "training"); `propensity`,
    the probability of selecting this set of responses; and `num_sets`, how many sets the prompt has.

    Raises: ValueError, naming the field or prompt, for numbers out of range, for scores that are missing, not finite,
    or not equally many for every candidate, for too few models for the rule, and for more than MAX_SETS sets.
    """
    _check(rule, responses_per_task, tasks_per_prompt, evaluation_share, uniform_share)
    weighed = list[_Weighed]()
    for place, prompt in enumerate(prompts):
        candidates = distinct(prompt.candidates)
        if rule.num_models:
            _check_scores(prompt.prompt_id, candidates, rule)
        if len(candidates) < responses_per_task:
            continue
        num_sets = math.comb(len(candidates), responses_per_task)
        if num_sets > MAX_SETS:
            raise ValueError(
                f"prompt {prompt.prompt_id!r}: {len(candidates)} candidates make {num_sets} sets of"
                f" {responses_per_task}; at most {MAX_SETS} were expected"
            )
        sets = list(combinations(range(len(candidates)), responses_per_task))
        is_evaluation = _uniform_number("slice", seed, prompt.prompt_id) < evaluation_share
        used = RULES["uniform"] if is_evaluation else rule
        scores_NE = np.array([candidate.scores for candidate in candidates], dtype=np.float64)
        weights = used.weights(scores_NE, sets)
        weighed.append(_Weighed(place, prompt, candidates, sets, weights, used.name, is_evaluation))
    if num_tasks:
        return _among_all(weighed, batch, num_tasks, tasks_per_prompt, uniform_share, seed)
    drawn = (
        _drawn(
            [of], [mixed(of.weights, uniform_share)], [tasks_per_prompt], batch, seed,
            start=("choice", seed, of.prompt.prompt_id),
        )
        for of in weighed
    )  # fmt: skip
    return [task for of_prompt in drawn for _, task in of_prompt]


def _among_all(
    weighed: Sequence[_Weighed], batch: str, num_tasks: int, most: int, uniform_share: float, seed: int
) -> list[Task]:
    """Draw tasks of all prompts together. Evaluation gets as large a part of the tasks as it has of the prompts."""
    evaluation, training = ([of for of in weighed if of.is_evaluation is held] for held in (True, False))
    num_evaluation = round(num_tasks * len(evaluation) / max(1, len(weighed)))
    found = list[tuple[int, Task]]()
    for own, number in ((evaluation, num_evaluation), (training, num_tasks - num_evaluation)):
        if own and number:
            shuffled = [own[place] for place in _order(len(own), seed, f"all, {own[0].slice}")]
            shares = _mixed_over_prompts([of.weights for of in shuffled], uniform_share)
            totals = np.array([share.sum() for share in shares])
            sizes = np.array([float(min(most, len(of.sets))) for of in shuffled])
            expected = _shared_out(totals, sizes, number).tolist()
            found += _drawn(shuffled, shares, expected, batch, seed, start=("all", seed, own[0].slice))
    return [task for _, task in sorted(found, key=lambda placed: placed[0])]


def _drawn(
    weighed: Sequence[_Weighed],
    shares: Sequence[Floats],
    expected: Sequence[float],
    batch: str,
    seed: int,
    *,
    start: tuple[str, int, str],
) -> list[tuple[int, Task]]:
    """Draw sets of these prompts by their shares, of each prompt as many as expected, rounded up or down. Returns the
    tasks with the places of their prompts.
    """
    chances, indices = list[Floats](), list[tuple[int, int]]()
    for place, (of, share, number) in enumerate(zip(weighed, shares, expected, strict=True)):
        order = _order(len(of.sets), seed, of.prompt.prompt_id)
        chances.append(inclusion_probabilities(share, number)[order])
        indices += [(place, index) for index in order]
    chance = np.concatenate(chances)
    chosen = systematic_sample(chance, _uniform_number(*start), range(len(chance)))
    picked = sorted((*indices[place], float(chance[place])) for place in chosen)
    return [(weighed[place].place, weighed[place].task(index, own, batch)) for place, index, own in picked]


def mixed(weights: Floats, uniform_share: float) -> Floats:
    """Returns the weights as shares of their sum, mixed with a uniform part; all alike if there is no weight."""
    total = weights.sum()
    shares = weights / total if total > 0 else np.full(len(weights), 1 / len(weights))
    return np.asarray(shares + uniform_share * (1 / len(weights) - shares))


def _mixed_over_prompts(weights: Sequence[Floats], uniform_share: float) -> list[Floats]:
    """Returns the weights of each prompt's sets as shares of the sum over all prompts, mixed with a uniform part: the
    same for all prompts, and for all sets of a prompt. They sum to 1.
    """
    total = sum(of.sum() for of in weights)
    found = []
    for of in weights:
        uniform = 1 / (len(weights) * len(of))
        shares = of / total if total > 0 else np.full(len(of), uniform)
        found.append(shares + uniform_share * (uniform - shares))
    return found


def _shared_out(weights: Floats, most: Floats, number: float) -> Floats:
    """Returns how many of `number` each weight gets: in proportion, but at most `most`; any excess goes to others."""
    full = np.zeros(len(weights), dtype=bool)
    while not full.all():
        rest = number - most[full].sum()
        found = np.where(full, most, rest * weights / weights[~full].sum())
        if (found <= most).all():
            return np.asarray(found)
        full |= found >= most
    return most.astype(np.float64)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops candidates whose response came before, ignoring white space at the ends. Keeps the order."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.response.strip(), candidate)
    return list(first.values())


def inclusion_probabilities(weights: Floats, num_chosen: float) -> Floats:
    """Returns each set's probability of being among the `num_chosen`: proportional to `weights`, at most 1.

    They sum to `num_chosen`, or are all 1 if there are no more sets than that. Any excess above 1 goes to other sets.
    """
    return _shared_out(weights, np.ones(len(weights)), num_chosen)


def systematic_sample(probabilities: Floats, start: float, order: Sequence[int]) -> list[int]:
    """Returns the sets whose interval of the running sum, taken in `order`, contains `start + k` for an integer k >= 0.

    If `start` is uniform in 0 to 1, set i is chosen with probability exactly `probabilities[i]`, no set is chosen
    twice, and the number of chosen sets is the sum of the probabilities. Madow 1949, Annals of Mathematical Statistics
    20(3).
    """
    ends = np.cumsum(probabilities[list(order)])
    ends[-1] = round(float(ends[-1]))  # the sum is an integer up to rounding
    marks = start + np.arange(int(ends[-1]))
    return sorted(int(order[index]) for index in np.searchsorted(ends, marks, side="right"))


def uniform_mean(tasks: Sequence[Task], values: Sequence[float], *, seed: int) -> Interval:
    """Estimates the mean value under uniform selection of tasks, with a 95% interval over prompts.

        Σ_i w_i·value_i / Σ_i w_i,   w_i = 1/(propensity_i · num_sets_i)

    Each prompt then has weight 1 in expectation, whichever of its sets were selected (Hájek 1971). Rare sets have large
    weights and may have unusual values, so the interval is a bootstrap-t over prompts (Efron & Tibshirani 1993, 12.5):
    it is as asymmetric as the studentised means of resamples. A few prompts may leave an end open (infinite).

    Raises: ValueError for a task without propensity, and if there are no tasks.
    """
    if len(tasks) != len(values) or not tasks:
        raise ValueError(
            f"values has {len(values)} entries for {len(tasks)} tasks; one per task, and at least one, was expected"
        )
    for task in tasks:
        if "propensity" not in task.details or "num_sets" not in task.details:
            raise ValueError(f"task {task.task_id!r}: details has no propensity or num_sets; choose_tasks writes both")
    weights = np.array([1 / (task.details["propensity"] * task.details["num_sets"]) for task in tasks])
    cluster = prompt_numbers([task.prompt for task in tasks])
    sum_P = np.bincount(cluster, weights * np.asarray(values, dtype=np.float64)).astype(np.float64)
    weight_P = np.bincount(cluster, weights).astype(np.float64)
    mean, error, t_N = studentised_ratios(sum_P, weight_P, seed=seed, num_resamples=NUM_RESAMPLES)
    if len(sum_P) == 1:
        return Interval(mean, math.nan, math.nan)
    return Interval(mean, *between_quantiles(mean, error, t_N, 1 - LEVEL)) if error else Interval(mean, mean, mean)


def _sigmoid(difference: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(difference / 2)))


def _entropy(chance: Floats) -> Floats:
    inside = chance.clip(1e-12, 1 - 1e-12)
    return np.asarray(-inside * np.log(inside) - (1 - inside) * np.log(1 - inside))


def _uniform_number(*key: object) -> float:
    """Returns a number in 0 to 1 that depends on the key alone, on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big") / 2.0**64


def _order(num_sets: int, seed: int, prompt_id: str) -> list[int]:
    """Returns a random order. In a fixed order neighbouring sets, which share responses, would exclude each other."""
    digest = hashlib.sha256(json.dumps(["order", seed, prompt_id]).encode()).digest()
    return [int(index) for index in np.random.default_rng(list(digest)).permutation(num_sets)]


def _check(
    rule: Rule, responses_per_task: int, tasks_per_prompt: int, evaluation_share: float, uniform_share: float
) -> None:
    if not 1 <= responses_per_task <= MAX_RESPONSES:
        raise ValueError(f"responses_per_task is {responses_per_task}; 1 to {MAX_RESPONSES} were expected")
    if responses_per_task < MIN_RESPONSES and rule.num_models:
        raise ValueError(
            f"responses_per_task is {responses_per_task}, but the rule {rule.name!r} chooses pairs; at least"
            f" {MIN_RESPONSES}, or the rule 'uniform', was expected"
        )
    if tasks_per_prompt < 1:
        raise ValueError(f"tasks_per_prompt is {tasks_per_prompt}; at least 1 was expected")
    if not 0 <= evaluation_share <= 1:
        raise ValueError(f"evaluation_share is {evaluation_share}; a share from 0 to 1 was expected")
    if not 0 < uniform_share <= 1:
        raise ValueError(f"uniform_share is {uniform_share}; above 0, so that every set may be chosen, was expected")


def _check_scores(prompt_id: str, candidates: Sequence[Candidate], rule: Rule) -> None:
    for candidate in candidates:
        if not candidate.scores or len(candidate.scores) != len(candidates[0].scores):
            raise ValueError(
                f"prompt {prompt_id!r}, source {candidate.source!r}: scores has {len(candidate.scores)} entries;"
                " one per reward model was expected, for every candidate"
            )
        if len(candidate.scores) < rule.num_models:
            raise ValueError(
                f"rule {rule.name!r} compares reward models with each other, but there is {len(candidate.scores)};"
                f" at least {rule.num_models} were expected"
            )
        if not all(math.isfinite(score) for score in candidate.scores):
            raise ValueError(
                f"prompt {prompt_id!r}, source {candidate.source!r}: scores is {list(candidate.scores)}; finite numbers"
                " were expected"
            )
