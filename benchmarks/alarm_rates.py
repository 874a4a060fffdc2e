"""How often `[ppo.alarm]` rings in planted worlds: `python -m benchmarks.alarm_rates [NUM_WORLDS]`.

`python -m benchmarks.alarm_rates --people [NUM_WORLDS]` does the same for people, whose answers come late or never.

In a planted world prompts differ in difficulty, a check is noisy, and score and check of a response correlate by 0.4,
so that at first one standard deviation of score is worth 0.1 of a check. In its run the score gains two standard
deviations, and the checks gain what the kind of world says. The checks of one iteration may have something in common.
The alarm looks after every iteration.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ppo.alarm import Evidence, evidence_of
from ppo.people import evidence_of_verdicts, number_to_send

Floats = NDArray[np.float64]

NUM_ITERATIONS = 20
NUM_PROMPTS = 1000
FALSE_ALARMS = 0.05
CHECKS = ((256, 16), (1024, 128))  # of the initial policy, and per iteration
CORRELATION = 0.4
SHARE = 0.5


@dataclass(frozen=True)
class Kind:
    """What a run's last policy gains; the others gain in proportion to their iteration, or, in a `step`, as much.

    All checks of an iteration are `shock` higher or lower, at random. Its prompts are drawn from all, from the easier
    or the harder half ("half"), or are the same in every iteration ("same").
    """

    what: str
    score: float  # standard deviations
    check: float
    shock: float = 0.0
    prompts: str = ""
    is_step: bool = False


KINDS: Mapping[str, Kind] = {
    "still": Kind("nothing changes", 0.0, 0.0),
    "real": Kind("the checks gain what the scores promise", 2.0, 0.2),
    "half": Kind("the checks gain half of what the scores promise, which is `share`", 2.0, 0.1),
    "shock.1": Kind("nothing changes; an iteration's checks are all .1 higher or lower", 0.0, 0.0, shock=0.1),
    "shock.2": Kind("the same; .2", 0.0, 0.0, shock=0.2),
    "shock.4": Kind("the same; .4", 0.0, 0.0, shock=0.4),
    "prompts": Kind("nothing changes; an iteration's prompts are all easy or all hard", 0.0, 0.0, prompts="half"),
    "same": Kind("nothing changes; the same prompts in every iteration", 0.0, 0.0, prompts="same"),
    "useless": Kind("the scores gain, the checks do not", 2.0, 0.0),
    "hacked": Kind("the scores gain, the checks fall by 0.2", 2.0, -0.2),
    "fall.1": Kind("from the first iteration on, checks are .1 lower, scores as before", 0.0, -0.1, is_step=True),
    "fall.2": Kind("the same; .2", 0.0, -0.2, is_step=True),
    "fall.3": Kind("the same; .3", 0.0, -0.3, is_step=True),
}


def evidence_along(kind: Kind, seed: int, initial_checks: int, each: int) -> list[Evidence]:
    """Returns the evidence at each look of one world's run."""
    rng = np.random.default_rng(seed)
    easy = np.sort(rng.beta(4, 4, NUM_PROMPTS))

    def draw(prompts: NDArray[np.int64], part: float, shock: float) -> tuple[Floats, Floats]:
        check = easy[prompts] + rng.normal(0, 0.2, len(prompts)) + shock
        noise = math.sqrt(1 - CORRELATION**2) * rng.normal(size=len(prompts))
        score = CORRELATION * (check - 0.5) / 0.25 + noise
        return (check + part * kind.check).clip(0, 1), score + part * kind.score

    same = rng.choice(NUM_PROMPTS, each, replace=False)
    drawn = [draw(rng.choice(NUM_PROMPTS, initial_checks, replace=initial_checks > NUM_PROMPTS), 0, 0)]
    for number in range(1, NUM_ITERATIONS + 1):
        half = NUM_PROMPTS // 2
        few = half * rng.integers(2) + rng.choice(half, each, replace=False)
        any_of = rng.choice(NUM_PROMPTS, each, replace=False)
        prompts = {"half": few, "same": same, "": any_of}[kind.prompts]
        drawn.append(draw(prompts, 1 if kind.is_step else number / NUM_ITERATIONS, kind.shock * rng.choice([-1, 1])))
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
        for last in range(1, NUM_ITERATIONS + 1)
    ]


def first_alarm(evidence: list[Evidence]) -> int:
    """Returns the iteration of the first alarm; 0 if there is none."""
    rings = [found.rings(FALSE_ALARMS) for found in evidence]
    return rings.index(True) + 1 if any(rings) else 0


PEOPLE_ITERATIONS = 40
TIES = 0.2
EACH = 16


