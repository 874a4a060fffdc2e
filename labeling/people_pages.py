"""The pages by which people come and go: signing in, one-time links, and the lead's page of accounts and links."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from labeling.attempts import Attempts, TooManyTriesError, sign_in, use_link
from labeling.html import COOKIE, Pages, Posted, fields_of, see
from labeling.labeling import RefusedError
from labeling.security import MAX_SIGN_IN_BYTES
from preferences.people import Account, People, Role, State

USED_UP = "One-time links work once and for a week, and a newer link voids an older one. Ask the labeling lead for one."


class PeoplePages:
    """The routes of these pages; `pages` shows them."""

    def __init__(self, pages: Pages, people: People, attempts: Attempts) -> None:
        self.pages, self.people, self.attempts = pages, people, attempts
        self.server = pages.config.server
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/sign-in", response_class=HTMLResponse)(self.sign_in_form)
        post("/sign-in", max_body_size=MAX_SIGN_IN_BYTES)(self.sign_in)
        post("/sign-out")(self.sign_out)
        get("/welcome/{code}", response_class=HTMLResponse)(self.welcome_form)
        post("/welcome/{code}", max_body_size=MAX_SIGN_IN_BYTES)(self.welcome)
        get("/lead/people", response_class=HTMLResponse)(self.people_page)
        post("/lead/invite")(self.invite)
        post("/lead/revoke")(self.revoke)
        post("/lead/state")(self.set_state)

    # ---- coming and going ----

    def sign_in_form(self) -> Response:
        return self.pages._page("sign_in", None, "", wrong="", name="")

    def sign_in(self, request: Request, posted: Posted) -> Response:
        fields = fields_of(posted)
        name, key = fields.text("name").strip(), fields.text("key").strip()
        try:
            token = sign_in(self.people, self.attempts, request, name, key)
        except TooManyTriesError as error:
            wrong = f"Too many tries; try again in {error.wait_seconds} seconds, or ask the lead for a one-time link."
            page = self.pages._page("sign_in", None, "", 429, wrong=wrong, name=name)
            page.headers["Retry-After"] = str(error.wait_seconds)
            return page
        if token is None:
            return self.pages._page("sign_in", None, "", 403, wrong="Name and key do not go together.", name=name)
        return self._with_session(see("/"), token, request)

    def sign_out(self, request: Request, posted: Posted) -> Response:
        _, token, _ = self.pages._form(request, posted)
        self.people.sign_out(token)
        response = see("/sign-in")
        response.delete_cookie(COOKIE)
        return response

    def welcome_form(self, code: str) -> Response:
        invitation = self.people.invitation(code)
        if invitation is None:
            return self._used_up()
        return self.pages._page("welcome", None, "", invitation=invitation, code=code)

    def welcome(self, code: str, request: Request) -> Response:
        accepted = use_link(self.people, self.attempts, request, code)
        if accepted is None:
            return self._used_up()
        account, key = accepted
        token = self.people.open_session(account.name)
        return self._with_session(self.pages._page("key", account, token, key=key), token, request)

    def _used_up(self) -> Response:
        return self.pages._page("message", None, "", 410, heading="This link is used up", text=USED_UP, typed="")

    def _with_session(self, response: Response, token: str, request: Request) -> Response:
        is_https = self.server.is_https or request.url.scheme == "https"
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_https)
        return response

    # ---- leading ----

    def people_page(self, request: Request) -> Response:
        account, token = self.pages._lead(request)
        return self._people_page(account, token)

    def _people_page(
        self, account: Account, token: str, link: str = "", invited: str = "", wrong: str = ""
    ) -> Response:
        return self.pages._page(
            "people",
            account,
            token,
            422 if wrong else 200,
            accounts=self.people.accounts(),
            links=self.people.links(),
            acts=self.people.acts(),
            link=link,
            invited=invited,
            wrong=wrong,
        )

    def invite(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.pages._lead_form(request, posted)
        name = fields.text("name").strip()
        role: Role = "lead" if fields.text("role") == "lead" else "labeler"
        try:
            code = self.people.invite(name, role, by=account.name)
        except ValueError as error:
            return self._people_page(account, token, wrong=str(error))
        return self._people_page(account, token, link=self.server.link(code), invited=name)

    def revoke(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.pages._lead_form(request, posted)
        try:
            self.people.revoke(fields.text("name"), by=account.name)
        except ValueError as error:
            return self._people_page(account, token, wrong=str(error))
        return see("/lead/people")

    def set_state(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.pages._lead_form(request, posted)
        if fields.text("name") == account.name:
            raise RefusedError("nobody closes their own account; another lead can")
        state: State = "closed" if fields.text("state") == "closed" else "admitted"
        self.people.set_state(fields.text("name"), state, by=account.name)
        return see("/lead/people")
