"""The test that a sampling engine must pass: it follows the policy through updates of the weights.

    from lm.samplers.verify import verify_sampler
    assert all(check.passed for check in verify_sampler(MyEngine, Path("model")))

Three rollouts, before, between and after two updates of the weights, must have the policy's log-probs of the sampled
tokens, and tokens that are drawn from the policy. If the log-probs are those of a known fault, the check names it.

`heed verify-sampler` runs `python -m lm.samplers.verify ENGINE MODEL PRECISION TEAM_SIZE PIPE` with an engine's own
Python, if it has one. Engines may print anything and may end the process, so checks have a separate pipe (a file
descriptor), one JSON line each, and a last line says how many there were. With a TEAM_SIZE above 1, so many processes
run the same test together, each with a share of the weights; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
identify them. Each sees one GPU at most, so LOCAL_RANK is 0.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from files.importing import load_function
from lm.config import Precision
from lm.generation import Generated
from lm.samplers.draws import ALARM, Evidence
from lm.samplers.engine import Agreement, LoadEngine, SamplingEngine
from lm.samplers.trial import (
    MAX_NEW_TOKENS,
    NUM_VERSIONS,
    TEMPERATURE,
    Trial,
    draw_evidence,
    explain,
    truth,
)

VLLM = "vllm"
TIMEOUT_SECONDS = 600.0  # that ranks of a team wait for each other
MISTAKE, DONE = "mistake", "done"  # keys of the last line: the user's mistake, or the number of checks
NOT_DRAWS = "tokens that are not draws from the policy"
MORE_DRAWS = 16  # responses per prompt for the test of draws
UNEXPLAINED = "another policy, for no reason that this test knows"


@dataclass(frozen=True)
class Check:
    """One thing that was tested. `found` says what was measured, or which fault was named."""

    name: str
    passed: bool
    found: str


def verify_sampler(load: LoadEngine, folder: Path, *, precision: Precision = "fp32") -> Iterator[Check]:
    """Yields the checks of the sampler that `load(folder, precision)` makes of a model directory, as they finish. They
    end with the first rollout of a wrong form.

    Raises: ValueError for a directory without a language model, or whose context is too short.
    """
    trial = Trial(folder, precision)
    sampler = load(folder, precision)
    try:
        yield from _checks(sampler, trial)
    finally:
        sampler.close()


def _checks(sampler: SamplingEngine, trial: Trial) -> Iterator[Check]:
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


def loader_of(engine: str, team_size: int) -> LoadEngine:
    """Returns the loader of an engine: "heed", "vllm", or a function, "FILE.py:FUNCTION" or "MODULE:FUNCTION".

    Raises: ValueError for anything else, and for a team whose ranks would share the weights of a function's engine.
    """
    if engine == "heed":
        from lm.samplers.heed_engine import HeedSampler
        from lm.tensor_parallel import Rendezvous, Team

        if team_size == 1:
            return HeedSampler.load
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return partial(HeedSampler.load, team=Team.join(Rendezvous(host, port, team_size, TIMEOUT_SECONDS)))
    if engine == VLLM:
        from lm.samplers.vllm_engine import VLLMSampler

        return partial(VLLMSampler, tensor_parallel_size=team_size)
    if team_size > 1:
        raise ValueError(
            f"--tensor-parallel-size is {team_size}; 1 was expected for an engine other than heed and vllm"
        )
    if ":" not in engine:
        raise ValueError(f'engine {engine!r}: "heed", "vllm", "FILE.py:FUNCTION" or "MODULE:FUNCTION" was expected')
    return load_function(engine, "sampler")


def main(engine: str, model: str, precision: Precision, team_size: str, pipe: str) -> int:
    with os.fdopen(int(pipe), "w") as checks:

        def write(line: object) -> None:
            print(json.dumps(line), file=checks, flush=True)

        num_checks = 0
        try:
            for check in verify_sampler(loader_of(engine, int(team_size)), Path(model), precision=precision):
                write(asdict(check))
                num_checks += 1
        except ValueError as error:
            write({MISTAKE: str(error)})
            return 2
        write({DONE: num_checks})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
