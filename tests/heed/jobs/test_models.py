"""The models that a job names: where the shape of its policy comes from, and what each machine downloads."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.connection import connect, disconnect
from heed.jobs.job_file import load_job
from heed.jobs.models import built_in_names, built_in_shape, fetch_models, hub_models
from heed.jobs.recovery import Workers
from heed.jobs.run import Run
from lm.config import ModelConfig
from lm.model import LanguageModel, count_parameters
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.rank import InitialModels, ScoreScale
from tests.hub_server import NAME, Hub, serve
from tests.models import load_language_model
from training.engine import StageContext

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"

# Parameter counts of the published checkpoints, from the model hub's pages.
PUBLISHED = {
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "openai/gpt-oss-20b": 20_914_757_184,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "google/gemma-3-1b-it": 999_885_952,
    "allenai/OLMo-2-0425-1B-Instruct": 1_484_916_736,
    "microsoft/phi-4": 14_659_507_200,
}


def test_shapes_of_the_hubs_models_have_their_number_of_parameters() -> None:
    # tests/configs counts those that are no decoders.
    others = {"google-bert/bert-base-uncased", "google-bert/bert-large-uncased", "google-t5/t5-small"}
    assert {name for name in built_in_names() if "/" in name} == set(PUBLISHED) | others
    for name, expected in PUBLISHED.items():
        with torch.device("meta"):
            found = count_parameters([LanguageModel(ModelConfig.model_validate(built_in_shape(name)))])
        assert found == expected, name


def write(path: Path, head: str, tail: str = "") -> Path:
    stages = """
        [ppo]
        init_from = "Qwen/Qwen2.5-0.5B"
        reward = { kind = "function", function = "heed.worlds.rewards:gold" }
        prompts = { source = "prompts.jsonl" }
        num_iterations = 2
        rollout_batch_size = 8
        minibatch = { batch_size = 8, micro_batch_size = 8 }
        max_new_tokens = 16
        policy_optimizer = { learning_rate = 1e-6 }
        advantage = { kind = "gae", value_optimizer = { learning_rate = 1e-6 } }
    """
    path.write_text(f'name = "mine"\n{head}\n{stages}\n{tail}', encoding="utf-8")
    return path


def test_a_plan_knows_the_shape_of_a_published_model_without_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(name: str) -> Path:
        raise ValueError(f"{name} would be fetched")

    monkeypatch.setattr("heed.jobs.models.model_directory", fetch)
    path = write(tmp_path / "job.toml", "")
    job = load_job(path, opens_models=False)
    assert (job.model.hidden_size, job.model.attention_bias) == (896, "qkv")
    with pytest.raises(ValueError, match=r"ppo\.init_from: Qwen/Qwen2\.5-0\.5B would be fetched"):
        load_job(path)


def test_a_plan_of_a_model_that_cannot_be_read_names_the_built_in_shapes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(name: str) -> Path:
        raise ValueError(f"{name} is not here")

    monkeypatch.setattr("heed.jobs.models.shape_and_tokenizer", fetch)
    path = write(tmp_path / "job.toml", "")
    path.write_text(path.read_text().replace("Qwen/Qwen2.5-0.5B", "owner/unknown"))
    with pytest.raises(ValueError, match=r"ppo\.init_from: owner/unknown is not here\. These .* built in: .*gpt3-125m"):
        load_job(path, opens_models=False)


def test_a_shape_is_given_by_name() -> None:
    model = load_job(DEBUG, ["model=gpt3-125m"]).model
    assert (model.hidden_size, model.num_hidden_layers, model.sliding_window) == (768, 12, (0, 256))
    with pytest.raises(ValueError, match=r"model is 'gpt3-1m'; one of .*gpt3-125m.* was expected"):
        load_job(DEBUG, ["model=gpt3-1m"])


def test_a_config_json_can_be_pasted(tmp_path: Path) -> None:
    pasted = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 160, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1,
    }  # fmt: skip
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in pasted.items())
    values = DEBUG.read_text(encoding="utf-8")
    start, end = values.index("[model]"), values.index("[pretrain]")
    path = tmp_path / "debug.toml"
    path.write_text(f"{values[:start]}[model]\n{lines}\n\n{values[end:]}", encoding="utf-8")
    model = load_job(path).model
    assert model == ModelConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=160, norm_eps=1e-6, rope_theta=5e5, tie_word_embeddings=False,
    )  # fmt: skip
    path.write_text(path.read_text().replace('"llama"', '"falcon"'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"debug\.toml:\d+: \[model\]: model_type is 'falcon'; one of .* was expected"):
        load_job(path)


def test_key_value_heads_and_head_dim_follow_from_the_heads() -> None:
    shape = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = ModelConfig.model_validate({**shape, "num_attention_heads": 4, "max_position_embeddings": 16})
    assert (model.num_key_value_heads, model.head_dim) == (4, 8)
    one = ModelConfig.model_validate({**model.model_dump(), "sliding_window": 8})
    assert one.sliding_window == (8,)


@pytest.mark.parametrize("key", ["record_micro_batches", "compile_blocks"])
def test_a_mixture_that_the_engine_cannot_train_is_refused_before_any_worker_starts(
    tiny_config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path, key: str
) -> None:
    """As the policy's shape when the job is loaded; as a reward model's own when its files are read."""
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    model = LanguageModel(tiny_config.model_copy(update={**experts, "max_position_embeddings": 160}))
    save_model(tmp_path / "mixture", model, model.state_dict(), tokenizer)
    given, policy = [f"engine.{key}=true", "workers=1"], ["pretrain=none", "ppo.ptx=none", "model=none"]
    mixture, expected = f"init_from={tmp_path / 'mixture'}", f"engine.{key} is true, but a mixture of experts cannot be"
    with pytest.raises(ValueError, match=rf"debug.toml: {expected}"):
        load_job(DEBUG, [*given, *policy, f"sft.{mixture}"])
    job = load_job(DEBUG, [*given, f"reward.{mixture}"])
    with pytest.raises(ValueError, match=rf"^reward.init_from: {expected}"):
        hub_models(job)


@pytest.fixture
def hub(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub; workers that start from now on keep downloads in `worker`, and this process keeps them in `driver`."""
    with serve(model_folder) as served:
        for name, value in served.environment(tmp_path / "worker").items():
            monkeypatch.setitem(os.environ, name, value)
        served.reach(monkeypatch, tmp_path / "driver")
        connect(2)
        yield served
        disconnect()


