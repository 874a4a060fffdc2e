"""Counts the source files of Heed that three walks enter: `python -m benchmarks.files_entered [--list]`.

The walks are what a new reader follows: one PPO iteration, one forward pass of a language model with two layers, and
training a reward model from a file of rankings. A file counts if one of its functions is called; imports and start-up
do not count. `--list` names the files. tests/test_budgets.py has the bounds.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import preferences.formats.registry  # noqa: F401  otherwise the walk would import it
from benchmarks.speed.own import ppo_config
from files.importing import PACKAGES
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from reward import stage as reward
from reward.comparisons import RankingsConfig
from reward.config import RewardConfig
from reward.prepared import ARRAYS, PreparedRankings, ranking_parts
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import StageContext
from training.tokens import write_arrays

ROOT = Path(__file__).parents[1]
SHAPE = ModelConfig(
    vocab_size=300,
    max_position_embeddings=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
)
ENGINE = EngineConfig(trackers=())
NUM_PROMPTS = 16


def files_entered(walk: Callable[[], Any]) -> list[str]:
    """Returns the files of Heed's packages that have a function called by `walk`, in any thread of this process."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        walk()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = (Path(name).relative_to(ROOT) for name in entered if Path(name).is_relative_to(ROOT))
    return sorted(str(path) for path in paths if path.parts[0] in PACKAGES)


def write_models(folder: Path) -> None:
    """Writes a policy and a reward model with random weights, and a file of rankings."""
    texts = [f"the cat sat on mat {number} and saw {number % 7} red birds" for number in range(40)]
    tokenizer = Tokenizer.train(texts, SHAPE.vocab_size, "chat")
    for name, model in (("policy", LanguageModel(SHAPE)), ("reward", ScalarModel(SHAPE))):
        init_weights(model, 1)
        save_model(folder / name, model, model.state_dict(), tokenizer)
    rows = [{"prompt": text, "chosen": "the cat", "rejected": "a red bird"} for text in texts]
    (folder / "rankings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ppo_iteration(folder: Path) -> Callable[[], Any]:
    """Returns the second iteration of a run with all roles in this process; the first one also does one-time work."""
    tokenizer = Tokenizer.load(folder / "policy")
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": f"cat {number}"}]) for number in range(NUM_PROMPTS)]
    config = ppo_config(2, NUM_PROMPTS, BatchConfig(batch_size=8, micro_batch_size=8), 6)
    models = InitialModels(folder / "policy", folder / "reward", ScoreScale(0.0, 1.0), None)
    roles = Roles.in_process(config, ENGINE, models)
    controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=0, seed=0)
    controller.step(0)
    return lambda: controller.step(1)


def forward_pass() -> Callable[[], Any]:
    """Returns a pass of a language model over a batch of two sequences."""
    model = LanguageModel(SHAPE)
    init_weights(model, 1)
    tokens_BT = torch.arange(24).view(2, 12)
    return torch.inference_mode()(lambda: model(tokens_BT))


def reward_model(folder: Path) -> Callable[[], Any]:
    """Returns what the driver and its only rank do to train a reward model on the file of rankings."""
    config = RewardConfig(
        rankings=RankingsConfig(source=str(folder / "rankings.jsonl")),
        batch=BatchConfig(batch_size=8, micro_batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    start, context = folder / "policy", StageContext(folder / "reward-run", 0, 1, ENGINE)

    def walk() -> None:
        tokenizer = Tokenizer.load(start)
        network = on_meta(reward.network_source(start, 0.0, 0, config.labels).build)
        parts = partial(ranking_parts, tokenizer, config, context.seed, network.config.max_position_embeddings)
        write_arrays(folder / "tokens", ARRAYS, parts)
        prepared = PreparedRankings(folder / "tokens", config)
        reward.train(context, config, start, prepared)

    return walk


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        walks = {
            "one PPO iteration": ppo_iteration(folder),
            "a forward pass of two layers": forward_pass(),
            "rankings to a reward model": reward_model(folder),
        }
        for what, walk in walks.items():
            entered = files_entered(walk)
            print(f"{what}: {len(entered)} files")
            if "--list" in sys.argv[1:]:
                print("".join(f"    {path}\n" for path in entered), end="")


if __name__ == "__main__":
    main()
