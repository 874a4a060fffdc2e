"""A labeling server as a separate process: `python server.py URL PORT CONFIG`."""

import sys
from pathlib import Path

from preferences.page.app import serve
from preferences.page.config import LabelingConfig

if __name__ == "__main__":
    url, port, config = sys.argv[1:]
    serve(url, LabelingConfig.load(Path(config)), host="127.0.0.1", port=int(port), announce=print)
