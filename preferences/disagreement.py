"""How far answers to one task agree. Rankings are compared by pairs of responses; a single response has no ranks, so
answers about it are compared by their ratings (overall, by criterion, and of earlier turns) and marks.

Summaries in the store and the statistics of leads use the same functions.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from preferences.annotations import Annotations
from preferences.records import Flags

# A question is ("rating", ""), ("criterion", name), ("turn 3", name) or ("mark", name). A mark that was set is 1.
Said = Mapping[tuple[str, str], float]
MARK = "mark"
FAR_APART = 6  # points between 1 and 7, at which the distance is 1; for yes and no, one point is enough


def disagreement(rankings: Sequence[Sequence[int]]) -> float:
    """Returns how far rankings of one task disagree: 0 if all agree, 1 if they order all pairs in opposite ways.

    A tie against a preference counts ¼. 0 for fewer than two rankings.
    """
    num_pairs, total = 0, 0.0
    for one, other in combinations(rankings, 2):
        for first, second in combinations(range(len(one)), 2):
            difference = _sign(one, first, second) - _sign(other, first, second)
            total += (difference / 2) ** 2
            num_pairs += 1
    return total / num_pairs if num_pairs else 0.0


def _sign(ranks: Sequence[int], first: int, second: int) -> int:
    return (ranks[first] > ranks[second]) - (ranks[first] < ranks[second])


def said_alone(ratings: Sequence[float], flags: Flags | Sequence[Sequence[str]], annotations: Annotations) -> Said:
    """Returns what an answer says about a single response and the turns before it, by question."""
    return {
        **({("rating", ""): float(ratings[0])} if ratings else {}),
        **{("criterion", one.name): float(one.ratings[0]) for one in annotations.criteria},
        **{(f"turn {one.turn}", one.name): float(one.rating) for one in annotations.turns},
        **{(MARK, flag): 1.0 for flag in (flags[0] if flags else ())},
    }


def disagreement_alone(answers: Sequence[Said]) -> float:
    """Returns how far answers about a single response disagree, 0 to 1, on the question on which they disagree most.

    For one question, it is the mean distance between two labelers' answers over all pairs of labelers. The distance is
    1 between yes and no, between a mark that is set and one that is not, and between ratings six points apart; it is
    proportionally smaller for closer ratings.
    """
    questions = dict.fromkeys(question for said in answers for question in said)
    return max((_distance(question, answers) for question in questions), default=0.0)


def _distance(question: tuple[str, str], answers: Sequence[Said]) -> float:
    is_mark = question[0] == MARK
    values = [said.get(question, 0.0) for said in answers if is_mark or question in said]
    full = 1 if min(values) == 0 else FAR_APART  # scales begin at 1, and no is 0
    distances = [min(1.0, abs(one - other) / full) for one, other in combinations(values, 2)]
    return sum(distances) / len(distances) if distances else 0.0


def compare_alone(one: Said, other: Said) -> tuple[int, int]:
    """Returns to how many questions two labelers gave the same answer, and how many questions both answered.

    A mark counts if at least one of them set it.
    """
    shared = [
        question for question in {**one, **other} if question[0] == MARK or (question in one and question in other)
    ]
    return sum(one.get(question, 0.0) == other.get(question, 0.0) for question in shared), len(shared)
