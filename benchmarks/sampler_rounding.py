"""How far rounding takes sampler and learner apart: `python -m benchmarks.sampler_rounding MODEL [--layers 2 8 16 30]`.

MODEL is a model directory, a GGUF file or a hub id. Its first layers, with its weights and with random ones, are
sampled from in bf16 (Heed's sampler) and scored as the learner scores them (fp32 weights under autocast). Each row has
the mean difference of log-probs in nats per token, the worst response, the limits of both (`max_difference` in
lm/samplers/engine.py), and the difference if two layers in the middle are exchanged in the sampler, or if it samples at
temperature .9.
"""

import argparse
import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lm.hub import model_directory
from lm.model import LanguageModel
from lm.samplers.engine import RESPONSE_FACTOR, Agreement, max_difference
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import truth, weights_of, with_exchanged, with_weights
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder

Prompts = Sequence[Sequence[int]]
TOPICS = (
    "the sea", "a dog", "how bread is made", "why the sky is blue", "the French revolution", "a good night's sleep",
    "learning to swim", "the moon",
)  # fmt: skip
QUESTIONS = (
    "Write a short poem about {}.", "Explain {} to a child.", "List three facts about {}.",
    "What do you think about {}?",
)  # fmt: skip
NUM_TOKENS = 24  # of each response; none ends earlier
NO_END: tuple[int, ...] = ()


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    asked = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    return [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in asked]


def agreement(prompts: Prompts, learner: LanguageModel, sampling: LanguageModel, temperature: float = 1.0) -> Agreement:
    """Samples from one model in bf16 at a temperature, and scores the tokens by another at temperature 1."""
    sampler = HeedSampler(sampling, NO_END)
    found = sampler.sample(prompts, range(len(prompts)), max_new_tokens=NUM_TOKENS, temperature=temperature)
    with torch.autocast("cpu", torch.bfloat16):
        learned_C = truth(learner, prompts, found.responses, 1.0)
    reported_C = torch.tensor([nats for row in found.logprobs for nats in row])
    return Agreement.of(learned_C - reported_C, [*map(len, found.responses)])


@torch.no_grad()
def print_row(prompts: Prompts, name: str, learner: LanguageModel) -> None:
    num_layers = learner.config.num_hidden_layers
    sampling = copy.deepcopy(learner).to(torch.bfloat16)
    middle = num_layers // 2
    exchanged = with_weights(sampling, with_exchanged(weights_of(sampling), middle - 1, middle))
    found, limit = agreement(prompts, learner, sampling), max_difference("bf16", num_layers)
    faults = agreement(prompts, learner, exchanged), agreement(prompts, learner, sampling, 0.9)
    healthy = f"{found.difference:.4f} of {limit:.3f}  {found.worst_response:.3f} of {RESPONSE_FACTOR * limit:.3f}"
    faulty = "  ".join(f"{fault.difference:>9.3f}" for fault in faults)
    print(f"{name:>8} {num_layers:>6}  {healthy}  {found.ratio:.4f}  {faulty}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 16, 30])
    given = parser.parse_args()
    folder = model_directory(given.model)
    prompts, whole = prompts_of(Tokenizer.load(folder)), load(ModelFolder(folder, LanguageModel)).eval()
    print(" weights layers       mean        worst response   ratio   exchanged  sampled at .9")
    for num_layers in given.layers:
        trained = copy.deepcopy(whole)
        trained.config = whole.config.model_copy(update={"num_hidden_layers": num_layers})
        trained.decoder.blocks = nn.ModuleList(trained.decoder.blocks[:num_layers])
        print_row(prompts, "trained", trained)
        print_row(prompts, "random", load(RandomInit(partial(LanguageModel, trained.config), seed=0)).eval())


if __name__ == "__main__":
    main()
