"""A stand-in for the Hugging Face hub on this machine: the few addresses that its client asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(root: Path, requests: list[str]) -> Iterator[str]:
    """Serve the folders org/name below `root`, and yield the endpoint; note what is asked.

    A repository whose name holds "gated" wants terms accepted, one with "broken" answers 500.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            requests.append(f"{self.command} {self.path}")
            is_api = path.startswith("api/models/")
            parts = path.removeprefix("api/models/").split("/")
            repository = "/".join(parts[:2])
            if "broken" in repository:
                self._send(500, b"", {}, with_body)
            elif "gated" in repository and not is_api:  # what lies in it is told, but not given
                self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            elif not (root / repository).is_dir():
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif is_api:
                self._send(200, self._list(root / repository, parts[2:3]), {}, with_body)
            else:
                self._send_file(root / repository / "/".join(parts[4:]), with_body)

        def _list(self, folder: Path, kind: list[str]) -> bytes:
            files = sorted(path for path in folder.iterdir() if path.is_file())
            if kind == ["tree"]:
                return json.dumps(
                    [
                        {
                            "type": "file",
                            "path": path.name,
                            "size": path.stat().st_size,
                            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                        }
                        for path in files
                    ]
                ).encode()
            return json.dumps(
                {
                    "id": "/".join(folder.parts[-2:]),
                    "sha": REVISION,
                    "siblings": [{"rfilename": path.name} for path in files],
                }
            ).encode()

        def _send_file(self, file: Path, with_body: bool) -> None:
            if not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
                return
            content = file.read_bytes()
            headers = {
                "X-Repo-Commit": REVISION,
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            }
            self._send(200, content, headers, with_body)

        def _send(
            self, status: int, content: bytes, headers: dict[str, str], with_body: bool
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
