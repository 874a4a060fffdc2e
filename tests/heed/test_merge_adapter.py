"""`heed merge-adapter`, from a real PEFT adapter to a model that transformers loads."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from typer.testing import CliRunner

from heed.cli import app
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from tests.hub_server import COMMIT, NAME, serve

TOKENS = torch.arange(10, 34).view(2, 12)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an adapter of it, and an adapter that makes it a classifier."""
    folder = tmp_path_factory.mktemp("adapters")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    Tokenizer.train(["a cat sat on a mat and saw one red bird"] * 9, 300, "chat").save(folder / "base")
    for task, kind in (("CAUSAL_LM", "AutoModelForCausalLM"), ("SEQ_CLS", "AutoModelForSequenceClassification")):
        options = {"num_labels": 1} if task == "SEQ_CLS" else {}
        model = getattr(transformers, kind).from_pretrained(folder / "base", **options)
        lora = peft.LoraConfig(task_type=task, r=3, lora_alpha=9, target_modules="all-linear")
        adapted = peft.get_peft_model(model, lora).eval()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
        adapted.save_pretrained(folder / task)
        with torch.no_grad():
            torch.save(adapted(TOKENS).logits, folder / f"{task}.pt")
    return folder


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge-adapter", *map(str, arguments)])
    return result.exit_code, result.output + str(result.exception or "")


@pytest.mark.parametrize(
    ("task", "kind"), [("CAUSAL_LM", "AutoModelForCausalLM"), ("SEQ_CLS", "AutoModelForSequenceClassification")]
)
def test_a_merged_adapter_is_a_model_like_any_other(made: Path, tmp_path: Path, task: str, kind: str) -> None:
    code, output = run(made / task, tmp_path / "model")
    assert code == 0, output
    assert "base with the adapter" in output.replace("\n", " ")
    with torch.no_grad():
        logits = getattr(transformers, kind).from_pretrained(tmp_path / "model").eval()(TOKENS).logits
    torch.testing.assert_close(logits, torch.load(made / f"{task}.pt"), atol=2e-5, rtol=1e-5)
    assert Tokenizer.load(tmp_path / "model") == Tokenizer.load(made / "base")
    code, output = run(made / task, tmp_path / "model")
    assert code == 1
    assert "exists already; the name of a new folder was expected" in output


def test_another_base_than_the_one_that_the_adapter_names_is_told(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "base", tmp_path / "other")
    code, output = run(made / "CAUSAL_LM", tmp_path / "model", "--base", tmp_path / "other")
    assert code == 0, output
    told = output.replace("\n", " ")
    assert f"warning: {made / 'CAUSAL_LM'} names {made / 'base'} as its model, not {tmp_path / 'other'}" in told
    assert "warning" not in run(made / "CAUSAL_LM", tmp_path / "again", "--base", made / "base")[1]


def test_mistakes_are_named_and_leave_nothing(made: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((made / "CAUSAL_LM" / name).read_bytes())
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for changes, options, message in (
        ({"use_dora": True}, (), "use_dora is True, which Heed does not support"),
        ({"base_model_name_or_path": None}, (), "the adapter names no model; --base MODEL was expected"),
        ({}, ("--base", tmp_path / "nowhere"), "no such folder"),
        ({}, ("--base", made / "SEQ_CLS"), "it is an adapter, not a model"),
        ({"task_type": "SEQ_CLS"}, (), "score.weight: expected [1, 32], missing"),
    ):
        path.write_text(json.dumps({**config, **changes}))
        code, output = run(tmp_path, tmp_path / "model", *options)
        assert code == 1
        assert message in output.replace("\n", " ")
        assert not (tmp_path / "model").exists()


def test_a_base_that_has_the_adapter_merged_already_is_refused(made: Path, tmp_path: Path) -> None:
    """A run writes model/ and adapter/ next to each other."""
    assert run(made / "CAUSAL_LM", tmp_path / "model")[0] == 0
    shutil.copytree(made / "CAUSAL_LM", tmp_path / "adapter")
    code, output = run(tmp_path / "adapter", tmp_path / "twice", "--base", tmp_path / "model")
    assert code == 1
    assert "has this adapter merged already; the model that it was trained on" in output.replace("\n", " ")
    assert not (tmp_path / "twice").exists()
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "runs/gone/model"}))
    code, output = run(tmp_path / "adapter", tmp_path / "twice")
    assert code == 1
    assert "names runs/gone/model as the model; --base MODEL can name another" in output.replace("\n", " ")
    with pytest.raises(ValueError, match=r"an adapter, not a model. .*model is the model that it is merged into"):
        model_directory(str(tmp_path / "adapter"))


def test_an_adapter_in_the_place_of_a_model_names_the_command(made: Path) -> None:
    with pytest.raises(ValueError, match=r"it is an adapter.*`heed merge-adapter .*CAUSAL_LM OUTPUT`"):
        model_directory(str(made / "CAUSAL_LM"))


def test_an_adapters_folder_is_no_model_for_any_command_either(made: Path, tmp_path: Path) -> None:
    """Some adapters are saved with their base's config.json."""
    folder = tmp_path / "adapter"
    shutil.copytree(made / "CAUSAL_LM", folder)
    shutil.copy(made / "base" / "config.json", folder)
    for arguments in (("inspect", folder), ("verify-sampler", "heed", folder), ("chat", folder)):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert f"`heed merge-adapter {folder} OUTPUT` to merge it into its base" in str(result.exception)


def test_a_token_without_an_embedding_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "CAUSAL_LM", tmp_path / "adapter")
    tokenizer = Tokenizer.train([f"the number {number} follows {number - 1}" for number in range(99)], 320, "chat")
    tokenizer.save(tmp_path / "adapter")
    code, output = run(tmp_path / "adapter", tmp_path / "model")
    assert code == 1
    assert "tokenizer.json has 320 tokens; at most 300 were expected, of which" in output


def test_the_base_is_the_revision_that_the_adapter_names(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made / "CAUSAL_LM", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = {**json.loads(path.read_text()), "base_model_name_or_path": NAME, "revision": "v2"}
    path.write_text(json.dumps(config))
    with serve(made / "base") as hub:
        hub.reach(monkeypatch, tmp_path / "cache")
        code, output = run(tmp_path / "adapter", tmp_path / "a" / "model")
    assert code == 0, output
    assert (tmp_path / "cache" / "models--owner--tiny" / "snapshots" / COMMIT / "config.json").is_file()
    assert hub.revisions == {"v2"}
