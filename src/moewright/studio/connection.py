"""A connection of the studio: who says nothing does not keep its place from others."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

# Within one to two of these a connection has to send the whole head of its next request.
PATIENCE_S = 10.0


class PromptConnection(H11Protocol):
    """A connection that is closed where it begins no request.

    The server counts all open connections, so those that never end the head of a request would
    take every place, and nobody would be answered.
    """

    _last_cycle: RequestResponseCycle | None = None

    def connection_made(  # type: ignore[override]  # as uvicorn narrows it
        self, transport: asyncio.Transport
    ) -> None:
        """Watch the connection from now on."""
        super().connection_made(transport)
        self.loop.call_later(PATIENCE_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        """Close the connection if no request began since the last look, and none is answered."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._last_cycle:
            self.transport.close()
            return
        self._last_cycle = self.cycle
        self.loop.call_later(PATIENCE_S, self._close_if_silent)
