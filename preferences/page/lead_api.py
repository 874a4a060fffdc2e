"""The part of the API with which leads organize labeling: progress, queue, search, overlap, assignment, and people."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import Field

from preferences import adjudication, organizing, search
from preferences.accounts import MAX_DAILY_QUOTA, Accounts
from preferences.adjudication import Threshold
from preferences.assignment import MAX_TAG_CHARACTERS, MAX_TAGS
from preferences.page.api import Bearer, signed_in_lead
from preferences.page.api_bodies import ERRORS, IS_WHOLE, MAX_TASKS_AT_ONCE, STORABLE, Body, Name, Text
from preferences.page.config import ServerConfig
from preferences.page.service import LeadView
from preferences.records import MAX_LABELERS
from preferences.search import Search, Sort, State

MAX_ROWS = 100

Tag = Annotated[str, Field(max_length=MAX_TAG_CHARACTERS, pattern=STORABLE)]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
TaskIds = Annotated[list[Name], Field(min_length=1, max_length=MAX_TASKS_AT_ONCE)]
NumLabelers = Annotated[int, Field(ge=1, le=MAX_LABELERS), IS_WHOLE]
Share = Annotated[float, Query(ge=0, le=1)]
Start = Annotated[int, Query(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Query(ge=0, le=4e9, description="Seconds since the epoch; 0 = any time.")]
Term = Annotated[str, Query(max_length=400, pattern=STORABLE)]
SignIns = Annotated[bool, Query(description="Sign-ins and refused ones, instead of everything else.")]
Kind = Literal["", "answer", "skip", "undo", "adjudication", "void"]


class TasksBody(Body):
    task_ids: TaskIds


class BatchOverlapBody(Body):
    batch: Name
    num_labelers: NumLabelers


class TaskOverlapBody(TasksBody):
    num_labelers: NumLabelers


class ClosedBody(Body):
    batch: Name
    is_closed: bool


class ArchivedBody(TasksBody):
    is_archived: bool


class BatchTagsBody(Body):
    """The tags that labelers need for a batch, all of them; none = anybody."""

    batch: Name
    tags: Tags


class TaskTagsBody(TasksBody):
    """The tags that labelers need for these tasks, in addition to those of their batch; none = anybody."""

    tags: Tags


class AssignmentBody(Body):
    """A labeler's tags, and their answers per day (0 = the configuration's number)."""

    name: Text
    tags: Annotated[Tags, Field(default_factory=list)]
    daily_quota: Annotated[int, Field(ge=0, le=MAX_DAILY_QUOTA), IS_WHOLE] = 0


class InvitationBody(Body):
    name: Text
    role: Literal["lead", "labeler"]


class RevocationBody(Body):
    name: Text


class ErasureBody(Body):
    name: Text


class StateBody(Body):
    name: Text
    state: Literal["admitted", "closed"]


class LeadApi:
    """The routes, all of them for leads only."""

    def __init__(self, accounts: Accounts, lead: LeadView, server: ServerConfig) -> None:
        self.accounts, self.lead, self.store, self.server = accounts, lead, lead.store, server
        self.router = APIRouter(prefix="/api", responses=ERRORS)
        get, post = self.router.get, self.router.post
        get("/progress", summary="What is left, when it may be done, and everybody's hours (leads)")(self.progress)
        get("/queue", summary="Tasks to adjudicate, most disagreement first (leads)")(self.queue)
        get("/search/tasks", summary="Tasks by words, batch, sort, state or disagreement (leads)")(self.search_tasks)
        get("/search/answers", summary="What labelers did, newest first (leads)")(self.search_answers)
        get("/accounts", summary="Accounts (leads)")(self.list_accounts)
        get("/invitations", summary="One-time links that can still be used (leads)")(self.invitations)
        post("/invitations", summary="Make a one-time link, which voids an older one (leads)")(self.invite)
        post("/invitations/revoked", summary="Void the link of a name (leads)", status_code=204)(self.revoke)
        get("/people/{name:path}", summary="Everything held about a person (leads)")(self.held_about)
        post("/people/erased", summary="Erase a person, except for judgments (leads)")(self.erase)
        get("/audit-log", summary="Who did what, or signed in (leads)")(self.audit_log)
        post("/accounts/state", summary="Admit somebody or close an account (leads)", status_code=204)(self.set_state)
        for path, summary, route in (
            ("/batches/labelers", "Set how many labelers each task of a batch wants", self.set_batch_labelers),
            ("/batches/closed", "Close or reopen a batch", self.set_closed),
            ("/batches/tags", "Set the tags that a batch requires", self.set_batch_tags),
            ("/tasks/labelers", "Set how many labelers these tasks want", self.set_task_labelers),
            ("/tasks/archived", "Archive tasks, or take them out of the archive", self.set_archived),
            ("/tasks/tags", "Set the tags that these tasks require", self.set_task_tags),
            ("/accounts/assignment", "Set a labeler's tags and daily quota", self.set_assignment),
        ):
            post(path, summary=f"{summary} (leads)", status_code=204)(route)

    def _change(self, bearer: Bearer) -> dict[str, Any]:
        account, _ = signed_in_lead(self.accounts, bearer)
        return {"by": account.name, "now": self.store.now()}

    # ---- reading ----

    def progress(self, bearer: Bearer) -> dict[str, Any]:
        signed_in_lead(self.accounts, bearer)
        found = self.lead.pace(self.lead.batches())
        batches = {
            name: asdict(found["settings"][name]) | asdict(estimate) for name, estimate in found["estimates"].items()
        }
        return {"batches": batches, **asdict(found["pace"])}

    def queue(
        self,
        bearer: Bearer,
        batch: Term = "",
        min_disagreement: Share = 0.25,
        fewer_than: Annotated[int, Query(ge=0, le=MAX_LABELERS)] = 0,
        start: Start = 0,
    ) -> dict[str, Any]:
        signed_in_lead(self.accounts, bearer)
        threshold = Threshold(batch, min_disagreement, fewer_than)
        with self.store.reading() as connection:
            found = adjudication.queued(connection, threshold, start=start, limit=MAX_ROWS)
            num_left = adjudication.num_queued(connection, threshold)
        return {"num_left": num_left, "tasks": [asdict(one) for one in found]}

    def search_tasks(
        self,
        bearer: Bearer,
        words: Term = "",
        batch: Term = "",
        sort: Sort = "",
        state: State = "",
        min_disagreement: Share = 0.0,
        after: Start = 0,
    ) -> list[dict[str, Any]]:
        """`after` is the position of the last task of the page before."""
        signed_in_lead(self.accounts, bearer)
        wanted = Search(words=words, batch=batch, sort=sort, state=state, min_disagreement=min_disagreement)
        with self.store.reading() as connection:
            return [asdict(one) for one in search.find_tasks(connection, wanted, after=after, limit=MAX_ROWS)]

    def search_answers(
        self,
        bearer: Bearer,
        words: Term = "",
        batch: Term = "",
        labeler: Term = "",
        kind: Kind = "",
        mark: Term = "",
        note: Term = "",
        since: Seconds = 0.0,
        until: Seconds = 0.0,
        before: Start = 0,
    ) -> list[dict[str, Any]]:
        """`before` is the `number` of the last event of the page before."""
        signed_in_lead(self.accounts, bearer)
        wanted = Search(
            words=words, batch=batch, labeler=labeler, kind=kind, mark=mark, note=note, since=since, until=until
        )
        with self.store.reading() as connection:
            found = search.find_answers(connection, wanted, before=before, limit=MAX_ROWS)
        return [{"number": number, **asdict(event)} for number, event in found]

    # ---- changing ----

    def set_batch_labelers(self, body: BatchOverlapBody, bearer: Bearer) -> None:
        how = self._change(bearer)
        with self.store.writing() as connection:
            positions = organizing.positions_in(connection, body.batch)
            organizing.set_num_labelers(connection, positions, body.num_labelers, **how)

    def set_closed(self, body: ClosedBody, bearer: Bearer) -> None:
        how = self._change(bearer)
        with self.store.writing() as connection:
            organizing.set_closed(connection, body.batch, is_closed=body.is_closed, **how)

    def set_batch_tags(self, body: BatchTagsBody, bearer: Bearer) -> None:
        how = self._change(bearer)
        with self.store.writing() as connection:
            organizing.set_required(connection, body.batch, body.tags, **how)

    def set_task_labelers(self, body: TaskOverlapBody, bearer: Bearer) -> None:
        how = self._change(bearer)
        with self.store.writing() as connection:
            positions = organizing.positions_of(connection, body.task_ids)
            organizing.set_num_labelers(connection, positions, body.num_labelers, **how)

    def set_archived(self, body: ArchivedBody, bearer: Bearer) -> None:
        how = self._change(bearer)
        with self.store.writing() as connection:
            positions = organizing.positions_of(connection, body.task_ids)
            organizing.set_archived(connection, positions, is_archived=body.is_archived, **how)

    def set_task_tags(self, body: TaskTagsBody, bearer: Bearer) -> None:
        how = self._change(bearer)
        with self.store.writing() as connection:
            positions = organizing.positions_of(connection, body.task_ids)
            organizing.set_required_of_tasks(connection, positions, body.tags, **how)

    def set_assignment(self, body: AssignmentBody, bearer: Bearer) -> None:
        account, _ = signed_in_lead(self.accounts, bearer)
        self.accounts.set_assignment(body.name, body.tags, body.daily_quota, by=account.name)

    # ---- people ----

    def list_accounts(self, bearer: Bearer) -> list[dict[str, Any]]:
        signed_in_lead(self.accounts, bearer)
        pseudonyms = self.accounts.pseudonyms()
        return [{**asdict(account), "pseudonym": pseudonyms[account.name]} for account in self.accounts.all()]

    def invitations(self, bearer: Bearer) -> list[dict[str, Any]]:
        signed_in_lead(self.accounts, bearer)
        return [asdict(link) for link in self.accounts.links()]

    def invite(self, body: InvitationBody, bearer: Bearer) -> dict[str, str]:
        account, _ = signed_in_lead(self.accounts, bearer)
        code = self.accounts.invite(body.name, body.role, by=account.name)
        return {"link": self.server.link(code)}

    def revoke(self, body: RevocationBody, bearer: Bearer) -> None:
        account, _ = signed_in_lead(self.accounts, bearer)
        self.accounts.revoke(body.name, by=account.name)

    def held_about(self, name: str, bearer: Bearer) -> dict[str, Any]:
        account, _ = signed_in_lead(self.accounts, bearer)
        if name not in self.accounts.pseudonyms():
            raise HTTPException(404, f"the store holds nothing under the name {name!a}")
        return self.accounts.held_about(name, by=account.name)

    def erase(self, body: ErasureBody, bearer: Bearer) -> dict[str, str]:
        account, _ = signed_in_lead(self.accounts, bearer)
        if body.name == account.name:
            raise HTTPException(403, "you cannot erase yourself; another lead can")
        return {"pseudonym": self.accounts.erase(body.name, by=account.name)}

    def audit_log(self, bearer: Bearer, *, sign_ins: SignIns = False) -> list[dict[str, Any]]:
        signed_in_lead(self.accounts, bearer)
        return [asdict(event) for event in self.accounts.audit_log(sign_ins=sign_ins)]

    def set_state(self, body: StateBody, bearer: Bearer) -> None:
        account, _ = signed_in_lead(self.accounts, bearer)
        if body.name == account.name:
            raise HTTPException(403, "you cannot close your own account; another lead can")
        self.accounts.set_state(body.name, body.state, by=account.name)
