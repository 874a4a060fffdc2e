"""The GPU benchmark's own code, at tiny sizes on a CPU: what it counts, measures, keeps and prints."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import ceiling, device
from benchmarks.gpu.__main__ import markdown
from benchmarks.gpu.counts import decoded_bytes, planned_bytes, training_flops
from benchmarks.gpu.measure import measure
from benchmarks.gpu.rows import ROWS, TINY_ROWS, Generation, Pretraining, Row, gpt
from heed.jobs.times import GPUS

CPU = torch.device("cpu")
# Two layers of width 4 with an MLP of 16, two heads of 2, and a tied head of 300: weights that multiply.
SHAPE = gpt(4, 2, 2, 64, vocab_size=300)
WEIGHTS = 2 * (4 * 12 + 4 * 4 + 4 * 16 + 16 * 4) + 300 * 4


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """Accelerate keeps one precision a process; an engine that another test left open has fixed another."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def tiny(kind: str) -> Row:
    return next(row for row in TINY_ROWS if row.kind == kind)


# --- what is counted -------------------------------------------------------------------------------------------------


def test_model_flops_are_three_passes_over_half_a_row() -> None:
    """Two FLOPs a weight; four for each of 5 keys of 4 dimensions in two layers (rows of 9 or 10 tokens)."""
    assert training_flops(SHAPE, 9) == training_flops(SHAPE, 10) == 3 * (2 * WEIGHTS + 2 * 4 * 5 * 4)


def test_decoding_reads_all_weights_and_what_is_in_use_of_the_cache() -> None:
    """3 sequences, prompts of 5, responses of 4: three steps that see 6, 7 and 8 tokens, each 32 numbers of bf16."""
    assert decoded_bytes(Generation(SHAPE, 3, 5, 4)) == 3 * 2 * WEIGHTS + 3 * (6 + 7 + 8) * (2 * 2 * 4) * 2


def test_the_ceiling_multiplies_what_a_training_step_does() -> None:
    products = ceiling.training_products(SHAPE, num_tokens=7)
    assert sum(2 * n * M * N * K for (_, M, N, K), n in products.items()) == 6 * WEIGHTS * 7
    assert products["weight", 7, 300, 4] == 1
    assert products["forward", 7, 12, 4] == 2


def test_rates_are_work_over_the_time_of_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("forward", 2, 3, 5): 0.5, ("input", 7, 1, 1): 2.0}
    monkeypatch.setattr(ceiling, "_product_seconds", lambda product, _: seconds[product])
    products: Counter[ceiling.Product] = Counter({("forward", 2, 3, 5): 4, ("input", 7, 1, 1): 1})
    assert ceiling.matrix_rate(products, CPU) == (4 * 2 * 30 + 2 * 7) / (4 * 0.5 + 2.0)
    monkeypatch.setattr(ceiling, "seconds_of", lambda _work, _device: 0.5)
    assert ceiling.copy_rate(1000, CPU) == 2 * 1000 / 0.5


