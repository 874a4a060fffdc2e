"""The leads' pages for finding tasks: the adjudication queue, and the search for tasks and answers."""

from datetime import UTC, date, datetime, timedelta
from typing import Any, get_args
from urllib.parse import parse_qs, quote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences import adjudication, organizing, search
from preferences.adjudication import Threshold
from preferences.page.forms import Fields
from preferences.page.service import LabelingService, RefusedError
from preferences.page.site import Posted, Site, redirect
from preferences.records import KINDS
from preferences.search import ANY_KIND, Search, Sort, State

PAGE_SIZE = 25
MAX_CHANGED = 10_000  # tasks that one form changes
SEARCHED = ("words", "batch", "sort", "state", "disagreement", "labeler", "kind", "mark", "note", "since", "until")


# ---- the adjudication queue ----


def threshold_of(query: str) -> Threshold:
    """Reads a threshold from a query string; what cannot be read has its default."""
    given = {name: values[0] for name, values in parse_qs(query).items()}
    low, fewer = _share(given.get("disagreement", "")), given.get("fewer", "")
    default = Threshold()
    return Threshold(
        given.get("batch", ""),
        default.min_disagreement if low is None else low,
        int(fewer) if fewer.isascii() and fewer.isdigit() and len(fewer) < 5 else default.fewer_than,
    )


def query_of(threshold: Threshold) -> str:
    """Returns a threshold as a query string."""
    given = {
        "batch": threshold.batch,
        "disagreement": f"{threshold.min_disagreement:g}",
        "fewer": str(threshold.fewer_than),
    }
    return urlencode(given)


def queue_path(query: str, task_id: str) -> str:
    """Returns the path of a task that is opened from the queue."""
    return f"/lead/task?task={quote(task_id, safe='')}&queue={quote(query, safe='')}"


def in_queue(service: LabelingService, query: str, task_id: str) -> dict[str, Any]:
    """Returns what a task's page shows about the queue that it was opened from: what is left, previous and next."""
    threshold = threshold_of(query)
    with service.store.reading() as connection:
        before, after = (
            adjudication.neighbour(connection, threshold, task_id, is_next=is_next) for is_next in (False, True)
        )
        num_left = adjudication.num_queued(connection, threshold)
    paths = {name: queue_path(query, found) if found else "" for name, found in (("before", before), ("after", after))}
    return {"query": query, "num_left": num_left, **paths}


def next_in_queue(service: LabelingService, query: str, task_id: str) -> str:
    """Returns where to go after a task of the queue: to the next task, or else to the queue's page."""
    with service.store.reading() as connection:
        after = adjudication.neighbour(connection, threshold_of(query), task_id, is_next=True)
    return queue_path(query, after) if after else f"/lead/queue?{query}"


# ---- the pages ----


