"""Who may use a studio, and what for: an address, a token, and whether files may be dropped."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from moewright.spec.units import mention

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
