"""A reward model that does not read the policy's tokens: an encoder with another vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels
from ppo.scorer import Asked
from reward.scoring import network_folder
from reward.stage import network_source
from tests.models import load_language_model
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

QUESTIONS = [" ".join(["the", "cat", "sat", "on"][: 1 + i % 4]) + f" {i}" for i in range(16)]
ASKED = [[{"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture
def worker(
    models: InitialModels,
    ppo_config: Callable[..., PPOConfig],
    encoder_folder: Path,
    tmp_path: Path,
) -> OneRank:
    judge = load(network_source(encoder_folder, 0.0, 4))
    save_model(tmp_path / "judge", judge, judge.state_dict(), Tokenizer.load(encoder_folder))
    config = ppo_config(ptx=None)
    engine = EngineConfig(precision="fp32", trackers=())
    return OneRank(config, engine, replace(models, reward=tmp_path / "judge", pretraining=None), ASKED)


def test_it_scores_the_texts_and_ppo_runs(worker: OneRank) -> None:
    policy = worker.tokenizer
    prompts = [policy.encode_prompt(asked) for asked in ASKED]
    rollout = worker.sample(prompts, range(16))
    scores, values = worker.scores(rollout), worker.values(rollout)
    network, reads = load(network_folder(worker.models.reward)).eval(), Tokenizer.load(worker.models.reward)
    _, responses = rollout.token_lists()
    for row, (question, response) in enumerate(zip(QUESTIONS, responses, strict=True)):
        text = f"<|end|>{question}<|end|>{policy.decode(response).strip()}<|end|>"
        with torch.no_grad():
            expected = float(network(torch.tensor([reads.encode(text)])))
        assert float(scores[row]) == pytest.approx(expected, abs=1e-5)
    assert not values.any()  # nothing is known of a half-written response yet
    sft = load_language_model(worker.models.sft)
    assert torch.equal(worker.learner.value.module.decoder.embedding.weight, sft.decoder.embedding.weight)
    controller = PPOController(
        worker.config, worker.roles, prompts, worker.models.scale, num_pretraining_rows=0, seed=5
    )
    metrics = [controller.step(iteration) for iteration in range(2)]
    assert metrics[0]["kl_nats"] == 0.0
    assert worker.values(rollout).any()  # learned
    worker.close()


def test_a_text_that_is_too_long_for_it_has_no_score(worker: OneRank) -> None:
    long = [{"role": "user", "content": "the cat " * 40}]
    prompt = worker.tokenizer.encode_prompt(long)[:50]
    short = worker.tokenizer.encode_prompt(ASKED[0])
    worker.roles.scorers.asked = Asked([long, ASKED[0]])
    scores = worker.scores(worker.sample([prompt, short], [0, 1]))
    assert scores.isnan().tolist() == [[True], [False]]
    worker.close()
