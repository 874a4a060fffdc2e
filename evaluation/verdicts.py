"""What comparisons rest on: responses of policies, and verdicts of judges on two of them.

Both are rows of Parquet files, so that every number of a report leads back to its rows and another judge can judge the
same responses. Shape letters: V verdicts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Side = Literal["a", "b", ""]


@dataclass(frozen=True)
class Response:
    """One response of a policy to a prompt. `index` counts a policy's samples of the prompt from 0.

    `num_tokens` and `finished` (it ended by itself) are None where whoever made the response did not say; `log_ratio`,
    log π - log π_ref of the whole response in nats, is NaN where no reference was measured. `where` names the file and
    line it was read from, "" if it was sampled here.
    """

    policy: str
    prompt_id: str
    index: int
    text: str
    num_tokens: int | None = None
    finished: bool | None = None
    log_ratio: float = math.nan
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """What one labeler of a judge says of two policies' responses to one prompt.

    `preference_a` is 1 where a is better, 0 where b is, ½ for a tie, anything between for a judge that is unsure, and
    NaN where the judge failed; `failure` then says why. Which policy is a has no meaning: `first` tells whose response
    was shown first, "" where that is unknown or means nothing (a reward model reads one response at a time). `labeler`
    is the person, or the judge again where it is one scorer. `score_a` and `score_b` are NaN where a judge gives none.
    `where` names the file and line of a verdict made elsewhere.
    """

    prompt_id: str
    policy_a: str
    policy_b: str
    index_a: int
    index_b: int
    judge: str
    labeler: str
    preference_a: float
    first: Side = ""
    score_a: float = math.nan
    score_b: float = math.nan
    length_a: int = 0  # characters
    length_b: int = 0
    category: str = ""
    failure: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        place = f"{self.where}: " if self.where else ""
        if self.policy_a == self.policy_b:
            raise ValueError(f"{place}prompt {self.prompt_id!r}: policy {self.policy_a!r} is compared with itself")
        if math.isnan(self.preference_a) != bool(self.failure):
            raise ValueError(
                f"{place}prompt {self.prompt_id!r}: preference_a is {self.preference_a}, failure {self.failure!r};"
                " a failure goes with NaN and nothing else does"
            )
        if not math.isnan(self.preference_a) and not 0 <= self.preference_a <= 1:
            raise ValueError(
                f"{place}prompt {self.prompt_id!r}: preference_a is {self.preference_a}; 0 to 1, or NaN for a failure,"
                " was expected"
            )


@dataclass(frozen=True)
class Comparisons:
    """The verdicts that stand (none failed) as columns [V], for statistics.

    `a_V` and `b_V` are places in `policies`, `prompt_V`, `labeler_V` and `category_V` in the lists of those names.
    `won_V` is `preference_a`; `first_V` is 1 where a was shown first, -1 where b was, 0 unknown; `longer_V` is a's
    length less b's in characters.
    """

    policies: tuple[str, ...]
    prompts: tuple[str, ...]
    labelers: tuple[str, ...]
    categories: tuple[str, ...]
    a_V: Ints
    b_V: Ints
    prompt_V: Ints
    labeler_V: Ints
    category_V: Ints
    won_V: Floats
    first_V: Ints
    longer_V: Floats

    def __len__(self) -> int:
        return len(self.won_V)

    def between(self, a: int, b: int) -> "Comparisons":
        """Only those of policies a and b, turned so that `won_V` is a's."""
        turned_V = (self.a_V == b) & (self.b_V == a)
        kept_V = ((self.a_V == a) & (self.b_V == b)) | turned_V
        sign_V = np.where(turned_V, -1, 1)[kept_V]
        return Comparisons(
            policies=self.policies,
            prompts=self.prompts,
            labelers=self.labelers,
            categories=self.categories,
            a_V=np.full(len(sign_V), a),
            b_V=np.full(len(sign_V), b),
            prompt_V=self.prompt_V[kept_V],
            labeler_V=self.labeler_V[kept_V],
            category_V=self.category_V[kept_V],
            won_V=np.where(sign_V > 0, self.won_V[kept_V], 1 - self.won_V[kept_V]),
            first_V=sign_V * self.first_V[kept_V],
            longer_V=sign_V * self.longer_V[kept_V],
        )

    def where(self, kept_V: npt.NDArray[np.bool_]) -> "Comparisons":
        """Only the verdicts marked true; names keep their places."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_V")}
        return replace(self, **{name: column[kept_V] for name, column in columns.items()})


def comparisons_of(verdicts: Sequence[Verdict], policies: Sequence[str] = ()) -> Comparisons:
    """Columns of the verdicts that did not fail, in their order; whoever calls counts those that did.

    `policies` gives the order of policies; without it they are sorted by name.
    Errors: ValueError for a verdict on a policy that is not among `policies`.
    """
    standing = [verdict for verdict in verdicts if not verdict.failure]
    named = sorted({name for verdict in verdicts for name in (verdict.policy_a, verdict.policy_b)})
    for name in named:
        if policies and name not in policies:
            raise ValueError(f"a verdict is of policy {name!r}; {', '.join(policies)} were expected")
    names = tuple(policies) or tuple(named)
    prompts, prompt_V = _places(verdict.prompt_id for verdict in standing)
    labelers, labeler_V = _places(verdict.labeler for verdict in standing)
    categories, category_V = _places(verdict.category for verdict in standing)
    place = {name: number for number, name in enumerate(names)}
    return Comparisons(
        policies=names,
        prompts=prompts,
        labelers=labelers,
        categories=categories,
        a_V=np.array([place[verdict.policy_a] for verdict in standing], dtype=np.int64),
        b_V=np.array([place[verdict.policy_b] for verdict in standing], dtype=np.int64),
        prompt_V=prompt_V,
        labeler_V=labeler_V,
        category_V=category_V,
        won_V=np.array([verdict.preference_a for verdict in standing], dtype=np.float64),
        first_V=np.array([{"a": 1, "b": -1, "": 0}[verdict.first] for verdict in standing], dtype=np.int64),
        longer_V=np.array([verdict.length_a - verdict.length_b for verdict in standing], dtype=np.float64),
    )


def _places(names: Iterable[str]) -> tuple[tuple[str, ...], Ints]:
    """The distinct names in the order they come up, and the place of each among them."""
    place: dict[str, int] = {}
    places = [place.setdefault(name, len(place)) for name in names]
    return tuple(place), np.array(places, dtype=np.int64)


def write_rows(path: Path, rows: Sequence[Verdict] | Sequence[Response]) -> None:
    """Rows as Parquet, whole or absent; the same rows give the same bytes.

    Errors: ValueError for no rows.
    """
    import pyarrow
    from pyarrow import parquet

    if not rows:
        raise ValueError(f"{path}: no rows to write")
    names = [field.name for field in fields(rows[0])]
    dicts = [asdict(row) for row in rows]
    table = pyarrow.table({name: [row[name] for row in dicts] for name in names})
    aside = path.with_name(f"{path.name}.writing")
    parquet.write_table(table, aside)
    aside.replace(path)


def read_verdicts(path: Path) -> list[Verdict]:
    """The rows of a `verdicts.parquet`. Errors: ValueError naming the file, the row, and what is wrong with it."""
    return [_verdict(f"{path}: row {number}", row) for number, row in enumerate(_rows(path, Verdict), start=1)]


def _verdict(where: str, row: dict[str, Any]) -> Verdict:
    try:
        return Verdict(**row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_responses(path: Path) -> list[Response]:
    """The rows of a `responses.parquet`. Errors: ValueError naming the file, and what is wrong with it."""
    return [Response(**row) for row in _rows(path, Response)]


def _rows(path: Path, kind: type[Verdict] | type[Response]) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from None
    expected = [field.name for field in fields(kind)]
    if table.column_names != expected:
        raise ValueError(f"{path}: its columns are {', '.join(table.column_names)}; {', '.join(expected)} expected")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
