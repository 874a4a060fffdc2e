"""How error messages name tasks and judgments: by file and line where they come from a file."""

from collections.abc import Mapping

MAX_NAME_CHARACTERS = 500  # PostgreSQL's indexes take 2,704 bytes, and a character is four at most
Locations = Mapping[tuple[str, str, int], str]  # file and line by (task, labeler, revision), a task's by (task, "", 0)
NO_LOCATIONS: Locations = {}  # for rows that come from no file


def named(locations: Locations, task_id: str, labeler: str = "", revision: int = 0) -> str:
    """Names a task, and who judged it, for an error message. File and line come first if they are known."""
    location = locations.get((task_id, labeler, revision), "")
    name = f"task {_short(task_id)}, labeler {_short(labeler)}" if labeler else f"task {_short(task_id)}"
    return f"{location}: {name}" if location else name


def _short(name: str) -> str:
    return repr(name) if len(name) <= MAX_NAME_CHARACTERS // 2 else f"{name[: MAX_NAME_CHARACTERS // 4]!r}..."
