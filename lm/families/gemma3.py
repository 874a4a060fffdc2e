"""Gemma 3 without its vision tower (arXiv 2503.19786)."""

from collections.abc import Mapping

from lm.families.gemma2 import Gemma2Family


class Gemma3Family(Gemma2Family):
    """Gemma 2 with RMSNorm of queries and keys instead of caps; five of six layers have a sliding window, with a rotary
    base of their own.
    """

    @property
    def classes(self) -> Mapping[str, str]:
        return {"language": "Gemma3ForCausalLM", "score": "Gemma3TextForSequenceClassification"}
