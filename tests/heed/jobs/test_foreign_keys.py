"""Keys of other projects are recognised in error messages."""

from pathlib import Path

import pytest

from heed.jobs.foreign_keys import ADVICE, COUNTERPARTS, counterpart
from heed.jobs.job import JobConfig
from heed.jobs.job_file import _models_in, load_job
from lm.config import ModelConfig, RopeScaling
from ppo.config import PPOConfig
from pretrain.stage import PretrainConfig
from reward.stage import RewardConfig
from sft.rejection import RejectionConfig
from sft.stage import SFTConfig
from training.config import OptimizerConfig

DEBUG = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
SECTIONS = (
    PPOConfig,
    RejectionConfig,
    PretrainConfig,
    SFTConfig,
    RewardConfig,
    OptimizerConfig,
    ModelConfig,
    RopeScaling,
)


def is_field(name: str) -> bool:
    """Returns whether a name is a path of fields from a section, or from the top level."""

    def follows(model: type, parts: list[str]) -> bool:
        field = model.model_fields.get(parts[0])
        if field is None or len(parts) == 1:
            return field is not None
        return any(follows(section, parts[1:]) for section in _models_in(field.annotation))

    return any(follows(model, name.split(".")) for model in (*SECTIONS, JobConfig))


def test_every_name_in_the_table_is_a_field() -> None:
    names = {name for table in COUNTERPARTS.values() for found in table.values() for name in found}
    assert [name for name in sorted(names) if not is_field(name)] == []


def test_no_key_of_heeds_own_is_listed_as_foreign() -> None:
    for table in COUNTERPARTS.values():
        assert all(key not in names for key, names in table.items())
    assert not [key for key in ADVICE if any(key in section.model_fields for section in SECTIONS)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.lam=0.95", "`lam`: unknown key in [ppo]; Heed calls it `advantage.gae_lambda`"),
        ("ppo.cliprange=0.2", "`cliprange`: unknown key in [ppo]; Heed calls it `loss.clip_range`"),
        ("ppo.policy_optimizer.lr=1", "`lr`: unknown key in [ppo.policy_optimizer]; Heed calls it `learning_rate`"),
        ("ppo.micro_train_batch_size=1", "Heed calls it `minibatch.micro_batch_size`"),
        ("sft.micro_train_batch_size=1", "Heed calls it `batch.micro_batch_size`"),
        ("ppo.n_samples_per_prompt=4", "Heed calls it `advantage.samples_per_prompt`"),
        ("ppo.adv_estimator=grpo", "Heed calls it `advantage.kind`"),
        ("ppo.kl_loss_type=k1", "As a loss, k1 has a mean gradient of 0, and k3 that of another divergence"),
        ("ppo.kl_estimator=k3", 'set `kl.kind`: "reward" subtracts the log ratio (k1)'),
        ("ppo.kl_coef=0.1", "`kl_coef`: unknown key in [ppo]; Heed calls it `kl.coef`"),
        ("ppo.loss.cliprange=0.1", "`cliprange`: unknown key in [ppo.loss]; Heed calls it `clip_range`"),
        ("remote_rm_url=http://a", "`remote_rm_url`: unknown key; in [ppo], Heed calls it `reward.url`"),
        ("ppo.zero_stage=2", "`zero_stage`: unknown key in [ppo]; Heed calls it `engine.zero_stage`"),
        (
            "ppo.train_batch_size=8",
            "OpenRLHF's key is called `minibatch.batch_size` here; verl's key is called `rollout_batch_size` here",
        ),
        ("sft.per_device_train_batch_size=8", "batch_size is global in Heed"),
        ("model.n_embd=8", "`n_embd`: unknown key in [model]; Heed calls it `hidden_size`"),
        ("model.num_heads=8", "`num_heads`: unknown key in [model]; Heed calls it `num_attention_heads`"),
        ("sft.max_seq_length=8", "`max_seq_length`: unknown key in [sft]; Heed calls it `seq_len`"),
    ],
)
def test_a_foreign_key_is_translated(override: str, message: str) -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_job(DEBUG, [override])
    assert message in str(caught.value)


def test_a_key_means_nothing_where_its_counterpart_does_not_belong() -> None:
    assert counterpart("lam", SFTConfig.model_fields.__contains__) == ""
    assert counterpart("no_such_key", PPOConfig.model_fields.__contains__) == ""
