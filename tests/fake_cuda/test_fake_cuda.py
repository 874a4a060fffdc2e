"""Runs `tests/gpu`, and the tests in on_device*.py, in a process whose "cuda" is the fake device (device.py).

Triton's kernels have a process of their own, since PyTorch behaves differently where it finds Triton.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.real.packages import unpacked
from tests.tiers import in_ci, tried

# One program runs all files, in two minutes, or in five on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1_200)]
ROOT = Path(__file__).parents[2]
FEWEST = {
    "tests/gpu": 46,
    "tests/fake_cuda/on_device.py": 19,
    "tests/fake_cuda/on_device_stages.py": 7,
    "tests/fake_cuda/on_device_memory.py": 8,
    "tests/fake_cuda/on_device_quarter.py": 7,
}  # tests that pass
REHEARSAL = "tests/fake_cuda/on_device_quarter.py"  # the nightly tests run it
KERNELS = {"tests/fake_cuda/on_device_kernels.py": 12}  # likewise, in Triton's interpreter


@pytest.fixture(scope="module")
def passed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How many tests of each file have passed, `tests.gpu.test_scoring` for one; no test has failed.

    One process runs all, for the libraries take it longer to load than many of the tests to run.
    """
    tests = [*tried(request, "tests"), *of_tier(request)]
    return run(tmp_path_factory.mktemp("found") / "tests.xml", tests, PYTHONPATH=str(ROOT))


def of_tier(request: pytest.FixtureRequest) -> list[str]:
    return [] if request.config.getoption("--nightly") else ["-m", "not nightly"]


def run(found: Path, tests: Iterable[str], **variables: str) -> Counter[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    options = ["-q", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={found}", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = ElementTree.parse(found).iter("testcase")
    return Counter(case.attrib["classname"] for case in cases if case.find("skipped") is None)


@pytest.mark.parametrize("tests", in_ci(FEWEST, FEWEST.keys() - {REHEARSAL}))
def test_it_passes_on_the_fake_device(passed: Counter[str], tests: str) -> None:
    module = tests.removesuffix(".py").replace("/", ".")
    number = sum(count for name, count in passed.items() if f"{name}.".startswith(f"{module}."))
    assert number >= FEWEST[tests]


def test_the_triton_kernels_pass_on_the_fake_device(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(unpacked("triton==3.7.1"))])
    passed = run(tmp_path / "tests.xml", [*KERNELS, *of_tier(request)], PYTHONPATH=path, TRITON_INTERPRET="1")
    assert passed.total() >= sum(KERNELS.values()), passed
