"""Which faults strike, and when: drawn from the seed before anything runs, so that a campaign can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """One fault to come: its kind, the stage in which it is due, and the moment as a fraction of that stage's time.

    `seed` draws what it strikes and how long it lasts.
    """

    kind: str
    stage: str
    moment: float
    seed: int


class Schedule:
    """Every kind once among as many faults as there are kinds, likewise every stage; moments are uniform."""

    def __init__(self, num_faults: int, seed: int, kinds: Sequence[str], stages: Sequence[str]) -> None:
        chance = random.Random(seed)
        drawn_kinds, drawn_stages = (_deal(num_faults, names, chance) for names in (kinds, stages))
        self._stages = tuple(stages)
        self._to_come = [
            Planned(kind, stage, chance.random(), chance.getrandbits(32))
            for kind, stage in zip(drawn_kinds, drawn_stages, strict=True)
        ]

    def __len__(self) -> int:
        """How many faults are still to come."""
        return len(self._to_come)

    def take(self, number: int) -> list[Planned]:
        """The faults of one run, in the order of its stages; no more than `number`."""
        taken, self._to_come = self._to_come[:number], self._to_come[number:]
        return sorted(taken, key=lambda planned: (self._stages.index(planned.stage), planned.moment))

    def give_back(self, planned: Sequence[Planned]) -> None:
        """Faults that a run ended too early for; a later run takes them first."""
        self._to_come = [*planned, *self._to_come]


def _deal(number: int, names: Sequence[str], chance: random.Random) -> list[str]:
    dealt = list[str]()
    while len(dealt) < number:
        dealt += chance.sample(names, len(names))
    return dealt[:number]
