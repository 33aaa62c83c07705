"""A headless chromium, a running studio, and pages that neither ask other hosts nor complain."""

import re
import shutil
import subprocess
import sys

import pytest

from selection import thorough
from studio_pages import show_controls

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=CHROMIUM, args=list(ARGS))
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def printed_address(tmp_path_factory):
    """Start a studio as users do, and return the address that it prints, with its token."""
    pytest.importorskip("uvicorn", reason="the studio extra is not installed")
    root = tmp_path_factory.getbasetemp()
    command = [sys.executable, "-m", "moewright", "studio", "--port", "0", "--folder", "studio"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        yield re.search(r"http://\S+", line)[0]
        process.terminate()


@pytest.fixture(scope="session")
def studio(printed_address):
    """Return the address of the studio without the token, as people send it."""
    return printed_address.partition("?")[0]


@pytest.fixture(scope="session")
def cookies(browser, printed_address, studio):
    """Return what a browser keeps that has opened the printed address once."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(printed_address)
    assert page.url == studio  # the token is gone from the address
    kept = context.cookies()
    context.close()
    return kept


@pytest.fixture(params=[1440, thorough(820), thorough(390)])
def screen(request):
    """Return the width of the screen on which a task is done: one test for each of three."""
    return request.param


@pytest.fixture
def open_page(request, browser):
    """Return a function that opens an address; at the end nothing else was asked or complained.

    Tests that use the fixture `screen` have their pages at its width. Where the form of the job is
    folded there, it is opened first, as a reader would.
    """
    usual_width = request.getfixturevalue("screen") if "screen" in request.fixturenames else 1440
    cookies = request.getfixturevalue("cookies") if "studio" in request.fixturenames else []
    contexts = []
    complaints = []
    requests = []

    def open_one(address, *, width=usual_width, scheme="light", offline=False):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=offline
        )
        context.add_cookies(cookies)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append((address, request.url)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        if "screen" in request.fixturenames:
            show_controls(page)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []
    for address, url in requests:
        assert url.startswith((address.split("/", 3)[0] + "//" + address.split("/")[2], "data:"))
