"""SQuAD 2.0's exact match and F1 of an answer, as its official script defines them (arXiv 1806.03822).

Both are 0 to 1, and the best over the reference answers. A question without a reference has no answer in its paragraph:
then only an empty prediction is right.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lowers the text and removes ASCII punctuation, articles and extra spaces, in this order."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Returns 1 if the prediction equals a reference after normalising, and else 0."""
    return float(normalized(prediction) in _answers(references))


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Returns the harmonic mean of precision and recall of words, each counted as often as it occurs."""
    return max(_f1(normalized(prediction).split(), reference.split()) for reference in _answers(references))


def _answers(references: Sequence[str]) -> list[str]:
    """Returns the normalised references that are not empty; [""] if there are none."""
    return [text for text in map(normalized, references) if text] or [""]


def _f1(predicted: Sequence[str], reference: Sequence[str]) -> float:
    if not predicted or not reference:
        return float(not predicted and not reference)
    num_shared = (Counter(predicted) & Counter(reference)).total()
    return 2 * num_shared / (len(predicted) + len(reference))
