"""Published files, if they are available. Their irregularities were counted independently of the readers."""

from collections import Counter
from pathlib import Path

import pytest

from files.rows import read_source
from preferences.formats.merging import ImportedLabels, collect_all
from preferences.formats.registry import sniff

REAL = Path(__file__).parents[3] / "shared" / "data"


def read_real(name: str, expected: str) -> ImportedLabels:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"the real data ({path}) is not on this machine")
    form, _ = sniff(read_source(str(path)), str(path))
    assert form.name == expected
    return collect_all(form, read_source(str(path)))


def lines_of(found: ImportedLabels, kind: str) -> list[int]:
    return [int(warning.where.split()[-1]) for warning in found.report.warnings if warning.kind == kind]


def test_hh() -> None:
    found = read_real("hh-rlhf/harmless-base/test.jsonl.gz", "hh")
    assert found.report.counts() == {"empty reply": 4, "same speaker twice": 4, "prompts differ": 4}
    assert lines_of(found, "prompts differ") == [1255, 1689, 1951, 1953]
    assert lines_of(found, "empty reply") == [87, 517, 926, 1104]
    assert lines_of(found, "same speaker twice") == [668, 764, 1320, 1850]
    assert (found.report.num_rows, len(found.tasks), len(found.judgments)) == (2000, 1992, 1992)
    # The position of the better reply must carry no information; 1,992 fair coins are within four deviations of half.
    num_first = sum(ranking.ranks == (1, 2) for ranking in found.rankings)
    assert abs(num_first - 996) < 4 * (1992**0.5) / 2


def test_oasst() -> None:
    found = read_real("oasst_en_100_tree.jsonl", "oasst")
    assert found.report.counts() == {"unranked siblings": 3}
    sizes = Counter(len(task.responses) for task in found.tasks.values())
    assert sizes == {2: 57, 3: 116 + 1, 4: 27, 5: 3, 6: 6, 8: 1, 9: 1}
    assert len(found.judgments) == 212
    # One of the sets with unranked replies has three ranked ones, whose ranking is kept.
    assert [warning.done for warning in found.report.warnings].count("the others are kept") == 1


def test_pandalm() -> None:
    found = read_real("pandalm_testset-v1.json", "pandalm")
    assert found.report.counts() == {
        "annotators disagree": 120, "empty reply": 54, "response is no text": 6, "empty instruction": 1
    }  # fmt: skip
    assert lines_of(found, "response is no text") == [158, 159, 160, 162, 163, 165]
    assert (found.report.num_rows, len(found.tasks), len(found.judgments)) == (999, 999, 2997)
    assert Counter(act.ranks for act in found.judgments) == {(2, 1): 1416, (1, 2): 1255, (1, 1): 326}
