"""Supervised fine-tuning end to end on one CPU rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm.config import ModelConfig
from lm.generation import generate
from lm.gguf_files import export_gguf
from lm.hub import model_directory
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from sft.demonstrations import Limit, demonstration_parts
from sft.stage import SFTConfig, make_objective, policy_source, train
from tests.models import load_language_model
from tests.rows import jsonl
from tests.token_files import sft_tokens
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig
from training.engine import StageContext
from training.metrics import read_metrics
from training.tokens import FITS, SKIPPED, TRUNCATED, sequence_arrays

PAIRS = [("Where is the fox?", "In the bush."), ("Where is the dog?", "Far."), ("The bird?", "In the hand, 山.")]


def write_data(path: Path, pairs: list[tuple[str, str]]) -> tuple[DataConfig, ...]:
    path.write_text(jsonl({"prompt": prompt, "completion": answer} for prompt, answer in pairs))
    return (DataConfig(source=str(path)),)


def config_for(folder: Path, **changes: Any) -> SFTConfig:
    values = {
        "demonstrations": write_data(folder / "train.jsonl", PAIRS * 12),
        "heldout": write_data(folder / "heldout.jsonl", PAIRS[:2]),
        "chat_template": "chat",
        "seq_len": 64,
        "num_epochs": 12.0,
        "batch": BatchConfig(batch_size=4, micro_batch_size=2),
        "optimizer": OptimizerConfig(learning_rate=0.02, schedule="linear"),
        "save_every_steps": 10,
        "evaluate_every_steps": 100,
    }
    return SFTConfig(**(values | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, dict[str, Any]]:
    """The run directory and results.json."""
    folder = tmp_path_factory.mktemp("sft")
    context = StageContext(folder / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    config = config_for(folder)
    train(context, config, model_folder, sft_tokens(folder, config, model_folder))
    return folder / "run", json.loads((folder / "run" / "results.json").read_text())


def test_loss_falls_and_results_are_consistent(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    lines = read_metrics(folder / "metrics.jsonl")
    assert results["num_steps"] == len(lines) == round(12 * results["num_rows"] / 4)
    assert results["heldout_loss"] < results["heldout_loss_before"] - 1
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert 0.5 < results["packing_efficiency"] <= 1


@torch.no_grad()
@pytest.mark.parametrize("which", ["before", "after"])
def test_heldout_loss_is_the_mean_over_assistant_tokens(
    finished: tuple[Path, dict[str, Any]], model_folder: Path, which: str
) -> None:
    """Conversation by conversation, unpacked, with the prompt's length as the only mask."""
    folder, results = finished
    source = model_folder if which == "before" else folder / "model"
    tokenizer, model = Tokenizer.load(source), load_language_model(source).eval()
    nats, count = 0.0, 0
    for prompt, answer in PAIRS[:2]:
        head = tokenizer.encode(f"<|user|> {prompt}<|end|><|assistant|>")
        tail = tokenizer.encode(f" {answer}<|end|>")
        logprobs = torch.log_softmax(model(torch.tensor([head + tail]))[0].double(), dim=-1)
        nats -= sum(float(logprobs[len(head) + i - 1, token]) for i, token in enumerate(tail))
        count += len(tail)
    name = "heldout_loss_before" if which == "before" else "heldout_loss"
    assert results[name] == pytest.approx(nats / count, rel=1e-5)


