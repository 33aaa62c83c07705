"""Whom the studio's server answers, without a browser."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="the studio extra is not installed")

from moewright.studio.app import build_app
from moewright.studio.confinement import Confinement, is_below
from moewright.studio.guard import Access

PORT = 8765
ACCESS = Access(port=PORT)
COOKIE = ("cookie", f"{ACCESS.cookie}={ACCESS.token}")


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
BEARER = ("authorization", f"Bearer {ACCESS.token}")


def build(tmp_path, access=ACCESS):
    walls = Confinement(root=tmp_path, folder=tmp_path / "folder", hub_cache=tmp_path / "hub")
    return build_app(walls, access)


@pytest.fixture
def app(tmp_path):
    return build(tmp_path)


def test_the_own_host_gets_the_page_under_a_strict_policy(app):
    for host in (f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}"):
        status, headers, content = ask(app, "/", ("host", host), COOKIE)
        assert status == 200
        assert b"moewright studio" in content
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{PORT}", "127.0.0.1:1", "", f"x@127.0.0.1:{PORT}", "[::1"],
)
def test_another_host_name_is_refused(app, host):
    assert ask(app, "/api/catalogue", ("host", host), COOKIE)[0] == 403


def test_pages_of_other_sites_are_refused(app):
    assert ask(app, "/api/plan", OWN, COOKIE, ("origin", "http://evil.example"))[0] == 403
    assert ask(app, "/api/script", OWN, COOKIE, ("origin", "null"), method="POST")[0] == 403
    crossing = (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"))
    assert ask(app, "/api/catalogue", OWN, COOKIE, *crossing)[0] == 403


@pytest.mark.parametrize("path", ["/", "/runs", "/assets/style.css", "/api/run?run=x", "/nowhere"])
@pytest.mark.parametrize(
    "given",
    [
        (),
        (("cookie", f"{ACCESS.cookie}="),),
        (("cookie", f"{ACCESS.cookie}={ACCESS.token[:-1]}"),),
        (("cookie", f"moewright-studio-1={ACCESS.token}"),),
        (("authorization", f"Bearer {ACCESS.token}x"),),
        (("authorization", ACCESS.token),),
        (("authorization", "Bearer \u00fc"),),
    ],
)
def test_nobody_gets_anything_without_the_token(app, path, given):
    status, headers, content = ask(app, path, OWN, *given)
    assert status == 403
    assert b"token" in content
    assert "default-src 'self'" in headers["content-security-policy"]
    assert ask(app, "/api/script", OWN, *given, method="POST", body=b"x")[0] == 403
    assert ask(app, f"/api/model?token={ACCESS.token}", OWN, *given, method="POST")[0] == 403


def test_the_token_of_an_address_becomes_a_cookie(app):
    address = f"/top?model=a%2Fb&token={ACCESS.token}&with=1&with=2"
    status, headers, _ = ask(app, address, OWN)
    assert (status, headers["location"]) == (303, "/top?model=a%2Fb&with=1&with=2")
    value, *attributes = headers["set-cookie"].lower().split("; ")
    assert value == f"{ACCESS.cookie}={ACCESS.token}".lower()
    assert {"httponly", "samesite=strict", "path=/"} <= set(attributes)
    assert ask(app, "/top", OWN, COOKIE)[0] == ask(app, "/top", OWN, BEARER)[0] == 200
    assert ask(app, f"/top?token={ACCESS.token}x", OWN)[0] == 403
    # No path leads to another host.
    assert ask(app, f"//evil.example?token={ACCESS.token}", OWN)[1]["location"] == "/evil.example"
    # A wrong token in the address is no reason to refuse who has the cookie.
    assert ask(app, "/top?token=x", OWN, COOKIE)[0] == 200


def test_behind_a_socket_any_port_of_this_machine_leads_here(tmp_path):
    access = Access(port=0)
    app = build(tmp_path, access)
    cookie = ("cookie", f"moewright-studio={access.token}")
    assert ask(app, "/", ("host", "localhost:1234"), cookie)[0] == 200
    assert ask(app, "/", ("host", "evil.example:1234"), cookie)[0] == 403
    assert ask(app, "/", ("host", "localhost:1234"), COOKIE)[0] == 403


def test_tokens_differ_and_are_not_printed():
    tokens = {Access(port=1).token for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 40
    assert ACCESS.token not in repr(ACCESS)


def test_who_may_only_read_drops_nothing(tmp_path):
    access = Access(port=PORT, is_read_only=True)
    app = build(tmp_path, access)
    bearer = ("authorization", f"Bearer {access.token}")
    for path in ("/api/model", "/api/script", "/api/drop"):
        status, _, content = ask(app, path, OWN, bearer, method="POST", body=b"x")
        assert status == 403
        assert b"takes no files" in content
    assert ask(app, "/api/catalogue", OWN, bearer)[0] == 200
    assert not list(tmp_path.iterdir())


def test_nothing_outside_the_assets_is_sent(app):
    for path in ("/assets/..", "/assets/palette.py", "/assets/%2e%2e", "/api/task/shell"):
        assert ask(app, path, OWN, COOKIE)[0] == 404


def test_an_asset_that_has_not_changed_is_not_sent_again(app):
    status, headers, content = ask(app, "/assets/basics.js", OWN, COOKIE)
    assert status == 200
    kept = ("if-none-match", headers["etag"])
    assert ask(app, "/assets/basics.js", OWN, COOKIE, kept)[::2] == (304, b"")
    assert ask(app, "/assets/style.css", OWN, COOKIE, kept)[0] == 200
    assert len(content) > 10_000


def test_an_address_that_leads_nowhere_leads_back(app):
    status, _, content = ask(app, "/nowhere<b>", OWN, COOKIE)
    assert status == 404
    assert b"There is no such page" in content
    assert b'href="/top"' in content
    assert b"<b>" not in content


def test_a_root_holds_what_lies_below_it_and_no_sibling():
    assert is_below("/etc/hosts", "/")
    assert is_below("/data/a", "/data")
    assert is_below("/data", "/data")
    assert not is_below("/database", "/data")
    assert not is_below("/", "/data")
