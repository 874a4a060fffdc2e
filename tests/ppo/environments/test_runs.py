"""PPO on conversations, in this process: what is learned from, what a failure costs, and a resumed run."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.model import LanguageModel
from lm.samplers.engine import max_difference
from lm.sampling import token_logprobs
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from ppo import loop
from ppo.config import PPOConfig
from ppo.controller import MissingScoresError, PPOController
from ppo.environments.kinds import OwnEnvironment
from ppo.rank import InitialModels, ScoreScale
from ppo.report import names_of
from ppo.roles import Roles
from ppo.rollout import FAILURES, PPOBatch
from reward.external import NoReward
from stages.data import Fitting
from tests.ppo.conftest import WORDS
from tests.ppo.test_ppo_stage import Killed, make_mortal
from training.config import EngineConfig
from training.data import Prompt
from training.engine import StageContext

ENGINE = EngineConfig(precision="fp32", trackers=())
# Rewards each turn by its vowels, and breaks in every fourth conversation.
CLASS = """
from ppo.environments.environment import Environment, Episode, Reply

class Vowels(Environment):
    most_words: int = 3

    def open(self, conversation, row, seed):
        return Counting(self.most_words, conversation, row, seed)

class Counting(Episode):
    def __init__(self, most_words, conversation, row, seed):
        self.most_words, self.asked, self.seed = most_words, conversation[-1]["content"], seed

    async def reply(self, message):
        if self.seed % 4 == 0:
            raise RuntimeError("the board is gone")
        vowels = sum(message.text.count(vowel) for vowel in "aeiou")
        words = " ".join(self.asked.split()[: 1 + self.seed % self.most_words])
        return Reply([{"role": "user", "content": words}], reward=vowels / 4)

    async def score(self):
        return 0.5
