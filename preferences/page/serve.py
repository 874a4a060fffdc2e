"""The labeling server as a process."""

from collections.abc import Callable
from pathlib import Path

import uvicorn

from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from preferences.people import People
from preferences.store import LabelStore

FIRST_LEAD = "lead"


def serve(
    url_or_path: str | Path, config: LabelingConfig, *, host: str, port: int, announce: Callable[[str], None]
) -> None:
    """Serve the page and the API until interrupted. Where nobody leads yet, a one-time link for a lead is announced.

    Raises ValueError for a database that cannot be one; OSError where the port is taken.
    """
    with LabelStore(url_or_path) as store:
        people = People(url_or_path)
        try:
            address = f"http://{host}:{port}"
            announce(f"labeling page: {address}")
            if not people.has_lead():
                announce(f"nobody leads yet; one-time link: {address}/welcome/{people.invite(FIRST_LEAD, 'lead')}")
            uvicorn.run(make_app(store, people, config), host=host, port=port, log_level="warning")
        finally:
            people.close()
