"""Makes a small judge for tests."""

from pathlib import Path

import torch

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model


def write_judge(folder: Path, config: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> Path:
    """Writes a language model of random weights that answers with a digit: the digits' logits are raised along the mean
    of the last states of some questions.
    """
    model = LanguageModel(config.model_copy(update={"tie_word_embeddings": False}))
    init_weights(model, seed)
    asked = [f"Is the {what} in the {where}?" for what in ("fox", "dog", "cat") for where in ("hand", "bush", "mat")]
    with torch.no_grad():
        model.decoder.embedding.weight[:, 0] = 0.5
        queries = [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in asked]
        queries = [[*query, *tokenizer.encode(" ")] for query in queries]  # as the chat template begins an answer
        states = [model.decoder.hidden(torch.tensor([query]), None)[0, -1] for query in queries]
        mean_D = torch.stack(states).mean(dim=0)
        for digit in "012345":
            model.head.weight[tokenizer.encode(digit)[0]] += 12 * mean_D / mean_D.square().sum()
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder
