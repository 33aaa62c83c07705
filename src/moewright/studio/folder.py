"""The studio's own folder: dropped files by their content, so that an address finds them again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from moewright.codec import write_text
from moewright.spec.errors import BadInput, Reason

_MOST_BYTES = 64 * 2**20


class StudioFolder:
    """The only folder that the studio writes to."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def decode(self, content: bytes) -> str:
        """Return the text of a dropped file.

        Raises:
            BadInput: the file is too large or no text.
        """
        if len(content) > _MOST_BYTES:
            rule = f"must have at most {_MOST_BYTES} bytes"
            raise BadInput(Reason(field="file", value=f"{len(content)} bytes", rule=rule))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadInput(Reason(field="file", rule="must be text (UTF-8)")) from None

    def keep(self, content: bytes, suffix: str, *, prefix: str = "") -> Path:
        """Write a dropped file under a name by its content, and return its path.

        Raises:
            BadInput: the file is too large, is no text, or cannot be written.
        """
        text = self.decode(content)
        path = self._name(content, suffix, prefix)
        if not path.exists():
            write_text(path, text)
        return path

    def keep_bytes(self, content: bytes, suffix: str) -> Path:
        """Write a dropped file that need not be text, and return its path."""
        path = self._name(content, suffix, "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def _name(self, content: bytes, suffix: str, prefix: str) -> Path:
        return self.root / "dropped" / f"{prefix}{sha256(content).hexdigest()[:12]}{suffix}"
