"""Planned times by hand: floors, traffic of memory, links and network, and generators over several GPUs."""

from dataclasses import replace

import pytest

from heed.jobs.estimate import GPUS, Times
from heed.jobs.memory import Counts, Layout, count
from lm.config import ModelConfig
from lm.lora import LoRAConfig
from training.config import OptimizerConfig

SHAPE = ModelConfig(
    vocab_size=1000, max_position_embeddings=2048, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, intermediate_size=2048, tie_word_embeddings=False,
)  # fmt: skip
COUNTS = count(SHAPE, OptimizerConfig(learning_rate=1e-3))
H100 = GPUS["h100"]
MEMORY = 0.8 * 3.35e12
LINK, NETWORK = 0.8 * 450e9, 0.8 * 8 * 50e9  # of a rank, and of a node with eight


def times(zero_stage: int = 1, ranks: int = 1, per_node: int = 8, **layout: int | bool) -> Times:
    made = Layout(ranks, zero_stage, is_bf16=True, is_gpu=True, ranks_per_node=min(ranks, per_node))
    return Times(SHAPE, replace(made, **layout), H100, share_of_peak=0.5)  # type: ignore[arg-type]


def test_a_short_pass_takes_as_long_as_its_launches() -> None:
    assert times().forward_seconds(64, 64, 1.0) == pytest.approx(4 * 17 * 6e-6)
    assert times().backward_seconds(COUNTS, 64, 64, 1.0) == pytest.approx(4 * 43 * 6e-6)


def test_a_long_pass_takes_its_products_and_its_traffic() -> None:
    """Under autocast, four blocks of 512 wide, 2,048 inside, and ten heads of 64 that are turned; 1,000 logits."""
    tokens, seq_len = 100_000, 1024
    weights = 4 * (512 * (8 + 4 + 8) * 64 + 3 * 512 * 2048) + 1000 * 512
    flops = tokens * (2 * weights + 4 * 4 * 8 * 64 * 512)  # on average, 512 keys
    forward = tokens * (4 * (10 * 2048 + (26 + 28) * 512 + 14 * 640) + 2 * 1000)
    backward = tokens * (4 * (22 * 2048 + (50 + 48) * 512 + 18 * 640) + 4 * 1000)
    found = times(zero_stage=0)
    assert found.forward_seconds(tokens, seq_len, 1.0) == pytest.approx(
        flops / (0.5 * 989e12) + forward / MEMORY, rel=0.01
    )
    assert found.backward_seconds(COUNTS, tokens, seq_len, 1.0) == pytest.approx(
        2 * flops / (0.5 * 989e12) + backward / MEMORY, rel=0.01
    )


def test_recomputing_takes_another_forward_pass_and_adapters_half_a_backward_pass() -> None:
    plain, again = times(), times(recomputes=True)
    size = 100_000, 1024, 0.0
    more = again.backward_seconds(COUNTS, *size) - plain.backward_seconds(COUNTS, *size)
    assert more == pytest.approx(plain.forward_seconds(*size))
    adapted = count(SHAPE, OptimizerConfig(learning_rate=1e-3), lora=LoRAConfig(rank=4))
    saved = plain.backward_seconds(COUNTS, *size) - plain.backward_seconds(adapted, *size)
    assert saved == pytest.approx(size[0] * plain.forward_flops(1024, 0.0) / (0.5 * 989e12))


@pytest.mark.parametrize(("ranks", "rate"), [(8, LINK), (16, min(LINK, NETWORK)), (4, LINK)])
def test_gathers_cross_nodes_through_all_cards_of_a_node(ranks: int, rate: float) -> None:
    assert times(ranks=ranks).gather_seconds(1e9) == pytest.approx(1e9 * (ranks - 1) / ranks / rate)
    slow = replace(times(ranks=16), hardware=replace(H100, network_bytes_per_second=1e9))
    assert slow.gather_seconds(1e9) == pytest.approx(1e9 * 15 / 16 / (0.8 * 8e9))
    assert slow.gather_seconds(1e9, in_node=True) == pytest.approx(1e9 * 7 / 8 / LINK)


def seconds(zero_stage: int, num_passes: int, ranks: int = 16, counts: Counts = COUNTS, **layout: int) -> float:
    """Of a step on a network so slow that nothing else counts, in units of a gather of one byte per parameter."""
    slow = replace(H100, network_bytes_per_second=1e6)
    found = replace(times(zero_stage, ranks, **layout), hardware=slow)
    tokens = 100 * num_passes
    return found.step_seconds(counts, tokens, 100, 100, 0.0) / found.gather_seconds(COUNTS.total)