def folders_of_rank(_context: StageContext, folder: Path, models: InitialModels) -> tuple[Path, Path, int]:
    own = models.on_this_machine()
    assert isinstance(own.reward, Path)
    assert Tokenizer.load(folder) == Tokenizer.load(own.sft)
    return folder, own.reward, load_language_model(folder).config.vocab_size


@pytest.mark.long
def test_every_machine_fetches_a_hub_model_for_itself(hub: Hub, tmp_path: Path) -> None:
    job = load_job(DEBUG, [f"reward.init_from={NAME}"])
    (model,) = hub_models(job)
    (tmp_path / "driver").rename(tmp_path / "elsewhere")  # another machine's disk
    hub.downloads.clear()
    workers = Workers((2,), tmp_path, ClusterConfig(), models=[model])
    run = Run(job, tmp_path, None, workers)
    assert workers().num_workers == 2
    assert set(hub.downloads.values()) == {1}  # before any stage asks, and once for both ranks
    models = InitialModels(model, model, ScoreScale(0.0, 1.0), None)
    for folder, reward, vocab_size in run.of("sft").on_ranks(folders_of_rank, model, models):
        assert folder == reward == tmp_path / "worker" / model.relative_to(tmp_path / "driver")
        assert vocab_size == 288
    assert set(hub.downloads.values()) == {1}
    unknown = tmp_path / "models--owner--other" / "snapshots" / ("c3" * 20)
    with pytest.raises(ValueError, match=rf"^{os.uname().nodename}: 'owner/other' is neither a local folder nor"):
        fetch_models(workers(), [unknown])
    workers.abandon()
