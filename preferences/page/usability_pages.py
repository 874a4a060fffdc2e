"""The questionnaire that ends each condition of a usability study, the results page for leads, and an API for both."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import Field

from files.records import as_json
from preferences import usability
from preferences.accounts import Account, Accounts
from preferences.database import STORE_AWAY, reason_of
from preferences.page.api import Bearer, signed_in
from preferences.page.api_bodies import ERRORS, IS_WHOLE, STORABLE, Body
from preferences.page.fields import Fields
from preferences.page.service import LabelingService
from preferences.page.site import ONLY_LEADS, Posted, Site, redirect
from preferences.questionnaire import LOAD, LOAD_CHOICES, LOAD_STEP, MAX_LOAD, MAX_SUS, MIN_SUS, SUS, SUS_CHOICES
from preferences.statistics.usability import read_report
from preferences.statistics.usability_tables import conclusions, usability_tables
from preferences.usability import MAX_COMMENT_CHARACTERS, NO_PREFERENCE, NOT_ASKED, QuestionnaireAnswer, Stage

LOG = logging.getLogger(__name__)
NO_PREFERENCE_VALUE = "none"  # of the field `preferred`; a condition is its index


class UsabilityPages:
    """The routes of the pages."""

    def __init__(self, site: Site, service: LabelingService) -> None:
        self.site, self.service = site, service
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/usability", response_class=HTMLResponse)(self.questionnaire)
        self.router.post("/usability")(self.answer)
        self.router.get("/lead/usability", response_class=HTMLResponse)(self.results)

    def questionnaire(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        stage = _due(self.service, account, token)
        return redirect("/task") if stage is None else self._page(account, token, stage)

    def answer(self, request: Request, posted: Posted) -> Response:
        """Stores the answers. If they were stored before, or no questionnaire is due, leads to the next task."""
        account, token, fields = self.site.form(request, posted)
        try:
            stage = _due(self.service, account, token)
            if stage is None or fields.text("condition") != str(stage.conditions[stage.place]):
                return redirect("/task")
            answer, wrong = read_questionnaire(fields, account.name, stage)
            if answer is None:
                return self._page(account, token, stage, fields, wrong)
            self.service.store_questionnaire(account, answer)
        except STORE_AWAY as error:
            LOG.error("a questionnaire was not stored: %s", reason_of(error))
            return self.site.unsaved_page(request, posted, 503, fields.text("comment"))
        if not stage.is_last:
            return redirect("/task")
        text = "You have finished the study. Your answers about all forms are stored."
        return self.site.page("message", account, token, heading="Thank you", text=text, typed="")

    def results(self, request: Request) -> Response:
        """Shows a lead the results of a study (default: the newest)."""
        account, token = self.site.lead(request)
        with self.service.store.reading() as connection:
            studies = usability.studies(connection)
            if not studies:
                return self.site.page("studies", account, token, studies=studies)
            name = request.query_params.get("study", "") or studies[-1].name
            study = usability.require(connection, name)
            report, said = read_report(connection, name), usability.answers(connection, name)
        return self.site.page(
            "studies",
            account,
            token,
            studies=studies,
            report=report,
            is_stopped=study.stopped_at > 0,
            num_finished=sum(num for _, num in report.finished),
            sentences=[*conclusions(report), *report.notes],
            tables=usability_tables(report),
            comments=[(study.conditions[one.condition].name, one.comment) for one in said if one.comment],
        )

    def _page(
        self,
        account: Account,
        token: str,
        stage: Stage,
        fields: Fields | None = None,
        wrong: Sequence[str] = (),
    ) -> Response:
        return self.site.page(
            "questionnaire",
            account,
            token,
            422 if wrong else 200,
            stage=stage,
            load=LOAD,
            load_choices=LOAD_CHOICES,
            sus=SUS,
            sus_choices=SUS_CHOICES,
            no_preference=NO_PREFERENCE_VALUE,
            max_comment=MAX_COMMENT_CHARACTERS,
            fields=fields or Fields({}),
            wrong=wrong,
        )


def _due(service: LabelingService, account: Account, token: str) -> Stage | None:
    """Returns a labeler's stage if its questionnaire is due."""
    if account.role == "lead" or service.next_task(account, token) != "questionnaire":
        return None
    return service.stage(account)