def test_what_each_zero_stage_sends_per_step() -> None:
    """All-reduces count twice; fp32 gradients without ZeRO, bf16 otherwise."""
    for passes in (1, 3):
        assert seconds(0, passes) == pytest.approx(2 * 4, rel=0.01)
        assert seconds(1, passes) == pytest.approx(2 * 2 + 2, rel=0.01)
        assert seconds(2, passes) == pytest.approx(passes * 2 * 2 + 2, rel=0.01)
        assert seconds(3, passes) == pytest.approx(passes * 3 * 2, rel=0.01)
        # With a copy on each node, one gather per step, and the gradients.
        assert seconds(3, passes, node_weights_limit=1 << 34) == pytest.approx((1 + passes) * 2, rel=0.01)
    assert times(3, 1).step_seconds(COUNTS, 100, 100, 100, 0.0) < 2e-3  # one rank sends nothing


def test_computing_hides_what_is_sent_meanwhile() -> None:
    alone, many = (times(zero_stage=3, ranks=ranks) for ranks in (1, 8))
    size = 200_000, 100_000, 1024, 1.0
    step = many.step_seconds(COUNTS, *size)
    assert many.gather_seconds(2 * COUNTS.total) > 0
    saved = 28 * COUNTS.total * 7 / 8 / MEMORY  # of the optimizer's step, which the ranks share
    assert alone.step_seconds(COUNTS, *size) - step == pytest.approx(saved, rel=1e-6)


def test_a_token_reads_weights_and_cache_once_and_its_kernels_take_their_least_time() -> None:
    rows, seq_len, new = 256, 1024, 512
    cache = 2 * 4 * 2 * 64 * 2 * 128 * seq_len
    kernels = 3e-6 * (17 * 4 + 30)
    draw = 3 * 2 * 128 * 1000 / MEMORY
    prompts = 256 * 512 * times().forward_flops(seq_len, 1.0) / (0.5 * 989e12)
    expected = prompts + 2 * new * (kernels + draw + (2 * COUNTS.total + cache) / MEMORY)
    assert times().sampling_seconds(COUNTS.total, rows, seq_len, new) == pytest.approx(expected)


def test_generators_over_several_gpus_read_parts_and_add_them_up() -> None:
    """Four ranks sample together what each would have sampled alone, in four times as many steps."""
    rows, seq_len, new, t = 128, 1024, 512, 4
    cache = 2 * 4 * 2 * 64 * 2 * 128 * seq_len
    read = (2 * COUNTS.total + cache) / t / MEMORY
    kernels, draw = 3e-6 * (17 * 4 + 30), 3 * 2 * 128 * 1000 / MEMORY
    reduced = 2 * 4 * (10e-6 + 2 * 3 / 4 * 128 * 512 * 2 / LINK)
    prompts = 4 * 128 * 512 * times().forward_flops(seq_len, 1.0) / (0.5 * 989e12) / t
    expected = prompts + 4 * new * (kernels + draw + read + reduced)
    assert times().sampling_seconds(COUNTS.total, rows, seq_len, new, t) == pytest.approx(expected)


def test_ranks_that_share_rows_exchange_heads() -> None:
    tokens = 100_000
    more = times(ranks=8, sequence_ranks=2).forward_seconds(tokens, 1024, 1.0)
    exchanged = 4 * (4 * 10e-6 + tokens * 2 * (8 + 2) * 64 * 2 / 2 / LINK)
    assert more - times(ranks=8).forward_seconds(tokens, 1024, 1.0) == pytest.approx(exchanged)


def test_weights_reach_generators_by_a_copy_or_over_the_network() -> None:
    size = 2 * COUNTS.total
    assert times(zero_stage=1, ranks=8).sync_seconds(size, is_apart=False) == pytest.approx(2 * size / MEMORY)
    sharded = times(zero_stage=3, ranks=8).sync_seconds(size, is_apart=True)
    assert sharded == pytest.approx(size * 7 / 8 / LINK + size / (0.8 * 50e9))


def test_on_a_cpu_only_products_count() -> None:
    layout = Layout(2, 3, is_bf16=False, is_gpu=False)
    found = Times(SHAPE, layout, replace(H100, is_gpu=False, flops=1e12), 0.5)
    forward = 100 * found.forward_flops(100, 1.0) / 0.5e12
    assert found.step_seconds(COUNTS, 100, 50, 100, 1.0) == pytest.approx(3 * forward)
