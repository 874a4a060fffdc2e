"""Reward models on an encoder, on another reward model, and the judge that reads texts or tokens."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from lm.encoder import SequenceClassifier
from lm.model import LanguageModel, ScalarModel
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, load_model, read_config, save_model
from reward.config import RankingsConfig, RewardConfig
from reward.scoring import RewardModel, head_scores, network_folder
from reward.stage import network_source
from tests.rows import jsonl
from tests.token_files import train_reward
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import StageContext

ASKED = [{"role": "user", "content": "Where is the dog?"}]


def write_rows(path: Path, rows: list[dict[str, object]]) -> DataConfig:
    path.write_text(jsonl(rows))
    return DataConfig(source=str(path))


def config_for(folder: Path, **changes: object) -> RewardConfig:
    """Responses with more exclamation marks are better."""
    rankings: list[dict[str, object]] = [
        {
            "task_id": f"t{i}",
            "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
            "responses": ["Far", "Far!!", "Far!"],
            "ranks": [3, 1, 2],
            "labeler": "ann",
        }
        for i in range(40)
    ]
    demonstrations: list[dict[str, object]] = [{"prompt": "The fox?", "completion": "In the bush!"}]
    values = {
        "rankings": RankingsConfig(source=write_rows(folder / "rankings.jsonl", rankings).source),
        "demonstrations": (write_rows(folder / "demonstrations.jsonl", demonstrations),),
        "heldout_share": 0.25,
        "num_epochs": 6.0,
        "batch": BatchConfig(batch_size=8, micro_batch_size=4),
        "optimizer": OptimizerConfig(learning_rate=0.01, schedule="constant"),
        "save_every_steps": 100,
        "evaluate_every_steps": 100,
    }
    return RewardConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, encoder_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    context = StageContext(folder / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    train_reward(context, config_for(folder), encoder_folder)
    return folder / "run"


def test_an_encoder_learns_the_preference(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert results["heldout_accuracy"]["mean"] > 0.9
    judge = RewardModel.load(finished / "model")
    assert isinstance(judge.network, SequenceClassifier)
    shown = judge.tokenizer.encode("<|end|>The fox?<|end|>In the bush!<|end|>")
    assert judge.score_sequences([shown]) == pytest.approx([0.0], abs=1e-5)  # the only demonstration


@torch.no_grad()
def test_padding_changes_no_score_and_transformers_gives_the_same(finished: Path) -> None:
    judge = RewardModel.load(finished / "model")
    sequences = [
        judge.tokenizer.encode(f"<|end|>The fox?<|end|>{text}<|end|>") for text in ("Far", "In the bush!!", "!")
    ]
    together = head_scores(judge.network, sequences)[:, 0].tolist()
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(finished / "model").eval()
    assert theirs.config.num_labels == 1
    for score, tokens in zip(together, sequences, strict=True):
        assert score == pytest.approx(float(head_scores(judge.network, [tokens])), abs=1e-5)
        assert score == pytest.approx(float(theirs(torch.tensor([tokens])).logits), abs=1e-4)


def test_a_reward_model_is_trained_further(finished: Path, tmp_path: Path) -> None:
    """A rate of almost nothing leaves what it started from, its head included, up to the shift."""
    optimizer = OptimizerConfig(learning_rate=1e-12, schedule="constant")
    config = config_for(tmp_path, num_epochs=0.01, optimizer=optimizer)
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    train_reward(context, config, finished / "model")
    first, again = (load(network_folder(folder)) for folder in (finished / "model", context.model_folder))
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-5, rtol=0, msg=name)


def test_a_decoders_reward_model_is_trained_further(model_folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = load(network_source(model_folder, 0.0, 4))
    assert isinstance(model, ScalarModel)
    model.bias.fill_(0.7)
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    again = load(network_source(tmp_path, 0.0, 5))
    assert torch.equal(again.score.weight, model.score.weight)
    assert float(again.bias) == pytest.approx(0.7)


def test_blocks_of_a_reward_model_are_dropped_and_added(
    model_folder: Path, encoder_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """From a policy, from an encoder, and from a reward model, whose head is kept."""
    old = load(network_source(model_folder, 0.0, 4))
    assert isinstance(old, ScalarModel)
    old.bias.fill_(0.7)
    save_model(tmp_path / "reward", old, old.state_dict(), tokenizer)
    for start in (model_folder, tmp_path / "reward"):
        new = load(network_source(start, 0.0, 5, dropped=1, added=2))
        assert new.config.num_hidden_layers == 3
        weights = new.state_dict()
        first, second = ((f"decoder.blocks.{block}.mlp.up.weight") for block in (0, 1))
        assert torch.equal(weights[first], old.state_dict()[first])
        assert not torch.equal(weights[second], old.state_dict()[second])
        assert torch.equal(weights["score.weight"], old.score.weight) == (start != model_folder)
        assert float(weights["bias"]) == 0
    whole = load(network_source(encoder_folder, 0.0, 4))
    shorter = load(network_source(encoder_folder, 0.0, 4, dropped=1))
    assert shorter.config.num_hidden_layers == whole.config.num_hidden_layers - 1
    assert all(torch.equal(t, whole.state_dict()[n]) for n, t in shorter.state_dict().items() if "blocks" in n)


def test_a_classifier_of_several_labels_is_no_reward_model(
    encoder_folder: Path, tmp_path: Path, masking_tokenizer: Tokenizer
) -> None:
    model = SequenceClassifier(read_config(encoder_folder, "masked")[0], ["good", "bad", "neither"])
    save_model(tmp_path, model, model.state_dict(), masking_tokenizer)
    with pytest.raises(ValueError, match=r"config.json: id2label names good, bad, neither; score was expected"):
        network_source(tmp_path, 0.0, 0)


def test_a_pooler_that_the_checkpoint_has_is_taken(encoder_folder: Path, tmp_path: Path) -> None:
    """Published encoders keep the layer that pools the first token."""
    from safetensors.torch import load_file, save_file

    held = load_file(encoder_folder / "model.safetensors")
    pooler = {"bert.pooler.dense.weight": torch.full((16, 16), 0.5), "bert.pooler.dense.bias": torch.full((16,), 0.25)}
    for path in encoder_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({**held, **pooler}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(network_source(tmp_path, 0.0, 0))
    assert isinstance(model, SequenceClassifier)
    assert torch.equal(model.pooler.weight, torch.full((16, 16), 0.5))
    assert torch.equal(model.pooler.bias, torch.full((16,), 0.25))
    assert float(model.classifier.weight.detach().std()) > 0


def test_a_judge_with_the_policys_tokens_reads_them_and_closes_what_was_cut_off(
    model_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = load(network_source(model_folder, 0.0, 4))
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    judge, end = RewardModel.load(tmp_path), tokenizer.end_id
    prompt = tokenizer.encode_prompt(ASKED)
    responses = [[*tokenizer.encode(" Far."), end], tokenizer.encode(" Far aw")]
    found = judge.score(tokenizer, [ASKED] * 2, [prompt] * 2, responses)
    whole = [[*prompt, *responses[0]], [*prompt, *responses[1], end]]
    assert [[*tokens] for tokens in judge.encoded(tokenizer, [ASKED] * 2, [prompt] * 2, responses)] == whole
    with torch.no_grad():
        expected = [float(judge.network(torch.tensor([tokens]))[0, -1]) for tokens in whole]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_judge_with_other_tokens_reads_the_texts(finished: Path, model_folder: Path) -> None:
    policy, judge = Tokenizer.load(model_folder), RewardModel.load(finished / "model")
    assert judge.tokenizer != policy
    responses = [[*policy.encode(" Far."), policy.end_id], policy.encode(" Far aw")]
    read = [[*tokens] for tokens in judge.encoded(policy, [ASKED] * 2, [policy.encode_prompt(ASKED)] * 2, responses)]
    texts = ["<|end|>Where is the dog?<|end|>Far.<|end|>", "<|end|>Where is the dog?<|end|>Far aw<|end|>"]
    assert read == [judge.tokenizer.encode(text) for text in texts]


def test_a_language_model_is_no_judge(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"architectures is \['LlamaForCausalLM'\]; .*ForSequenceClassification"):
        RewardModel.load(model_folder)
    assert load_model(model_folder, LanguageModel).config == ModelFolder(model_folder, LanguageModel).build().config
