"""Do the intervals of a lead's page cover the truth as often as they say? `python -m benchmarks.label_coverage`.

Worlds whose labelers are known by construction are drawn again and again, tasks and answers anew; every interval of
`preferences.summary` is held against the truth, which follows in closed form from the traits:

    utility of a response = quality + lasting opinion + noise,  quality ~ N(0, 1)

An inattentive labeler answers in the order shown (`lazy_first`) or at random (`lazy_random`), in under a second; an
attentive one ties a whole task now and then. `tests/preferences/test_coverage.py` runs 200 worlds, docs/labels.md has
the table of 2,000.

Shape letters: J answers, K responses.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from preferences.alpha import Alpha
from preferences.habits import TOO_FAST_WORDS_PER_MINUTE
from preferences.intervals import Interval, Share, Tally, clustered_shares
from preferences.records import Judgment, Message, Task
from preferences.resampling import Floats
from preferences.summary import LabelReport, summary

NUM_RESPONSES = 3
NUM_TASKS, NUM_GOLD, NUM_REPEATS = 90, 40, 40
LABELERS_PER_TASK = 3
NUM_WORDS = 301  # a task: a prompt of one, three responses of a hundred
CUTS = (-1.2, -0.4, 0.4, 1.2)  # between ratings 1 to 5
PACE_SPREAD = 0.5  # standard deviation of log milliseconds


@dataclass(frozen=True)
class Traits:
    """A labeler by construction. Standard deviations are in units of the qualities' own."""

    name: str
    noise: float
    opinion: float
    lazy_first: float
    lazy_random: float
    tie: float  # of attentive answers, the share that ties all responses
    median_milliseconds: float  # of attentive answers
    drift: float  # added to the ratings of the later half

    @property
    def lazy(self) -> float:
        return self.lazy_first + self.lazy_random

    @property
    def untied(self) -> float:
        """The share of answers that are no tie."""
        return 1 - (1 - self.lazy) * self.tie

    @property
    def attentive_if_untied(self) -> float:
        return (1 - self.lazy) * (1 - self.tie) / self.untied


TRAITS = (
    Traits("careful", 0.3, 0.2, 0.0, 0.0, 0.05, 60_000, 0.0),
    Traits("noisy", 1.2, 0.3, 0.0, 0.0, 0.15, 45_000, 0.0),
    Traits("opinionated", 0.2, 1.0, 0.0, 0.0, 0.0, 50_000, 0.0),
    Traits("lazy", 0.5, 0.2, 0.2, 0.1, 0.1, 30_000, 0.0),
)


# ---- the truth ----


def agreement(one: Traits, other: Traits) -> float:
    """P(two labelers order a pair alike | neither ties it): ½ + arcsin(ρ)/π where both attend (Sheppard 1899)."""
    variances = [1 + traits.noise**2 + traits.opinion**2 for traits in (one, other)]
    both = one.attentive_if_untied * other.attentive_if_untied
    return 0.5 + both * math.asin(1 / math.sqrt(variances[0] * variances[1])) / math.pi


def overall_agreement() -> float:
    pairs = list(combinations(TRAITS, 2))
    weights = [one.untied * other.untied for one, other in pairs]
    return float(np.average([agreement(*pair) for pair in pairs], weights=weights))


def agreement_with_others(traits: Traits) -> float:
    others = [other for other in TRAITS if other is not traits]
    return float(np.average([agreement(traits, other) for other in others], weights=[o.untied for o in others]))


def alpha() -> float:
    """1 - D_o/D_e: opposite preferences disagree by 1, a tie and a preference by ¼; by chance, ½ and ¼."""
    observed = []
    for one, other in combinations(TRAITS, 2):
        one_tied = one.untied * (1 - other.untied) + other.untied * (1 - one.untied)
        observed.append(one.untied * other.untied * (1 - agreement(one, other)) + one_tied / 4)
    return 1 - float(np.mean(observed)) / (float(np.mean([traits.untied for traits in TRAITS])) / 2)


def self_agreement(traits: Traits) -> float:
    lasting = 1 + traits.opinion**2
    return 0.5 + traits.attentive_if_untied**2 * math.asin(lasting / (lasting + traits.noise**2)) / math.pi


def gold_accuracy(traits: Traits) -> float:
    correlation = 1 / math.sqrt(1 + traits.noise**2 + traits.opinion**2)
    return 0.5 + (1 - traits.lazy) * (1 - traits.tie) * math.asin(correlation) / math.pi


def shown_first(traits: Traits) -> float:
    return 0.5 + traits.lazy_first / traits.untied / 2


def median_milliseconds(traits: Traits) -> float:
    """Lazy answers are all faster than attentive ones, nearly; so the median is a quantile of the attentive ones."""
    quantile = (0.5 - traits.lazy) / (1 - traits.lazy)
    return traits.median_milliseconds * math.exp(PACE_SPREAD * float(stats.norm.ppf(quantile)))


def too_fast(traits: Traits) -> float:
    cutoff = NUM_WORDS * 60_000 / TOO_FAST_WORDS_PER_MINUTE
    fast = stats.norm.cdf(math.log(cutoff / traits.median_milliseconds) / PACE_SPREAD)
    return traits.lazy + (1 - traits.lazy) * float(fast)


