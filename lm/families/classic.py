"""What GPT-2, BERT and BART share."""

from lm.config import ModelConfig
from lm.families.family import Fields

CLASSIC: Fields = {"mlp_bias": True, "attention_bias": "all", "positions": "learned", "norm": "layer"}

# Their names of activations, and Heed's.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def activation_to_hf(config: ModelConfig) -> str:
    """Their name of the MLP's activation."""
    return {"gelu_tanh": "gelu_new"}.get(config.mlp, config.mlp)
