"""The page of the instructions: reading them, what has changed since the last time, and the quiz about them.

Labelers get tasks once they have confirmed the current version. If it has a quiz, confirming takes a right answer to
every question; each try gets feedback with explanations, and the audit log counts the tries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences.accounts import Account, Accounts
from preferences.page.config import LabelingConfig, QuizQuestion
from preferences.page.forms import Fields
from preferences.page.service import LabelingService
from preferences.page.site import Posted, Site, redirect

CONTEXT_LINES = 1  # unchanged lines shown around a change


@dataclass(frozen=True)
class Feedback:
    """What a labeler chose, whether it is right, and why; the explanation comes with every choice."""

    chosen: str
    is_right: bool
    explanation: str


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


def grade(quiz: Sequence[QuizQuestion], chosen: Sequence[str]) -> list[Feedback]:
    """Returns feedback on each choice. Raises: ValueError for another number of choices."""
    if len(chosen) != len(quiz):
        raise ValueError(f"answers has {len(chosen)} entries; one for each of the {len(quiz)} questions was expected")
    pairs = zip(quiz, chosen, strict=True)
    return [Feedback(choice, choice == one.answer, one.explanation) for one, choice in pairs]


def take_quiz(accounts: Accounts, account: Account, config: LabelingConfig, chosen: Sequence[str]) -> list[Feedback]:
    """Grades a try, writes it to the audit log, and confirms the instructions if all of it is right."""
    found = grade(config.quiz, chosen)
    num_right = sum(one.is_right for one in found)
    subject = f"version {config.version}: {num_right} of {len(found)} right"
    accounts.log(account.name, "took the quiz", subject)
    if num_right == len(found):
        accounts.confirm_reading(account.name, config.version)
    return found


def retry(feedback: Sequence[Feedback]) -> str:
    """Returns what the page says above a try that was not all right: how much was, and what to read and do next."""
    wrong = [one for one in feedback if not one.is_right]
    num_right = len(feedback) - len(wrong)
    found = f"{num_right} of {len(feedback)} answers {'is' if num_right == 1 else 'are'} right."
    if not num_right:
        found = "Your answer is not right." if len(feedback) == 1 else f"None of your {len(feedback)} answers is right."
    explained = sum(bool(one.explanation) for one in wrong)
    text = "instructions" if not explained else "explanation" if explained == 1 else "explanations"
    what = "answer" if not num_right else f"answer the other{'' if len(wrong) == 1 else 's'}"
    return f"{found} Read the {text} and {what} again."


class InstructionPages:
    """The routes of the page."""

    def __init__(self, site: Site, service: LabelingService) -> None:
        self.site, self.service = site, service
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/instructions", response_class=HTMLResponse)(self.instructions)
        self.router.post("/instructions")(self.confirm_reading)

    def instructions(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        return self._page(account, token)

    def confirm_reading(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.form(request, posted)
        config = self.service.config
        if account.role == "lead" or account.read_version == config.version or not config.quiz:
            self.site.accounts.confirm_reading(account.name, config.version)
            return redirect("/")
        chosen = [fields.text(f"quiz_{number}") for number in range(len(config.quiz))]
        if not all(chosen):
            return self._page(account, token, 422, fields=fields, wrong="Answer every question.")
        feedback = take_quiz(self.site.accounts, account, config, chosen)
        is_passed = all(one.is_right for one in feedback)
        return self._page(account, token, 200 if is_passed else 422, feedback=feedback, fields=fields)

    def _page(
        self,
        account: Account,
        token: str,
        status: int = 200,
        *,
        feedback: Sequence[Feedback] = (),
        fields: Fields | None = None,
        wrong: str = "",
    ) -> Response:
        config, is_passed = self.service.config, bool(feedback) and all(one.is_right for one in feedback)
        is_new = account.role == "labeler" and account.read_version != config.version
        earlier = self.site.accounts.instructions_text(account.read_version) if is_new else None
        return self.site.page(
            "instructions",
            account,
            token,
            status,
            text=config.instructions,
            quiz=config.quiz if is_new else (),
            has_read=not is_new or is_passed,
            is_passed=is_passed,
            is_revised=earlier is not None,
            changes=changes(earlier, config.instructions) if earlier is not None else [],
            feedback=feedback,
            retry=retry(feedback),
            fields=fields or Fields({}),
            wrong=wrong,
        )
