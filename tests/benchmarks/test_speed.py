"""The harness of `make bench`, on a model of two layers and without peers."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from benchmarks.speed import __main__ as speed
from benchmarks.speed import own, protocol
from benchmarks.speed.ceiling import Products
from benchmarks.speed.environments import NotInstalledError, install
from benchmarks.speed.machine import cpu_name
from benchmarks.speed.peers import higher_ceiling, measure_ceiling, results_file
from benchmarks.speed.process import run
from benchmarks.speed.protocol import Clock, Task, command
from benchmarks.speed.rows import OWN_MODULE, ROWS
from benchmarks.speed.table import README, markdown, write_between_markers
from benchmarks.speed.work import Sizes, write_work
from lm.config import ModelConfig

SHAPE = ModelConfig(
    vocab_size=400,
    max_position_embeddings=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
)
SIZES = Sizes(prompt_tokens=8, response_tokens=8, seq_len=32, num_prompts=16, num_comparisons=12, num_conversations=64)


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """Accelerate keeps one precision a process; an engine that another test left open has fixed another."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Task]:
    folder = tmp_path_factory.mktemp("work")
    write_work(folder, SHAPE, SIZES)

    def build(kind: str) -> Task:
        row = next(row for row in ROWS if row.kind == kind)
        return replace(row, batch=4, warmup_steps=1, timed_steps=2).task(str(folder), SIZES)

    return build


@pytest.mark.parametrize(("kind", "work"), [("generate", 2 * 4 * 8), ("train", 2 * 4 * 32), ("reward", 2 * 4)])
def test_every_step_does_the_work_of_its_row(task: Callable[[str], Task], kind: str, work: float) -> None:
    clock = Clock(task(kind))
    own.KINDS[kind](clock.task, clock)
    result = clock.result("heed")
    assert result["work"] == work
    assert all(float(result[name]) > 0 for name in ("seconds", "cpu_seconds", "warmup_seconds"))


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_ragged_work_is_counted_as_it_was_done(task: Callable[[str], Task], kind: str) -> None:
    clock = Clock(task(kind))
    own.KINDS[kind](clock.task, clock)
    full = {"sft": 4 * 32, "ppo": 4 * 8}[kind]
    assert len(clock.amounts) == 3
    assert all(0.5 * full < amount <= full for amount in clock.amounts)


def test_a_process_prints_its_result_last(task: Callable[[str], Task]) -> None:
    found = run(command(sys.executable, OWN_MODULE, task("generate")), threads=1)
    assert found["work"] == 2 * 4 * 8
    assert found["library"] == "heed"
    assert "KeyError" in run(command(sys.executable, OWN_MODULE, replace(task("generate"), kind="none")), 1)["failed"]


@pytest.mark.nightly
def test_a_second_round_trains_again(task: Callable[[str], Task]) -> None:
    """And does not go on from what the first one saved."""
    own = task("train")
    found = [run(command(sys.executable, OWN_MODULE, own), threads=1) for _ in range(2)]
    assert [round_.get("work") for round_ in found] == [2 * 4 * 32] * 2, found


@pytest.mark.nightly
def test_the_ceiling_counts_the_products_of_a_training_step(task: Callable[[str], Task]) -> None:
    """6 FLOPs a token and weight of a linear map, of which only the tied head's embedding is one."""
    counts = Products(task("train")).of_row()
    weights = 2 * (32 * 96 + 32 * 32 + 32 * 128 + 64 * 32) + 400 * 32
    assert sum(2 * n * M * N * K for (_, M, N, K), n in counts.items()) == 6 * weights * 4 * 32
    found = measure_ceiling({"a row": task("train")}, "cpu_seconds", threads=1)
    assert found["step_seconds"]["a row"] > 0
    assert found["bytes_per_second"] > 1e8


def test_of_two_ceilings_the_higher_counts() -> None:
    before = {"bf16_flops": 5.0, "bytes_per_second": 7.0, "step_seconds": {"a": 0.3, "b": 0.2}}
    after = {"bf16_flops": 6.0, "bytes_per_second": 4.0, "step_seconds": {"a": 0.4, "b": 0.1}}
    expected = {"bf16_flops": 6.0, "bytes_per_second": 7.0, "step_seconds": {"a": 0.3, "b": 0.1}}
    assert higher_ceiling(before, after) == expected


def test_steps_of_the_warm_up_are_left_out(monkeypatch: pytest.MonkeyPatch, task: Callable[[str], Task]) -> None:
    clock = Clock(task("train"))
    for at, amount in ((10.0, 5), (12.0, 6), (15.0, 8)):
        monkeypatch.setattr(protocol.time, "perf_counter", lambda at=at: at)
        monkeypatch.setattr(protocol.time, "process_time", lambda at=at: at / 2)
        clock.tick(amount)
    found = clock.result("x")
    assert (found["work"], found["seconds"], found["cpu_seconds"]) == (14, 5.0, 2.5)