def read_questionnaire(fields: Fields, labeler: str, stage: Stage) -> tuple[QuestionnaireAnswer | None, list[str]]:
    """Returns the answers in a posted form, or None and a sentence for each mistake."""
    wrong: list[str] = []
    load = _read_all(fields, "load", LOAD_CHOICES, [scale.name for scale in LOAD], wrong)
    sus = _read_all(fields, "sus", SUS_CHOICES, [f"statement {number}" for number in range(1, len(SUS) + 1)], wrong)
    preferred = NOT_ASKED
    if stage.is_last:
        is_none, number = fields.text("preferred") == NO_PREFERENCE_VALUE, fields.number("preferred")
        preferred = NO_PREFERENCE if is_none or number is None else number
        if not is_none and number not in stage.conditions:
            wrong.append("Say which form you would rather work with, or that you have no preference.")
    # A browser sends line breaks as two characters but counts one.
    comment = fields.text("comment").strip().replace("\r\n", "\n")
    if len(comment) > MAX_COMMENT_CHARACTERS:
        wrong.append(f"The comment has {len(comment):,} characters; at most {MAX_COMMENT_CHARACTERS:,} are allowed.")
    condition = stage.conditions[stage.place]
    answer = QuestionnaireAnswer(labeler, condition, tuple(load), tuple(sus), preferred, comment)
    return (None if wrong else answer), wrong


def _read_all(fields: Fields, name: str, choices: Sequence[int], items: Sequence[str], wrong: list[str]) -> list[int]:
    """Returns the fields NAME_0, NAME_1, ... Adds to `wrong` a sentence that names those without a valid choice."""
    found = [fields.number(f"{name}_{index}") for index in range(len(items))]
    missing = [item for item, value in zip(items, found, strict=True) if value not in choices]
    if missing:
        wrong.append(f"Not answered: {', '.join(missing)}.")
    return [value or 0 for value in found]


# ---- the same as an API ----


class QuestionnaireBody(Body):
    """Answers to the questionnaire that is due.

    `preferred` is -2, except after the last form: then it is a condition, or -1 for no preference.
    """

    condition: Annotated[int, Field(ge=0, le=2**31 - 1), IS_WHOLE]
    load: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_LOAD, multiple_of=LOAD_STEP), IS_WHOLE]],
        Field(min_length=len(LOAD), max_length=len(LOAD)),
    ]
    sus: Annotated[
        list[Annotated[int, Field(ge=MIN_SUS, le=MAX_SUS), IS_WHOLE]], Field(min_length=len(SUS), max_length=len(SUS))
    ]
    preferred: Annotated[int, Field(ge=NOT_ASKED, le=2**31 - 1), IS_WHOLE] = NOT_ASKED
    comment: Annotated[str, Field(max_length=MAX_COMMENT_CHARACTERS, pattern=STORABLE)] = ""


class UsabilityApi:
    """The routes of the API about usability studies."""

    def __init__(self, service: LabelingService, accounts: Accounts) -> None:
        self.service, self.accounts = service, accounts
        self.router = APIRouter(prefix="/api", responses=ERRORS)
        self.router.get("/usability", summary="The usability study's questionnaire, if it is due")(self.questionnaire)
        self.router.post("/usability", summary="Answer the questionnaire", status_code=204)(self.answer)
        self.router.get("/usability/{study:path}", summary="Results of a usability study (leads)")(self.results)

    def questionnaire(self, bearer: Bearer) -> dict[str, Any]:
        account, token = signed_in(self.accounts, bearer)
        stage = _due(self.service, account, token)
        if stage is None:
            raise HTTPException(404, "no questionnaire is due")
        names = {str(index): stage.study.conditions[index].name for index in stage.conditions}
        return {
            "condition": stage.conditions[stage.place],
            "place": stage.place + 1,
            "asks_which_is_preferred": names if stage.is_last else {},
            "load": [asdict(scale) for scale in LOAD],
            "sus": list(SUS),
        }

    def answer(self, body: QuestionnaireBody, bearer: Bearer) -> None:
        account, token = signed_in(self.accounts, bearer)
        said = body.model_dump() | {"load": tuple(body.load), "sus": tuple(body.sus)}
        if account.role == "lead":
            raise HTTPException(403, "only labelers answer questionnaires")
        stage = self.service.stage(account)
        is_next = stage is not None and stage.conditions[stage.place] == body.condition
        if is_next and _due(self.service, account, token) is None:
            raise HTTPException(409, "no questionnaire about this form is due")
        self.service.store_questionnaire(account, QuestionnaireAnswer(account.name, **said))

    def results(self, study: str, bearer: Bearer) -> dict[str, Any]:
        account, _ = signed_in(self.accounts, bearer)
        if account.role != "lead":
            raise HTTPException(403, ONLY_LEADS)
        with self.service.store.reading() as connection:
            if usability.find(connection, study) is None:
                raise HTTPException(404, f"study {study!r} is not in the store")
            return dict(as_json(read_report(connection, study)))