def test_the_model_answers_and_stops(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    tokenizer, model = Tokenizer.load(folder / "model"), load_language_model(folder / "model").eval()
    prompt = tokenizer.encode_prompt([{"role": "user", "content": PAIRS[1][0]}])
    found = generate(model, [prompt], max_new_tokens=24, end_ids=[tokenizer.end_id], choice=Choice(0), seeds=[0])
    assert found.finished == [True]
    assert tokenizer.decode(found.responses[0]).strip() in [answer for _, answer in PAIRS]


def test_the_template_of_the_job_goes_into_the_model(tmp_path: Path, model_folder: Path) -> None:
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    optimizer = OptimizerConfig(learning_rate=0.001, schedule="constant")
    config = config_for(tmp_path, chat_template="continuation", num_epochs=0.1, optimizer=optimizer)
    train(context, config, model_folder, sft_tokens(tmp_path, config, model_folder))
    ours = Tokenizer.load(context.model_folder)
    assert ours.render([{"role": "user", "content": "A"}], add_generation_prompt=True) == "A"
    assert json.loads((context.folder / "results.json").read_text())["num_steps"] == 1


def test_blocks_of_a_decoder_are_dropped_and_added(tmp_path: Path, model_folder: Path) -> None:
    """All but the new blocks are the start's; transformers and GGUF hold the trained model."""
    config = config_for(tmp_path, dropped_layers=1, added_layers=2)
    start = dict(ModelFolder(model_folder, LanguageModel).tensors())
    weights = dict(policy_source(model_folder, config, seed=5).tensors())
    kept = {name for name in start if ".blocks.1." not in name}
    assert all(torch.equal(weights[name], start[name]) for name in kept)
    assert weights.keys() - start.keys() == {name.replace(".1.", ".2.") for name in start.keys() - kept}
    name = "decoder.blocks.{}.mlp.up.weight"
    drawn = [weights[name.format(block)] for block in (1, 2)]
    assert not torch.equal(drawn[0], start[name.format(1)])
    assert not torch.equal(*drawn)
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    train(context, config, model_folder, sft_tokens(tmp_path, config, model_folder))
    results = json.loads((context.folder / "results.json").read_text())
    assert results["heldout_loss"] < results["heldout_loss_before"] - 1
    ours, tokens = load_language_model(context.model_folder).eval(), torch.tensor([[5, 80, 17, 200]])
    assert ours.config.num_hidden_layers == 3
    theirs = AutoModelForCausalLM.from_pretrained(context.model_folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    export_gguf(context.model_folder, tmp_path / "model.gguf", "f32")
    written = load_language_model(model_directory(str(tmp_path / "model.gguf")))
    assert all(torch.equal(own, written.state_dict()[name]) for name, own in ours.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropped_layers": 2}, r"dropped_layers is 2 and added_layers 0; the model has 2 blocks, and at least one"),
        ({"dropped_layers": 3, "added_layers": 1}, r"dropped_layers is 3 and added_layers 1; the model has 2 blocks"),
        ({"added_layers": 1, "lora": {"rank": 2}}, r"lora with dropped_layers 0 and added_layers 1: adapters are"),
    ],
)
def test_blocks_that_cannot_be_changed_are_named(
    tmp_path: Path, model_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy_source(model_folder, config_for(tmp_path, **changes), seed=5).build()


def test_windows_of_attention_stay_with_their_blocks(tiny_config: ModelConfig) -> None:
    banded = tiny_config.model_copy(update={"num_hidden_layers": 4, "sliding_window": (0, 0, 0, 8)})
    assert banded.with_blocks(1, 0).sliding_window == (0,)
    assert [banded.with_blocks(2, 4).window(layer) for layer in range(6)] == [0, 0, 0, 8, 0, 0]


def test_a_conversation_longer_than_a_row_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sources = write_data(tmp_path / "long.jsonl", [PAIRS[0], ("x" * 70, "y")])
    with pytest.raises(ValueError, match=r"long\.jsonl: line 2: the conversation has 7\d tokens; sft.seq_len all"):
        list(demonstration_parts(tokenizer, sources, Limit(False, 64), 0))


STRICT = """{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
<|{{ message.role }}|> {{ message.content }}{{ eos_token }}
{% endfor %}"""


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    conversations = [turns(SHORT), [{"role": "system", "content": "Be brief."}, *turns(SHORT)]]
    path.write_text(jsonl({"messages": messages} for messages in conversations))
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        list(demonstration_parts(tokenizer.with_template(STRICT), (DataConfig(source=str(path)),), Limit(False, 64), 0))
    assert str(refused.value) == f"{path}: line 2: chat_template refuses the conversation: System role not supported"


def test_skipped_rows_are_in_the_results(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "some.jsonl"
    rows = [{"prompt": question, "completion": answer} for question, answer in PAIRS]
    path.write_text(jsonl([{"prompt": "no answer"}, *rows, rows[0]]))
    context = StageContext(tmp_path / "run", 3, 1, EngineConfig(precision="fp32", trackers=()))
    sources = (DataConfig(source=str(path), on_invalid="skip"),)
    config = config_for(tmp_path, demonstrations=sources, num_epochs=0.1)
    train(context, config, model_folder, sft_tokens(tmp_path, config, model_folder))
    results = json.loads((context.folder / "results.json").read_text())
    counted = {"invalid (skipped)": 1, "seen before (kept)": 1}
    assert {"source": str(path), "num_rows": len(rows) + 2, "unusual": counted} in results["sources"]


def test_no_demonstrations_are_refused(tmp_path: Path, model_folder: Path) -> None:
    config = config_for(tmp_path, demonstrations=write_data(tmp_path / "none.jsonl", []))
    data = sft_tokens(tmp_path, config, model_folder)
    with pytest.raises(ValueError, match=r"none\.jsonl: no demonstrations; at least one was expected"):
        make_objective(False, Tokenizer.load(model_folder), config.demonstrations, data.training, 64)


def test_long_conversations_are_skipped_or_cut_and_plain_texts_need_no_template(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    long = [{"prompt": "q", "completion": "x" * 90}, {"prompt": "y" * 90, "completion": "a"}, SHORT]
    sources = (write_rows(tmp_path / "long.jsonl", *long),)
    encoded = [tokenizer.encode_conversation(turns(row)) for row in long]
    for choice, kept, fates in (
        ("skip", [encoded[2]], [SKIPPED, SKIPPED, FITS]),
        ("truncate", [tuple(part[:48] for part in encoded[0]), encoded[2]], [TRUNCATED, SKIPPED, FITS]),
    ):
        (part,) = demonstration_parts(tokenizer, sources, Limit(False, 48, choice), 0)
        expected = sequence_arrays(kept)
        assert part.arrays["overlong"].tolist() == fates
        assert all((part.arrays[name] == array).all() for name, array in expected.items())
    text = (write_rows(tmp_path / "text.jsonl", {"text": "Two and two."}),)
    (part,) = demonstration_parts(tokenizer, text, Limit(False, 48), 0)
    assert part.arrays["tokens"].tolist() == [*tokenizer.encode_plain(["Two and two."])[0], tokenizer.end_id]
    assert part.arrays["counted"].all()
    rendered = (
        write_rows(tmp_path / "rendered.jsonl", {"text": tokenizer.render(turns(SHORT), add_generation_prompt=False)}),
    )
    with pytest.raises(ValueError, match=r"rendered\.jsonl: line 1: the text contains the name of a special token"):
        list(demonstration_parts(tokenizer, rendered, Limit(False, 48), 0))


SHORT = {"prompt": "Why?", "completion": "So."}


def turns(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


def write_rows(path: Path, *rows: dict[str, str]) -> DataConfig:
    path.write_text(jsonl(rows))
    return DataConfig(source=str(path))
