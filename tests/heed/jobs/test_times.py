"""Planned times by hand: products and traffic of memory, links and network, sampling, and teams of generators."""

from dataclasses import replace

import pytest

from heed.jobs.memory import Layout, count, forward_pass
from heed.jobs.times import GPUS, Times
from lm.config import ModelConfig
from lm.inspection import block_bytes
from lm.lora import LoRAConfig
from training.config import OptimizerConfig

SHAPE = ModelConfig(
    vocab_size=1000, max_position_embeddings=2048, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, intermediate_size=2048, tie_word_embeddings=False,
)  # fmt: skip
COUNTS = count(SHAPE, OptimizerConfig(learning_rate=1e-3))
H100 = GPUS["h100"]
PEAK, MEMORY = 0.5 * 989e12, 0.8 * 3.35e12
LINK, NETWORK = 0.8 * 450e9, 0.8 * 8 * 50e9  # of a rank, and of a node with eight
SIZE = 100_000, 1024, 1.0  # tokens of a pass, of a row, and the share that has logits


def times(zero_stage: int = 1, ranks: int = 1, **layout: bool) -> Times:
    return Times(Layout(ranks, zero_stage, True, True, ranks_per_node=min(ranks, 8), **layout), H100, share_of_peak=0.5)


def test_a_pass_takes_its_products_and_its_traffic() -> None:
    """Four blocks of 512 wide, 2,048 inside, and ten heads of 64 that read 512 keys on average; 1,000 logits."""
    weights = 4 * (512 * (8 + 4 + 8) * 64 + 3 * 512 * 2048) + 1000 * 512
    computed = SIZE[0] * (2 * weights + 4 * 4 * 8 * 64 * 512) / PEAK
    kept, logits = 4 * block_bytes(SHAPE, forward_pass(times().layout, 1, 1024)) / 1024 * SIZE[0], 2 * 1000 * SIZE[0]
    assert times().forward(SHAPE, *SIZE) == pytest.approx(computed + (2 * kept + logits) / MEMORY, rel=0.01)
    assert times().backward(COUNTS, *SIZE) == pytest.approx(2 * computed + (4 * kept + 2 * logits) / MEMORY, rel=0.01)
    again = times(recomputes=True).backward(COUNTS, *SIZE) - times().backward(COUNTS, *SIZE)
    assert again == pytest.approx(times().forward(SHAPE, *SIZE[:2], 0.0))
    adapted = count(SHAPE, OptimizerConfig(learning_rate=1e-3), lora=LoRAConfig(rank=4))
    saved = times().backward(COUNTS, *SIZE) - times().backward(adapted, *SIZE)
    assert saved == pytest.approx(computed, rel=0.01), "weights without gradients save one of two products"


@pytest.mark.parametrize(("ranks", "rate"), [(8, LINK), (16, min(LINK, NETWORK)), (4, LINK)])
def test_gathers_cross_nodes_through_all_cards_of_a_node(ranks: int, rate: float) -> None:
    assert times(ranks=ranks).gather(1e9) == pytest.approx(1e9 * (ranks - 1) / ranks / rate)
    slow = replace(times(ranks=16), hardware=replace(H100, network_bytes_per_second=1e9))
    assert slow.gather(1e9) == pytest.approx(1e9 * 15 / 16 / (0.8 * 8e9))


@pytest.mark.parametrize("passes", [1, 3])
def test_what_each_zero_stage_sends_per_step(passes: int) -> None:
    """On a network so slow that nothing else counts. All-reduces count twice; gradients are fp32 without ZeRO."""
    hardware = replace(H100, network_bytes_per_second=1e6)
    for stage, sent in enumerate((2 * 4, 2 * 2 + 2, passes * 2 * 2 + 2, passes * 3 * 2)):
        found = replace(times(stage, ranks=16), hardware=hardware)
        assert found.step(COUNTS, 100 * passes, 100, 100, 0.0) == pytest.approx(found.gather(sent * COUNTS.total), 0.01)


def test_computing_hides_what_is_sent_meanwhile() -> None:
    alone, many = (times(zero_stage=3, ranks=ranks).step(COUNTS, 200_000, *SIZE) for ranks in (1, 8))
    saved = 28 * COUNTS.total * 7 / 8 / MEMORY  # of the optimizer's step, which the ranks share
    assert alone - many == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("team", [1, 4])
def test_a_token_reads_weights_and_cache_once(team: int) -> None:
    """Ranks of a team sample what each would have sampled alone, in parts that two all-reduces per layer add up."""
    rows, seq_len, new = 128, 1024, 512
    cache = 2 * 4 * 2 * 64 * 2 * 128 * seq_len
    step = (2 * COUNTS.total + cache) / team / MEMORY + 5e-5 * (4 + 2) + (2 * 4 * 2e-5 if team > 1 else 0)
    prompts = rows * 512 * times()._flops(SHAPE, seq_len, 1.0) / PEAK
    assert times().sampling(COUNTS, rows, 128, seq_len, new, team) == pytest.approx(prompts + team * new * step)


def test_on_a_cpu_only_products_count() -> None:
    found = Times(Layout(2, 3, is_bf16=False, is_gpu=False), replace(H100, is_gpu=False, flops=1e12), 0.5)
    forward = 100 * found._flops(SHAPE, 100, 1.0) / 0.5e12
    assert found.step(COUNTS, 100, 50, 100, 1.0) == pytest.approx(3 * forward)
