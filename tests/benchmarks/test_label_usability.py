"""The analysis of a usability study recovers planted effects, and its intervals cover them; also over HTTP."""

import math

import pytest

from benchmarks.label_usability import Effects, Size, coverage, estimates, run_over_http, truths

SIZE, NUM_STUDIES = Size(num_labelers=10, num_tasks=30, tasks_per_condition=12), 250
NOTHING = dict.fromkeys(("load", "sus", "seconds", "accuracy"), 0.0)


@pytest.mark.parametrize("effects", [Effects(), Effects(form=NOTHING, place=NOTHING)], ids=["planted", "none"])
def test_planted_effects_are_recovered_and_covered(effects):
    """With 250 studies, a coverage of 95% has a standard error of 1.4%. The studies are fixed by their seeds."""
    true = truths(effects, SIZE.num_tasks, 5_000)
    found = coverage(effects, SIZE, NUM_STUDIES, seed=100)
    assert len(found) == 12
    shares = {key: round(one.share, 3) for key, one in found.items()}
    assert {key: share for key, share in shares.items() if share < 0.91} == {}
    for key, one in found.items():
        assert one.num >= NUM_STUDIES - 5
        assert abs(one.bias) < 0.06 * one.width, (key, true[key], one)
    assert abs(true["load", "difference"]) > 10 or effects.form is NOTHING


@pytest.mark.usefixtures("cheap_hashes")
def test_scripted_users_take_part_over_http():
    """The effects are large, so that two users per order show them."""
    large = {"load": 30.0, "sus": -30.0, "seconds": math.log(4.0), "accuracy": 0.0}
    size = Size(num_labelers=4, num_tasks=12, tasks_per_condition=6)
    report = run_over_http(Effects(form=large, place=NOTHING), size, seed=1)
    assert [num for _, num in report.finished] == [2, 2]
    found = {key: mean for key, (_, mean, _) in estimates(report).items()}
    assert found["load", "difference"] == pytest.approx(30, abs=12)
    assert found["sus", "difference"] == pytest.approx(-27, abs=14)
    assert 2.5 < found["seconds", "difference"] < 6.5  # 4, but for the noise of four tasks each
    assert report.num_without_preference == 4
