"""How often `[ppo.alarm]` rings in planted worlds: `python -m benchmarks.alarm_rates [NUM_WORLDS]`.

In a planted world prompts differ in difficulty, a check is noisy, and score and check of a response correlate by 0.4,
so that at first one standard deviation of score is worth 0.1 of a check. In its run the score gains two standard
deviations, and the checks gain what the kind of world says. The alarm looks after every second iteration.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ppo.alarm import Evidence, evidence_of

Floats = NDArray[np.float64]

NUM_ITERATIONS = 20
EVERY = 2
NUM_PROMPTS = 1000
FALSE_ALARMS = 0.05
CHECKS = ((256, 16), (1024, 128))  # of the initial policy, and per iteration
CORRELATION = 0.4
SHARE = 0.5


@dataclass(frozen=True)
class Kind:
    """What a run's last policy gains; the others gain in proportion to their iteration."""

    what: str
    score: float  # standard deviations
    check: float


KINDS: Mapping[str, Kind] = {
    "still": Kind("nothing changes", 0.0, 0.0),
    "real": Kind("the checks gain what the scores promise", 2.0, 0.2),
    "half": Kind("the checks gain half of it, which is `share`", 2.0, 0.1),
    "useless": Kind("the scores gain, the checks do not", 2.0, 0.0),
    "hacked": Kind("the scores gain, the checks fall by 0.2", 2.0, -0.2),
}


def evidence_along(kind: Kind, seed: int, initial_checks: int, each: int) -> list[Evidence]:
    """Returns the evidence at each look of one world's run."""
    rng = np.random.default_rng(seed)
    easy = rng.beta(4, 4, NUM_PROMPTS)

    def draw(number: int, part: float) -> tuple[Floats, Floats]:
        prompts = rng.choice(NUM_PROMPTS, number, replace=number > NUM_PROMPTS)
        check = easy[prompts] + rng.normal(0, 0.2, number)
        noise = math.sqrt(1 - CORRELATION**2) * rng.normal(size=number)
        score = CORRELATION * (check - 0.5) / 0.25 + noise
        return (check + part * kind.check).clip(0, 1), score + part * kind.score

    drawn = [draw(initial_checks, 0), *(draw(each, number / NUM_ITERATIONS) for number in range(1, NUM_ITERATIONS + 1))]
    checks, scores = (np.concatenate(part) for part in zip(*drawn, strict=True))
    policies = np.repeat(np.arange(NUM_ITERATIONS + 1), [initial_checks, *[each] * NUM_ITERATIONS])
    return [
        evidence_of(
            checks[policies <= last],
            scores[policies <= last],
            policies[policies <= last],
            share=SHARE,
            num_iterations=NUM_ITERATIONS,
            false_alarms=FALSE_ALARMS,
        )
        for last in range(EVERY, NUM_ITERATIONS + 1, EVERY)
    ]


def first_alarm(evidence: list[Evidence]) -> int:
    """Returns the iteration of the first alarm; 0 if there is none."""
    rings = [found.rings(FALSE_ALARMS) for found in evidence]
    return EVERY * (rings.index(True) + 1) if any(rings) else 0


def main(num_worlds: int) -> None:
    print("| world | checks | runs with an alarm | median iteration of it |\n|---|---|---|---|")
    for kind in KINDS.values():
        for initial, each in CHECKS:
            found = [first_alarm(evidence_along(kind, seed, initial, each)) for seed in range(num_worlds)]
            rang = [iteration for iteration in found if iteration]
            when = f"{np.median(rang):g} of {NUM_ITERATIONS}" if rang else ""
            print(f"| {kind.what} | {initial} + {each} | {len(rang) / num_worlds:.2%} | {when} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
