"""The lead's pages: progress, batches, quality, exports, accounts and links. `labeler_pages` has the one to adjudicate.

The tasks of an uploaded file wait in memory, one file per lead, until the lead has seen their number and stores them.
"""

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences import assignment, organizing, recording
from preferences.accounts import Account, Role, State
from preferences.formats.annotated import TURNS, WHOLE, CriterionNeededError
from preferences.formats.exchange import read_new_tasks
from preferences.formats.parts import Report
from preferences.formats.registry import FORMATS
from preferences.page.search_pages import tags_in
from preferences.page.security import MAX_TASKS_BYTES
from preferences.page.service import EXPORTS, Exported, LeadView, RefusedError, exported_what, warning_of
from preferences.page.site import Posted, Site, Uploaded, download, redirect
from preferences.recording import Import
from preferences.records import Locations
from preferences.store import LabelStore

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
