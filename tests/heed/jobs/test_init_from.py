"""A run that starts from a published model: its weights, shape and vocabulary, and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from lm.hub import model_directory
from lm.tokenizer import END, Tokenizer
from tests.models import load_language_model

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
Published = Callable[..., Path]


@pytest.fixture
def published(tmp_path: Path, tokenizer: Tokenizer) -> Published:
    """A random Qwen2 with a tokenizer like those of published models: its end token in an object, fields changed or
    missing."""

    def make(**fields: Any) -> Path:
        folder = tmp_path / "published"
        config = transformers.Qwen2Config(
            vocab_size=288, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=28, max_position_embeddings=400, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(3)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        tokenizer.save(folder)
        path = folder / "tokenizer_config.json"
        values = {**json.loads(path.read_text()), "eos_token": {"content": END}, **fields}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
        return folder

    return make


def job_without_model(tmp_path: Path) -> Path:
    text = DEBUG.read_text()
    start, end = text.index("[model]"), text.index("[pretrain]")
    path = tmp_path / "job.toml"
    path.write_text(text[:start] + text[end:])
    return path


@pytest.mark.nightly
@pytest.mark.usefixtures("one_ray")
def test_a_run_goes_on_from_a_published_model(published: Published, tmp_path: Path) -> None:
    source = published(pad_token=None, chat_template=None)
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    overrides = [
        f"pretrain.init_from={source}",
        "pretrain.num_steps=0",
        "sft.seq_len=400",
    ]
    job = load_job(job_without_model(tmp_path), overrides)
    for stage in ("pretrain", "sft"):
        run_job(job, tmp_path / "runs", only=stage)
    run = tmp_path / "runs" / "debug"
    expected = load_language_model(source)
    taken = load_language_model(run / "pretrain" / "model")
    assert taken.config == expected.config == job.model
    for name, tensor in expected.state_dict().items():
        assert torch.equal(taken.state_dict()[name], tensor), name
    figures = json.loads((run / "pretrain" / "results.json").read_text())
    assert figures["heldout_loss"] > 3  # measured with random weights
    assert figures["trained_tokens"] == 0
    tuned = load_language_model(run / "sft" / "model")
    assert tuned.config == expected.config
    assert not torch.equal(tuned.head.weight, taken.head.weight)
    # The run's own job file is complete and means the same later.
    assert load_job(run / "job.toml").model == job.model


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pretrain.end_token=x"], "end_token is set without init_from"),
        (["pretrain.pad_token=x"], "pad_token.*leave it out: Heed masks by length"),
        (["pretrain.init_from=/nowhere/at/all"], "pretrain.init_from: /nowhere/at/all: no such folder"),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_job(DEBUG, overrides)


def test_a_shape_must_agree_with_the_models_own(published: Published) -> None:
    source = published()
    with pytest.raises(ValueError, match=r"model.vocab_size is 512, but .*published has 288; leave \[model\] out"):
        load_job(DEBUG, [f"pretrain.init_from={source}"])


def test_the_hub_out_of_reach_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"'Qwen/Qwen2.5-0.5B' is neither a local folder nor a model that the hub provided"
    ):
        model_directory("Qwen/Qwen2.5-0.5B")
