"""A reward model that is no decoder of the policy's tokens: an encoder with a vocabulary of its own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm.source import materialise
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, save_model
from ppo.colocated import ColocatedWorker
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.initial_models import InitialModels
from reward.scoring import load_network
from reward.training import network_source
from training.config import EngineConfig
from training.data import DataConfig

QUESTIONS = [" ".join(["the", "cat", "sat", "on"][: 1 + i % 4]) + f" {i}" for i in range(16)]


@pytest.fixture
def worker(
    models: InitialModels,
    ppo_config: Callable[..., PPOConfig],
    encoder_folder: Path,
    tmp_path: Path,
) -> ColocatedWorker:
    judge = materialise(network_source(encoder_folder, 0.0, 4))
    save_model(tmp_path / "judge", judge, judge.state_dict(), Tokenizer.load(encoder_folder))
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    config = ppo_config(prompts=DataConfig(source=str(data)), ptx_coef=0.0, ptx_rows=0)
    engine = EngineConfig(precision="fp32", trackers=())
    return ColocatedWorker(config, engine, replace(models, reward=tmp_path / "judge", pretraining=None), 1)


def test_it_scores_the_texts_and_ppo_runs(worker: ColocatedWorker) -> None:
    policy = worker.tokenizer
    prompts = [policy.encode_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    rollout = worker.generate(prompts, range(16))
    scores, values = worker.scores(rollout), worker.values(rollout)
    network, reads = load_network(worker.models.reward).eval(), Tokenizer.load(worker.models.reward)
    _, responses = rollout.token_lists()
    for row, (question, response) in enumerate(zip(QUESTIONS, responses, strict=True)):
        text = f"<|end|>{question}<|end|>{policy.decode(response).strip()}<|end|>"
        with torch.no_grad():
            expected = float(network(torch.tensor([reads.encode(text)])))
        assert float(scores[row]) == pytest.approx(expected, abs=1e-5)
    assert not values.any()  # nothing is known of a half-written response yet
    sft = load_language_model(worker.models.sft)
    assert torch.equal(worker.value.module.decoder.embedding.weight, sft.decoder.embedding.weight)
    controller = PPOController(worker.config, worker, prompts, worker.models.scale, num_pretraining_rows=0, seed=5)
    figures = [controller.step(iteration) for iteration in range(2)]
    assert figures[0]["kl_nats"] == 0.0
    assert worker.values(rollout).any()  # learned
    worker.close()


def test_a_text_that_is_too_long_for_it_has_no_score(worker: ColocatedWorker) -> None:
    long = [{"role": "user", "content": "the cat " * 40}]
    prompt = worker.tokenizer.encode_prompt(long)[:50]
    worker._conversations[tuple(prompt)] = long
    short = worker.tokenizer.encode_prompt([{"role": "user", "content": QUESTIONS[0]}])
    scores = worker.scores(worker.generate([prompt, short], [0, 1]))
    assert scores.isnan().tolist() == [[True], [False]]
    worker.close()