def test_ppo_measures_by_the_passes_of_its_update(task: Callable[[str], Task]) -> None:
    """Reward model and reference score. Policy and value function learn, and their forward passes also measure."""
    counts = Products(task("ppo")).of_row()
    tokens = 4 * (8 + 8)
    passes = {way: counts[way, tokens, 96, 32] // 2 for way in ("forward", "input", "weight")}  # two layers
    assert passes == {"forward": 4, "input": 2, "weight": 2}


def test_amds_generations_have_their_own_files() -> None:
    info = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: {}\n\n"
    second = info.format("AuthenticAMD", 26, 2, "another")
    names = [
        cpu_name(info.format("AuthenticAMD", family, model, "AMD EPYC") + second)
        for family, model in ((25, 1), (25, 17), (26, 2), (23, 49))
    ]
    assert names == ["AMD EPYC (Zen 3)", "AMD EPYC (Zen 4)", "AMD EPYC (Zen 5)", "AMD EPYC"]
    intel = cpu_name(info.format("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Processor"))
    assert results_file(intel).name == "peers-intel-r-xeon-r-processor.json"
    assert results_file(names[1]).name == "peers-amd-epyc-zen-4.json"
    assert cpu_name("") == cpu_name("Hardware\t: BCM2835\n") == ""


@pytest.mark.long
def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("")
    with pytest.raises(NotInstalledError, match="no-such-torch"):
        install(requirements, f"{tmp_path}/no-such-torch.whl", tmp_path / "environment")
    assert not (tmp_path / "environment" / "requirements.txt").exists()


def figures() -> dict[str, Any]:
    run = {"seconds": 2.0, "cpu_seconds": 1.0, "warmup_seconds": 3.0, "library": "TRL 1"}
    peers = [
        {"name": "TRL", "module": "m", "environment": "trl"},
        {"name": "vLLM", "module": "m", "environment": "vllm"},
    ]
    return {
        "machine": {"cpu": "a CPU", "cores": 2, "amx_bf16": True, "python": "3.11", "torch": "2.13.0"},
        "threads": 2,
        "seconds": "seconds",
        "missing": {"vllm": "no matching distribution"},
        "ceiling": {"bf16_flops": 2e12, "fp32_flops": 1e12, "bytes_per_second": 1e10, "step_seconds": {"a row": 0.1}},
        "rows": {
            "a row": {
                "unit": "tokens", "timed_steps": 2, "peers": peers, "aims": [2.0, 3.0],
                "runs": [
                    {"Heed": {**run, "work": 400}, "TRL": {**run, "work": 100}},
                    {"Heed": {**run, "work": 400}, "TRL": {**run, "work": 200}},
                    {"Heed": {**run, "work": 400, "seconds": 4.0}, "TRL": {**run, "work": 100}},
                ],
            }
        },
    }  # fmt: skip


def test_the_table_has_ratios_of_runs_side_by_side() -> None:
    """Heed's rates 200, 200, 100 and the peer's 50, 100, 50: ratios 4, 2, 2. A step of 200 takes Heed 1 s."""
    trl, vllm = markdown(figures()).splitlines()[-2:]
    assert trl == "| a row | TRL 1 | 200 tokens | 50.00 | 2.00 (2.00 to 4.00) | 2.0 | 10% | 3 s, 3 s |"
    assert "not measured: no matching distribution" in vllm


def test_a_table_takes_its_place_in_a_text(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    other = "<!-- other begins -->\nkept\n<!-- other ends -->\n"
    path.write_text(f"before\n<!-- one begins -->\nold\n<!-- one ends -->\nafter\n{other}")
    write_between_markers(path, "one", "new")
    assert path.read_text() == f"before\n<!-- one begins -->\n\nnew\n\n<!-- one ends -->\nafter\n{other}"
    with pytest.raises(ValueError, match=r"two begins.*the table goes between them"):
        write_between_markers(path, "two", "new")


@pytest.mark.parametrize("name", ["table", *speed.COMMANDS])
def test_every_table_has_its_place(name: str) -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(f"<!-- {name} begins -->") == text.count(f"<!-- {name} ends -->") == 1


@pytest.mark.parametrize(("name", "called"), [("", "peers"), ("peers", "peers"), ("growth", "growth")])
def test_peers_are_the_command_without_a_name(monkeypatch: pytest.MonkeyPatch, name: str, called: str) -> None:
    seen: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(speed.peers, "main", lambda rest: seen.append(("peers", rest)))
    monkeypatch.setattr(speed, "measure", lambda name, rest: seen.append((name, rest)))
    speed.main([*([name] if name else []), "--rounds", "1"])
    assert seen == [(called, ["--rounds", "1"])]


def test_a_command_keeps_its_figures_and_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, results = tmp_path / "README.md", tmp_path / "overhead.json"
    text.write_text("<!-- overhead begins -->\n<!-- overhead ends -->\n")
    row = [{"tokens": 4000, "heed": 2.0, "bare": 1.8}]
    monkeypatch.setattr(speed, "README", text)
    monkeypatch.setattr(speed, "run", lambda *_: {"rows": {"a row": row}})
    speed.main(["overhead", "--rounds", "1", "--loaded", "--results", str(results)])
    assert json.loads(results.read_text())["rows"] == {"a row": row}
    assert "| a row | 50.0 | 45.0 | 2,000 | 0.900 (0.900 to 0.900) |" in text.read_text()
    assert "others were using" in text.read_text()
    monkeypatch.setattr(speed, "run", lambda *_: {"failed": "ValueError: why"})
    with pytest.raises(RuntimeError, match="overhead was not measured: ValueError: why"):
        speed.main(["overhead"])
