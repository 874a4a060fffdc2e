"""Tokens as the driver writes them for the ranks, for tests that train in their own process."""

import tempfile
from functools import partial
from pathlib import Path

from dpo import stage as dpo
from dpo.config import DPOConfig
from lm.model import LanguageModel
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from pretrain.stage import PretrainConfig, heldout_parts, stream_parts
from reward import stage as reward
from reward.config import ComparisonsConfig, RewardConfig
from reward.prepared import ARRAYS, PreparedRankings, ranking_parts
from sft.demonstrations import Limit, demonstration_parts
from sft.stage import SFTConfig
from training.engine import StageContext
from training.tokens import CHECKED_SEQUENCES, TokenFolders, write_arrays


def pretrain_tokens(folder: Path, config: PretrainConfig, tokenizer: Path) -> TokenFolders:
    """Writes the streams of pretraining below `folder`."""
    loaded, found = Tokenizer.load(tokenizer), TokenFolders(folder / "train-tokens", folder / "heldout-tokens")
    write_arrays(found.training, ("tokens",), partial(stream_parts, loaded, config.texts))
    write_arrays(found.heldout, ("tokens", "num_bytes"), partial(heldout_parts, loaded, config.heldout))
    return found


def sft_tokens(folder: Path, config: SFTConfig, start: Path, *, has_source: bool = False) -> TokenFolders:
    """Writes the conversations of SFT below `folder`."""
    tokenizer = Tokenizer.load(start).with_template(config.chat_template)
    found = TokenFolders(folder / "train-tokens", folder / "heldout-tokens")
    for path, sources in ((found.training, config.demonstrations), (found.heldout, config.heldout)):
        limit = Limit(has_source, config.seq_len, config.on_overlong)
        write_arrays(path, CHECKED_SEQUENCES, partial(demonstration_parts, tokenizer, sources, limit))
    return found


def train_reward(context: StageContext, config: RewardConfig, start: Path) -> None:
    """What the driver and this rank do to train a reward model."""
    tokenizer = Tokenizer.load(start, end=config.end_token).with_template(config.chat_template)
    network = on_meta(reward.network_source(start, 0.0, 0, config.labels).build)
    data = _prepared(context, config, tokenizer, network.config.max_position_embeddings)
    reward.train(context, config, start, data)


def train_dpo(context: StageContext, config: DPOConfig, start: Path) -> None:
    """What the driver and this rank do to train a policy by DPO."""
    tokenizer = Tokenizer.load(start, end=config.end_token).with_template(config.chat_template)
    shape = on_meta(ModelFolder(start, LanguageModel).build).config
    data = _prepared(context, config, tokenizer, shape.max_position_embeddings)
    context.folder.mkdir(exist_ok=True)
    dpo.train(context, config, start, data)


def _prepared(
    context: StageContext, config: ComparisonsConfig, tokenizer: Tokenizer, max_tokens: int
) -> PreparedRankings:
    context.folder.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=context.folder.parent)) / "tokens"
    write_arrays(folder, ARRAYS, partial(ranking_parts, tokenizer, config, context.seed, max_tokens))
    return PreparedRankings(folder, config)