@pytest.mark.parametrize("way", ["forward", "input", "weight"])
def test_every_product_is_measured_as_it_is_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of M = 2 tokens, N = 3 columns out, K = 5 in: x Wᵀ is [M, N], the gradients of x and W are [M, K] and [N, K]."""
    shapes: list[torch.Size] = []
    monkeypatch.setattr(ceiling, "seconds_of", lambda work, _device: shapes.append(work().shape))
    ceiling._product_seconds((way, 2, 3, 5), CPU)
    assert tuple(shapes[0]) == {"forward": (2, 3), "input": (2, 5), "weight": (3, 5)}[way]


def test_the_time_of_one_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "SHORTEST_SECONDS", 0.01)
    clock = [0.0]
    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 0.003

    assert ceiling.seconds_of(work, CPU) == pytest.approx(0.003)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_fits_an_h100_by_the_plan(row: Row) -> None:
    assert planned_bytes(row.sizes) < 0.9 * GPUS["h100"].memory_bytes
    has_aim = not (isinstance(row.sizes, Pretraining) and row.sizes.options)  # a row with options is to be compared
    assert row.aim == ({"pretrain": 0.5, "generate": 0.6, "ppo": 0}[row.kind] if has_aim else 0)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_pretraining_is_measured() -> None:
    row = tiny("pretrain")
    found = measure(row, CPU)
    assert found["flops_per_second"] == pytest.approx(found["tokens_per_second"] * training_flops(row.sizes.model, 24))
    assert found["tokens_per_second"] > 0
    assert found["peak_bytes"] == 0  # nothing counts a CPU's


def test_generation_is_measured_in_both_kinds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import measure as measuring

    asked: list[tuple[str, int]] = []
    generate = measuring.generate

    def seen(*arguments: Any, **options: Any) -> Any:
        asked.append((options["steps"], options["max_new_tokens"]))
        return generate(*arguments, **options)

    monkeypatch.setattr(measuring, "generate", seen)
    row = tiny("generate")
    found = measure(row, CPU)
    assert Counter(asked) == {("eager", 1): 3, ("fixed", 12): 3, ("eager", 12): 3}
    assert found["decoded_bytes"] == decoded_bytes(row.sizes)  # type: ignore[arg-type]
    whole = 4 * 12 / found["tokens_per_second"]
    # A difference of two times, which other work on the machine can turn round.
    assert found["decoding_seconds"] < whole


def test_an_iteration_is_the_sum_of_its_phases() -> None:
    found = measure(tiny("ppo"), CPU)
    phases = [found[f"{name}_seconds"] for name in ("sampling", "scoring", "learning", "weights", "rest")]
    assert min(phases) > 0
    assert sum(phases) == pytest.approx(found["seconds"])
    # 8 responses of 8 tokens but for those that end by chance.
    assert 0.5 * 64 < found["response_tokens_per_second"] * found["seconds"] <= 64


# What a lent GPU's image may lack. pydantic has a stand-in, benchmarks/gpu/bare.py; the others are not imported.
ABSENT = (
    "ray", "deepspeed", "transformers", "datasets", "tensorboard", "fastapi", "scipy", "sklearn", "matplotlib",
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "sqlalchemy", "tenacity", "httpx", "tomli_w",
    "typer", "rich",
)  # fmt: skip


def on_a_bare_machine(code: str) -> str:
    """What a Python without these packages prints."""
    # An engine of another test has named this process's rank, and a port that it holds.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_PORT")}
    command = [sys.executable, "-c", f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n{code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=program.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bare_machine_measures() -> None:
    code = f"from benchmarks.gpu.measure import main\nmain([{tiny('ppo').name!r}, 'cpu', 'tiny'])"
    assert json.loads(on_a_bare_machine(code).splitlines()[-1])["seconds"] > 0


def test_configs_are_the_same_without_pydantic() -> None:
    """Defaults, derived fields, validators, nested configs, tables of several kinds, and fields that are refused."""
    code = (
        "import benchmarks.gpu\n"
        "from benchmarks.gpu.rows import ROWS\n"
        "from benchmarks.speed.own import ENGINE, ppo_config\n"
        "from lm.config import ModelConfig\n"
        "from ppo.config import PPOConfig\n"
        "from training.config import BatchConfig\n"
        "ppo = ppo_config(3, 8, BatchConfig(batch_size=4, micro_batch_size=2), 5)\n"
        "tables = {**ppo.model_dump(), 'advantage': {'kind': 'group_mean', 'samples_per_prompt': 2},\n"
        "    'kl': {'target': {'nats': 2.0}}, 'loss': {'clip_range': 0.1}, 'reward': {'model': 'm'}}\n"
        "apart = {**tables, 'reward': {'kind': 'url', 'url': 'http://h'}, 'placement': {'kind': 'disaggregated'}}\n"
        "shape = dict(vocab_size=64, max_position_embeddings=8, hidden_size=16, num_hidden_layers=4,\n"
        "    num_attention_heads=4, intermediate_size=8)\n"
        "scaled = ModelConfig.model_validate({**shape, 'sliding_window': [0, 4, 0, 4], 'rope_scaling':\n"
        "    {'rope_type': 'llama3', 'factor': 8.0, 'original_max_position_embeddings': 4}})\n"
        "assert hash(scaled) == hash(ModelConfig(**scaled.model_dump()))\n"
        "found = [row.sizes.model.model_dump(mode='json') for row in ROWS]\n"
        "found += [config.model_dump(mode='json') for config in (ENGINE, ppo, scaled)]\n"
        "for given in (tables, apart):\n"
        "    config = PPOConfig.model_validate(given)\n"
        "    assert config == PPOConfig.model_validate(config.model_dump()) == PPOConfig(**dict(config))\n"
        "    found.append(config.model_dump(mode='json'))\n"
        "for wrong in (\n"
        "    {**shape, 'num_attention_heads': 3}, {**shape, 'layers': 1}, {'vocab_size': 64},\n"
        "    {**tables, 'loss': {'kind': 'responses'}}, {**tables, 'advantage': 'group_mean'},\n"
        "    {**tables, 'placement': {'num_scorers': 2}}, {**tables, 'reward': {'kind': 'url'}},\n"
        "):\n"
        "    try:\n"
        "        (PPOConfig if 'kl' in wrong else ModelConfig).model_validate(wrong)\n"
        "    except ValueError:\n"
        "        found.append('refused')\n"
        "import json\n"
        "print(json.dumps(found))\n"
    )
    here: dict[str, Any] = {}
    exec(code, here)
    assert here["found"][-7:] == ["refused"] * 7
    assert json.loads(on_a_bare_machine(code)) == json.loads(json.dumps(here["found"]))


# --- what is kept and printed ----------------------------------------------------------------------------------------

BEGINS, ENDS = "<!-- gpu begins -->", "<!-- gpu ends -->"
MACHINE = {"device": "a GPU", "driver": "1.2", "cuda": "13.0", "torch": "2.13.0", "python": "3.11.7"}
RATES = {"bytes": 2e12, ROWS[0].name: 5e14, ROWS[1].name: 4e14}
MEMORY = {"peak_bytes": 3 * 2**30, "planned_bytes": 4 * 2**30}
PRETRAINED = {"tokens_per_second": 1234.0, "flops_per_second": 2e14, **MEMORY}


def options(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values = {"rows": "all", "device": "cpu", "tiny": True, "results": tmp_path / "results.json", "seconds": 100.0}
    return argparse.Namespace(**values | changes)


@pytest.mark.nightly
def test_a_tiny_run_prints_a_table_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGINS}\n{ENDS}\n")
    monkeypatch.setattr(program, "README", readme)
    program.main(["generate", "--device", "cpu", "--tiny", "--results", str(tmp_path / "results.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("**a CPU**: torch 2.")
    assert any(line.startswith("| generation, tiny |") and "of the memory bandwidth; eager" in line for line in lines)
    assert any(line.startswith("| PPO, tiny | not yet measured |") for line in lines)
    assert readme.read_text() == f"{BEGINS}\n{ENDS}\n"
    assert not (tmp_path / "results.json").exists()


def test_a_row_that_fails_or_hangs_says_so(tmp_path: Path) -> None:
    assert "not finished within 0 s" in program.run(tiny("generate").name, options(tmp_path), 0.01)["failed"]
    assert program.run("no such row", options(tmp_path), 60) == {"failed": "ended with 1"}
    said = "Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\n[W1] Warning: not destroyed\n"
    assert program.cause(said) == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_failed_row_leaves_the_others_and_what_is_not_begun_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"ceilings": {"machine": MACHINE, "rates": RATES}, ROWS[0].name: {"failed": "why"}}
    clock = chain([0.0, 10.0], repeat(99.0))
    monkeypatch.setattr(program.time, "monotonic", lambda: next(clock))
    limits: list[float] = []

    def run(name: str, _options: argparse.Namespace, limit_seconds: float) -> dict[str, Any]:
        limits.append(limit_seconds)
        return dict(given[name])

    monkeypatch.setattr(program, "run", run)
    earlier = {
        "a GPU": {"machine": MACHINE, "rates": {}, "rows": {ROWS[1].name: PRETRAINED, ROWS[0].name: PRETRAINED}},
        "another": {"machine": {"device": "another"}, "rates": {}, "rows": {}},
    }
    found = program.measure(ROWS, options(tmp_path), earlier, is_kept=True)
    assert found["a GPU"] == {
        "machine": MACHINE, "rates": RATES, "rows": {ROWS[0].name: {"failed": "why"}, ROWS[1].name: PRETRAINED},
    }  # fmt: skip
    assert found["another"] == earlier["another"]
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert limits == [program.CEILING_SECONDS, 90.0]  # the row's own limit, and 90 s that were left


def test_figures_of_other_versions_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "run", lambda *_: {"machine": MACHINE, "rates": RATES})
    earlier = {"a GPU": {"machine": {**MACHINE, "driver": "1.1"}, "rates": {}, "rows": {ROWS[1].name: PRETRAINED}}}
    assert program.measure([], options(tmp_path), earlier, is_kept=False)["a GPU"]["rows"] == {}
    monkeypatch.setattr(program, "run", lambda *_: {"failed": "no memory"})
    with pytest.raises(SystemExit, match="the ceilings were not measured: no memory"):
        program.measure([], options(tmp_path), earlier, is_kept=False)


def test_what_is_sized_for_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in ((["all"], "no GPU found"), (["all", "--device", "cpu"], "--device cpu needs --tiny")):
        with pytest.raises(SystemExit):
            program.parse(arguments)
        assert words in capsys.readouterr().err


def test_the_table_has_shares_of_the_ceilings() -> None:
    """200 of 500 TFLOP/s; 3e12 bytes take 1.5 s at 2 TB/s, half of 3 s and a quarter of 6."""
    generated = {
        "tokens_per_second": 5000.0, "eager_tokens_per_second": 2500.0, "decoding_seconds": 3.0,
        "eager_decoding_seconds": 6.0, "decoded_bytes": 3e12, **MEMORY,
    }  # fmt: skip
    seconds = {"sampling": 4.0, "scoring": 1.5, "learning": 3.25, "weights": 0.5, "rest": 0.75}
    iteration = {
        "seconds": 10.0, **{f"{name}_seconds": value for name, value in seconds.items()},
        "response_tokens_per_second": 6553.6, **MEMORY,
    }  # fmt: skip
    rows = {ROWS[0].name: PRETRAINED, ROWS[2].name: generated, ROWS[3].name: {"failed": "a|b"}, ROWS[4].name: iteration}
    lines = markdown({"a GPU": {"machine": MACHINE, "rates": RATES, "rows": rows}}, ROWS).splitlines()
    assert lines[0] == (
        "**a GPU**: driver 1.2, cuda 13.0, torch 2.13.0, python 3.11.7. A copy moves 2 TB/s, read and written;"
    )
    assert lines[1].endswith("own shapes: 500 (pretraining, 124M), 400 (pretraining, 1.3B).")
    assert lines[5:] == [
        "| pretraining, 124M | 1,234 tokens per second, 200 TFLOP/s | 40% of the matrix rate | 50% |"
        " 3.0 GiB, planned 4.0 |",
        "| pretraining, 1.3B | not yet measured | | 50% | |",
        "| generation, 124M, 256 sequences | 5,000 tokens per second; eager 2,500"
        " | 50% of the memory bandwidth; eager 25% |"
        " 60% | 3.0 GiB, planned 4.0 |",
        "| generation, 1.3B, 256 sequences | failed: a/b | | 60% | |",
        "| PPO, 1.3B policy, 350M critic | 10.00 s: sampling 4.00, scoring 1.50, learning 3.25, weights 0.50, rest"
        " 0.75; 6,554 response tokens per second | | | 3.0 GiB, planned 4.0 |",
        *(f"| {row.name} | not yet measured | | | |" for row in ROWS[5:]),
    ]


def test_the_page_shows_the_results_that_are_kept() -> None:
    """No figure that was not measured: the table is what results.json makes, which without one says so of every row."""
    table = program.README.read_text(encoding="utf-8").partition(BEGINS)[2].partition(ENDS)[0].strip()
    assert table == markdown(program.read(program.RESULTS), ROWS)
    assert markdown({}, ROWS).count("not yet measured") == len(ROWS)
