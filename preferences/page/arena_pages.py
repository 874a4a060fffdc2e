"""The arena's pages: forms that work without JavaScript, and a stream of events that shows both answers as they grow.

Nothing that a page or a response contains says which policy is on which side: there are no policies' names in it, both
sides change in the same event, and an error does not say whose it is.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.datastructures import FormData
from starlette.types import Receive, Scope, Send

from preferences.accounts import Account
from preferences.arena_records import OWN, Conversation
from preferences.database import STORE_AWAY, reason_of
from preferences.keys import BusyError
from preferences.page.arena import CHOICES, MAX_QUESTION_CHARACTERS, WHY_CLOSED, Arena, Given
from preferences.page.forms import Fields
from preferences.page.security import HEADERS
from preferences.page.service import RefusedError
from preferences.page.site import Posted, SignInNeededError, Site, fields_of, redirect

LOG = logging.getLogger(__name__)
EMPTY = Fields({})
NUM_CONVERSATIONS = 30  # on the first page
LOOK_SECONDS = 0.1  # between two looks at a turn; both sides change at the same moment
PING_SECONDS = 5.0  # after which a silent stream sends a comment, so that proxies keep it, and a session is looked up
MAX_STREAMS = 4  # of a person, who has one running turn; a page without a stream asks again every two seconds
SESSION_OVER = "Nothing was stored. Sign in again. What you entered is below, so that you can copy it."
CSP = "Content-Security-Policy"


class _Stream(StreamingResponse):
    """Events for a page. It calls `on_end` however it ends."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        headers = {"X-Accel-Buffering": "no"}  # nginx would collect the events
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


