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
from intervals.estimates import Floats
from jobs.job import JobConfig
from studies.algorithm_arms import every_arm
from studies.findings import Measures

STAMP = "stamp"


def measures_file(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}.npz"


def stamp_of(job: JobConfig) -> str:
    """What a seed's measures depend on: what the study's job sets, its seed included, and the definitions of all arms.

    Keys that have their defaults do not count, so that new keys leave old measures readable.
    """
    arms = [[arm.name, arm.stages, arm.after, dict(arm.changes)] for arm in every_arm(job, Path("SEED")).values()]
    values = [job.model_dump(mode="json", exclude_defaults=True, exclude={"cluster", "name", "note"}), arms]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


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

    def write(self, path: Path, stamp: str) -> None:
        """Writes everything that was asked for, beside what the file has of the same study, atomically.

        Raises: OSError if the file cannot be written.
        """
        before = _read(path) if path.is_file() else {}
        kept = before if str(before.get(STAMP, "")) == stamp else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{**kept, **self.arrays, STAMP: np.array(stamp)})


@dataclass(frozen=True)
class StoredMeasures:
    """The measures of a seed that `Recorded.write` has stored."""

    path: Path
    seed: int
    arrays: Mapping[str, Floats]

    @classmethod
    def read(cls, path: Path, seed: int, stamp: str) -> "StoredMeasures":
        """Raises: ValueError for a file that is damaged, or whose study had another job or other arms."""
        arrays = _read(path)
        if str(arrays.pop(STAMP, "")) != stamp:
            raise ValueError(f"{path}: measures of another job or of other arms; remove it to run this study's")
        return cls(path, seed, arrays)

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
