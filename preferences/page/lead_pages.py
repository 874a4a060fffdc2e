"""The lead's pages: progress, quality and exports. Adjudication uses the labelers' page, in `task_pages`."""

import json

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences.formats.registry import FORMATS
from preferences.page.lead import EXPORTS, Exported, LeadView, exported_what
from preferences.page.site import Site, download

JSONL = "application/jsonl"


class LeadPages:
    """The routes of the lead's pages."""

    def __init__(self, site: Site, lead: LeadView) -> None:
        self.site, self.lead = site, lead
        self.router = APIRouter(include_in_schema=False)
        get = self.router.get
        get("/lead", response_class=HTMLResponse)(self.progress)
        get("/lead/quality", response_class=HTMLResponse)(self.quality)
        get("/lead/answers", response_class=HTMLResponse)(self.answers)
        get("/lead/export", response_class=HTMLResponse)(self.export)
        get("/lead/export/rows")(self.export_rows)
        get("/lead/export/report")(self.export_report)

    def progress(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self.site.page("lead", account, token, batches=self.lead.batches(), export_formats=EXPORTS)

    def quality(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self.site.page("quality", account, token, **self.lead.quality(request.query_params.get("batch", "")))

    def answers(self, request: Request) -> Response:
        """Shows every answer, skip, undo and adjudication of a batch, a page at a time."""
        account, token = self.site.lead(request)
        batch, labeler, kind, start = (
            request.query_params.get(name, "") for name in ("batch", "labeler", "kind", "start")
        )
        first = int(start) if start.isascii() and start.isdigit() and len(start) < 10 else 0
        found = self.lead.answers(batch, labeler, kind, first)
        return self.site.page("every-answer", account, token, **found)

    def export(self, request: Request) -> Response:
        """Shows what an export contains and leaves out, before anything is downloaded."""
        account, token = self.site.lead(request)
        batch, form, found = self._exported(request)
        description = FORMATS[form].description
        return self.site.page(
            "export",
            account,
            token,
            batch=batch,
            form=form,
            description=description,
            found=found,
            with_names=_with_names(request),
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
        return batch, form, self.lead.export(batch, form, with_names=_with_names(request))


def _with_names(request: Request) -> bool:
    return request.query_params.get("names", "") == "true"
