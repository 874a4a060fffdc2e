"""Five hundred texts on which tokenizers differ where they can, and a hundred conversations of them."""

import random

_WORDS = """
    the The AND it's WE'LL naïve café Ünïcode x86_64 don't Ελληνικά русский 漢字かな ไทย हिन्दी עברית العربية 한국어
    e\u0301 ﬁn ½ ² ٣٤٥ １２ 😀 👍🏽 👩\u200d👩\u200d👧 🇫🇷 \u200b … — “quoted” 1 12 123 1234 3.14159 1,000,000 0x1F
    http://a.b/c?d=e#f me@example.org snake_case camelCase XMLHttpRequest == != -> // /* */ {} [] (); \\n $x #include
    <div> </p> &amp; def return lambda SELECT I'm rock'n'roll o'clock A.B.C.
""".split()  # noqa: SIM905
_SPACES = (" ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n    ", "\u00a0", "\u3000", "")


def _text(generator: random.Random) -> str:
    """Words with spaces between them, in an order that no file has."""
    return "".join(generator.choice(_WORDS) + generator.choice(_SPACES) for _ in range(generator.randrange(1, 25)))


TEXTS = tuple(_text(random.Random(number)) for number in range(500))
CONVERSATIONS = tuple(
    [
        {"role": role, "content": _text(random.Random(1000 * number + turn)).strip()}
        for turn, role in enumerate(("user", "assistant") * (1 + number % 3))
    ]
    for number in range(1, 101)
)
