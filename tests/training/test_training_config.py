"""Schedules and batch sizes by hand."""

import pytest

from training.config import BatchConfig, EngineConfig, OptimizerConfig


def rates(num_steps: int, **options: object) -> list[float]:
    config = OptimizerConfig(learning_rate=8.0, **options)
    return [config.rate(step, num_steps) for step in range(num_steps)]


def test_schedules_by_hand() -> None:
    assert rates(3, schedule="constant") == [8.0, 8.0, 8.0]
    assert rates(4, schedule="linear") == pytest.approx([8.0, 6.0, 4.0, 2.0])
    # (1 + cos(0, π/4, π/2, 3π/4)) / 2 of the peak
    assert rates(4, schedule="cosine") == pytest.approx([8.0, 8 * 0.853553, 4.0, 8 * 0.146447], rel=1e-5)


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    assert rates(6, schedule="linear", warmup_steps=4) == pytest.approx([2.0, 4.0, 6.0, 8.0, 8.0, 4.0])
    assert rates(3, schedule="linear", warmup_steps=5) == pytest.approx([1.6, 3.2, 4.8])


def test_the_final_share_is_a_floor() -> None:
    # 8 · (1/4 + 3/4 · (1, 3/4, 1/2, 1/4))
    assert rates(4, schedule="linear", min_lr_ratio=0.25) == pytest.approx([8.0, 6.5, 5.0, 3.5])


@pytest.mark.parametrize(
    "options",
    [{"learning_rate": 0}, {"schedule": "step"}, {"min_lr_ratio": 1.5}, {"warmup_steps": -1}, {"momentum": 0.9}],
)
def test_impossible_optimizers_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimizerConfig(**{"learning_rate": 1e-3, "schedule": "constant", **options})


def test_batch_arithmetic() -> None:
    batch = BatchConfig(batch_size=24, micro_batch_size=4)
    assert [batch.num_micro_batches(ranks) for ranks in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ValueError, match=r"batch_size over ranks x micro_batch_size: 24 is not a multiple of 20"):
        batch.num_micro_batches(5)
    with pytest.raises(ValueError, match=r"batch_size over micro_batch_size: 10 is not a multiple of 4"):
        BatchConfig(batch_size=10, micro_batch_size=4)
    with pytest.raises(ValueError, match=r"micro_batch_size"):
        BatchConfig(batch_size=10, micro_batch_size=0)


def test_precision_is_what_was_asked_for() -> None:
    assert EngineConfig(precision="fp32").resolved_precision() == "fp32"
    assert EngineConfig(precision="bf16").resolved_precision() == "bf16"
    assert EngineConfig().resolved_precision() in ("fp32", "bf16")


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"avx2": True, "avx512_f": True}, "fp32"),
        ({"avx512_f": True, "avx512_bf16": True}, "bf16"),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, "bf16"),
        ({}, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], precision: str
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert EngineConfig().resolved_precision() == precision


@pytest.mark.parametrize(
    ("offload", "zero_stage", "message"),
    [
        (("optimizer",), 0, r"offload of 'optimizer' with zero_stage 0; at least zero_stage 1 was expected"),
        (("parameters",), 2, r"offload of 'parameters' with zero_stage 2; at least zero_stage 3 was expected"),
    ],
)
def test_only_what_is_sharded_is_offloaded(offload: tuple[str, ...], zero_stage: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(offload=offload, zero_stage=zero_stage)
