"""The test that a sampling engine must pass: it follows the policy through updates, and planted faults are found.

    from lm.samplers.verify import verify_sampler
    assert verify_sampler(MyEngine, Path("model")).passed

Three rollouts, before, between and after two updates of the weights, must have the policy's log-probs of the sampled
tokens, and tokens that are drawn from the policy. If they do, each fault of `faults.py` is planted, and must be found
and named in the rollout after the last update. This proves that the test can fail.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lm.config import Precision
from lm.generation import Generated
from lm.samplers.draws import ALARM, Evidence
from lm.samplers.engine import Agreement, LoadEngine, SamplingEngine
from lm.samplers.faults import FAULTS, NOT_DRAWS, StaleCache
from lm.samplers.own import HeedSampler
from lm.samplers.trial import (
    MAX_NEW_TOKENS,
    NUM_VERSIONS,
    TEMPERATURE,
    Trial,
    draw_evidence,
    explain,
    save_untied,
    truth,
)

MORE_DRAWS = 16  # responses per prompt for the test of draws
UNEXPLAINED = "another policy, for no reason that this test knows"


@dataclass(frozen=True)
class Check:
    """One thing that was tested. `found` says what was measured, or which fault was named."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Verification:
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def verify_sampler(
    load: LoadEngine,
    folder: Path,
    *,
    precision: Precision = "fp32",
    seed: int = 0,
    tell: Callable[[Check], None] = lambda _check: None,
) -> Verification:
    """Test the sampler that `load(folder, precision)` makes of a model directory. `tell` is called with each check.

    Raises: ValueError for a directory without a language model, or whose context is too short.
    """
    trial, checks = Trial(folder, precision, seed), list[Check]()

    def note(found: Iterator[Check]) -> None:
        for check in found:
            checks.append(check)
            tell(check)

    sampler = load(folder, precision)
    note(_honest(sampler, trial))
    if not all(check.passed for check in checks):  # faults planted into a faulty sampler would prove nothing
        sampler.close()
        return Verification(tuple(checks))
    with tempfile.TemporaryDirectory() as untied:
        if trial.shape.tie_word_embeddings:
            # A head that is the embedding cannot be older than it, so faults are planted into an untied copy.
            save_untied(folder, Path(untied))
            sampler.close()
            trial = Trial(Path(untied), precision, seed)
            sampler = load(trial.folder, precision)
        note(_planted(sampler, trial))
        sampler.close()
    return Verification(tuple(checks))


def _honest(sampler: SamplingEngine, trial: Trial) -> Iterator[Check]:
    rollouts = list[Generated]()
    for version in range(NUM_VERSIONS):
        name = "the model as loaded" if not version else f"after update {version}"
        if version:
            sampler.receive(trial.sent(version))
        rollouts.append(trial.sample(sampler))
        form = _form(f"form of responses, {name}", rollouts[-1], trial)
        yield form
        if not form.passed:
            return
        fault, measured = judge(trial, rollouts[-1], version)
        yield Check(f"policy, {name}", not fault, fault or measured)
    yield _draws(more_draws(sampler, trial))
    sampler.sleep()
    sampler.wake()
    sampler.receive(trial.sent(0))
    again = trial.sample(sampler)
    same = again.responses == rollouts[0].responses
    found = "the same tokens" if same else "other tokens"
    yield Check("the same seeds again, after sleeping, with the first weights", same, found)


def more_draws(sampler: SamplingEngine, trial: Trial) -> Evidence:
    """Test that tokens are drawn from the policy, on more tokens than a rollout has, because some faults are small."""
    prompts = trial.prompts * MORE_DRAWS
    seeds = trial.draw_seeds("draws", len(prompts))
    found = sampler.sample(prompts, seeds, max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE)
    return draw_evidence(trial, trial.policy(NUM_VERSIONS - 1), prompts, found)


def _draws(evidence: Evidence) -> Check:
    measured = f"the evidence against it is {evidence.nats:+.1f} nats; above {ALARM:.1f} is an alarm"
    return Check("draws from the policy", not evidence.is_alarm, _biased(evidence) or measured)


def _biased(evidence: Evidence) -> str:
    """Returns what is wrong with draws; "" if nothing is."""
    return f"{NOT_DRAWS} ({evidence.nats:.1f} nats of evidence): {evidence}" if evidence.is_alarm else ""


def _planted(sampler: SamplingEngine, trial: Trial) -> Iterator[Check]:
    for name, (plant, expected) in FAULTS.items():
        faulty = plant(sampler, trial)
        fault, measured = judge(trial, trial.last_rollout(faulty), NUM_VERSIONS - 1)
        faulty.unplant()
        if not fault and plant is StaleCache and not isinstance(sampler, HeedSampler):
            yield Check(f"planted: {name}", True, "nothing to find: the engine keeps no keys and values of prompts")
            continue
        yield Check(f"planted: {name}", fault.startswith(expected), fault or f"not found: {measured}")


def judge(trial: Trial, generated: Generated, version: int) -> tuple[str, str]:
    """Returns what is wrong with a rollout after `version` updates ("" if nothing is), and what was measured."""
    policy = trial.policy(version)
    true_C = truth(policy, trial.prompts, generated.responses, TEMPERATURE)
    reported_C = torch.tensor([nats for row in generated.logprobs for nats in row])
    agreement = Agreement.of(true_C - reported_C, [*map(len, generated.responses)])
    measured = f"log-probs differ by {agreement.difference:.1e} nats on average, mean ratio {agreement.ratio:.4f}"
    if not agreement.holds(trial.max_difference):
        return f"{explain(trial, generated, reported_C, version) or UNEXPLAINED} ({measured})", measured
    return _biased(draw_evidence(trial, policy, trial.prompts, generated)), measured


def _form(name: str, generated: Generated, trial: Trial) -> Check:
    """Check lengths, end tokens, and that each token has a log-prob."""
    end_ids, wrong = trial.tokenizer.end_ids, list[str]()
    if len(generated.responses) != len(trial.prompts):
        return Check(name, False, f"{len(generated.responses)} responses to {len(trial.prompts)} prompts")
    for row, (response, finished, logprobs) in enumerate(
        zip(generated.responses, generated.finished, generated.logprobs, strict=True)
    ):
        if not 1 <= len(response) <= MAX_NEW_TOKENS:
            wrong.append(f"response {row} has {len(response)} tokens")
        elif any(token in end_ids for token in response[:-1]):
            wrong.append(f"response {row} continues after an end token")
        elif finished != (response[-1] in end_ids):
            wrong.append(f"response {row} is said to be {'finished' if finished else 'cut off'}")
        elif not finished and len(response) < MAX_NEW_TOKENS:
            wrong.append(f"response {row} stops after {len(response)} tokens without an end token")
        elif len(logprobs) != len(response):
            wrong.append(f"response {row} has {len(logprobs)} log-probs for {len(response)} tokens")
    tokens = sum(map(len, generated.responses))
    return Check(name, not wrong, wrong[0] if wrong else f"{len(generated.responses)} responses, {tokens} tokens")