def mean_rating(traits: Traits) -> float:
    spread = math.sqrt(1 + traits.noise**2)
    return 1 + float(sum(stats.norm.sf(cut / spread) for cut in CUTS))


def rating_alpha() -> float:
    """Krippendorff's, of the joint distribution of two labelers' ratings of one response."""
    joint = np.mean([_joint_ratings(*pair) for pair in combinations(TRAITS, 2)], axis=0)
    joint = (joint + joint.T) / 2
    margin = joint.sum(axis=0)
    middle = np.cumsum(margin) - margin / 2
    squares = (middle[:, None] - middle[None, :]) ** 2
    return 1 - float((joint * squares).sum() / (np.outer(margin, margin) * squares).sum())


def _joint_ratings(one: Traits, other: Traits) -> Floats:
    covariance = [[1 + one.noise**2, 1.0], [1.0, 1 + other.noise**2]]
    ends = np.array([-20.0, *CUTS, 20.0])
    grid = np.stack(np.meshgrid(ends, ends, indexing="ij"), axis=-1)
    below = stats.multivariate_normal([0.0, 0.0], covariance).cdf(grid)
    return np.asarray(np.diff(np.diff(below, axis=0), axis=1))


# ---- a world ----


def draw_world(generator: np.random.Generator) -> tuple[list[Task], list[Judgment]]:
    """Ordinary tasks, each for some of the labelers; gold tasks for all; repeats of the first ordinary tasks."""
    quality = generator.normal(size=(NUM_TASKS + NUM_GOLD, NUM_RESPONSES))
    opinions = {traits.name: traits.opinion * generator.normal(size=quality.shape) for traits in TRAITS}
    tasks: list[Task] = []
    judgments: list[Judgment] = []
    for index in range(NUM_TASKS + NUM_GOLD + NUM_REPEATS):
        is_repeat = index >= NUM_TASKS + NUM_GOLD
        root = index - NUM_TASKS - NUM_GOLD if is_repeat else index
        is_gold = root >= NUM_TASKS
        gold = tuple(int(rank) for rank in _ranks(quality[root])) if is_gold else ()
        responses = tuple(f"{'word ' * 99}{root}-{place}" for place in range(NUM_RESPONSES))
        task = Task(
            f"t{index}", (Message("user", f"{root}"),), responses, ("p",) * NUM_RESPONSES, gold_ranks=gold,
            repeat_of=f"t{root}" if is_repeat else "",
        )  # fmt: skip
        tasks.append(task)
        num_labelers = len(TRAITS) if is_gold or is_repeat else LABELERS_PER_TASK
        for labeler in generator.permutation(len(TRAITS))[:num_labelers]:
            traits = TRAITS[labeler]
            judgments.append(
                _judge(task, traits, quality[root] + opinions[traits.name][root], quality[root], generator)
            )
    return tasks, judgments


def _judge(task: Task, traits: Traits, liking: Floats, quality: Floats, generator: np.random.Generator) -> Judgment:
    order = generator.permutation(NUM_RESPONSES)
    mood = generator.random()
    ranks = _ranks(liking + traits.noise * generator.normal(size=NUM_RESPONSES))
    milliseconds = traits.median_milliseconds * math.exp(PACE_SPREAD * generator.normal())
    if mood < traits.lazy:
        milliseconds = 300 + 600 * generator.random()
        ranks = np.argsort(order) + 1 if mood < traits.lazy_first else 1 + generator.permutation(NUM_RESPONSES)
    elif generator.random() < traits.tie:
        ranks = np.ones(NUM_RESPONSES, dtype=np.int64)
    ratings = 1 + np.searchsorted(CUTS, quality + traits.noise * generator.normal(size=NUM_RESPONSES))
    return Judgment(
        task.task_id, traits.name, 1, "answer", tuple(ranks.tolist()), tuple(map(float, ratings.tolist())), (), "",
        tuple(order.tolist()), "1", round(milliseconds), "scripted", generator.random(),
    )  # fmt: skip


