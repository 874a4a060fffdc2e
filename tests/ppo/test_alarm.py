"""The alarm: its evidence by other code and in planted worlds, and what it does to a run."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.torch import load_file

from benchmarks.alarm_rates import KINDS, NUM_ITERATIONS, evidence_along, first_alarm
from lm.tokenizer import Tokenizer
from ppo import loop
from ppo.alarm import (
    BETS,
    CAUTION,
    MOST_AT_STAKE,
    MOST_ERRORS,
    MOST_STD,
    NUM_BEGINNINGS,
    Evidence,
    evidence_of,
    slope,
)
from ppo.config import PPOConfig
from ppo.rank import InitialModels
from ppo.report import report
from ppo.roles import Roles
from stages.data import Fitting
from stages.reports.run_folder import StageFolder
from tests.ppo.test_ppo_stage import ENGINE, Killed, make_mortal, same_weights_and_log
from training.data import Prompt
from training.engine import StageContext

Run = Callable[..., None]
Floats = NDArray[np.float64]


def found_by(
    initial: Floats,
    initial_scores: Floats,
    later: Floats,
    scores: Floats,
    policies: NDArray[np.int64],
    *,
    share: float = 0.5,
    num_iterations: int = NUM_ITERATIONS,
    false_alarms: float = 0.05,
) -> Evidence:
    return evidence_of(
        np.concatenate([initial, later]),
        np.concatenate([initial_scores, scores]),
        np.concatenate([np.zeros(len(initial), dtype=np.int64), policies]),
        share=share,
        num_iterations=num_iterations,
        false_alarms=false_alarms,
    )


def stakes(
    initial: Sequence[float], later: Sequence[tuple[int, float]], begins: Sequence[int], threshold: float, aim: float
) -> list[float]:
    """The product of both gamblers' stakes at one threshold, for each beginning of a fall: bet after bet."""
    seen, first = list[float](), [1.0] * len(CAUTION)
    second = {begin: [1.0] * len(BETS) for begin in begins}

    def spread() -> float:
        known = [0.0, 1.0, *seen]
        return max(float(np.var(known)), 1e-4)

    for value in initial:
        for place, caution in enumerate(CAUTION):
            size = math.sqrt(2 * aim / (len(initial) * caution * spread()))
            first[place] *= 1 + min(size, MOST_AT_STAKE / max(threshold, 1e-9)) * (value - threshold)
        seen.append(value)
    seen.pop()  # the last check says nothing about bets on those before it
    for policy in sorted({policy for policy, _ in later}):
        checks = [value for of, value in later if of == policy]
        errors = (np.mean(checks) - threshold) / math.sqrt(spread() / len(checks)) / MOST_ERRORS
        for begin, stake in second.items():
            for place, bet in enumerate(BETS):
                stake[place] *= 1 - bet * float(np.clip(errors, -1, 1)) if policy >= begin else 1
    return [float(np.mean(first) * np.mean(second[begin])) for begin in begins]


def test_the_evidence_is_the_smallest_product_of_two_gamblers_stakes() -> None:
    rng = np.random.default_rng(3)
    initial, later = rng.uniform(0.4, 1, 40), rng.uniform(0, 0.6, 24)
    updates = np.repeat([1, 2, 3, 4], 6)
    # With share 0 a check is its own value; the first quarter of the initial ones only tells the slope.
    found = found_by(initial, np.zeros(40), later, np.zeros(24), updates, share=0, num_iterations=4, false_alarms=0.1)
    begins = [1, 2, 3, 4]
    aim, pairs = math.log(len(begins) / 0.1), list(zip(updates.tolist(), later.tolist(), strict=True))
    grid = np.array([stakes(initial[10:].tolist(), pairs, begins, m, aim) for m in np.linspace(0, 1, 1025)])
    exact = np.log(grid.min(axis=0).mean())
    assert found.nats == pytest.approx(exact, abs=0.3)
    assert found.nats <= exact + 1e-9  # a coarser grid may only understate it
    assert found.fall == begins[int(grid.min(axis=0).argmax())]


def test_the_slope_is_what_a_standard_deviation_of_score_is_worth() -> None:
    scores = np.array([-1.0, 0.0, 1.0, 2.0])
    assert slope(0.5 + 0.1 * scores, scores) == pytest.approx(0.1)
    assert slope(np.array([0.2, 0.4]), np.array([1.0, 1.0])) == 0
    assert slope(np.array([0.0, 1.0]), np.array([0.0, 100.0])) == pytest.approx(1 / MOST_STD)


@pytest.mark.parametrize("name", ["still", "real", "half", "prompts", "shock.2"])
def test_a_run_whose_gain_is_real_rarely_has_an_alarm(name: str) -> None:
    assert sum(first_alarm(evidence_along(KINDS[name], seed, 256, 16)) > 0 for seed in range(40)) <= 4


def test_a_run_that_hacks_its_reward_has_an_alarm_and_a_beginning() -> None:
    found = [evidence_along(KINDS["hacked"], seed, 256, 16) for seed in range(20)]
    assert sum(first_alarm(evidence) > 0 for evidence in found) >= 19
    assert all(1 <= evidence[-1].fall <= NUM_ITERATIONS for evidence in found)


