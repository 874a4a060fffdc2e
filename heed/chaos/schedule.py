"""Which faults are injected, and when: drawn from the seed before anything runs, so a campaign can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """A planned fault: its kind, the stage in which it is due, and the moment as a fraction of that stage's duration.

    `seed` draws its target and duration.
    """

    kind: str
    stage: str
    moment: float
    seed: int


class Schedule:
    """Draws faults so that kinds and stages each occur equally often, up to one; moments are uniform."""

    def __init__(self, num_faults: int, seed: int, kinds: Sequence[str], stages: Sequence[str]) -> None:
        chance = random.Random(seed)
        drawn_kinds, drawn_stages = (_deal(num_faults, names, chance) for names in (kinds, stages))
        self._stages = tuple(stages)
        self._to_come = [
            Planned(kind, stage, chance.random(), chance.getrandbits(32))
            for kind, stage in zip(drawn_kinds, drawn_stages, strict=True)
        ]

    def __len__(self) -> int:
        """Returns the number of remaining faults."""
        return len(self._to_come)

    def take(self, number: int) -> list[Planned]:
        """Takes at most `number` faults for one run, in the order of its stages."""
        taken, self._to_come = self._to_come[:number], self._to_come[number:]
        return sorted(taken, key=lambda planned: (self._stages.index(planned.stage), planned.moment))

    def give_back(self, planned: Sequence[Planned]) -> None:
        """Returns faults that a run ended too early for; the next run takes them first."""
        self._to_come = [*planned, *self._to_come]


def _deal(number: int, names: Sequence[str], chance: random.Random) -> list[str]:
    dealt = list[str]()
    while len(dealt) < number:
        dealt += chance.sample(names, len(names))
    return dealt[:number]
