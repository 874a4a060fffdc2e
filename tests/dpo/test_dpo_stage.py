"""The DPO stage on one CPU rank: what it learns, what it leaves, what it refuses, and how it resumes."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dpo.config import DPOConfig
from dpo.policy import COMPARISONS, LOGPROBS, REFERENCE
from lm.tokenizer import Tokenizer
from preferences.rankings import split_rankings
from reward.prepared import read_rankings
from tests.models import load_language_model
from tests.rows import jsonl
from tests.token_files import train_dpo
from training.config import EngineConfig
from training.engine import StageContext
from training.metrics import read_metrics

SEED = 3
Values = dict[str, Any]


def write_rankings(path: Path, num_tasks: int = 40, long_tasks: Sequence[int] = (), objective: str = "") -> None:
    """Responses with more exclamation marks are better; two of every second task are equal, and tied."""
    rows = []
    for labeler, ranks, every in (("ann", [3, 1, 2, 3], 1), ("bo", [2, 1, 1, 2], 3)):
        for i in range(0, num_tasks, every):
            responses = ["Far", "Far!!", "Far!", "Far"][: 3 + i % 2]
            if i in long_tasks:
                responses[1] = "Far!! " * 60
            row = {"task_id": f"t{i}", "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
                   "responses": responses, "ranks": ranks[: 3 + i % 2], "labeler": labeler}  # fmt: skip
            rows.append(row | ({"objective": objective if i % 2 else "calm"} if objective else {}))
    path.write_text(jsonl(rows))


def config_for(folder: Path, **changes: Any) -> DPOConfig:
    if not (folder / "rankings.jsonl").exists():
        write_rankings(folder / "rankings.jsonl")
    values: Values = {
        "rankings": {"source": str(folder / "rankings.jsonl")},
        "heldout_share": 0.25,
        "num_epochs": 4.0,
        "beta": 0.5,
        "batch": {"batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"learning_rate": 0.005, "schedule": "constant"},
        "save_every_steps": 6,
        "evaluate_every_steps": 5,
    }
    return DPOConfig.model_validate(values | changes)


def context_of(folder: Path, **engine: Any) -> StageContext:
    return StageContext(folder, SEED, 1, EngineConfig.model_validate({"precision": "fp32", "trackers": ()} | engine))


def results_of(folder: Path) -> Values:
    found: Values = json.loads((folder / "results.json").read_text())
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, DPOConfig]:
    """The run directory and the config."""
    folder = tmp_path_factory.mktemp("dpo")
    config = config_for(folder)
    train_dpo(context_of(folder / "run"), config, model_folder)
    return folder / "run", config


def test_it_learns_the_preference_from_log_2_on(finished: tuple[Path, DPOConfig]) -> None:
    folder, _ = finished
    lines, results = read_metrics(folder / "metrics.jsonl"), results_of(folder)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert lines[-1]["loss"] < 0.5
    assert lines[-1]["margin"] == pytest.approx(lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"], abs=1e-5)
    assert results["heldout_accuracy"]["mean"] > 0.9
    assert results["margin"]["mean"] > 0.5
    assert results["length_correlation"] > 0.5  # the better ones are longer here
    assert results["pairs"]["chosen_tokens"] > results["pairs"]["rejected_tokens"] >= 2  # the end token counts
    assert 0 < results["num_equal_pairs"] < results["num_pairs"]
    assert results["train_comparisons"] + results["heldout_comparisons"] == 40
    assert results["num_steps"] == len(lines)


def test_implicit_rewards_are_those_of_the_model_that_it_leaves(
    finished: tuple[Path, DPOConfig], model_folder: Path
) -> None:
    """By a loop over texts and tokens; the accuracy over untied pairs of every ranking."""
    folder, config = finished
    after, before = load_language_model(folder / "model").eval(), load_language_model(model_folder).eval()
    tokenizer, found = Tokenizer.load(folder / "model"), json.loads((folder / "heldout_rewards.json").read_text())
    _, heldout = split_rankings(read_rankings(config.rankings), 0.25, SEED)
    margins, before_of = [], dict[str, list[float]]()
    for ranking in heldout:
        rewards, sums = [], []
        for response in ranking.responses:
            prompt = tokenizer.encode_prompt([{"role": "user", "content": ranking.prompt[0].content}])
            answer = [*tokenizer.encode(f" {response}"), tokenizer.end_id]
            logprobs = [
                sum(
                    float(F.log_softmax(model(torch.tensor([[*prompt, *answer]]))[0].detach(), -1)[t - 1, token])
                    for t, token in enumerate(answer, len(prompt))
                )
                for model in (after, before)
            ]
            rewards.append(config.beta * (logprobs[0] - logprobs[1]))
            sums.append(logprobs[1])
        assert found[ranking.task_id] == pytest.approx(rewards, abs=1e-3)
        before_of[ranking.task_id] = sums
        for i, one in enumerate(ranking.ranks):
            margins += [rewards[i] - rewards[j] for j, other in enumerate(ranking.ranks) if one < other]
    results = results_of(folder)
    assert results["margin"]["mean"] == pytest.approx(sum(margins) / len(margins), abs=1e-3)
    kept = [value for sums in before_of.values() for value in sums]
    assert load_file(folder / REFERENCE)[LOGPROBS][-len(kept) :].tolist() == pytest.approx(kept, abs=1e-3)


def test_a_killed_run_ends_like_an_untouched_one(finished: tuple[Path, DPOConfig], model_folder: Path) -> None:
    """From every checkpoint and from the reference alone, which is read; the folder of another model's is refused."""
    folder, config = finished
    expected = {name: sha256(folder / name) for name in ("model/model.safetensors", "heldout_rewards.json", REFERENCE)}
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    for kept in (checkpoints[:1], []):
        run = folder.parent / f"killed-{len(kept)}"
        run.mkdir()
        shutil.copy(folder / REFERENCE, run / REFERENCE)
        for name in kept:
            shutil.copytree(folder / "checkpoints" / name, run / "checkpoints" / name)
        train_dpo(context_of(run), config, model_folder)
        assert {name: sha256(run / name) for name in expected} == expected
    run = folder.parent / "other"
    run.mkdir()
    stored = load_file(folder / REFERENCE)[LOGPROBS]
    of = json.loads(_header(folder / REFERENCE))["__metadata__"][COMPARISONS]
    save_file({LOGPROBS: stored + 0.5}, run / REFERENCE, {COMPARISONS: of})
    with pytest.raises(ValueError, match=r"differ by up to 0.5 nats per response.* log 2 = 0.6931 was expected"):
        train_dpo(context_of(run), config, model_folder)
    save_file({LOGPROBS: stored}, run / REFERENCE, {COMPARISONS: "0" * 64})
    with pytest.raises(
        ValueError, match=r"reference.safetensors: these reference log-probabilities belong to other comparisons"
    ):
        train_dpo(context_of(run), config, model_folder)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


