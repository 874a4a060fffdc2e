"""Waiting of generators and learners: iterations of placements by hand, and what `heed plan` prints of them."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heed.cli import app
from heed.jobs.job_file import load_job
from heed.jobs.plan import Setting, make_plan
from heed.jobs.times import GPUS
from heed.jobs.waiting import Speeds, Waiting, simulate
from lm.config import ModelConfig
from ppo.config import PPOConfig
from ppo.plan import PPOIteration
from stages.sizes import Lengths, ResponseTokens

DEBUG = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
SHAPE = ModelConfig(
    vocab_size=10, max_position_embeddings=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, intermediate_size=8,
)  # fmt: skip
LONG_TAILED = {10: 9.0, 100: 1.0}


def waiting(kind: str, weights: Mapping[int, float], learn: float, *, read: float = 0.0) -> Waiting:
    """An iteration has 16 responses; two teams draw a token in each of their rows per second, and learners take `learn`
    seconds.
    """
    apart = () if kind == "colocated" else ("ppo.placement.num_generators=2",)
    ahead = ("ppo.placement.max_staleness=1",) if kind in ("asynchronous", "continuous") else ()
    rounds = ("ppo.placement.round_tokens=5",) if kind == "continuous" else ()
    job = load_job(DEBUG, [f"ppo.placement.kind={kind}", *apart, *ahead, *rounds])
    config = job.section_of(job.stage("ppo"))
    assert isinstance(config, PPOConfig)
    responses = ResponseTokens(weights)
    work = PPOIteration(config, Lengths.bound(128), responses, SHAPE, SHAPE, None, (), (), 0)
    speeds = Speeds(2, 8, 4.0, lambda _: 1.0, lambda tokens: read * tokens, lambda _: learn)
    return simulate(work, speeds)


@pytest.mark.parametrize(
    ("kind", "seconds", "shares"),
    [
        ("colocated", 40, {"workers": 0}),
        ("disaggregated", 40, {"generators": 0.75, "learners": 0.25}),
        ("asynchronous", 30, {"generators": 2 / 3, "learners": 0}),
        ("continuous", 30, {"generators": 2 / 3, "learners": 0}),
    ],
)
def test_equal_lengths_by_hand(kind: str, seconds: float, shares: dict[str, float]) -> None:
    """Ten seconds of sampling, and thirty of learning."""
    found = waiting(kind, {10: 1.0}, 30)
    assert found.seconds == pytest.approx(seconds)
    assert found.shares == pytest.approx(shares)


def test_what_is_read_counts_once_per_prompt_and_again_with_new_weights() -> None:
    """Eight prompts of four tokens per team. All responses end with their batch, so nothing is read again."""
    assert waiting("disaggregated", {10: 1.0}, 30, read=0.5).seconds == pytest.approx(40 + 0.5 * 8 * 4)
    assert waiting("continuous", {10: 1.0}, 1, read=0.5).seconds == pytest.approx(10 + 0.5 * 8 * 4)
    plain, again = (waiting("continuous", LONG_TAILED, 1, read=read).seconds for read in (0.0, 0.5))
    assert again > plain + 0.5 * 8 * 4


def test_long_responses_delay_what_waits_for_them() -> None:
    """Most rollouts last as long as a response of 100 tokens. A response has 19 on average, and rounds of five leave a
    row idle for at most four steps: with 16 rows, `continuous` draws 16 responses in 19 to 23 seconds.
    """
    found = {
        kind: waiting(kind, LONG_TAILED, 20) for kind in ("colocated", "disaggregated", "asynchronous", "continuous")
    }
    assert 80 < found["asynchronous"].seconds < 100
    assert found["disaggregated"].seconds == pytest.approx(found["asynchronous"].seconds + 20, rel=0.05)
    assert found["colocated"].seconds == pytest.approx(found["disaggregated"].seconds)
    assert found["colocated"].shares["workers"] > 0
    assert 19 <= found["continuous"].seconds < 25
    assert found["continuous"].shares["learners"] < 0.3 < found["asynchronous"].shares["learners"]


@pytest.mark.parametrize("text", ["100", "100:9,", "0:1", "100:-1", "100:0", "a:1", "100:9,100:1"])
def test_malformed_lengths_name_the_option(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^--response-tokens '.*': different lengths with weights above 0, .* were expected, such"
    ):
        ResponseTokens.parse(text)


def test_the_plan_takes_lengths_of_responses() -> None:
    """They change times, and not memory, which is that of the longest ones."""
    runner, command = CliRunner(), ["plan", str(DEBUG), "--gpu", "h100", "--set", "ppo.placement.kind=disaggregated"]
    plain, shorter = (runner.invoke(app, [*command, *option]) for option in ((), ("--response-tokens", "4:9,16:1")))
    assert (plain.exit_code, shorter.exit_code) == (0, 0)
    assert "every response is max_new_tokens long (--response-tokens)" in plain.stdout
    assert "waiting" not in plain.stdout
    assert re.search(r"waiting, in shares of an iteration: generators \d+%, learners \d+%", shorter.stdout)
    assert "max_new_tokens long" not in shorter.stdout
    peaks = [[line for line in ran.stdout.splitlines() if "peak" in line] for ran in (plain, shorter)]
    assert peaks[0] == peaks[1] != []
    tokens = [
        int(re.findall(r"tokens per iteration ([\d,]+)", ran.stdout)[0].replace(",", "")) for ran in (plain, shorter)
    ]
    assert tokens[0] - tokens[1] == pytest.approx(16 * (16 - 5.2), abs=16)  # the mean of rows is rounded


def test_longer_responses_than_the_job_allows_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^--response-tokens: a response of 17 tokens, with ppo.max_new_tokens 16; at"
    ):
        make_plan(load_job(DEBUG), Setting(GPUS["h100"], 0.5, 1, response_tokens=ResponseTokens({17: 1.0})))
