"""Whom the studio's server answers, without a browser."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="the studio extra is not installed")

from moewright.studio.app import build_app

PORT = 8765


def ask(app, path, *headers, method="GET", body=b""):
    """Return status, headers and body of a request, as an ASGI server would make it."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", PORT),
        "client": ("127.0.0.1", 1),
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    # A browser of other tests keeps an event loop running in this thread.
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(asyncio.run, app(scope, receive, send)).result()
    content = b"".join(message.get("body", b"") for message in sent[1:])
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, content


OWN = ("host", f"127.0.0.1:{PORT}")


@pytest.fixture
def app(tmp_path):
    return build_app(tmp_path / "folder", PORT)


def test_the_own_host_gets_the_page_under_a_strict_policy(app):
    for host in (f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}"):
        status, headers, content = ask(app, "/", ("host", host))
        assert status == 200
        assert b"moewright studio" in content
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1:1", ""])
def test_another_host_name_is_refused(app, host):
    assert ask(app, "/api/catalogue", ("host", host))[0] == 403


def test_pages_of_other_sites_are_refused(app):
    assert ask(app, "/api/plan", OWN, ("origin", "http://evil.example"))[0] == 403
    assert ask(app, "/api/script", OWN, ("origin", "null"), method="POST")[0] == 403
    crossing = (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"))
    assert ask(app, "/api/catalogue", OWN, *crossing)[0] == 403


def test_nothing_outside_the_assets_is_sent(app):
    for path in ("/assets/..", "/assets/palette.py", "/assets/%2e%2e", "/api/task/shell"):
        assert ask(app, path, OWN)[0] == 404


def test_dropped_files_stay_in_the_folder(app, tmp_path):
    hostile = b'{"architectures": ["../../x/Qwen3MoeForCausalLM"], "model_type": "nothing"}'
    status, _, content = ask(app, "/api/model", OWN, method="POST", body=hostile)
    assert status == 200
    assert json.loads(content)["kind"] == "RefusalView"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert all((tmp_path / "folder") in path.parents for path in written)
    content = ask(app, "/api/script", OWN, method="POST", body=b"\xff\xfe")[2]
    assert b"must be text" in content
