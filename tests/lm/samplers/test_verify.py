"""The test of sampling engines: Heed's own passes it, engines with a fault do not, and the fault is named."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.draw_power import Faulty
from lm.config import ModelConfig, Precision
from lm.generation import Generated, Limits, generate
from lm.samplers.engine import SamplingEngine, SentWeights
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import (
    UNEXPLAINED,
    Check,
    Trial,
    truth,
    truth_with_stale_prefixes,
    verify_sampler,
    weights_of,
    with_exchanged,
    with_weights,
)
from lm.samplers.vllm_engine import require_shape_for_cpus
from lm.sampling import Choice
from tests.lm.samplers.faults import FAULTS, faults_found


def first_failure(checks: Iterator[Check], of: str = "") -> tuple[str, str]:
    """Returns the first check that fails, of those whose name starts so, and what it found; later ones are not made."""
    return next((check.name, check.found) for check in checks if not check.passed and check.name.startswith(of))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=pytest.mark.nightly)])
def test_heeds_sampler_passes(model: str, precision: Precision, request: pytest.FixtureRequest) -> None:
    found = [*verify_sampler(HeedSampler.load, request.getfixturevalue(model), precision=precision)]
    assert all(check.passed for check in found), found
    assert len(found) == 9
    (power,) = (check.found for check in found if check.name == "nats of evidence that 512 draws have of each fault")
    assert re.search(r"^  the end token is never drawn +\d+\.\d  found$", power, re.MULTILINE)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_every_planted_fault_is_found_and_named(untied: Path, precision: Precision) -> None:
    sampler, trial = HeedSampler.load(untied, precision), Trial(untied, precision)
    for name, expected, found in faults_found(sampler, trial):
        assert found.startswith(expected), f"{name}: {found}"


# A stale cache and old weights show after the first update, exchanged layers at once.
@pytest.mark.parametrize(
    ("fault", "first_seen", "named"),
    [
        ("two layers exchanged", "the model as loaded", "layers 0 and 1 exchanged"),
        ("temperature not applied", "the model as loaded", "a temperature of 1"),
        ("likely tokens preferred", "the model as loaded", "tokens that are not draws"),
        ("weights one update old", "after update 1", "the weights it was loaded with"),
        pytest.param(
            "the old output head kept", "after update 1", "an output head that is older", marks=pytest.mark.nightly
        ),
        pytest.param("a stale prefix cache", "after update 1", "keys and values of prompts", marks=pytest.mark.nightly),
    ],
)
def test_an_engine_with_a_fault_fails_with_its_name(untied: Path, fault: str, first_seen: str, named: str) -> None:
    def load(folder: Path, precision: Precision) -> SamplingEngine:
        trial = Trial(folder, precision)
        faulty = FAULTS[fault][0](HeedSampler.load(folder, precision), trial)
        faulty.receive(trial.sent(0))
        return faulty

    name, found = first_failure(verify_sampler(load, untied), of="policy")
    assert name == f"policy, {first_seen}"
    assert found.startswith(named)


class _Changed(Faulty):
    """Its responses are changed by a function."""

    def __init__(self, sampler: SamplingEngine, change: Callable[[Generated], None]) -> None:
        super().__init__(sampler, Trial(Path(), "fp32"))
        self.change = change

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        found = super().sample(prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature)
        self.change(found)
        return found


def _drop_last_token(found: Generated) -> None:
    found.responses[3].pop()
    found.logprobs[3].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_last_token, "response 3 stops after 23 tokens without an end token"),
        (lambda found: found.finished.__setitem__(2, True), "response 2 is said to be finished"),
        (lambda found: found.responses[1].append(5), "response 1 has 25 tokens"),
        (lambda found: found.responses.pop(), "31 responses to 32 prompts"),
        (lambda found: found.logprobs[0].pop(), "response 0 has 23 log-probs for 24 tokens"),
    ],
)
def test_responses_of_the_wrong_form_are_found(untied: Path, change: Callable[[Generated], None], message: str) -> None:
    found = verify_sampler(lambda *given: _Changed(HeedSampler.load(*given), change), untied)
    assert first_failure(found) == ("form of responses, the model as loaded", message)


class _Cut(HeedSampler):
    """Samples with top_p, and reports the log-probs of the whole distribution."""

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        choice = Choice(temperature, top_p=0.9)
        return generate(
            self.policy, prompts, max_new_tokens=max_new_tokens, end_ids=self.end_ids, choice=choice, seeds=seeds
        )


def test_tokens_that_are_not_drawn_from_the_policy_are_found_though_their_logprobs_are_right(untied: Path) -> None:
    _, draws = first_failure(verify_sampler(_Cut.load, untied), of="draws from the policy")
    assert draws.startswith("tokens that are not draws from the policy")


class _Unknown(HeedSampler):
    """Scales the last norm, which no explanation covers."""

    def receive(self, sent: Iterable[SentWeights]) -> None:
        super().receive(sent)
        self.policy.decoder.norm.weight.data.mul_(1.5)


@pytest.mark.long
def test_a_fault_that_nobody_knows_is_found_too(untied: Path) -> None:
    name, found = first_failure(verify_sampler(_Unknown.load, untied), of="policy")
    assert name == "policy, after update 1"
    assert found.startswith(UNEXPLAINED)


def test_a_stale_prefix_by_hand(untied: Path) -> None:
    """Layer by layer: keys and values of the first tokens from one model, all else from the other."""
    trial = Trial(untied, "fp32")
    now, before = trial.policy(1), trial.policy(0)
    prompt, response = list(range(40, 61)), [7, 9, 11]
    args = [prompt], [response], 0.7
    honest = truth(now, *args)
    assert torch.allclose(truth_with_stale_prefixes(now, now, *args, 4), honest, atol=1e-5)
    assert torch.equal(truth_with_stale_prefixes(now, before, *args, 32), honest)  # no whole block
    stale = truth_with_stale_prefixes(now, before, *args, 4)
    assert float((stale - honest).abs().max()) > 0.01
    # The last token is never stale: with the embedding of all other tokens equal, only their keys differ.
    all_stale = truth_with_stale_prefixes(now, before, *args, 1)
    assert float((all_stale - truth(before, *args)).abs().max()) > 0.01


def test_exchanged_layers_by_hand(untied: Path) -> None:
    policy = Trial(untied, "fp32").policy(0)
    weights = weights_of(policy)
    found = with_exchanged(weights, 0, 2)
    for name, tensor in found.items():
        source = (
            name.replace("blocks.0.", "blocks.x.").replace("blocks.2.", "blocks.0.").replace("blocks.x.", "blocks.2.")
        )
        assert tensor is weights[source], name
    model, tokens = with_weights(policy, found), torch.arange(30, 50)[None]
    assert torch.equal(model.decoder.blocks[0].mlp.up.weight, policy.decoder.blocks[2].mlp.up.weight)
    assert not torch.equal(model(tokens), policy(tokens))


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heed", "verify-sampler", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "400", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.long
def test_the_command_tests_an_engine_of_ones_own(untied: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text(
        "from lm.samplers.heed_engine import HeedSampler\n"
        "class Stuck(HeedSampler):\n"
        "    def receive(self, sent):\n"
        "        list(sent)\n"
        "def load(folder, precision):\n"
        "    print({'an engine': 'may print'})\n"
        "    return Stuck.load(folder, precision)\n"
    )
    done = _run(f"{engine}:load", str(untied))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("ok     policy, the model as loaded: log-probs differ by")
    assert lines[3].startswith(
        "FAILED policy, after update 1: the weights it was loaded with: no update, or no adapter"
    )


@pytest.mark.long
def test_an_engine_that_ends_the_process_does_not_pass(untied: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text("import os\ndef load(folder, precision):\n    os._exit(0)\n")
    done = _run(f"{engine}:load", str(untied))
    assert done.returncode == 1
    assert "ended with exit code 0 before the test did: it wrote nothing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_the_command_tests_a_team(untied: Path) -> None:
    done = _run("heed", str(untied), "--tensor-parallel-size", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, verdict = done.stdout.splitlines()
    assert all(line.startswith(("ok ", "  ")) for line in lines)
    assert verdict == "the engine holds the policy that it is sent"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("heed", "MODEL", "--tensor-parallel-size", "3"), "tensor_parallel_size is 3; a divisor of the model's num_"),
        (("engine.py:load", "MODEL", "--tensor-parallel-size", "2"), "--tensor-parallel-size is 2; 1 was expected"),
        (("sglang", "MODEL"), 'engine \'sglang\': "heed", "vllm", "FILE.py:FUNCTION"'),
        (("heed", "/nowhere"), "/nowhere: a model directory with a config.json was expected"),
        (("vllm", "MODEL", "--python", "/nowhere/python"), "there is no Python with vLLM at /nowhere/python"),
        (("vllm", "MODEL", "--python", sys.executable), "has no vllm"),
    ],
)
def test_mistakes_are_one_line(
    untied: Path, arguments: tuple[str, ...], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused("verify-sampler", *(str(untied) if word == "MODEL" else word for word in arguments))


def test_the_folder_of_a_run_leads_to_its_models(untied: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "model").symlink_to(untied)
    line = refused("verify-sampler", "heed", str(tmp_path))
    assert f"is the folder of a run; its models are {tmp_path}/ppo/model" in line


def test_without_vllm_the_commands_own_option_is_named(
    untied: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.samplers.vllm_engine.DEFAULT_PYTHON", Path("/nowhere/python"))
    assert "run `make vllm`, or name another with --python" in refused("verify-sampler", "vllm", str(untied))


def test_latent_attention_is_not_given_to_vllm_on_cpus() -> None:
    shape = {"vocab_size": 12, "max_position_embeddings": 8, "hidden_size": 16, "num_hidden_layers": 1}
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = ModelConfig.model_validate({**shape, **latent, "num_attention_heads": 2, "intermediate_size": 8})
    with pytest.raises(ValueError, match="model: kv_lora_rank is 8; vLLM on CPUs has no latent attention"):
        require_shape_for_cpus(Path("model"), config)


def test_threads_do_not_spin_while_they_wait(
    untied: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")  # what Heed's processes have otherwise
    engine = tmp_path / "engine.py"
    engine.write_text(
        "import os\ndef load(folder, precision):\n"
        "    raise ValueError('threads spin ' + os.environ['GOMP_SPINCOUNT'])\n"
    )
    assert "threads spin 0" in refused("verify-sampler", f"{engine}:load", str(untied))