@dataclass(frozen=True)
class People:
    """A world of people. `edge` is the mean verdict of the last policy, and of the others from iteration `since` on in
    proportion, or as much with `is_step`; `delay` is the mean number of iterations until an answer comes. With
    `is_eager`, defeats of the policy are answered at once and the rest after `delay`; a share `lost` of its victories
    is never answered. The mean verdict of an iteration is `shock` higher or lower, at random; with `is_rare`, 4 `shock`
    lower in a fifth of the iterations and `shock` higher in the others.
    """

    what: str
    edge: float
    since: int = 0
    delay: float = 0.0
    is_eager: bool = False
    lost: float = 0.0
    shock: float = 0.0
    is_rare: bool = False
    is_step: bool = False


PEOPLE: tuple[People, ...] = (
    People("no policy is better or worse; answers at once", 0.0),
    People("the same; an answer takes 5 iterations on average", 0.0, delay=5),
    People("the same; defeats are answered at once, the rest after 5", 0.0, delay=5, is_eager=True),
    People("the same; and 30% of the victories are never answered", 0.0, delay=5, is_eager=True, lost=0.3),
    *(
        People(f"an iteration's mean verdict is {size:g} higher or lower; at once", 0.0, shock=size)
        for size in (0.1, 0.2, 0.3, 0.4)
    ),
    People("0.4 lower in a fifth of the iterations, 0.1 higher in the others", 0.0, shock=0.1, is_rare=True),
    *(People(f"from the first iteration on at -{size:g}; at once", -size, is_step=True) for size in (0.1, 0.2, 0.3)),
    People("the policy becomes better, to 0.3; after 5", 0.3, delay=5),
    People("the policy becomes worse, to -0.3; at once", -0.3),
    People("the policy becomes worse, to -0.3; after 5", -0.3, delay=5),
    People("the policy becomes worse, to -0.6; after 5", -0.6, delay=5),
    People("the policy becomes worse from iteration 20 on, to -0.6; after 5", -0.6, since=20, delay=5),
)


def people_run(world: People, seed: int) -> tuple[int, int]:
    """Returns the iteration of the first alarm (0 = none) and how many comparisons were sent until then.

    Iteration i has the policy after i iterations; it reads what has come, sends tasks, and looks at the evidence.
    """
    rng, aim = np.random.default_rng(seed), -math.log(FALSE_ALARMS)
    verdict, policy, comes = (list[float]() for _ in range(3))
    for iteration in range(1, PEOPLE_ITERATIONS):
        come_N = np.array(comes) <= iteration
        known_N, policy_N = np.array(verdict), np.array(policy, dtype=np.int64)
        answered = evidence_of_verdicts(known_N[come_N], policy_N[come_N], PEOPLE_ITERATIONS) if verdict else None
        number = number_to_send(EACH, answered.nats if answered else 0.0, aim, int((~come_N).sum()))
        part = 1 if world.is_step else max(0.0, (iteration - world.since) / (PEOPLE_ITERATIONS - world.since))
        up = rng.choice([-4, 1], p=[0.2, 0.8]) if world.is_rare else rng.choice([-1, 1])
        edge = world.edge * part + world.shock * up
        for _ in range(number):
            draw, wins = rng.random(), (1 - TIES + edge) / 2
            verdict.append(1.0 if draw < wins else 0.0 if draw < wins + TIES else -1.0)
            waits = 0 if world.is_eager and verdict[-1] < 0 else rng.geometric(1 / (1 + world.delay)) - 1
            never = verdict[-1] > 0 and rng.random() < world.lost
            policy.append(iteration)
            comes.append(math.inf if never else iteration + 1 + waits)
        seen_N = np.where(np.array(comes) <= iteration, np.array(verdict), math.nan)
        if evidence_of_verdicts(seen_N, np.array(policy, dtype=np.int64), PEOPLE_ITERATIONS).rings(FALSE_ALARMS):
            return iteration, len(verdict)
    return 0, len(verdict)


def people_rates(num_worlds: int) -> None:
    print("| people | runs with an alarm | median iteration of it | median comparisons sent |\n|---|---|---|---|")
    for world in PEOPLE:
        found = [people_run(world, seed) for seed in range(num_worlds)]
        rang = [iteration for iteration, _ in found if iteration]
        when = f"{np.median(rang):g} of {PEOPLE_ITERATIONS}" if rang else ""
        sent = np.median([number for _, number in found])
        print(f"| {world.what} | {len(rang) / num_worlds:.2%} | {when} | {sent:g} |", flush=True)


def main(num_worlds: int) -> None:
    print("| world | checks | runs with an alarm | median iteration of it |\n|---|---|---|---|")
    for kind in KINDS.values():
        for initial, each in CHECKS:
            found = [first_alarm(evidence_along(kind, seed, initial, each)) for seed in range(num_worlds)]
            rang = [iteration for iteration in found if iteration]
            when = f"{np.median(rang):g} of {NUM_ITERATIONS}" if rang else ""
            print(f"| {kind.what} | {initial} + {each} | {len(rang) / num_worlds:.2%} | {when} |", flush=True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word != "--people"]
    (people_rates if "--people" in sys.argv else main)(*numbers or [2000])
