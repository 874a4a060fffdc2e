"""Signing in with a company's account: OpenID Connect, authorization code flow with PKCE, state and nonce.

Authlib does the protocol. This file decides who may come in and who leads. What a flow must remember until the provider
sends the browser back is in a signed cookie of its own, for ten minutes.

Leaves out: signing out at the provider, and API tokens; programs sign in with a key.
"""

import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from authlib.integrations.starlette_client import OAuth, OAuthError
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from joserfc.errors import JoseError
from starlette.middleware.sessions import SessionMiddleware

from preferences.accounts import SIGN_IN_FAILED, UNKNOWN, AccountClosedError, Role
from preferences.names import SERVER
from preferences.page.config import DEFAULT_URL, OidcConfig
from preferences.page.security import Attempts, address_of
from preferences.page.site import Site

LOG = logging.getLogger(__name__)
PATH = "/sign-in/oidc"
FLOW_COOKIE, FLOW_SECONDS = "heed_oidc", 600
SIGNATURES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
FAILED = "The sign-in was not completed. Try again; if it fails again, ask the labeling lead."
NOT_REACHED = "The company's sign-in cannot be reached just now. Try again in a moment, or sign in with a key."


class NotAllowedError(Exception):
    """The provider vouches for somebody who may not come in. The text is for them to read."""


class OidcPages:
    """The routes that send people to the provider and take them back."""

    def __init__(self, site: Site, attempts: Attempts, config: OidcConfig) -> None:
        self.site, self.accounts, self.attempts, self.config = site, site.accounts, attempts, config
        self.redirect_uri = f"{site.config.server.public_url or DEFAULT_URL}{PATH}/callback"
        self.provider = OAuth().register(
            "provider",
            client_id=config.client_id,
            client_secret=config.secret() or None,
            server_metadata_url=f"{config.issuer}/.well-known/openid-configuration",
            client_kwargs={"scope": "openid email", "code_challenge_method": "S256", "timeout": 10},
        )
        self.router = APIRouter(include_in_schema=False)
        self.router.get(PATH)(self.start)
        self.router.get(f"{PATH}/callback", response_class=HTMLResponse)(self.callback)

    async def start(self, request: Request) -> Response:
        """Sends the browser to the provider."""
        try:
            await self._load()
            found: Response = await self.provider.authorize_redirect(request, self.redirect_uri)
        except Exception as error:  # Authlib's HTTP library is one of two, depending on what is installed
            return self._not_reached(request, error)
        return found

    async def callback(self, request: Request) -> Response:
        """Takes the browser back, checks the provider's word, and signs the person in."""
        tried = self.attempts.reserve_link(address_of(request))  # each try makes the server ask the provider
        try:
            claims = await self._claims(request)
            name, role = self._who(claims)
            token = await run_in_threadpool(
                self.accounts.sign_in_with, self.config.issuer, str(claims["sub"]), name, role
            )
        except (NotAllowedError, AccountClosedError) as error:
            return await self._refused(request, str(error))
        except (OAuthError, JoseError, ValueError, KeyError) as error:
            LOG.warning("a sign-in through %s failed: %s: %s", self.config.issuer, type(error).__name__, error)
            return await self._refused(request, FAILED)
        except Exception as error:
            return self._not_reached(request, error)
        self.attempts.succeeded(tried)
        return self._signed_in(request, token)

    async def _load(self) -> Mapping[str, Any]:
        """Returns the provider's metadata, without signatures that anybody could make.

        Raises: ValueError if the metadata are another issuer's.
        """
        metadata: dict[str, Any] = await self.provider.load_server_metadata()
        if metadata.get("issuer") != self.config.issuer:
            raise ValueError(f"issuer is {metadata.get('issuer')!r}; {self.config.issuer!r} was expected")
        known = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
        metadata["id_token_signing_alg_values_supported"] = [name for name in known if name in SIGNATURES]
        return metadata

    async def _claims(self, request: Request) -> Mapping[str, Any]:
        """Returns the claims of the ID token, whose signature, issuer, audience, nonce and times were checked."""
        await self._load()
        options = {
            "iss": {"essential": True, "value": self.config.issuer},
            "aud": {"essential": True, "value": self.config.client_id},
            "sub": {"essential": True},
        }
        token = await self.provider.authorize_access_token(request, claims_options=options)
        claims: Mapping[str, Any] | None = token.get("userinfo")
        if claims is None:
            raise ValueError("the provider sent no ID token")
        return claims

    def _who(self, claims: Mapping[str, Any]) -> tuple[str, Role]:
        """Returns name and role of the person. Raises: NotAllowedError."""
        email = str(claims.get("email") or "").strip().lower()
        if "@" not in email:
            raise NotAllowedError("Your account has no e-mail address, so it cannot be used here.")
        if self.config.requires_verified_email and claims.get("email_verified") is not True:
            raise NotAllowedError("Your e-mail address is not verified, so it cannot be used here.")
        if email.rpartition("@")[2] not in self.config.domains:
            raise NotAllowedError("Accounts with your e-mail address may not sign in here. Ask the labeling lead.")
        return email, "lead" if email in self.config.leads else "labeler"

    def _signed_in(self, request: Request, token: str) -> Response:
        """Returns a page of this server that continues to the next one without a click.

        A redirect would be part of the provider's navigation, for which browsers hold back the session's cookie.
        """
        before = self.site.token(request)
        if before:
            self.accounts.sign_out(before)
        request.session.clear()
        response = self.site.page("signed-in", None, "")
        is_https = self.site.is_https(request)
        response.set_cookie(self.site.cookie(request), token, httponly=True, samesite="strict", secure=is_https)
        return response

    async def _refused(self, request: Request, text: str) -> Response:
        request.session.clear()
        await run_in_threadpool(self.accounts.log, SERVER, SIGN_IN_FAILED, UNKNOWN)
        return self.site.page("message", None, "", 403, heading="Not signed in", text=text, typed="")

    def _not_reached(self, request: Request, error: Exception) -> Response:
        LOG.error("%s cannot be reached: %s: %s", self.config.issuer, type(error).__name__, error)
        return self.site.message(request, 503, "Not possible just now", NOT_REACHED)


def add_oidc(app: FastAPI, site: Site, attempts: Attempts, config: OidcConfig) -> OidcPages:
    """Adds the flow's cookie to an application. Returns the pages. Raises: ValueError for a missing client secret."""
    pages = OidcPages(site, attempts, config)
    secret = config.secret()
    # Derived, so that several servers and a restarted one can finish each other's flows.
    key = hashlib.sha256(b"flow cookie\0" + secret.encode()).hexdigest() if secret else secrets.token_urlsafe(32)
    app.add_middleware(
        SessionMiddleware,
        secret_key=key,
        session_cookie=FLOW_COOKIE,
        max_age=FLOW_SECONDS,
        path=PATH,
        same_site="lax",  # the provider's site sends the browser back
        https_only=site.config.server.is_https,
    )
    return pages
