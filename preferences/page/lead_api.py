"""The part of the API with which leads organize labeling: progress, queue, overlap, and closed accounts.

Leaves out: search, links, tags of people and batches, and personal data, which have pages and commands.
"""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import Field

from preferences import adjudication, organizing
from preferences.accounts import Accounts
from preferences.adjudication import Threshold
from preferences.assignment import MAX_TAG_CHARACTERS, MAX_TAGS
from preferences.page.api import Bearer, signed_in_lead
from preferences.page.api_bodies import ERRORS, IS_WHOLE, MAX_TASKS_AT_ONCE, STORABLE, Body, Name, Text
from preferences.page.service import LeadView
from preferences.records import MAX_LABELERS

MAX_ROWS = 100

Tag = Annotated[str, Field(max_length=MAX_TAG_CHARACTERS, pattern=STORABLE)]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
TaskIds = Annotated[list[Name], Field(min_length=1, max_length=MAX_TASKS_AT_ONCE)]
NumLabelers = Annotated[int, Field(ge=1, le=MAX_LABELERS), IS_WHOLE]
Share = Annotated[float, Query(ge=0, le=1)]
Start = Annotated[int, Query(ge=0, le=2**31 - 1)]
Term = Annotated[str, Query(max_length=400, pattern=STORABLE)]


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


class TaskTagsBody(TasksBody):
    """The tags that labelers need for these tasks, in addition to those of their batch; none = anybody."""

    tags: Tags


class StateBody(Body):
    name: Text
    state: Literal["admitted", "closed"]


class LeadApi:
    """The routes, all of them for leads only."""

    def __init__(self, accounts: Accounts, lead: LeadView) -> None:
        self.accounts, self.lead, self.store = accounts, lead, lead.store
        self.router = APIRouter(prefix="/api", responses=ERRORS)
        get, post = self.router.get, self.router.post
        get("/progress", summary="What is left, when it may be done, and everybody's hours (leads)")(self.progress)
        get("/queue", summary="Tasks to adjudicate, most disagreement first (leads)")(self.queue)
        post("/accounts/state", summary="Admit somebody or close an account (leads)", status_code=204)(self.set_state)
        for path, summary, route in (
            ("/batches/labelers", "Set how many labelers each task of a batch wants", self.set_batch_labelers),
            ("/batches/closed", "Close or reopen a batch", self.set_closed),
            ("/tasks/labelers", "Set how many labelers these tasks want", self.set_task_labelers),
            ("/tasks/archived", "Archive tasks, or take them out of the archive", self.set_archived),
            ("/tasks/tags", "Set the tags that these tasks require", self.set_task_tags),
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

    def set_state(self, body: StateBody, bearer: Bearer) -> None:
        account, _ = signed_in_lead(self.accounts, bearer)
        if body.name == account.name:
            raise HTTPException(403, "you cannot close your own account; another lead can")
        self.accounts.set_state(body.name, body.state, by=account.name)
