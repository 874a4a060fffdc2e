"""Questions of labelers to the leads: asking on a task's page, and a page of threads for either side.

A labeler sees their own threads; leads see all, those that wait for a reply first.
"""

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences.accounts import Account
from preferences.database import STORE_AWAY
from preferences.page.service import RefusedError
from preferences.page.site import Posted, Site, redirect
from preferences.questions import MAX_QUESTION_CHARACTERS, Thread, ThreadState
from preferences.store import LabelStore


class Questions:
    """What the pages and the API do with questions."""

    def __init__(self, store: LabelStore) -> None:
        self.store = store

    def of(self, account: Account) -> list[Thread]:
        """Returns a labeler's threads, or all threads for a lead; those that wait for this person come first."""
        if account.role == "lead":
            return sorted(self.store.threads(), key=lambda thread: thread.state != "question")
        return sorted(self.store.threads(labeler=account.name), key=lambda thread: thread.state != "reply")

    def num_waiting(self, account: Account) -> int:
        """Counts the threads that wait for this person; 0 if the store cannot be read, because every page shows it."""
        try:
            return self.store.num_waiting("" if account.role == "lead" else account.name)
        except STORE_AWAY:
            return 0

    def write(self, account: Account, handle: str, labeler: str, kind: ThreadState, text: str) -> None:
        """Appends a message to a thread. Labelers write in their own threads, whatever `labeler` is.

        Raises: RefusedError for a thread that is not there, and a ValueError for an empty or too long text.
        """
        owner = labeler if account.role == "lead" else account.name
        thread = next((one for one in self.of(account) if (one.handle, one.labeler) == (handle, owner)), None)
        if thread is None:
            raise RefusedError("there is no such question")
        said: ThreadState = "resolved" if kind == "resolved" else "reply" if account.role == "lead" else "question"
        self.store.write_message(thread.task_id, owner, account.name, said, text.strip())


class QuestionPages:
    """The routes of the page of questions."""

    def __init__(self, site: Site, questions: Questions) -> None:
        self.site, self.questions = site, questions
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/questions", response_class=HTMLResponse)(self.threads)
        self.router.post("/questions/write")(self.write)

    def threads(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        threads = self.questions.of(account)
        return self.site.page("questions", account, token, threads=threads, max_question=MAX_QUESTION_CHARACTERS)

    def write(self, request: Request, posted: Posted) -> Response:
        """Stores a reply, a further question, or that a thread is resolved."""
        account, _, fields = self.site.form(request, posted)
        handle, labeler = fields.text("task"), fields.text("labeler")
        kind: ThreadState = "resolved" if fields.text("resolved") else "reply"
        text = "" if kind == "resolved" else fields.text("text")[:MAX_QUESTION_CHARACTERS]
        if kind == "resolved" or text.strip():  # an empty reply stays unsaid
            self.questions.write(account, handle, labeler, kind, text)
        return redirect(f"/questions#{quote(f'thread-{handle}-{labeler}', safe='')}")