class ArenaPages:
    """The routes of the arena's pages."""

    def __init__(self, site: Site, arena: Arena) -> None:
        self.site, self.arena = site, arena
        self._num_streams = Counter[str]()  # that are open, by person
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/arena", response_class=HTMLResponse)(self.home)
        post("/arena")(self.begin)
        get("/arena/{handle}", response_class=HTMLResponse)(self.conversation)
        get("/arena/{handle}/events")(self.events)
        post("/arena/{handle}/ask")(self.ask)
        post("/arena/{handle}/again")(self.again)
        post("/arena/{handle}/stop")(self.stop)
        post("/arena/{handle}/verdict")(self.verdict)

    # ---- pages ----

    def home(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        return self._unread(account) or self._home_page(account, token)

    def conversation(self, handle: str, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        return self._unread(account) or self._page(handle, account, token)

    async def events(self, handle: str, request: Request) -> Response:
        """Streams what both sides show, until the last turn is written or the session ends.

        Raises: HTTPException if the person has `MAX_STREAMS` already.
        """
        account, _ = await run_in_threadpool(self.site.signed_in, request)
        turns = (await run_in_threadpool(self.arena.conversation, account, handle)).turns
        if self._num_streams[account.name] >= MAX_STREAMS:
            raise HTTPException(429, "You watch models write in too many windows.", {"Retry-After": "2"})
        self._num_streams[account.name] += 1
        return _Stream(
            self._looks(request, account, handle, len(turns) - 1),
            on_end=lambda: self._num_streams.subtract([account.name]),
        )

    async def _looks(self, request: Request, account: Account, handle: str, turn: int) -> AsyncIterator[str]:
        shown, sent_at, checked_at, num_changes = ("", ""), time.monotonic(), 0.0, -1
        while (glance := self.arena.look(handle, turn)) is not None:
            now = time.monotonic()
            if num_changes != self.site.accounts.num_changes or now - checked_at >= PING_SECONDS:
                checked_at, num_changes = now, self.site.accounts.num_changes
                found, _ = await run_in_threadpool(self.site.who, request)
                if found is None or found.role != account.role:
                    break
            if glance.texts != shown or now - sent_at >= PING_SECONDS:
                yield f"data: {json.dumps(glance.texts)}\n\n" if glance.texts != shown else ": waiting\n\n"
                shown, sent_at = glance.texts, now
            if glance.is_over:
                break
            await asyncio.sleep(LOOK_SECONDS)
        yield "event: over\ndata:\n\n"

    def _unread(self, account: Account) -> Response | None:
        """Sends labelers to the instructions until they have read them."""
        has_read = account.role == "lead" or account.read_version == self.arena.config.version
        return None if has_read else redirect("/instructions")

    def _home_page(self, account: Account, token: str, fields: Fields = EMPTY, wrong: str = "") -> Response:
        latest = self.arena.conversations.latest(account.name, NUM_CONVERSATIONS)
        seen = self.arena.conversations.seen_prompts(account.name)
        return self.site.page(
            "arena",
            account,
            token,
            422 if wrong else 200,
            closed=self.arena.why_closed(account),
            conversations=latest,
            has_prompts=any(prompt.prompt_id not in seen for prompt in self.arena.prompts),
            fields=fields,
            wrong=wrong,
            max_characters=MAX_QUESTION_CHARACTERS,
        )

    def _page(
        self,
        handle: str,
        account: Account,
        token: str,
        fields: Fields = EMPTY,
        wrong: str = "",
        wrong_turn: int | None = None,
    ) -> Response:
        """Shows a conversation. `wrong` is about the verdict on `wrong_turn`, or if that is None the next message."""
        arena = self.arena
        is_live = arena.is_live(handle)  # before reading what is stored: a turn may end in between
        conversation = arena.conversation(account, handle)
        turns = conversation.turns
        glance = arena.look(handle, len(turns) - 1)
        given = [
            arena.given(account, conversation, number)
            if turn.is_finished and not (is_live and turn is turns[-1])
            else None
            for number, turn in enumerate(turns)
        ]
        page = self.site.page(
            "conversation",
            account,
            token,
            422 if wrong else 200,
            closed=arena.why_closed(account),
            conversation=conversation,
            sides=[self._sides(conversation, number) for number in range(len(turns))],
            given=given,
            is_live=is_live,
            failure=glance.failure if glance is not None else "",
            choices=CHOICES,
            flags=arena.config.flags,
            continues=_continues(given[-1]),
            fields=fields,
            wrong=wrong,
            wrong_turn=wrong_turn,
            max_characters=MAX_QUESTION_CHARACTERS,
        )
        page.headers[CSP] = f"{HEADERS[CSP]}; connect-src 'self'"  # for the stream of events
        return page

    def _sides(self, conversation: Conversation, number: int) -> dict[str, object]:
        """Returns a turn's answers in the sides' order, whether the limit of tokens cut them off, and the side that the
        turn continues ("" = each its own).
        """
        turn, order = conversation.turns[number], conversation.policy_of
        follows = "" if turn.follows == OWN else "AB"[order.index(int(turn.follows))]
        answers = [turn.responses[policy] for policy in order] if turn.is_finished else []
        is_cut = [turn.records[policy].get("finished") is False for policy in order] if turn.is_finished else []
        return {"answers": answers, "is_cut": is_cut, "follows": follows}

    # ---- what people send ----

    def begin(self, request: Request, posted: Posted) -> Response:
        def save(account: Account, fields: Fields) -> str:
            if fields.text("take"):
                return _path_of(self.arena.begin_with_prompt(account))
            return _path_of(self.arena.begin(account, fields.text("question")))

        return self._saved(request, posted, save, self._home_page)

    def ask(self, handle: str, request: Request, posted: Posted) -> Response:
        def save(account: Account, fields: Fields) -> str:
            turn, question = fields.number("turn") or 0, fields.text("question")
            self.arena.ask(account, handle, turn, question, fields.text("continues"))
            return f"{_path_of(handle)}#turn-{turn + 1}"

        return self._saved(request, posted, save, partial(self._page, handle))

    def again(self, handle: str, request: Request, posted: Posted) -> Response:
        def save(account: Account, _fields: Fields) -> str:
            self.arena.again(account, handle)
            return _path_of(handle)

        return self._saved(request, posted, save, partial(self._page, handle))

    def stop(self, handle: str, request: Request, posted: Posted) -> Response:
        account, _, _ = self.site.form(request, posted)
        self.arena.stop(account, handle)
        return redirect(_path_of(handle))

    def verdict(self, handle: str, request: Request, posted: Posted) -> Response:
        turn = fields_of(posted).number("turn") or 0

        def save(account: Account, fields: Fields) -> str:
            marks = [tuple(fields.ticked.get(f"flags_{side}", ())) for side in "ab"]
            note, revision = fields.text("note").strip(), fields.number("revision") or 0
            given = Given(fields.text("choice"), (marks[0], marks[1]), note, revision)
            self.arena.judge(account, self.arena.conversation(account, handle), turn, given)
            return f"{_path_of(handle)}#verdict-{turn + 1}"

        return self._saved(request, posted, save, partial(self._page, handle, wrong_turn=turn))

    def _saved(
        self, request: Request, posted: FormData, save: Callable[[Account, Fields], str], show: Callable[..., Response]
    ) -> Response:
        """Saves a form and redirects to where `save` says. If it is refused or fails, returns what the person typed.

        `show(account, token, fields, wrong)` shows the form again with what is wrong with it.
        """
        try:
            account, token, fields = self.site.form(request, posted)
            if self._unread(account) is not None:
                raise RefusedError(WHY_CLOSED["instructions"])
            return redirect(save(account, fields))
        except SignInNeededError:
            return self.site.typed_page(request, 401, "Your session has ended", SESSION_OVER, _typed(posted))
        except RefusedError as error:
            return self.site.typed_page(request, 403, "Not possible", str(error), _typed(posted))
        except (ValueError, BusyError) as error:
            return show(account, token, fields, _sentence(error))
        except STORE_AWAY as error:
            LOG.error("a message or a verdict was not stored: %s", reason_of(error))
            return self.site.unsaved_page(request, posted, 503, _typed(posted))


def _typed(posted: FormData) -> str:
    """Returns what was entered, as lines that can be copied."""
    fields = fields_of(posted)
    choice = CHOICES.get(fields.text("choice"))
    marks = [f"{side.upper()}: {', '.join(on)}" for side in "ab" if (on := fields.ticked.get(f"flags_{side}", ()))]
    lines = [fields.text("question"), choice.label if choice else "", *marks, fields.text("note")]
    return "\n".join(line for line in lines if line.strip())


def _continues(given: Given | None) -> str:
    """Returns whose answer the conversation continues unless the person says otherwise: that of the better one."""
    chosen = given.choice[:1] if given is not None and given.choice not in ("", "tie", "bad") else ""
    return chosen or OWN


def _sentence(error: Exception) -> str:
    """Returns an error for the page. The store's errors name tasks, which people must not see."""
    text = str(error)
    if text.startswith("task "):
        return "This verdict was changed in another window. Reload the page."
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _path_of(handle: str) -> str:
    return f"/arena/{quote(handle, safe='')}"
