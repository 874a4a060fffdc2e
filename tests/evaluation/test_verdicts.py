import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation.verdicts import Response, Verdict, comparisons_of, read_responses, read_verdicts, write_rows

WON = Verdict("p1", "ppo", "sft", 0, 0, "gold", "gold", 1.0, "a", 2.5, -1.0, 30, 10, "poem")
TURNED = replace(WON, prompt_id="p2", policy_a="sft", policy_b="ppo", preference_a=0.75, first="b", category="")
FAILED = replace(WON, prompt_id="p3", preference_a=math.nan, failure="no answer in 60 s")


def test_rows_come_back_as_they_were_written_with_the_same_bytes(tmp_path: Path) -> None:
    responses = [
        Response("sft", "p1", 0, "Hello\n", 2, True, -0.25, 1.5),
        Response("sft", "p1", 1, "", where="a: line 2"),
    ]
    write_rows(tmp_path / "verdicts.parquet", [WON, TURNED])
    write_rows(tmp_path / "again.parquet", [WON, TURNED])
    write_rows(tmp_path / "responses.parquet", responses)
    assert read_verdicts(tmp_path / "verdicts.parquet") == [WON, TURNED]
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "verdicts.parquet").read_bytes()
    first, second = read_responses(tmp_path / "responses.parquet")
    assert first == responses[0]
    assert math.isnan(second.log_ratio)
    assert math.isnan(second.proxy_score)
    found, written = (replace(row, log_ratio=0.0, proxy_score=0.0) for row in (second, responses[1]))
    assert found == written
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.parquet",
        "responses.parquet",
        "verdicts.parquet",
    ]


def test_failed_verdicts_are_no_comparisons() -> None:
    found = comparisons_of([WON, FAILED, TURNED])
    assert found.policies == ("ppo", "sft")
    assert found.prompts == ("p1", "p2")
    assert found.won_V.tolist() == [1.0, 0.75]
    assert found.first_V.tolist() == [1, -1]


def test_a_pair_is_turned_to_the_side_of_the_first() -> None:
    other = replace(WON, policy_b="base")
    pair = comparisons_of([WON, TURNED, other], ["sft", "ppo", "base"]).between(1, 0)
    assert pair.won_V.tolist() == [1.0, 0.25]
    assert pair.first_V.tolist() == [1, 1]
    assert pair.longer_V.tolist() == [20.0, -20.0]
    assert np.array_equal(pair.prompt_V, [0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preference_a": 1.5}, "preference_a is 1.5"),
        ({"preference_a": math.nan}, "must be NaN exactly when there is a failure"),
        ({"failure": "late"}, "must be NaN exactly when there is a failure"),
        ({"policy_b": "ppo", "where": "f: line 3"}, "f: line 3: prompt 'p1': policy 'ppo' is compared with itself"),
    ],
)
def test_verdicts_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WON, **change)  # type: ignore[arg-type]


def test_files_that_are_no_verdicts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.parquet"
    with pytest.raises(ValueError, match="no such file"):
        read_verdicts(path)
    path.write_text("not parquet")
    with pytest.raises(ValueError, match=r"verdicts\.parquet: cannot be read"):
        read_verdicts(path)
    write_rows(path, [Response("sft", "p1", 0, "x")])
    with pytest.raises(ValueError, match=r"found columns policy, prompt_id.*preference_a"):
        read_verdicts(path)
    with pytest.raises(ValueError, match=r"policy 'ppo'; sft, base were expected"):
        comparisons_of([WON], ["sft", "base"])
