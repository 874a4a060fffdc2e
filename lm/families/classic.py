"""What GPT-2, BERT and BART have in common."""

from lm.config import ModelConfig
from lm.families.family import Fields

CLASSIC: Fields = {"mlp_bias": True, "attention_bias": "all", "positions": "learned", "norm": "layer"}

# Their activations in our words.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def activation_to_hf(config: ModelConfig) -> str:
    """The MLP's activation in their words."""
    return {"gelu_tanh": "gelu_new"}.get(config.mlp, config.mlp)
