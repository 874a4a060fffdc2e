"""How far rounding takes sampler and learner apart: `python -m benchmarks.sampler_rounding MODEL [--layers 2 8 16 30]`.

MODEL is a model directory, a GGUF file or a hub id. Its first layers, with its weights and with random ones, are
sampled from in bf16 (Heed's sampler) and scored as the learner scores them (fp32 weights under autocast). Each row has
the mean difference of log-probs in nats per token, the worst response, the limits of both (`max_difference` in
lm/samplers/engine.py), and the difference if two layers in the middle are exchanged in the sampler, or if it samples at
temperature .9.
"""

import argparse
import copy
from functools import partial

import torch
from torch import nn

from lm.hub import model_directory
from lm.model import LanguageModel
from lm.samplers.engine import RESPONSE_FACTOR, Agreement, max_difference
from lm.samplers.own import HeedSampler
from lm.samplers.trial import MAX_NEW_TOKENS, Trial, truth, weights_of, with_exchanged, with_weights
from lm.source import RandomInit, load
from lm.weights import ModelFolder


def agreement(trial: Trial, learner: LanguageModel, sampling: LanguageModel, temperature: float = 1.0) -> Agreement:
    """Samples from one model in bf16 at a temperature, and scores the tokens by another at temperature 1."""
    sampler = HeedSampler(sampling, trial.tokenizer.end_ids)
    found = sampler.sample(trial.prompts, trial.seeds, max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
    with torch.autocast("cpu", torch.bfloat16):
        learned_C = truth(learner, trial.prompts, found.responses, 1.0)
    reported_C = torch.tensor([nats for row in found.logprobs for nats in row])
    return Agreement.of(learned_C - reported_C, [*map(len, found.responses)])


@torch.no_grad()
def print_row(trial: Trial, name: str, learner: LanguageModel) -> None:
    num_layers = learner.config.num_hidden_layers
    sampling = copy.deepcopy(learner).to(torch.bfloat16)
    middle = num_layers // 2
    exchanged = with_weights(sampling, with_exchanged(weights_of(sampling), middle - 1, middle))
    found, limit = agreement(trial, learner, sampling), max_difference("bf16", num_layers)
    faults = agreement(trial, learner, exchanged), agreement(trial, learner, sampling, 0.9)
    healthy = f"{found.difference:.4f} of {limit:.3f}  {found.worst_response:.3f} of {RESPONSE_FACTOR * limit:.3f}"
    faulty = "  ".join(f"{fault.difference:>9.3f}" for fault in faults)
    print(f"{name:>8} {num_layers:>6}  {healthy}  {found.ratio:.4f}  {faulty}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 16, 30])
    given = parser.parse_args()
    folder = model_directory(given.model)
    trial, whole = Trial(folder, "bf16"), load(ModelFolder(folder, LanguageModel)).eval()
    print(" weights layers       mean        worst response   ratio   exchanged  sampled at .9")
    for num_layers in given.layers:
        trained = copy.deepcopy(whole)
        trained.config = whole.config.model_copy(update={"num_hidden_layers": num_layers})
        trained.decoder.blocks = nn.ModuleList(trained.decoder.blocks[:num_layers])
        print_row(trial, "trained", trained)
        print_row(trial, "random", load(RandomInit(partial(LanguageModel, trained.config), seed=0)).eval())


if __name__ == "__main__":
    main()
