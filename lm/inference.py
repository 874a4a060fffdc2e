"""Where a model computes that is not trained, and in which type: the one place that decides it.

Scoring, sampling and chat outside of training load their models here. The stages' own ranks compute on the engine's
device in the engine's precision.
"""

from typing import TypeVar

import torch
from torch import nn

from lm.source import ModelSource, load

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def inference_device() -> torch.device:
    """This process' GPU, or the CPU if it sees none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_dtype() -> torch.dtype:
    """bf16 on GPUs that multiply it, else fp32."""
    is_fast = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_fast else torch.float32


def load_for_inference(source: ModelSource[AnyModel], dtype: torch.dtype | None = None) -> AnyModel:
    """The model on `inference_device`, without dropout or gradients, its parameters in `dtype` (default:
    `inference_dtype`). Raises: ValueError as for the source.
    """
    return load(source, inference_device(), dtype or inference_dtype()).eval().requires_grad_(False)
