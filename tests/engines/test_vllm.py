"""vLLM as PPO's sampler: it passes the test of samplers, and PPO with it completes, resumes and is proved."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.connection import disconnect
from cluster.group import WorkerGroup
from lm.config import ModelConfig, Precision
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.samplers.engine import max_difference
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from tests.heed.jobs.conftest import DEBUG_JOB, ROOT, HeedCommand
from tests.lm.samplers.conftest import SENTENCE, small_shape
from tests.lm.samplers.faults import FAULTS
from tests.rays import start_ray
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    """A policy with a tied output head, and a reward model, both with random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), Tokenizer.train([SENTENCE] * 20, 320, "chat")
    config = small_shape(tokenizer, tied=True)
    policy, reward = LanguageModel(config), ScalarModel(config)
    init_weights(policy, 1)
    init_weights(reward, 2)
    save_model(folder / "sft", policy, policy.state_dict(), tokenizer)
    save_model(folder / "reward", reward, reward.state_dict(), tokenizer)
    return InitialModels(folder / "sft", folder / "reward", ScoreScale(0.5, 2.0), None)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 1), ("bf16", 1), ("fp32", 2)])
def test_vllm_passes(
    vllm_python: str, heed: Callable[..., HeedCommand], models: InitialModels, precision: Precision, size: int
) -> None:
    command = heed(
        "verify-sampler", "vllm", str(models.sft), "--precision", precision, "--python", vllm_python,
        "--tensor-parallel-size", str(size), environment={"COLUMNS": "400"},
    )  # fmt: skip
    assert command.wait() == 0, command.output
    lines = [line for line in command.output.splitlines() if line.startswith(("ok", "FAILED"))]
    assert all(line.startswith("ok ") for line in lines)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_fault_planted_into_vllm_is_named(vllm_python: str, untied: Path, precision: Precision) -> None:
    command = [vllm_python, "-m", "tests.lm.samplers.faults", str(untied), precision]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [name for name, _, _ in found] == [*FAULTS]
    assert all(is_named for _, is_named, _ in found), found


@pytest.fixture(scope="module")
def _room() -> Iterator[None]:
    """Lets Ray place more workers than this machine has cores."""
    start_ray(num_cpus=8)
    yield
    disconnect()


def config_of(**changes: object) -> PPOConfig:
    optimizer = OptimizerConfig(learning_rate=3e-3)
    values = {
        "prompts": DataConfig(source="unread.jsonl"), "num_iterations": 3, "rollout_batch_size": 8,
        "minibatch": BatchConfig(batch_size=8, micro_batch_size=4), "max_new_tokens": 24, "temperature": 0.7,
        "policy_optimizer": optimizer, "advantage": {"value_optimizer": optimizer}, "sampler": {"kind": "vllm"},
    }  # fmt: skip
    return PPOConfig.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("transport", "team_size"), [("object_store", 1), ("broadcast", 1), ("broadcast", 2), ("on the learner's place", 1)]
)
@pytest.mark.usefixtures("_room")
def test_weights_reach_it_by_every_transport(
    vllm_python: str, models: InitialModels, transport: str, team_size: int
) -> None:
    """With a `team_size` of 2, four ranks are two generators."""
    one_thread = ClusterConfig(cpu_threads=1)
    engine = EngineConfig(precision="fp32", trackers=())
    tokenizer = Tokenizer.load(models.sft)
    words = SENTENCE.split()
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": " ".join(words[: 4 + row])}]) for row in range(16)]
    with WorkerGroup(1, one_thread) as learners:
        is_guest = transport == "on the learner's place"
        host = learners if is_guest else None
        num_generators = team_size**2
        with WorkerGroup(num_generators, one_thread, python=vllm_python, host=host) as generators:
            apart = {"kind": "disaggregated", "weight_transport": transport, "num_generators": num_generators}
            sampler = {"kind": "vllm", "tensor_parallel_size": team_size}
            config = config_of() if is_guest else config_of(placement=apart, sampler=sampler)
            roles = Roles.on_groups(
                config, engine, models, [], learners=learners, generators=generators, scorers=learners
            )
            controller = PPOController(
                config,
                roles,
                prompts,
                models.scale,
                num_pretraining_rows=1,
                seed=5,
                max_difference=max_difference("fp32", 2),
            )
            before = controller.step(0)
            assert not controller.sent_digests
            for iteration in (1, 2):  # which the digests and the log-probs of the sampled tokens prove
                metrics = controller.step(iteration)
                assert metrics["sampler_difference"] < max_difference("fp32", 2) / 10
                assert len(controller.sent_digests) > 10
            assert metrics["kl_nats"] != before["kl_nats"] == pytest.approx(0, abs=1e-4)
            roles.close()


def test_a_debug_job_completes_and_resumes_after_a_kill(
    vllm_python: str, heed: Callable[..., HeedCommand], tmp_path: Path
) -> None:
    changes = ["model.hidden_size=64", "ppo.sampler.kind=vllm", f"ppo.sampler.python={vllm_python}"]
    changes += ["ppo.num_iterations=8", "ppo.save_every_iterations=1", "workers=2"]
    arguments = ["run", str(DEBUG_JOB), "--runs", str(tmp_path), *[w for change in changes for w in ("--set", change)]]
    first, ppo = heed(*arguments), tmp_path / "debug" / "ppo"
    end = time.monotonic() + 200
    while len([*(ppo / "checkpoints").glob("step-*")]) < 2:
        assert time.monotonic() < end, first.output
        assert first.process.poll() is None, first.output
        time.sleep(0.02)
    first.kill_everything()
    assert not first.wait_until_gone()
    again = heed(*arguments)
    assert again.wait() == 0, again.output
    assert "ppo: resumes from iteration " in again.output
    assert "report: " in again.output
    lines = [json.loads(line) for line in (ppo / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert max(line["sampler_difference"] for line in lines) < max_difference("fp32", 2) / 10


def test_a_shape_that_it_cannot_run_is_named(
    vllm_python: str, heed: Callable[..., HeedCommand], models: InitialModels, tmp_path: Path
) -> None:
    config = json.loads((models.sft / "config.json").read_text())
    small = ModelConfig(
        vocab_size=config["vocab_size"], max_position_embeddings=128, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
    )  # fmt: skip
    model = LanguageModel(small)
    init_weights(model, 1)
    save_model(tmp_path / "small", model, model.state_dict(), Tokenizer.load(models.sft))
    command = heed("verify-sampler", "vllm", str(tmp_path / "small"), "--python", vllm_python)
    assert command.wait() == 2, command.output
    assert "head_dim is 16; vLLM on CPUs has 32, 64, 80" in command.output
