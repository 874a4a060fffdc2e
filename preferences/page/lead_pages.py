"""The lead's pages: progress, the adjudication queue, search, batches, quality, exports, accounts and links.
`labeler_pages` has the one to adjudicate.

The tasks of an uploaded file wait in memory, one file per lead, until the lead has seen their number and stores them.
"""

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args
from urllib.parse import parse_qs, quote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences import adjudication, assignment, organizing, recording, search
from preferences.accounts import Account, Role, State
from preferences.adjudication import Threshold
from preferences.formats.annotated import TURNS, WHOLE, CriterionNeededError
from preferences.formats.exchange import read_new_tasks
from preferences.formats.parts import Report
from preferences.formats.registry import FORMATS
from preferences.page.forms import Fields
from preferences.page.security import MAX_TASKS_BYTES
from preferences.page.service import (
    EXPORTS,
    Exported,
    LabelingService,
    LeadView,
    RefusedError,
    exported_what,
    warning_of,
)
from preferences.page.site import Posted, Site, Uploaded, download, redirect
from preferences.recording import Import
from preferences.records import KINDS, Locations
from preferences.search import ANY_KIND, Search, Sort
from preferences.store import LabelStore

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
            labelers=sorted(self.site.accounts.pseudonyms()),
            kinds=(ANY_KIND, *KINDS),
            sorts=get_args(Sort)[1:],
            states=get_args(search.State)[1:],
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
    for name, known in (("sort", get_args(Sort)), ("state", get_args(search.State)), ("kind", ("", ANY_KIND, *KINDS))):
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


# ---- batches, quality and exports ----


JSONL = "application/jsonl"
MAX_INVITED = 200  # names on one form
NOBODY: Mapping[str, str] = {}
UPLOADED = (".jsonl", ".json", ".csv")
LABELS = (TURNS, "trl_unpaired")  # formats in which a criterion gives labels, and no ranks


@dataclass(frozen=True)
class Upload:
    """A file's tasks that are not stored yet. `key` identifies the preview that its lead saw."""

    key: str
    coming: Import
    locations: Locations


