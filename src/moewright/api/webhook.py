"""Alarms of a watched run, posted to a webhook from a thread of its own."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from queue import SimpleQueue
from urllib.parse import urlsplit

from moewright.diagnosis.run_watch import Alarm
from moewright.spec.errors import BadInput, Reason

_REQUEST_S = 10.0  # chat servers answer in one
_CLOSING_S = 12.0  # at the end of a watch: a request that is under way, and a little
_FIRST_PAUSE_S = 1.0  # before an alarm is posted again; doubled each time
_LONGEST_PAUSE_S = 60.0


class Webhook:
    """An address that gets each alarm as JSON; a watch never waits for it while it goes on.

    What is not taken is posted again until it is, or until the watch ends; why it was not is told
    once for each alarm.
    """

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        """Begin to deliver.

        Raises:
            BadInput: the address is none of http or https.
        """
        check_address(url)
        self._url = url
        self._tell = tell
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def post(self, alarm: Alarm, source: str) -> None:
        """Hand an alarm over; `text` is what Slack, Mattermost and Teams show of it."""
        data = {
            "text": f"{source}: {alarm.text}",
            "source": source,
            "kind": alarm.kind.value,
            "step": alarm.step,
        }
        self._queue.put(json.dumps(data).encode())

    def close(self) -> None:
        """Try once more what is left, for a few seconds in all."""
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            self._tell(f"the webhook did not answer within {_CLOSING_S:g} s")

    def _deliver(self) -> None:
        while (data := self._queue.get()) is not None:
            failure = self._send(data)
            if failure:
                self._tell(f"the webhook does not answer: {failure}")
            pause_s = _FIRST_PAUSE_S
            while failure and not self._is_closing.wait(pause_s):
                failure = self._send(data)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _send(self, data: bytes) -> str:
        """Return why a request failed, "" where it did not."""
        try:
            request = urllib.request.Request(self._url, data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=_REQUEST_S):
                return ""
        except (OSError, ValueError, HTTPException) as error:
            return str(error).strip() or type(error).__name__


def check_address(url: str) -> None:
    """Refuse what is no address that alarms can be posted to.

    Raises:
        BadInput: it is none of http or https, with a host and, if any, a port.
    """
    try:
        parts = urlsplit(url)
        is_usable = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isascii()
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # a port of 99999, half an address of IPv6
        is_usable = False
    if not is_usable:
        rule = "must be an address of http or https, with a host"
        nearest = "https://HOST/PATH"
        raise BadInput(Reason(field="--webhook", value=url, rule=rule, nearest=nearest))