@pytest.mark.parametrize(
    ("changes", "first_loss"),
    [
        ({"loss": "ipo", "beta": 0.2}, None),
        ({"loss": "length_normalised"}, math.log(2)),
        ({"loss": "simpo", "margin": 0.5}, None),
        ({"ties": "davidson"}, None),
        ({"sft_coef": 1.0, "labeler_weights": "reliability", "dropout": 0.1}, None),
    ],
    ids=["ipo", "length-normalised", "simpo", "davidson", "sft-term"],
)
def test_other_losses_learn_it_too(
    tmp_path: Path, model_folder: Path, changes: Values, first_loss: float | None
) -> None:
    rate = {"learning_rate": 0.002, "schedule": "constant"}
    config = config_for(tmp_path, **{"num_epochs": 8.0, "optimizer": rate, **changes})
    train_dpo(context_of(tmp_path / "run", precision="bf16"), config, model_folder)
    lines, results = read_metrics(tmp_path / "run" / "metrics.jsonl"), results_of(tmp_path / "run")
    assert results["heldout_accuracy"]["mean"] > 0.9
    assert lines[-1]["loss"] < lines[0]["loss"]
    if first_loss is not None:
        assert lines[0]["loss"] == pytest.approx(first_loss, abs=2e-2)
    if config.ties == "davidson":
        assert results["learned_nu"] > 0
        # The folder holds a language model and nothing else.
        assert "nu" not in load_file(tmp_path / "run" / "model" / "model.safetensors")
    if not config.preference_loss.has_reference:
        # The report's log-probs from before training are those of held-out rankings alone.
        stored = load_file(tmp_path / "run" / REFERENCE)[LOGPROBS]
        assert 3 <= len(stored) / results["heldout_comparisons"] <= 4  # responses of each
        assert results["pairs"]["chosen_logprob"] != results["pairs"]["chosen_logprob_before"]
    if config.sft_coef:
        assert lines[-1]["sft_loss"] < lines[0]["sft_loss"]
        assert results["pairs"]["chosen_logprob"] > results["pairs"]["chosen_logprob_before"]


def test_rows_that_are_too_long_follow_on_overlong(tmp_path: Path, model_folder: Path) -> None:
    write_rankings(tmp_path / "rankings.jsonl", long_tasks=(1, 2))
    with pytest.raises(
        ValueError,
        match=r"rankings\.jsonl: line \d+: prompt and response have .* context is 96 \(dpo.on_overlong = \"skip\" or",
    ):
        train_dpo(context_of(tmp_path / "refuse"), config_for(tmp_path), model_folder)
    for what in ("skip", "truncate"):
        config = config_for(tmp_path, on_overlong=what, num_epochs=0.3)
        train_dpo(context_of(tmp_path / what), config, model_folder)
        results = results_of(tmp_path / what)
        skipped, truncated = (2, 0) if what == "skip" else (0, 2)
        assert results["overlong"] == {"num_rows": 40, "num_truncated": truncated, "num_skipped": skipped}
        assert results["train_comparisons"] + results["heldout_comparisons"] == 40 - skipped


def test_rankings_of_several_objectives_need_a_name(tmp_path: Path, model_folder: Path) -> None:
    write_rankings(tmp_path / "rankings.jsonl", objective="loud")
    for named, shown in (("", r"\[\]"), ("bold", r"\['bold'\]")):
        with pytest.raises(
            ValueError, match=rf"dpo.objective is {shown}, but the rankings .* the objectives calm, loud"
        ):
            train_dpo(context_of(tmp_path / "run"), config_for(tmp_path, objective=named), model_folder)
    train_dpo(context_of(tmp_path / "run"), config_for(tmp_path, objective="loud", num_epochs=0.5), model_folder)
    results = results_of(tmp_path / "run")
    assert results["train_comparisons"] + results["heldout_comparisons"] == 20
