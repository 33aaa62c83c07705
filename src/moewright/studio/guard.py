"""What the studio's server refuses: other hosts' names, other sites' requests, large bodies."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
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


class LocalGuard:
    """Middleware that serves this machine alone.

    A page of another site can send requests to a port of this machine, also under a name of its own
    that it lets point there (DNS rebinding). Its requests have its name as Host or as Origin, or
    say that they cross sites, and are refused.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = frozenset(f"{name}:{port}" for name in _LOCAL_NAMES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it with 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if refusal := self._refuse(Headers(scope=scope)):
            response = PlainTextResponse(refusal, status_code=403)
            await response(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS:
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, send_guarded)

    def _refuse(self, headers: Headers) -> str:
        if headers.get("host", "") not in self._hosts:
            return "the studio serves 127.0.0.1 and localhost alone"
        origin = headers.get("origin", "")
        if origin and not _is_origin(origin, self._hosts):
            return "the studio answers its own pages alone"
        crosses_sites = headers.get("sec-fetch-site", "") in ("cross-site", "same-site")
        if crosses_sites and headers.get("sec-fetch-mode", "") != "navigate":
            return "the studio answers its own pages alone"
        return ""


def _is_origin(origin: str, hosts: Iterable[str]) -> bool:
    return origin.removeprefix("http://") in hosts
