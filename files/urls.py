"""What may be said of a URL: it may hold a password or a key, and messages end up in logs that others read."""

import re

_URL = re.compile(r"https?://[^\s'\"]+")
_SECRET = re.compile(r"(?<=://)[^\s/@]+(?=@)|(?<=\?).+")


def without_credentials(text: str) -> str:
    """Replace the user, password and query of every URL in a text."""
    return _URL.sub(lambda url: _SECRET.sub("***", url[0]), text)
