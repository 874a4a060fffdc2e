"""The routes that a sampler records: Heed's pass the test, planted faults fail it and are named."""

from pathlib import Path

import pytest

from lm.config import Precision
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import NUM_VERSIONS, Trial, judge, judge_recorded_routes, verify_sampler
from tests.lm.samplers.faults import ROUTE_FAULTS


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heeds_sampler_of_a_mixture_passes(mixture: Path, precision: Precision) -> None:
    checks = [*verify_sampler(HeedSampler.load, mixture, precision=precision, num_draws=64)]
    assert all(check.passed for check in checks), checks
    routes = [check.found for check in checks if check.name.startswith("routes, ")]
    assert len(routes) == NUM_VERSIONS
    assert all("of the routes differ from those of whole passes" in found for found in routes)


def test_honest_routes_have_no_fault(mixture: Path) -> None:
    trial, sampler = Trial(mixture, "fp32"), HeedSampler.load(mixture, "fp32")
    for version in range(NUM_VERSIONS):
        sampler.receive(trial.sent(version))
        fault, measured = judge_recorded_routes(trial, trial.sample(sampler), version)
        assert (fault, measured) == ("", "0.00% of the routes differ from those of whole passes")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", ROUTE_FAULTS)
def test_a_planted_fault_of_routes_is_named(mixture: Path, precision: Precision, fault: str) -> None:
    plant, expected = ROUTE_FAULTS[fault]
    trial = Trial(mixture, precision)
    faulty = plant(HeedSampler.load(mixture, precision), trial)
    for version in range(NUM_VERSIONS):
        faulty.receive(trial.sent(version))
        generated = trial.sample(faulty)
    found, _ = judge_recorded_routes(trial, generated, NUM_VERSIONS - 1)
    assert found.startswith(expected), found
    of_policy, measured = judge(trial, generated, NUM_VERSIONS - 1)  # only wrong routers change what is sampled
    assert of_policy.startswith(expected) if fault == "stale router weights" else not of_policy, measured
