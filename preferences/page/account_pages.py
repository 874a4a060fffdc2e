"""The pages for signing in and one-time links, and the lead's page of accounts and links."""

import json

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from preferences.accounts import Account, State
from preferences.invitations import Role
from preferences.page.attempts import Attempts, TooManyTriesError, sign_in, use_link
from preferences.page.security import MAX_SIGN_IN_BYTES
from preferences.page.service import RefusedError
from preferences.page.site import COOKIE, Posted, Site, download, fields_of, redirect

USED_UP = (
    "One-time links work once, within a week, and a newer link voids an older one. Ask the labeling lead for a new one."
)


class AccountPages:
    """The routes of these pages."""

    def __init__(self, site: Site, attempts: Attempts) -> None:
        self.site, self.accounts, self.attempts = site, site.accounts, attempts
        self.server = site.config.server
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/sign-in", response_class=HTMLResponse)(self.sign_in_form)
        post("/sign-in", max_body_size=MAX_SIGN_IN_BYTES)(self.sign_in)
        post("/sign-out")(self.sign_out)
        get("/welcome/{code}", response_class=HTMLResponse)(self.welcome_form)
        post("/welcome/{code}", max_body_size=MAX_SIGN_IN_BYTES)(self.welcome)
        get("/lead/people", response_class=HTMLResponse)(self.people)
        post("/lead/invite")(self.invite)
        post("/lead/revoke")(self.revoke)
        post("/lead/state")(self.set_state)
        get("/lead/person", response_class=HTMLResponse)(self.person)
        post("/lead/person/data")(self.person_data)
        post("/lead/person/erase")(self.erase)

    # ---- signing in and out ----

    def sign_in_form(self) -> Response:
        return self.site.page("sign_in", None, "", wrong="", name="")

    def sign_in(self, request: Request, posted: Posted) -> Response:
        fields = fields_of(posted)
        name, key = fields.text("name").strip(), fields.text("key").strip()
        try:
            token = sign_in(self.accounts, self.attempts, request, name, key)
        except TooManyTriesError as error:
            wrong = f"Too many tries; try again in {error.wait_seconds} seconds, or ask the lead for a one-time link."
            page = self.site.page("sign_in", None, "", 429, wrong=wrong, name=name)
            page.headers["Retry-After"] = str(error.wait_seconds)
            return page
        if token is None:
            return self.site.page("sign_in", None, "", 403, wrong="Name and key do not match.", name=name)
        return self._with_session(redirect("/"), token, request)

    def sign_out(self, request: Request, posted: Posted) -> Response:
        _, token, _ = self.site.form(request, posted)
        self.accounts.sign_out(token)
        response = redirect("/sign-in")
        response.delete_cookie(COOKIE)
        return response

    def welcome_form(self, code: str) -> Response:
        invitation = self.accounts.invitation(code)
        if invitation is None:
            return self._used_up()
        return self.site.page("welcome", None, "", invitation=invitation, code=code)

    def welcome(self, code: str, request: Request) -> Response:
        accepted = use_link(self.accounts, self.attempts, request, code)
        if accepted is None:
            return self._used_up()
        account, key = accepted
        token = self.accounts.open_session(account.name)
        return self._with_session(self.site.page("key", account, token, key=key), token, request)

    def _used_up(self) -> Response:
        return self.site.page("message", None, "", 410, heading="This link no longer works", text=USED_UP, typed="")

    def _with_session(self, response: Response, token: str, request: Request) -> Response:
        is_https = self.server.is_https or request.url.scheme == "https"
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_https)
        return response

    # ---- accounts and links ----

    def people(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        return self._people_page(account, token)

    def _people_page(
        self, account: Account, token: str, link: str = "", invited: str = "", wrong: str = "", erased: str = ""
    ) -> Response:
        return self.site.page(
            "people",
            account,
            token,
            422 if wrong else 200,
            accounts=self.accounts.all(),
            links=self.accounts.links(),
            events=self.accounts.audit_log(),
            pseudonyms=self.accounts.pseudonyms(),
            link=link,
            invited=invited,
            wrong=wrong,
            erased=erased,
        )

    def invite(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.lead_form(request, posted)
        name = fields.text("name").strip()
        role: Role = "lead" if fields.text("role") == "lead" else "labeler"
        try:
            code = self.accounts.invite(name, role, by=account.name)
        except ValueError as error:
            return self._people_page(account, token, wrong=str(error))
        return self._people_page(account, token, link=self.server.link(code), invited=name)

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
        """Sends everything held about a person. It is a form's answer, because the audit log records it."""
        account, _, fields = self.site.lead_form(request, posted)
        name = fields.text("name")
        held = self.accounts.held_about(name, by=account.name)
        return download(json.dumps(held, indent=2) + "\n", f"{name}.json", "application/json")

    def erase(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.lead_form(request, posted)
        name = fields.text("name")
        if name == account.name:
            raise RefusedError("you cannot erase yourself; another lead can")
        if fields.text("typed").strip() != name:
            return self._person_page(account, token, name, "Type the name exactly as it is shown.")
        pseudonym = self.accounts.erase(name, by=account.name)
        return self._people_page(account, token, erased=pseudonym)
