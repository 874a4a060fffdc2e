"""Tokens as the driver writes them for the ranks, for tests that train in their own process."""

import tempfile
from functools import partial
from pathlib import Path

from lm.source import on_meta
from lm.tokenizer import Tokenizer
from pretrain.stage import PretrainConfig, heldout_parts, stream_parts
from reward import training as reward
from reward.comparisons import read_judgments
from reward.config import RewardConfig
from reward.prepared import PreparedRankings, ranking_parts
from sft.stage import SFTConfig, demonstration_parts
from training.stage import StageContext
from training.tokens import SEQUENCES, TokenFolders, write_arrays


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
        parts = partial(demonstration_parts, has_source, tokenizer, sources, config.seq_len)
        write_arrays(path, SEQUENCES, parts)
    return found


def train_reward(context: StageContext, config: RewardConfig, start: Path) -> None:
    """What the driver and this rank do to train a reward model."""
    tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token).with_template(config.chat_template)
    network = on_meta(reward.network_source(start, 0.0, 0, config.labels).build)
    context.folder.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=context.folder.parent)) / "tokens"
    found = read_judgments(config.rankings)
    parts = partial(ranking_parts, tokenizer, found, network.config.max_position_embeddings)
    write_arrays(folder, SEQUENCES, parts)
    reward.train(context, config, start, PreparedRankings.of(found, config, context.seed, folder))
