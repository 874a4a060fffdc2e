"""The page of the instructions: reading them, and what has changed since the last time.

Labelers get tasks once they have confirmed the current version.
"""

from dataclasses import dataclass
from difflib import SequenceMatcher

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences.page.service import LabelingService
from preferences.page.site import Posted, Site, redirect

CONTEXT_LINES = 1  # unchanged lines shown around a change


@dataclass(frozen=True)
class Line:
    """A line of the instructions: "added", "removed" or "kept". After a gap, unchanged lines before it are left out."""

    kind: str
    text: str
    is_after_gap: bool = False


def changes(before: str, after: str) -> list[Line]:
    """Returns the lines that differ between two versions, with a line of context around them; [] if none does."""
    old, new = before.splitlines(), after.splitlines()
    found: list[Line] = []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT_LINES)):
        lines = []
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                lines += [("kept", text) for text in new[new_start:new_end]]
                continue
            lines += [("removed", text) for text in old[old_start:old_end]]
            lines += [("added", text) for text in new[new_start:new_end]]
        found += [Line(kind, text, is_after_gap=bool(number) and not index) for index, (kind, text) in enumerate(lines)]
    return found


class InstructionPages:
    """The routes of the page."""

    def __init__(self, site: Site, service: LabelingService) -> None:
        self.site, self.service = site, service
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/instructions", response_class=HTMLResponse)(self.instructions)
        self.router.post("/instructions")(self.confirm_reading)

    def instructions(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        config = self.service.config
        is_new = account.role == "labeler" and account.read_version != config.version
        earlier = self.site.accounts.instructions_text(account.read_version) if is_new else None
        return self.site.page(
            "instructions",
            account,
            token,
            text=config.instructions,
            has_read=not is_new,
            is_revised=earlier is not None,
            changes=changes(earlier, config.instructions) if earlier is not None else [],
        )

    def confirm_reading(self, request: Request, posted: Posted) -> Response:
        account, _, _ = self.site.form(request, posted)
        self.site.accounts.confirm_reading(account.name, self.service.config.version)
        return redirect("/")
