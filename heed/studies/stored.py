"""The measures of a seed in one file, from which its findings are computed again without the runs.

`heed study --measures FOLDER` reads FOLDER/seed-N.npz instead of running seed N, so a study can go on on another
machine, and a reader can check its verdicts. A file has one array per measure, named by what was asked for:
"rl/ppo-1/gold_KP", "best_of_n/reward-full/kl_KP", "tokens/grpo-3/0".
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from evaluation.measures.curves import Curve, Kind
from files.atomic import atomic_file
from heed.jobs.job import JobConfig
from heed.studies.algorithm_arms import every_arm
from heed.studies.arms import with_those_before
from heed.studies.findings import Measures
from preferences.statistics.estimates import Floats

STAMP = "stamp"


def measures_file(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}.npz"


def stamps_of(job: JobConfig) -> dict[str, str]:
    """What an arm's measures depend on, by the arm's name: what the study's job sets, its seed included, and the
    definitions of the arm and of those that it reads.

    Keys that have their defaults do not count, so that new keys leave old measures readable.
    """
    values = job.model_dump(mode="json", exclude_defaults=True, exclude={"cluster", "name", "note"})
    arms = every_arm(job, Path("SEED"))

    def stamp(name: str) -> str:
        read = [[arm.name, arm.stages, arm.after, dict(arm.changes)] for arm in with_those_before(arms, [name])]
        return hashlib.sha256(json.dumps([values, read], sort_keys=True).encode()).hexdigest()

    return {name: stamp(name) for name in arms}


def _arm_of(measure: str) -> str:
    """The arm that a measure is of: "rl/ppo-1/gold_KP" is of ppo-1, "bits/base/sft/0" of base. An array of a file that
    was written before arms had stamps, "stamp", is of none.
    """
    return [*measure.split("/"), ""][1]


class Recorded:
    """The measures of a seed, each kept under the name by which it was asked for."""

    def __init__(self, measures: Measures) -> None:
        self._measures, self.arrays = measures, dict[str, Floats]()

    @property
    def seed(self) -> int:
        return self._measures.seed

    def best_of_n(self, judge: str) -> Curve:
        return self._curve(f"best_of_n/{judge}", self._measures.best_of_n(judge))

    def rl(self, arm: str) -> Curve:
        return self._curve(f"rl/{arm}", self._measures.rl(arm))

    def tokens(self, arm: str) -> Floats:
        found = self._measures.tokens(arm)
        self.arrays[f"tokens/{arm}/0"] = found
        return found

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        return self._pair(f"bits/{stage}", self._measures.bits(stage))

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        return self._pair(f"right_pairs/{judge}", self._measures.right_pairs(judge))

    def _curve(self, name: str, curve: Curve) -> Curve:
        for field in fields(Curve):
            if field.name != "kind":
                self.arrays[f"{name}/{field.name}"] = np.asarray(getattr(curve, field.name))
        return curve

    def _pair(self, name: str, pair: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        self.arrays |= {f"{name}/{place}": value for place, value in enumerate(pair)}
        return pair

    def write(self, path: Path, stamps: Mapping[str, str]) -> None:
        """Writes everything that was asked for, in addition to what the file has of the same arms, atomically.

        Raises: OSError if the file cannot be written.
        """
        before = _read(path) if path.is_file() else {}
        known = {name for name in stamps if str(before.get(f"{STAMP}/{name}", "")) == stamps[name]}
        arrays = {name: value for name, value in before.items() if _arm_of(name) in known} | self.arrays
        own = {f"{STAMP}/{arm}": np.array(stamps[arm]) for arm in sorted({_arm_of(name) for name in arrays})}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{**arrays, **own})


@dataclass(frozen=True)
class StoredMeasures:
    """The measures of a seed that `Recorded.write` has stored."""

    path: Path
    seed: int
    arrays: Mapping[str, Floats]

    @classmethod
    def read(cls, path: Path, seed: int, stamps: Mapping[str, str]) -> "StoredMeasures":
        """Raises: ValueError for a file that is damaged, or whose study had another job, or an arm of another
        definition.
        """
        arrays = _read(path)
        for name in arrays:
            arm = _arm_of(name)
            if str(arrays.get(f"{STAMP}/{arm}", "")) != stamps.get(arm, ""):
                raise ValueError(
                    f"{path}: measures of another job, or of another arm {arm}; remove it to run this study's"
                )
        return cls(path, seed, {name: value for name, value in arrays.items() if not name.startswith(f"{STAMP}/")})

    def best_of_n(self, judge: str) -> Curve:
        return self._curve("best_of_n", judge)

    def rl(self, arm: str) -> Curve:
        return self._curve("rl", arm)

    def tokens(self, arm: str) -> Floats:
        return self._array(f"tokens/{arm}/0")

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        return self._array(f"bits/{stage}/0"), self._array(f"bits/{stage}/1")

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        return self._array(f"right_pairs/{judge}/0"), self._array(f"right_pairs/{judge}/1")

    def _curve(self, kind: Kind, of: str) -> Curve:
        name = f"{kind}/{of}"
        return Curve(
            kind=kind,
            names=tuple(str(each) for each in self._array(f"{name}/names")),
            kl_KP=self._array(f"{name}/kl_KP"),
            gold_KP=self._array(f"{name}/gold_KP"),
            proxy_KP=self._array(f"{name}/proxy_KP"),
            start_gold_P=self._array(f"{name}/start_gold_P"),
            start_proxy_P=self._array(f"{name}/start_proxy_P"),
        )

    def _array(self, name: str) -> Floats:
        """Raises: ValueError for a measure that no finding had asked for when the file was written."""
        if name not in self.arrays:
            raise ValueError(f"{self.path}: no {name!r}; it was stored for other findings. Remove it to run the arms")
        return self.arrays[name]


def _read(path: Path) -> dict[str, Floats]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}; a file that `heed study` wrote was expected") from None
