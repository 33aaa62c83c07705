"""What the studio's server refuses: whoever has no token, other hosts' names, other sites."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moewright.spec.errors import Reason
from moewright.spec.units import mention
from moewright.studio.wire import encode_refusal

_TOKEN_BYTES = 32  # 256 bits: nobody guesses it


def _draw_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The terms of access: `port` is 0 behind a unix socket, where any port may be forwarded."""

    port: int
    is_read_only: bool = False
    token: str = field(default_factory=_draw_token, repr=False)

    @property
    def cookie(self) -> str:
        """The name of the cookie: hosts have one jar for all their ports."""
        return "moewright-studio" + mention("-{}", self.port)

    def accepts(self, token: str) -> bool:
        """Return whether a text is the token; it takes as long wherever they differ."""
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())


_LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)
_READING = ("GET", "HEAD")
_SCHEME = "Bearer "
_REFUSED_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>moewright studio</title></head>
<body><h1>moewright studio</h1><p>{}.</p>
<p>If a link of another site brought you here, <a href="">go on</a>.</p></body></html>
"""
_NEEDS_TOKEN = "is needed: open the address that the studio printed when it was started"


class LocalGuard:
    """Middleware that serves those who know the token, on this machine alone.

    The token comes in the address, once: the answer puts it into a cookie and leads to the same
    address without it. Programs send it as `Authorization: Bearer`.

    A page of another site can send requests to a port of this machine, also under a name of its own
    that it lets point there (DNS rebinding). Its requests have its name as Host or as Origin, or
    say that they cross sites, and are refused; the cookie stays at home with them (SameSite).
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it with 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: the studio has none
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS:
                    headers[name] = value
            await send(message)

        response = self._answer(Request(scope))
        await (response or self._app)(scope, receive, send_guarded)

    def _answer(self, request: Request) -> Response | None:
        """Return what is answered in place of the application; None where it may answer."""
        if rule := self._find_strangeness(request):
            return _refuse(request, Reason(field="address", rule=rule))
        token = request.query_params.get("token", "")
        if token and request.method in _READING and self._access.accepts(token):
            return self._hand_cookie(request)
        if not any(map(self._access.accepts, self._list_tokens(request))):
            return _refuse(request, Reason(field="token", rule=_NEEDS_TOKEN))
        if self._access.is_read_only and request.method not in _READING:
            return _refuse(request, Reason(field="--read-only", rule="takes no files"))
        return None

    def _list_tokens(self, request: Request) -> tuple[str, ...]:
        authorization = request.headers.get("authorization", "")
        sent = authorization.removeprefix(_SCHEME) if authorization.startswith(_SCHEME) else ""
        return request.cookies.get(self._access.cookie, ""), sent

    def _hand_cookie(self, request: Request) -> Response:
        params = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
        # A path of two slashes would be another host.
        path = f"/{request.scope['path'].lstrip('/')}"
        address = path + mention("?{}", urlencode(params))
        response = RedirectResponse(address, status_code=303)
        name, token = self._access.cookie, self._access.token
        response.set_cookie(name, token, httponly=True, samesite="strict", path="/")
        response.headers["cache-control"] = "no-store"
        return response

    def _find_strangeness(self, request: Request) -> str:
        headers = request.headers
        if not self._is_local(f"http://{headers.get('host', '')}"):
            return "the studio serves 127.0.0.1 and localhost alone"
        origin = headers.get("origin", "")
        if origin and origin != f"http://{headers['host']}":
            return "the studio answers its own pages alone"
        crosses_sites = headers.get("sec-fetch-site", "") in ("cross-site", "same-site")
        if crosses_sites and headers.get("sec-fetch-mode", "") != "navigate":
            return "the studio answers its own pages alone"
        return ""

    def _is_local(self, address: str) -> bool:
        try:
            parts = urlsplit(address)
            port = parts.port or 80
        except ValueError:
            return False
        is_bare = parts.netloc == address.removeprefix("http://") and "@" not in parts.netloc
        return is_bare and parts.hostname in _LOCAL_NAMES and self._access.port in (0, port)


def _refuse(request: Request, reason: Reason) -> Response:
    """Refuse in the form that is asked for: a page for a person, a record for a page."""
    if request.scope["path"].startswith("/api/"):
        content = encode_refusal(reason) + b"\n"
        return Response(content, status_code=403, media_type="application/json")
    return HTMLResponse(_REFUSED_PAGE.format(f"{reason.field} {reason.rule}"), status_code=403)
