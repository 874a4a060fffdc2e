"""AdamW and Muon, and which parameters each of them updates."""

import torch
from torch import nn

from training.config import OptimizerConfig
from training.internals import full_shape
from training.muon import Muon, dtype_on


def make_optimizers(model: nn.Module, config: OptimizerConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, after Muon if the config asks for it; no parameter belongs to both."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if config.kind == "adamw":
        return [_make_adamw(list(parameters.values()), config, device)]
    # Embedding and head are tables of one vector per token: orthogonal updates are for maps between activations.
    inner = [name for name, p in parameters.items() if ".blocks." in name and p.dim() == 2]
    outer = [p for name, p in parameters.items() if name not in inner]
    optimizers: list[torch.optim.Optimizer] = [_make_adamw(outer, config, device)]
    if inner:  # there are none if only what follows the blocks is trained
        matrices = [parameters[name] for name in inner]
        muon = Muon(matrices, config.learning_rate, config.weight_decay, dtype_on(device))
        optimizers.insert(0, muon)
    return optimizers


def _make_adamw(parameters: list[nn.Parameter], config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no scale to shrink."""
    matrices = [p for p in parameters if len(full_shape(p)) > 1]
    vectors = [p for p in parameters if len(full_shape(p)) <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=device.type in ("cpu", "cuda")
    )
