"""A bucket of S3 on this machine that can refuse, fall silent and go away."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from threading import Event, Thread
from typing import Any

_DENIED = b"<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>"
_GONE = b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>"


class Bucket:
    """moto's server behind a door, which lets requests in, refuses them, or keeps them."""

    def __init__(self) -> None:
        # Imported here: a run of the matrix without copies needs neither.
        from werkzeug.serving import make_server

        moto: Any = import_module("moto.server")
        self._inner = moto.DomainDispatcherApplication(moto.create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._speaks = Event()
        self._speaks.set()
        self._refusal: tuple[str, bytes] | None = None
        Thread(target=self._server.serve_forever, daemon=True).start()

    def environment(self) -> Mapping[str, str]:
        """Return the variables by which a client of S3 finds the bucket, and is known to it."""
        return {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
        }

    def make(self) -> None:
        """Make the bucket."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server.server_port)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()

    def close(self) -> None:
        """End the server; what still waits for it is left to itself."""
        self.come_back()
        self._server.shutdown()

    def refuse(self) -> None:
        """Know nobody's credentials from now on."""
        self._refusal = "403 Forbidden", _DENIED

    def go_away(self) -> None:
        """Be no bucket from now on."""
        self._refusal = "404 Not Found", _GONE

    def fall_silent(self) -> None:
        """Take requests and answer none from now on."""
        self._speaks.clear()

    def come_back(self) -> None:
        """Answer as ever, also what still waits."""
        self._refusal = None
        self._speaks.set()

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        self._speaks.wait()
        if self._refusal is None:
            answer: Iterable[bytes] = self._inner(environ, start_response)
            return answer
        status, text = self._refusal
        start_response(status, [("Content-Type", "application/xml")])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else text]
