"""Heed's own config fields and tensor names, which only Heed reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lm.config import ModelConfig
from lm.families.family import Fields, Stored


class HeedFamily:
    """Any shape, in Heed's own fields and names."""

    model_type = "heed"
    classes: ClassVar = {
        "language": "HeedForCausalLM",
        "score": "HeedForSequenceClassification",
        "masked": "HeedForMaskedLM",
        "next": "HeedForPreTraining",
        "sequence": "HeedForEncoderSequenceClassification",
        "token": "HeedForTokenClassification",
        "span": "HeedForQuestionAnswering",
        "translate": "HeedForConditionalGeneration",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        return config.model_dump(mode="json")

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        missing = [name for name, field in ModelConfig.model_fields.items() if field.is_required() and name not in raw]
        if missing:
            raise KeyError(missing[0])
        return {name: raw[name] for name in ModelConfig.model_fields if name in raw}

    def stored(self, _config: ModelConfig, ours: str) -> Stored:
        return Stored({ours: None})