class SearchPages:
    """The routes of the queue and the search."""

    def __init__(self, site: Site, service: LabelingService) -> None:
        self.site, self.service, self.store = site, service, service.store
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/lead/queue", response_class=HTMLResponse)(self.queue)
        self.router.get("/lead/search", response_class=HTMLResponse)(self.search)
        self.router.post("/lead/tasks")(self.change_tasks)

    def queue(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        threshold, start = threshold_of(str(request.query_params)), _number(request.query_params.get("start", ""))
        with self.store.reading() as connection:
            num_left = adjudication.num_queued(connection, threshold)
            found = adjudication.queued(connection, threshold, start=start, limit=PAGE_SIZE + 1)
            has_overlap = adjudication.has_overlap(connection, threshold.batch)
        return self.site.page(
            "queue",
            account,
            token,
            threshold=threshold,
            query=query_of(threshold),
            batches=self.store.batches(),
            num_left=num_left,
            has_overlap=has_overlap,
            found=found[:PAGE_SIZE],
            has_more=len(found) > PAGE_SIZE,
            prompts=self.store.shown_prompts([one.task_id for one in found[:PAGE_SIZE]]),
            start=start,
            page_size=PAGE_SIZE,
        )

    def search(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        given = {name: request.query_params.get(name, "").strip() for name in SEARCHED}
        wanted, wrong = search_of(given)
        after = _number(request.query_params.get("after", ""))
        found: dict[str, Any] = {"tasks": [], "events": [], "next": 0}
        if not wrong:
            found = self._found(wanted, after)
        names = [one.task_id for one in (*found["tasks"], *found["events"])]
        return self.site.page(
            "search",
            account,
            token,
            422 if wrong else 200,
            given=given,
            query=urlencode({name: value for name, value in given.items() if value}),
            wrong=wrong,
            after=after,
            batches=self.store.batches(),
            labelers=self._labelers(),
            kinds=(ANY_KIND, *KINDS),
            sorts=get_args(Sort)[1:],
            states=get_args(State)[1:],
            marks=self.service.config.flags,
            finds_answers=wanted.finds_answers,
            prompts=self.store.shown_prompts(names),
            voidable=(),
            **found,
        )

    def _found(self, wanted: Search, after: int) -> dict[str, Any]:
        """Returns a page of tasks or of events, and where the next page begins (0 = there is none)."""
        with self.store.reading() as connection:
            if wanted.finds_answers:
                events = search.find_answers(connection, wanted, before=after, limit=PAGE_SIZE + 1)
                last = events[PAGE_SIZE - 1][0] if len(events) > PAGE_SIZE else 0
                return {"tasks": [], "events": [event for _, event in events[:PAGE_SIZE]], "next": last}
            tasks = search.find_tasks(connection, wanted, after=after, limit=PAGE_SIZE + 1)
            last = tasks[PAGE_SIZE - 1].position if len(tasks) > PAGE_SIZE else 0
            return {"tasks": tasks[:PAGE_SIZE], "events": [], "next": last}

    def _labelers(self) -> list[str]:
        return sorted(self.site.accounts.pseudonyms())

    def change_tasks(self, request: Request, posted: Posted) -> Response:
        """Changes the ticked tasks, or all that the search finds."""
        account, _, fields = self.site.lead_form(request, posted)
        query, by, now = fields.text("query"), account.name, self.store.now()
        action = _action(fields)
        if action == "nothing":
            return redirect(f"/lead/search?{query}")
        with self.store.writing() as connection:
            if fields.text("which") == "all":
                given = {name: values[0] for name, values in parse_qs(query).items()}
                wanted, wrong = search_of({name: given.get(name, "") for name in SEARCHED})
                if wrong:
                    raise RefusedError(wrong)
                positions = search.find_positions(connection, wanted, limit=MAX_CHANGED + 1)
                if len(positions) > MAX_CHANGED:
                    raise RefusedError(f"the search finds more than {MAX_CHANGED:,} tasks; narrow it down first")
            else:
                positions = organizing.positions_of(connection, fields.ticked.get("flags_task", []))
            if not positions:
                raise RefusedError("no task was chosen; tick some, or choose all that the search finds")
            how: dict[str, Any] = {"by": by, "now": now}
            if action == "labelers":
                number = fields.number("num_labelers") or 0
                organizing.set_num_labelers(connection, positions, number, **how)
            elif action == "tags":
                organizing.set_required_of_tasks(connection, positions, tags_in(fields), **how)
            elif action in ("archive", "unarchive"):
                organizing.set_archived(connection, positions, is_archived=action == "archive", **how)
            else:
                raise RefusedError("the form names no change")
        return redirect(f"/lead/search?{query}")


def _action(fields: Fields) -> str:
    """Returns the change that a form asks for. Enter in a field asks for what was typed; "nothing" if nothing was.

    Raises: RefusedError if both the number and the tags were typed.
    """
    if fields.text("action") != "typed":
        return fields.text("action")
    typed = [action for action, field in (("labelers", "num_labelers"), ("tags", "tags")) if fields.text(field).strip()]
    if len(typed) > 1:
        raise RefusedError("both a number and tags were typed; press the button of the one that you want to set")
    return typed[0] if typed else "nothing"


def tags_in(fields: Fields) -> list[str]:
    """Returns the tags in a form, which are separated by commas."""
    return [tag.strip() for tag in fields.text("tags").split(",") if tag.strip()]


def search_of(given: dict[str, str]) -> tuple[Search, str]:
    """Returns the search that a form describes, and what is wrong with it ("" if nothing is)."""
    low = _share(given["disagreement"]) if given["disagreement"] else 0.0
    since, until = _day(given["since"]), _day(given["until"])
    if low is None:
        return Search(), "Disagreement is a number from 0 to 1."
    if since is None or until is None:
        return Search(), "Dates are written like 2026-11-30."
    for name, known in (("sort", get_args(Sort)), ("state", get_args(State)), ("kind", ("", ANY_KIND, *KINDS))):
        if given[name] not in known:
            return Search(), f"“{given[name]}” is not a choice that this page has."
    if until:
        until += timedelta(days=1).total_seconds()  # the last day counts too
    texts = {name: given[name] for name in ("words", "batch", "labeler", "kind", "mark", "note")}
    sort: Any = given["sort"]
    state: Any = given["state"]
    return Search(**texts, sort=sort, state=state, min_disagreement=low, since=since, until=until), ""


def _day(text: str) -> float | None:
    """Returns the start of a day (UTC) in seconds since the epoch; 0 for "", None if it is no date."""
    if not text:
        return 0.0
    try:
        return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC).timestamp()
    except ValueError:
        return None


def _share(text: str) -> float | None:
    try:
        found = float(text.replace(",", "."))
    except ValueError:
        return None
    return found if 0 <= found <= 1 else None


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