def _ranks(utility: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.argsort(np.argsort(-utility)) + 1


# ---- coverage ----


def held_against_truth(report: LabelReport) -> Iterator[tuple[str, Interval | Share | Alpha, float]]:
    """(what, estimate, truth) of every interval in a report of a drawn world."""
    yield "agreement, over all", report.agreement, overall_agreement()
    yield "alpha of rankings", report.alpha, alpha()
    yield "alpha of ratings", report.rating_alpha, _RATING_ALPHA
    yield (
        "shown first, over all",
        report.shown_first,
        float(np.average([shown_first(traits) for traits in TRAITS], weights=[traits.untied for traits in TRAITS])),
    )
    lazy_first = float(np.mean([traits.lazy_first for traits in TRAITS]))
    for place, mean in enumerate(report.ranks_by_place[0].means):
        yield "mean rank by place", mean, (1 - lazy_first) * (NUM_RESPONSES + 1) / 2 + lazy_first * (place + 1)
    by_name = {labeler.labeler: labeler for labeler in report.labelers}
    for traits in TRAITS:
        found = by_name[traits.name]
        yield "agreement with others", found.agreement, agreement_with_others(traits)
        yield "self-agreement", found.self_agreement, self_agreement(traits)
        yield "accuracy on gold", found.gold_accuracy, gold_accuracy(traits)
        yield "shown first, by labeler", found.shown_first, shown_first(traits)
        yield "median time", found.pace.milliseconds, median_milliseconds(traits)
        yield "too fast", found.pace.too_fast, too_fast(traits)
        yield "mean rating", found.ratings.mean, mean_rating(traits)
        yield "drift of ratings", found.ratings.drift, 0.0


_RATING_ALPHA = rating_alpha()


@dataclass(frozen=True)
class Covered:
    """How often an estimate's interval held the truth; `bias` is the mean of estimate less truth."""

    num_covered: int
    num_counted: int
    bias: float
    width: float

    @property
    def share(self) -> float:
        return self.num_covered / self.num_counted


def coverage(num_worlds: int, seed: int) -> dict[str, Covered]:
    """Every interval of `num_worlds` worlds against the truth, by what is estimated."""
    rows: dict[str, list[tuple[bool, float, float]]] = {}
    for world in range(num_worlds):
        report = summary(*draw_world(np.random.default_rng([seed, world])), seed=world)
        for what, estimate, truth in held_against_truth(report):
            value = estimate.value if isinstance(estimate, Alpha) else estimate.mean
            row = (estimate.low <= truth <= estimate.high, value - truth, estimate.high - estimate.low)
            rows.setdefault(what, []).append(row)
    return {
        what: Covered(sum(r[0] for r in found), len(found), *np.mean([r[1:] for r in found], axis=0).tolist())
        for what, found in rows.items()
    }


# ---- few tasks, as in screening ----

FEW_TASKS = (5, 10, 20, 50)
JUDGES = ((0.15, 0.0), (0.5, 0.0), (1.5, 0.0), (0.15, 0.2))  # (noise, share of tasks ranked at random)


@dataclass(frozen=True)
class FewTasks:
    """Accuracy on a few gold tasks: the truth, how often its interval holds it, and the interval's mean width."""

    truth: float
    share: float
    width: float


def few_tasks(
    num_tasks: int, num_responses: int, noise: float, careless: float, *, num_labelers: int, seed: int
) -> FewTasks:
    """`num_labelers` alike labelers with gold tasks of their own, held against the truth."""
    generator = np.random.default_rng(seed)
    shape = (num_labelers, num_tasks, num_responses)
    quality = generator.normal(size=shape)
    liking = quality + noise * generator.normal(size=shape)
    is_careless = generator.random(shape[:2]) < careless
    liking[is_careless] = generator.normal(size=(int(is_careless.sum()), num_responses))
    pairs = list(combinations(range(num_responses), 2))
    alike = [(quality[..., i] > quality[..., j]) == (liking[..., i] > liking[..., j]) for i, j in pairs]
    rows = num_labelers * num_tasks
    compared = np.full(rows, float(len(pairs)))
    tally = Tally(
        group_R=np.repeat(np.arange(num_labelers), num_tasks),
        task_R=np.tile(np.arange(num_tasks), num_labelers),
        prompt_R=np.tile(np.arange(num_tasks), num_labelers),
        right_R=np.sum(alike, axis=0, dtype=np.float64).ravel(),
        compared_R=compared,
        pairs_R=compared,
        responses_R=np.full(rows, num_responses),
    )
    truth = 0.5 + (1 - careless) * math.asin(1 / math.sqrt(1 + noise**2)) / math.pi
    shares = clustered_shares(tally, num_labelers)
    covered = float(np.mean([share.low <= truth <= share.high for share in shares]))
    return FewTasks(truth, covered, float(np.mean([share.high - share.low for share in shares])))


def print_few_tasks(num_labelers: int, seed: int) -> None:
    titles = [f"noise {noise:g}" + (f", {careless:.0%} careless" if careless else "") for noise, careless in JUDGES]
    print(f"\n| responses | gold tasks | {' | '.join(titles)} |\n|---|---|{'---|' * len(titles)}")
    for num_responses in (2, 4):
        for num_tasks in FEW_TASKS:
            found = [
                few_tasks(num_tasks, num_responses, *judge, num_labelers=num_labelers, seed=seed) for judge in JUDGES
            ]
            cells = [f"{100 * few.share:.1f}% of {few.truth:.2f}, ±{few.width / 2:.2f}" for few in found]
            print(f"| {num_responses} | {num_tasks} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| estimate | intervals | cover the truth | bias | mean width |\n|---|---|---|---|---|")
    for what, covered in coverage(arguments.worlds, arguments.seed).items():
        share = f"{100 * covered.share:.1f}%"
        print(f"| {what} | {covered.num_counted} | {share} | {covered.bias:.4g} | {covered.width:.3g} |")
    print_few_tasks(2 * arguments.worlds, arguments.seed)


if __name__ == "__main__":
    main()