def test_a_fall_in_a_long_run_costs_as_much_evidence_as_in_a_short_one() -> None:
    checks, scores = np.zeros(40), np.zeros(40)
    short, long = (
        found_by(np.ones(64), np.zeros(64), checks, scores, policies, num_iterations=number)
        for number, policies in ((NUM_BEGINNINGS, np.arange(40) // 10 + 1), (1000, np.arange(40) // 10 * 250 + 1))
    )
    assert long.nats == pytest.approx(short.nats)


@pytest.fixture
def run(adapted: InitialModels, prompts: list[list[int]], ppo_config: Callable[..., PPOConfig]) -> Run:
    """Runs the stage with an alarm whose spot checker likes the first 16 responses that it sees, and no others."""
    tokenizer = Tokenizer.load(adapted.sft)
    asked = [
        Prompt(prompt_id=str(i), messages=({"role": "user", "content": tokenizer.decode(tokens).strip()},), kind="")
        for i, tokens in enumerate(prompts)
    ]

    def build(folder: Path, change: Callable[[Roles], None] = lambda _roles: None, **alarm: object) -> None:
        checker = folder.parent / f"{folder.name}_checks.py"
        if not checker.exists():
            checker.write_text(
                "seen = []\n\ndef check(prompts, responses):\n"
                "    seen.extend(responses)\n    return [float(len(seen) <= 16)] * len(responses)\n"
            )
        table = {
            "source": {"kind": "function", "function": f"{checker}:check"},
            "initial_checks": 16,
            "false_alarms": 0.49,
        }
        config = ppo_config(learning_rate=1e-2, keep_policies_every=1, num_iterations=5, alarm=table | alarm)
        roles = Roles.in_process(config, ENGINE, adapted)
        change(roles)
        try:
            loop.train(StageContext(folder, 11, 1, ENGINE), config, roles, adapted, Fitting(asked, prompts))
        finally:
            roles.close()

    return build


def results_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "results.json").read_text())
    return found


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("action", "num_iterations", "result"), [("stop", 4, 4), ("warn", 5, 5), ("roll_back", 4, 0)])
def test_an_alarm_acts_as_configured(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, action: str, num_iterations: int, result: int
) -> None:
    run(tmp_path / "run", action=action)
    log = steps_of(tmp_path / "run")
    assert [line["spot_check"] for line in log] == [1.0] + [0.0] * (num_iterations - 1)
    assert log[3]["alarm_nats"] > -math.log(0.49) > log[2]["alarm_nats"]
    results = results_of(tmp_path / "run")
    alarm = results["alarm"]
    assert isinstance(alarm, dict)
    assert results["num_iterations"] == num_iterations == len(log)
    assert (alarm["policy"], alarm["fall"], alarm["num_checks"], alarm["result"]) == (3, 1, 64, result)
    model = load_file(tmp_path / "run" / "model" / "model.safetensors")
    kept = load_file(tmp_path / "run" / "policies" / f"{result:06d}" / "model.safetensors")
    assert all(bool((model[name] == kept[name]).all()) for name in kept)
    (said,) = [message for message in caplog.messages if "alarm" in message]
    assert "64 spot checks by run_checks.py:check, the latest of the policy after iteration 3, show" in said
    told = report(StageFolder("ppo", tmp_path / "run", results, log, {})).warning
    assert "Spot checks rang the alarm after iteration 3 and " in told
    assert told.endswith(f"The result is the policy after iteration {result}.")
    run(tmp_path / "run", action=action)  # nothing is left to do
    assert results_of(tmp_path / "run") == results


def test_a_killed_run_has_the_same_checks_as_an_uninterrupted_one(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "whole", action="warn")
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, action="warn")
    run(tmp_path / "killed", action="warn")
    same_weights_and_log(tmp_path / "whole", tmp_path / "killed", num_iterations=5)
    assert results_of(tmp_path / "whole") == results_of(tmp_path / "killed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lowest": 1.0}, "lowest 1 and highest 1"),
        ({"action": "roll_back"}, "keep_policies_every above 0 was expected"),
        ({"source": {"kind": "function", "function": "mine.py:score"}}, "is the reward that the policy is trained on"),
    ],
)
def test_an_alarm_that_cannot_work_is_refused(
    ppo_config: Callable[..., PPOConfig], changes: dict[str, object], message: str
) -> None:
    table = {"source": {"kind": "function", "function": "gold.py:score"}, **changes}
    reward = {"kind": "function", "function": "mine.py:score"}
    with pytest.raises(ValidationError, match=message):
        ppo_config(alarm=table, reward=reward)


def test_a_check_out_of_range_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gave 1; a number from `lowest` 0 to `highest` 0.5 was expected"):
        run(tmp_path / "run", highest=0.5)


def test_an_alarm_is_refused_where_prompts_are_kept_by_their_scores(ppo_config: Callable[..., PPOConfig]) -> None:
    """On easy prompts, a group with different scores has more wrong responses than usual, whatever the policy."""
    with pytest.raises(ValidationError, match=r"advantage.oversample 1.5 keeps only prompts .* 1 was expected"):
        ppo_config(
            alarm={"source": {"kind": "function", "function": "gold.py:score"}},
            advantage={"kind": "group_mean", "samples_per_prompt": 4, "oversample": 1.5},
            ptx=None,
        )
