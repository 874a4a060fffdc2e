"""Do the intervals of a lead's page have their nominal coverage? `python -m benchmarks.label_coverage`.

Worlds with known labelers (`benchmarks.known_labelers`) are drawn repeatedly, each with new tasks and answers. Every
interval of `preferences.statistics.summary` is compared with the truth (`benchmarks.label_truth`). The same labelers
give the same answers over HTTP in `tests/preferences/page/test_scripted_labelers.py`, so this also covers the server.
`tests/preferences/statistics/test_coverage.py` runs fewer worlds; docs/labels-quality.md sums up 2,000 of them.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy

from benchmarks.known_labelers import Size, draw_world
from benchmarks.label_truth import held_against_truth, is_covered
from preferences.records import Judgment, Message, Ranking, Task
from preferences.statistics.agreement import Alpha, alpha_of_units, labeler_reliability, ranking_alpha
from preferences.statistics.intervals import Tally, clustered_shares
from preferences.statistics.panel import PairCounts, Panel
from preferences.statistics.quality import agreement_with_others
from preferences.statistics.summary import summary

SIZE = Size(num_ordinary=90, num_gold=40, num_repeats=40)


# ---- coverage ----


@dataclass(frozen=True)
class Covered:
    """How often an interval contained the truth; `bias` is the mean of estimate - truth, `width` the mean width."""

    num_covered: int
    num_counted: int
    bias: float
    width: float

    @property
    def share(self) -> float:
        return self.num_covered / self.num_counted


def coverage(num_worlds: int, seed: int, size: Size = SIZE) -> dict[str, Covered]:
    """Compares every interval of worlds `seed`, `seed + 1`, ... with the truth, by what is estimated."""
    rows: dict[str, list[tuple[bool, float, float]]] = {}
    for world in range(num_worlds):
        report = summary(*draw_world(size, seed + world))
        for what, _, estimate, truth in held_against_truth(report):
            value = estimate.value if isinstance(estimate, Alpha) else estimate.mean
            row = (is_covered(estimate, truth), value - truth, estimate.high - estimate.low)
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
    """Accuracy on a few gold tasks: the truth, how often its interval contains it, and the mean width."""

    truth: float
    share: float
    width: float


def few_tasks(
    num_tasks: int, num_responses: int, noise: float, careless: float, *, num_labelers: int, seed: int
) -> FewTasks:
    """Compares `num_labelers` identical labelers, each with its own gold tasks, with the truth."""
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


# ---- alphas of few prompts ----

FEW_PROMPTS = ((8, 1, 3, 2), (15, 1, 2, 2), (15, 2, 2, 2), (15, 2, 4, 2), (40, 2, 3, 3))  # prompts, tasks, K, labelers
NOISES = (0.2, 0.5, 1.5)
POOL = 6  # labelers; their noise is between half and twice the mean
NUM_RATINGS, TIE = 7, 0.2
NUM_PROMPTS_OF_TRUTH = 40_000


def alphas(
    generator: np.random.Generator, shape: tuple[int, int, int, int], noise: float, num_worlds: int
) -> list[tuple[Alpha, Alpha]]:
    """Draws worlds of (prompts, tasks per prompt, responses, labelers per task); returns alphas of ranks and ratings.

    Prompts differ in how far apart their responses are. Responses closer than TIE tie.
    """
    num_prompts, tasks_each, num_responses, num_labelers = shape
    rows = num_prompts * tasks_each
    prompt_T, sizes_T = np.repeat(np.arange(num_prompts), tasks_each), np.full(rows, num_responses)
    found = []
    for _ in range(num_worlds):
        spread_T, level_T = np.exp(0.6 * generator.normal(size=num_prompts)), 0.5 * generator.normal(size=num_prompts)
        quality_TK = generator.normal(size=(rows, num_responses)) * spread_T[prompt_T, None] + level_T[prompt_T, None]
        who_TL = np.argsort(generator.random((rows, POOL)), axis=1)[:, :num_labelers]
        noise_TL = noise * np.linspace(0.5, 2, POOL)[who_TL]
        liking_TLK = quality_TK[:, None] + noise_TL[..., None] * generator.normal(size=(*who_TL.shape, num_responses))
        gaps = [liking_TLK[..., i] - liking_TLK[..., j] for i, j in combinations(range(num_responses), 2)]
        counted = [[(sign * gap > TIE).sum(axis=1) for gap in gaps] for sign in (1, -1)]
        first_TP, second_TP = (np.stack(columns, axis=1).astype(np.float64) for columns in counted)
        pairs = PairCounts(first_TP, second_TP, num_labelers - first_TP - second_TP)
        rating_TLK = np.clip(np.rint(4 + 1.3 * liking_TLK), 1, NUM_RATINGS)
        counts_UV = np.stack([(rating_TLK == value).sum(axis=1) for value in range(1, NUM_RATINGS + 1)], axis=-1)
        by_rating = alpha_of_units(
            counts_UV.reshape(-1, NUM_RATINGS).astype(np.float64), np.repeat(np.arange(rows), num_responses), prompt_T
        )
        found.append((ranking_alpha(pairs, prompt_T, sizes_T), by_rating))
    return found


def few_prompts(shape: tuple[int, int, int, int], noise: float, *, num_worlds: int, seed: int) -> dict[str, Covered]:
    """Compares alphas of few prompts with those of very many prompts of the same kind."""
    generator = np.random.default_rng(seed)
    ((rank_truth, rating_truth),) = alphas(generator, (NUM_PROMPTS_OF_TRUTH, *shape[1:]), noise, 1)
    drawn = alphas(generator, shape, noise, num_worlds)
    covered = {}
    for what, truth, found in (
        ("rankings", rank_truth.value, [ranks for ranks, _ in drawn]),
        ("ratings", rating_truth.value, [ratings for _, ratings in drawn]),
    ):
        known = [alpha for alpha in found if not alpha.reason]
        covered[what] = Covered(
            sum(alpha.low <= truth <= alpha.high for alpha in known),
            len(known),
            float(np.mean([alpha.value for alpha in known])) - truth,
            float(np.mean([alpha.high - alpha.low for alpha in known])),
        )
    return covered


def print_few_prompts(num_worlds: int, seed: int) -> None:
    titles = [f"{what}, noise {noise:g}" for noise in NOISES for what in ("rankings", "ratings")]
    print(f"\n| prompts × tasks, K, labelers | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    for shape in FEW_PROMPTS:
        cells = [
            f"{100 * found.share:.1f}%, {found.bias:+.3f}, ±{found.width / 2:.2f}"
            for noise in NOISES
            for found in few_prompts(shape, noise, num_worlds=num_worlds, seed=seed).values()
        ]
        print(f"| {shape[0]} × {shape[1]}, {shape[2]}, {shape[3]} | {' | '.join(cells)} |")


# ---- reliability, and joint verdicts weighted by it ----


@dataclass(frozen=True)
class Team:
    """Labelers who are right with these probabilities; `labels` of them judge each of `num_tasks` pairs.

    On a share `misled` of the pairs, the first `num_misled` labelers are all wrong together.
    """

    accuracies: tuple[float, ...]
    num_tasks: int
    labels: int
    num_misled: int = 0
    misled: float = 0.0


TEAMS = {
    "5 labelers, 0.6 to 0.9, 300 × 3": Team((0.6, 0.7, 0.8, 0.85, 0.9), 300, 3),
    "the same, 60 × 3": Team((0.6, 0.7, 0.8, 0.85, 0.9), 60, 3),
    "20 labelers, 0.6 to 0.9, 40 × 3": Team(tuple(np.linspace(0.6, 0.9, 20).tolist()), 40, 3),
    "2 labelers, 0.9 and 0.7, 60 × 2": Team((0.9, 0.7), 60, 2),
    "3 good, 4 at or below chance, 300 × 5": Team((0.9, 0.85, 0.9, 0.5, 0.5, 0.4, 0.3), 300, 5),
    "4 at 0.8, 1 upside down (0.1), 200 × 3": Team((0.8, 0.8, 0.8, 0.8, 0.1), 200, 3),
    "3 at 0.65, 4 at chance, 40 × 3": Team((0.65, 0.65, 0.65, 0.5, 0.5, 0.5, 0.5), 40, 3),
    "4 misled on 60% of pairs, 3 good, 300 × 3": Team((0.9,) * 7, 300, 3, num_misled=4, misled=0.6),
}


def team_rankings(team: Team, generator: np.random.Generator) -> list[Ranking]:
    """Returns rankings of pairs in which the first response is better. Each pair has its own prompt."""
    rankings = []
    for task in range(team.num_tasks):
        is_misleading = generator.random() < team.misled
        for who in generator.choice(len(team.accuracies), size=team.labels, replace=False).tolist():
            is_right = generator.random() < team.accuracies[who] and not (is_misleading and who < team.num_misled)
            prompt = (Message("user", str(task)),)
            rankings.append(Ranking(str(task), prompt, ("a", "b"), (1, 2) if is_right else (2, 1), f"{who:02}"))
    return rankings


def verdict_accuracy(rankings: Sequence[Ranking], weights: Mapping[str, float]) -> float:
    """Returns the share of tasks whose weighted votes prefer the first response; a tie counts ½."""
    votes: dict[str, float] = {}
    for ranking in rankings:
        sign = 1 if ranking.ranks == (1, 2) else -1
        votes[ranking.task_id] = votes.get(ranking.task_id, 0.0) + sign * weights[ranking.labeler]
    return float(np.mean([(np.sign(vote) + 1) / 2 for vote in votes.values()]))


def team_results(team: Team, *, num_worlds: int, seed: int) -> list[float]:
    """Returns the mean accuracy of joint verdicts by three rules: equal weights, weights cut off at 0
    (`Reliability.weight`), and negative weights, which reverse a labeler.
    """
    generator, accuracies = np.random.default_rng(seed), list[list[float]]()
    for _ in range(num_worlds):
        rankings = team_rankings(team, generator)
        found = labeler_reliability(rankings)
        odds = {name: math.log(one.accuracy / (1 - one.accuracy)) for name, one in found.items()}
        cut = {name: one.weight for name, one in found.items()}
        rules = (dict.fromkeys(found, 1.0), cut, odds)
        accuracies.append([verdict_accuracy(rankings, weights) for weights in rules])
    return np.mean(accuracies, axis=0).tolist()


def print_teams(num_worlds: int, seed: int) -> None:
    print("\n| team | alike | cut off at 0 | reversed |\n|---|---|---|---|")
    for name, team in TEAMS.items():
        cells = " | ".join(f"{accuracy:.3f}" for accuracy in team_results(team, num_worlds=num_worlds, seed=seed))
        print(f"| {name} | {cells} |", flush=True)


# ---- agreement with the others, if tasks differ in difficulty ----


def differing_tasks(num_labelers: int, num_tasks: int, spread: float, *, num_worlds: int, seed: int) -> Covered:
    """Compares each labeler's agreement with the others with its truth. Three labelers (or both) judge each task.

    Labeler l is right with probability σ(θ_l + ease), where σ(θ_l) is evenly spaced from .65 to .95 over the labelers,
    and a task's ease is normal with standard deviation `spread`.
    """
    generator = np.random.default_rng(seed)
    theta_L = scipy.special.logit(np.linspace(0.65, 0.95, num_labelers))
    node_Q, weight_Q = np.polynomial.hermite_e.hermegauss(40)
    right_QL = scipy.special.expit(theta_L + spread * node_Q[:, None])
    both_LL = np.einsum("q,ql,qk->lk", weight_Q, right_QL, right_QL) / weight_Q.sum()
    right_L = weight_Q @ right_QL / weight_Q.sum()
    alike_LL = 1 - right_L[:, None] - right_L + 2 * both_LL
    truth_L = (alike_LL.sum(axis=1) - np.diag(alike_LL)) / (num_labelers - 1)
    tasks = [Task(str(task), (Message("user", str(task)),), ("a", "b"), ("x", "y")) for task in range(num_tasks)]
    rows = []
    for _ in range(num_worlds):
        answers = []
        for task in tasks:
            ease = spread * generator.normal()
            for who in generator.choice(num_labelers, min(3, num_labelers), replace=False).tolist():
                ranks = (1, 2) if generator.random() < scipy.special.expit(theta_L[who] + ease) else (2, 1)
                answers.append(
                    Judgment(task.task_id, f"{who:02}", 0, "answer", ranks, (), (), "", (0, 1), "", 0, "", 0.0)
                )
        found = agreement_with_others(Panel.of(tasks, answers))
        rows += [
            (share.low <= truth <= share.high, share.mean - truth, share.high - share.low)
            for share, truth in zip(found, truth_L.tolist(), strict=True)
        ]
    covered, bias, width = np.mean(rows, axis=0).tolist()
    return Covered(round(covered * len(rows)), len(rows), bias, width)


def print_differing_tasks(num_worlds: int, seed: int) -> None:
    print("\n| labelers, tasks | spread 0 | spread 1 | spread 2 |\n|---|---|---|---|")
    for num_labelers in (2, 3, 5, 10):
        for num_tasks in (60, 300):
            cells = [
                differing_tasks(num_labelers, num_tasks, spread, num_worlds=num_worlds, seed=seed)
                for spread in (0.0, 1.0, 2.0)
            ]
            shown = " | ".join(f"{cell.share:.1%}, ±{cell.width / 2:.2f}" for cell in cells)
            print(f"| {num_labelers}, {num_tasks} | {shown} |", flush=True)


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
    print_few_prompts(arguments.worlds, arguments.seed)
    print_teams(arguments.worlds // 5, arguments.seed)
    print_differing_tasks(arguments.worlds // 10, arguments.seed)


if __name__ == "__main__":
    main()