"""
ASKED = [[{"role": "user", "content": " ".join(WORDS[: 1 + i % 9])}] for i in range(16)]


@pytest.fixture
def setup(
    one_objective: InitialModels, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> Callable[..., tuple[PPOConfig, InitialModels]]:
    (tmp_path / "vowels.py").write_text(CLASS)

    def build(**changes: Any) -> tuple[PPOConfig, InitialModels]:
        own = {
            "kind": "class",
            "class_name": f"{tmp_path}/vowels.py:Vowels",
            "max_turns": 3,
            "settings": {"most_words": 2},
        }
        reward = {"kind": "none"}
        config = ppo_config(
            **{"environment": own, "reward": reward, "max_new_tokens": 30, "max_failed_share": 0.9, **changes}
        )
        return config, replace(one_objective, reward=NoReward(), scale=ScoreScale(0.0, 1.0, config.score_coef))

    return build


def first_batch(
    config: PPOConfig, models: InitialModels, prompts: list[list[int]]
) -> tuple[PPOBatch, dict[str, float]]:
    roles = Roles.in_process(config, ENGINE, models, ASKED)
    controller = PPOController(
        config, roles, prompts, models.scale, num_pretraining_rows=5, seed=3, max_difference=max_difference("fp32", 2)
    )
    metrics = controller.step(0)
    assert controller.batch is not None
    roles.close()
    return controller.batch, metrics


RLOO = {"kind": "leave_one_out", "samples_per_prompt": 4, "scale": "none"}
ADAPTERS = {"lora": {"rank": 2}, "policy_optimizer": {"learning_rate": 1e-3}}


@pytest.mark.parametrize("changes", [{}, {"advantage": RLOO}, ADAPTERS], ids=["gae", "rloo", "adapters"])
def test_only_what_the_policy_wrote_is_learned_from(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]], changes: dict[str, Any]
) -> None:
    """The step itself checks that the sampler's log-probs are the learner's, and that tokens are draws."""
    config, models = setup(**changes)
    batch, metrics = first_batch(config, models, prompts)
    rollout, mask_BR = batch.rollout, batch.rollout.written_BR
    between_BR = ~mask_BR & (torch.arange(30) < rollout.response_tokens_B[:, None])
    assert int(between_BR.sum()) > 16
    nothing = [batch.logprobs_BR, batch.ref_logprobs_BR, batch.rewards_BR, batch.advantages_BR, batch.values_BR]
    for values_BR in (*nothing, batch.returns_BR, rollout.behaviour_logprobs_BR):
        assert (values_BR[~mask_BR] == 0).all()
    assert (batch.counted_BR <= mask_BR).all()
    # Log-probs are those of a plain pass over each conversation, the environment's tokens among them.
    model = load(ModelFolder(models.sft, LanguageModel))
    for row in range(len(rollout)):
        length, prompt = int(rollout.num_tokens_B[row]), int(rollout.prompt_tokens_B[row])
        with torch.no_grad():
            logits_TV = model(rollout.tokens_BT[row : row + 1, :length])[0]
        tokens = rollout.tokens_BT[row, 1:length]
        expected = token_logprobs(logits_TV[:-1], tokens, config.temperature)[prompt - 1 :]
        own = mask_BR[row, : length - prompt]
        torch.testing.assert_close(batch.logprobs_BR[row, : length - prompt][own], expected[own], rtol=1e-4, atol=1e-4)
    failed_B = rollout.failure_B == FAILURES.index("error")
    assert 0 < int(failed_B.sum()) < 16
    assert torch.equal(batch.scores_B.isnan(), failed_B)
    assert not batch.counted_BR[failed_B].any()
    _check_rewards(batch, config, models.sft)
    assert metrics["environment_failed/error"] == pytest.approx(float(failed_B.float().mean()))
    assert metrics["failed_scores"] == int(failed_B.sum())
    assert metrics["response_tokens"] == pytest.approx(float(mask_BR.sum(dim=1).float().mean()))
    assert metrics["environment_tokens"] == pytest.approx(float(between_BR.sum(dim=1).float().mean()))
    assert 1 < metrics["turns"] <= 3
    assert metrics["score"] == pytest.approx(float(batch.scores_B[~failed_B].mean()))


def _check_rewards(batch: PPOBatch, config: PPOConfig, policy: Path) -> None:
    """Check rewards turn by turn: the vowels of a closed turn at its last token, and the score at the last of all."""
    tokenizer, rollout = Tokenizer.load(policy), batch.rollout
    log_ratio_BR = batch.logprobs_BR - batch.ref_logprobs_BR
    for row in (~batch.scores_B.isnan()).nonzero()[:, 0].tolist():
        expected, place = torch.zeros(config.max_new_tokens), 0
        for is_written, tokens in rollout.turns(row):
            place += len(tokens)
            if is_written and tokens[-1] in tokenizer.end_ids:
                text = tokenizer.decode(tokens)
                expected[place - 1] += sum(text.count(vowel) for vowel in "aeiou") / 4
        expected[place - 1] += 0.5
        assert float(batch.scores_B[row]) == pytest.approx(float(expected.sum()), abs=1e-5)
        expected[place - 1] -= config.missing_eos_penalty * (not bool(rollout.finished_B[row]))
        torch.testing.assert_close(batch.rewards_BR[row], expected - config.kl.coef * log_ratio_BR[row])


def test_reports_name_the_class_that_scores(setup: Callable[..., tuple[PPOConfig, InitialModels]]) -> None:
    config, _ = setup()
    assert names_of(config, starts_from_sft=False).score == "score of the environment Vowels"


def test_too_many_failures_end_the_run_with_the_first_cause(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]]
) -> None:
    config, models = setup(max_failed_share=0.0)
    with pytest.raises(ValueError, match=r"no finite score.*RuntimeError: the board is gone") as caught:
        first_batch(config, models, prompts)
    assert "vowels.py" in str(caught.value)


def test_a_resumed_run_has_the_same_conversations(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]], tmp_path: Path
) -> None:
    config, models = setup(ptx=None, num_epochs=1)
    asked = [Prompt(prompt_id=str(i), messages=tuple(messages), kind="") for i, messages in enumerate(ASKED)]

    def run(folder: Path, *, stops: bool = False) -> None:
        roles = Roles.in_process(config, ENGINE, models, ASKED)
        if stops:
            make_mortal(roles)
        loop.train(StageContext(folder, 11, 1, ENGINE), config, roles, models, Fitting(asked, prompts))
        roles.close()

    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", stops=True)
    run(tmp_path / "parts")
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert [line["responses"] for line in whole] == [line["responses"] for line in parts]
    assert [line["scores"] for line in whole] == [line["scores"] for line in parts]
    samples = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    assert any("\n[environment] " in sample["response"] for sample in samples)


@pytest.mark.parametrize("kind", ["asynchronous", "continuous"])
def test_conversations_that_failed_are_sampled_again_by_a_resumed_run(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]], tmp_path: Path, kind: str
) -> None:
    """The board breaks after the first iteration. The rollout sampled ahead then is in no checkpoint."""
    config, models = setup(
        ptx=None, num_epochs=1, max_failed_share=0.0, num_iterations=4, placement={"kind": kind, "max_staleness": 1},
    )  # fmt: skip
    stage = tmp_path / "ppo"
    broken = f"Path('{stage}/metrics.jsonl').stat().st_size and not Path('{stage}/mended').exists()"
    source = CLASS.replace("self.seed % 4 == 0", broken)
    (tmp_path / "vowels.py").write_text(f"from pathlib import Path\n{source}")
    asked = [Prompt(prompt_id=str(i), messages=tuple(messages), kind="") for i, messages in enumerate(ASKED)]

    def run() -> None:
        roles = Roles.in_process(config, ENGINE, models, ASKED)
        loop.train(StageContext(stage, 11, 1, ENGINE), config, roles, models, Fitting(asked, prompts))
        roles.close()

    with pytest.raises(MissingScoresError, match="the board is gone"):
        run()
    saved = max((stage / "checkpoints").glob("step-*"))
    assert not [*saved.glob("rollout-*")]
    (stage / "mended").touch()
    run()
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["failed_scores"]) for line in lines] == [(step, 0) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("source", "name", "settings", "message"),
    [
        (CLASS, "Nothing", {}, r"has no function 'Nothing'"),
        (CLASS, "Counting", {}, r"is not a subclass of ppo\.environments\.environment\.Environment"),
        (CLASS, "Vowels", {"most_words": "x"}, r"settings of .*: most_words: Input should be a valid integer"),
        (CLASS, "Vowels", {"least": 1}, r"settings of .*: least: Extra inputs are not permitted"),
        ("import nowhere_at_all", "Vowels", {}, r"No module named 'nowhere_at_all'"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_named(
    source: str, name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "vowels.py").write_text(source)
    kind = OwnEnvironment(class_name=f"{tmp_path}/vowels.py:{name}", settings=settings)
    with pytest.raises(ValueError, match=message):
        kind.check([])


@pytest.mark.parametrize(("returned", "is_right"), [('named_fields(("item",), "Vowels")', True), ('["item"]', False)])
def test_a_class_gets_the_fields_of_rows_that_it_names(returned: str, is_right: bool, tmp_path: Path) -> None:
    wants = f"    most_words: int = 3\n\n    @property\n    def row_fields(self):\n        return {returned}\n"
    source = "from training.data import named_fields\n" + CLASS.replace("    most_words: int = 3\n", wants)
    (tmp_path / "vowels.py").write_text(source)
    kind = OwnEnvironment(class_name=f"{tmp_path}/vowels.py:Vowels")
    if is_right:
        assert kind.row_fields.of("here", {"item": "a pen", "price": 3}) == {"item": "a pen"}
        with pytest.raises(ValueError, match=r"^here: field 'item', of Vowels, is missing$"):
            kind.row_fields.of("here", {"price": 3})
    else:  # such rows would be empty, without a word
        with pytest.raises(ValueError, match=r"row_fields is \['item'\]; a property that returns named_fields"):
            _ = kind.row_fields


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"kind": "calculator"}}, 'reward.kind "none" leaves nothing to learn from'),
        ({"environment": {"kind": "chess"}}, 'a table with kind "class"'),
        ({"sampler": {"tensor_parallel_size": 2}}, "sampler.tensor_parallel_size 2 with environment.kind 'class'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        setup(**changes)


def test_a_reward_reads_the_last_turn_and_the_environments_rewards_are_added(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "length.py").write_text(
        "def length(prompts, responses):\n    return [len(text) for text in responses]\n"
    )
    config, models = setup(reward={"kind": "function", "function": f"{tmp_path}/length.py:length"})
    assert config.external_reward is not None
    batch, _ = first_batch(config, replace(models, reward=config.external_reward), prompts)
    tokenizer = Tokenizer.load(models.sft)

    def expected(row: int) -> float:
        last = tokenizer.decode(batch.rollout.turns(row)[-1][1]).strip()
        return len(last) + float(batch.rollout.turn_rewards_BR[row].sum())

    scores: Tensor = batch.scores_B
    for row in range(16):
        assert math.isnan(scores[row]) or float(scores[row]) == pytest.approx(expected(row))