class LeadPages:
    """The routes of the pages about batches."""

    def __init__(self, site: Site, lead: LeadView) -> None:
        self.site, self.lead = site, lead
        self._uploads: dict[str, Upload] = {}  # by lead
        self.router = APIRouter(include_in_schema=False)
        get = self.router.get
        post = self.router.post
        get("/lead", response_class=HTMLResponse)(self.progress)
        post("/lead/batch/new", max_body_size=MAX_TASKS_BYTES)(self.preview_batch)
        post("/lead/batch/store")(self.store_batch)
        post("/lead/batch/labelers")(self.set_labelers)
        post("/lead/batch/closed")(self.set_closed)
        post("/lead/batch/tags")(self.set_required)
        get("/lead/quality", response_class=HTMLResponse)(self.quality)
        get("/lead/export", response_class=HTMLResponse)(self.export)
        get("/lead/export/rows")(self.export_rows)
        get("/lead/export/report")(self.export_report)

    def progress(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self._progress_page(account, token)

    def _progress_page(self, account: Account, token: str, refused: str = "") -> Response:
        batches = self.lead.batches()
        with self.lead.store.reading() as connection:
            wrong = warning_of(self.site.config, connection)
        found = self.lead.pace(batches)
        return self.site.page(
            "lead",
            account,
            token,
            422 if refused else 200,
            batches=batches,
            exports=[FORMATS[name] for name in EXPORTS],
            wrong=wrong,
            refused=refused,
            **found,
        )

    # ---- new batches ----

    def preview_batch(self, request: Request, uploaded: Uploaded) -> Response:
        """Checks a file as an import does, and shows what would be stored."""
        posted, file = uploaded
        account, token, fields = self.site.lead_form(request, posted)
        suffix, batch = Path(file.filename or "").suffix.lower(), fields.text("batch").strip()
        with TemporaryDirectory(prefix="heed-upload-") as folder:
            try:
                if not batch or suffix not in UPLOADED:
                    raise ValueError(
                        f"A batch's name, and a file whose name ends in {', '.join(UPLOADED)}, were expected."
                    )
                path = Path(folder) / f"tasks{suffix}"
                path.write_bytes(file.file.read())
                coming, locations, num_same = read_new_tasks(str(path), batch, fields.number("num_labelers") or 1)
                self.lead.store.import_all([coming], files=locations, only_check=True)
            except ValueError as error:
                return self._progress_page(account, token, str(error).replace(f"{folder}/", ""))
        upload = self._uploads[account.name] = Upload(secrets.token_urlsafe(12), coming, locations)
        with self.lead.store.reading() as connection:
            num_known = len(recording.stored(connection, [task.task_id for task in coming.tasks]))
        return self.site.page(
            "new-batch",
            account,
            token,
            upload=upload,
            num_same=num_same,
            num_new=len(coming.tasks) - num_known,
            is_new=batch not in self.lead.store.batches(),
            num_responses=sorted(Counter(len(task.responses) for task in coming.tasks).items()),
            num_labelers=sorted(Counter(coming.quotas).items()),
        )

    def store_batch(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.lead_form(request, posted)
        upload = self._uploads.get(account.name)
        if upload is None or upload.key != fields.text("upload"):
            return self._progress_page(account, token, "This preview is out of date. Upload the file again.")
        self.lead.store.import_all([upload.coming], files=upload.locations)
        self._uploads.pop(account.name, None)
        self.site.accounts.log(account.name, "added", f"{len(upload.coming.tasks)} tasks to {upload.coming.batch}")
        return redirect("/lead")

    # ---- changing batches ----

    def set_labelers(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.site.lead_form(request, posted)
        batch, number = fields.text("batch"), fields.number("num_labelers") or 0
        with self.lead.store.writing() as connection:
            positions = organizing.positions_in(connection, batch)
            organizing.set_num_labelers(connection, positions, number, by=account.name, now=self.lead.store.now())
        return redirect("/lead")

    def set_closed(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.site.lead_form(request, posted)
        is_closed, now = fields.text("closed") == "true", self.lead.store.now()
        with self.lead.store.writing() as connection:
            organizing.set_closed(connection, fields.text("batch"), is_closed=is_closed, by=account.name, now=now)
        return redirect("/lead")

    def set_required(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.site.lead_form(request, posted)
        now = self.lead.store.now()
        with self.lead.store.writing() as connection:
            organizing.set_required(connection, fields.text("batch"), tags_in(fields), by=account.name, now=now)
        return redirect("/lead")

    def quality(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self.site.page("quality", account, token, **self.lead.quality(request.query_params.get("batch", "")))

    def export(self, request: Request) -> Response:
        """Shows what an export contains and leaves out, before anything is downloaded."""
        account, token = self.site.lead(request)
        form, needs_criterion = request.query_params.get("format", ""), False
        try:
            _, _, found = self._exported(request)
        except CriterionNeededError as error:
            found, needs_criterion = Exported([], Report(), error.criteria), True
        return self.site.page(
            "export",
            account,
            token,
            batch=request.query_params.get("batch", ""),
            form=form,
            description=FORMATS[form].description,
            found=found,
            with_names=_with_names(request),
            criterion=request.query_params.get("criterion", ""),
            whole=WHOLE,
            labels=LABELS,
            needs_criterion=needs_criterion,
        )

    def export_rows(self, request: Request) -> Response:
        account, _ = self.site.lead(request)
        batch, form, found = self._exported(request)
        self.site.accounts.log(account.name, "exported", exported_what(batch, form, with_names=_with_names(request)))
        response = download(found.lines, f"{batch}.{form}.jsonl", JSONL)
        response.headers["Heed-Left-Out"] = json.dumps(found.report.counts())  # for programs that download
        return response

    def export_report(self, request: Request) -> Response:
        self.site.lead(request)
        batch, form, found = self._exported(request)
        return download(found.report_lines, f"{batch}.{form}.left-out.jsonl", JSONL)

    def _exported(self, request: Request) -> tuple[str, str, Exported]:
        batch, form = (request.query_params.get(name, "") for name in ("batch", "format"))
        criterion = request.query_params.get("criterion", "")
        return batch, form, self.lead.export(batch, form, with_names=_with_names(request), criterion=criterion)


def _with_names(request: Request) -> bool:
    return request.query_params.get("names", "") == "true"


class PeoplePages:
    """The routes of the pages of accounts, one-time links and personal data."""

    def __init__(self, site: Site, store: LabelStore) -> None:
        self.site, self.store, self.accounts, self.server = site, store, site.accounts, site.config.server
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/lead/people", response_class=HTMLResponse)(self.people)
        post("/lead/invite")(self.invite)
        post("/lead/revoke")(self.revoke)
        post("/lead/state")(self.set_state)
        post("/lead/assignment")(self.set_assignment)
        get("/lead/person", response_class=HTMLResponse)(self.person)
        post("/lead/person/data")(self.person_data)
        post("/lead/person/erase")(self.erase)

    # ---- accounts and links ----

    def people(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self._people_page(account, token)

    def _people_page(
        self, account: Account, token: str, links: Mapping[str, str] = NOBODY, wrong: str = "", erased: str = ""
    ) -> Response:
        """Shows accounts and links. `links` are new ones by name, and `wrong` says why there are none."""
        with self.store.reading() as connection:
            requires = {name: assignment.settings_of(connection, name).requires for name in self.store.batches()}
        return self.site.page(
            "people",
            account,
            token,
            422 if wrong else 200,
            accounts=self.accounts.all(),
            has_screening=self.site.config.screening is not None,
            links=self.accounts.links(),
            requires={name: tags for name, tags in requires.items() if tags},
            events=self.accounts.audit_log(),
            sign_ins=self.accounts.audit_log(sign_ins=True),
            pseudonyms=self.accounts.pseudonyms(),
            new_links=links,
            max_names=MAX_INVITED,
            wrong=wrong,
            erased=erased,
        )

    def invite(self, request: Request, posted: Posted) -> Response:
        """Invites everybody on a list, one name per line, and gives them the tags that a batch requires."""
        account, token, fields = self.site.lead_form(request, posted)
        names = [*dict.fromkeys(name for line in fields.text("names").splitlines() if (name := line.strip()))]
        role: Role = "lead" if fields.text("role") == "lead" else "labeler"
        try:
            if not 1 <= len(names) <= MAX_INVITED:
                raise ValueError(f"{len(names)} names; 1 to {MAX_INVITED} were expected, one per line")
            with self.store.reading() as connection:
                tags = assignment.settings_of(connection, fields.text("batch")).requires if role == "labeler" else ()
            codes = self.accounts.invite_all(names, role, tags=tags, by=account.name)
        except ValueError as error:
            return self._people_page(account, token, wrong=str(error))
        return self._people_page(account, token, dict(zip(names, map(self.server.link, codes), strict=True)))

    def revoke(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.lead_form(request, posted)
        try:
            self.accounts.revoke(fields.text("name"), by=account.name)
        except ValueError as error:
            return self._people_page(account, token, wrong=str(error))
        return redirect("/lead/people")

    def set_state(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.site.lead_form(request, posted)
        if fields.text("name") == account.name:
            raise RefusedError("you cannot close your own account; another lead can")
        state: State = "closed" if fields.text("state") == "closed" else "admitted"
        self.accounts.set_state(fields.text("name"), state, by=account.name)
        return redirect("/lead/people")

    def set_assignment(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.lead_form(request, posted)
        quota = fields.number("daily_quota") if fields.text("daily_quota") else 0
        try:
            if quota is None:
                raise ValueError(f"daily_quota is {fields.text('daily_quota')!a}; a whole number was expected")
            self.accounts.set_assignment(fields.text("name"), tags_in(fields), quota, by=account.name)
        except ValueError as error:
            return self._people_page(account, token, wrong=str(error))
        return redirect("/lead/people")

    # ---- personal data ----

    def person(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self._person_page(account, token, request.query_params.get("name", ""))

    def _person_page(self, account: Account, token: str, name: str, wrong: str = "") -> Response:
        pseudonym = self.accounts.pseudonyms().get(name)
        if pseudonym is None:
            raise ValueError(f"name {name!a}: the store holds nothing under this name")
        status = 422 if wrong else 200
        return self.site.page("person", account, token, status, name=name, pseudonym=pseudonym, wrong=wrong)

    def person_data(self, request: Request, posted: Posted) -> Response:
        """Sends everything held about a person, in response to a form, because the audit log records it."""
        account, _, fields = self.site.lead_form(request, posted)
        name = fields.text("name")
        held = self.accounts.held_about(name, by=account.name)
        return download([json.dumps(held, indent=2) + "\n"], f"{name}.json", "application/json")

    def erase(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.lead_form(request, posted)
        name = fields.text("name")
        if name == account.name:
            raise RefusedError("you cannot erase yourself; another lead can")
        if fields.text("typed").strip() != name:
            return self._person_page(account, token, name, "Type the name exactly as it is shown.")
        pseudonym = self.accounts.erase(name, by=account.name)
        return self._people_page(account, token, erased=pseudonym)
