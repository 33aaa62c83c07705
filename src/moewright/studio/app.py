"""The studio's routes: pages, records of the Python interface as JSON, and streams of searches."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from moewright.api.catalogues import hardware as list_hardware
from moewright.api.catalogues import models as list_models
from moewright.api.running import export
from moewright.api.views import (
    view_comparison,
    view_judgement,
    view_plan,
    view_timetable,
    view_what_if,
)
from moewright.report.trace import build_trace
from moewright.spec.errors import BadInput
from moewright.spec.quoting import Html
from moewright.spec.record import Record, format_json
from moewright.spec.workload import Dtype
from moewright.studio.confinement import Confinement
from moewright.studio.course import (
    open_chapters,
    send_lesson,
    show_chapter,
    show_contents,
    show_glossary,
)
from moewright.studio.folder import (
    LARGEST_TEXT_BYTES,
    LARGEST_TRACE_BYTES,
    StudioFolder,
    encode_runs,
    is_other_file,
    list_run_folders,
    read_runs,
    stamp_log,
    stamp_runs,
)
from moewright.studio.guard import Access, LocalGuard
from moewright.studio.queries import clean_name, read_query
from moewright.studio.tasks import Workers
from moewright.studio.wire import build_or_refuse, encode_data, encode_failure, encode_record
from moewright.view.card import render_card
from moewright.view.course.glossary import list_terms, load_glossary
from moewright.view.page import (
    PAGES,
    load_assets,
    render_course_page,
    render_page,
    render_shell,
)

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_JSON = "application/json"
_MOST_COMPARED = 3  # columns that fit a page beside the first
_MOST_RUNS = 8  # curves that can be told apart in one chart
_MOST_THREADS = 8  # each reads a file for a page; the work is done by processes
_GONE = 499  # as nginx calls it
_TASKS = ("search", "budget", "design", "diagnosis")
_SUFFIXES = (".json", ".json.gz", ".gz", ".log", ".txt", ".sqlite")  # of traces and logs
_T = TypeVar("_T")


def build_app(confinement: Confinement, access: Access) -> Starlette:
    """Build the application that serves the folders of its confinement on these terms."""
    # Read before the confinement closes: in a checkout the glossary lies among the documentation.
    load_glossary()
    studio = _Studio(confinement)
    routes = [
        Route("/", studio.show_page),
        *(Route(f"/{name}", studio.show_page) for name, _ in PAGES[1:]),
        Route("/assets/{name}", studio.send_asset),
        Route("/learn", show_contents),
        Route("/learn/glossary", show_glossary),
        Route("/learn/{chapter}", show_chapter),
        Route("/api/lesson/{chapter}", send_lesson),
        Route("/api/catalogue", studio.list_catalogue),
        Route("/api/plan", studio.send_plan),
        Route("/api/judgement", studio.send_judgement),
        Route("/api/timetable", studio.send_timetable),
        Route("/api/what-if", studio.send_what_if),
        Route("/api/compare", studio.send_comparison),
        Route("/api/task/{task}", studio.stream_task),
        Route("/api/page", studio.send_page),
        Route("/api/plan.json", studio.send_plan_file),
        Route("/api/card.svg", studio.send_card),
        Route("/api/trace", studio.send_trace),
        Route("/api/export", studio.send_launch_file),
        Route("/api/runs", studio.list_runs),
        Route("/api/run", studio.send_runs),
        Route("/api/watch", studio.send_watch),
        Route("/api/drop", studio.take_trace, methods=["POST"]),
        Route("/api/model", studio.take_model, methods=["POST"]),
        Route("/api/script", studio.take_script, methods=["POST"]),
    ]
    guard = Middleware(LocalGuard, access=access)
    return Starlette(
        routes=routes,
        middleware=[guard],
        exception_handlers={ClientDisconnect: _leave_alone, 404: _show_missing},
        lifespan=studio.live,
    )


class _Studio:
    """The handlers of a server, with its folder and its workers."""

    def __init__(self, confinement: Confinement) -> None:
        self._root = confinement.root
        self._folder = StudioFolder(confinement.folder)
        self._workers = Workers(confinement)

    @asynccontextmanager
    async def live(self, _: Starlette) -> AsyncIterator[None]:
        """Keep a worker ready while the server runs, and few threads."""
        current_default_thread_limiter().total_tokens = _MOST_THREADS
        await self._workers.prepare()
        # Tables of devices and models are read before somebody asks for a page or a chapter.
        reading = asyncio.create_task(run_in_threadpool(_read_tables))
        yield
        await reading
        await self._workers.close()

    async def show_page(self, _: Request) -> Response:
        return Response(render_shell(), media_type="text/html")

    async def send_asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        asset = load_assets().get(name)
        if asset is None:
            return PlainTextResponse("no such file", status_code=404)
        # An address with the digest leads to this content for ever; without it a browser asks.
        is_named = request.url.query == asset.digest
        kept = "max-age=31536000, immutable" if is_named else "no-cache"
        headers = {"cache-control": kept, "etag": f'"{asset.digest}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        media_type = _TYPES.get(Path(name).suffix, "text/plain")
        return Response(asset.content, media_type=media_type, headers=headers)

    async def list_catalogue(self, _: Request) -> Response:
        return _send_json(await run_in_threadpool(_encode_names))

    async def send_plan(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer(lambda: view_plan(read_query(params)))

    async def send_judgement(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer(lambda: view_judgement(read_query(params), params.get("best", "")))

    async def send_timetable(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer(lambda: view_timetable(read_query(params)))

    async def send_what_if(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer(lambda: view_what_if(read_query(params)))

    async def send_comparison(self, request: Request) -> Response:
        params = dict(request.query_params)
        others = request.query_params.getlist("with")[:_MOST_COMPARED]
        return await _answer(lambda: view_comparison(read_query(params), others))

    async def send_page(self, request: Request) -> Response:
        params = dict(request.query_params)

        def render() -> str:
            query = read_query(params)
            return render_page((view_plan(query), view_timetable(query)), query.layout or "plan")

        return await _send_file(render, "text/html")

    async def send_plan_file(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _send_file(lambda: format_json(read_query(params).build()), _JSON)

    async def send_card(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _send_file(lambda: render_card(read_query(params).build()), _TYPES[".svg"])

    async def send_trace(self, request: Request) -> Response:
        params = dict(request.query_params)
        build = partial(_render_trace, params)
        return await _send_file(build, _JSON)

    async def send_launch_file(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer_data(lambda: {"text": _render_launch_file(params)})

    async def list_runs(self, request: Request) -> Response:
        is_gone = Event()
        walk = run_in_threadpool(list_run_folders, self._root, is_gone.is_set)
        names = await _while_connected(request, walk, tell_gone=is_gone.set)
        return _send_json(encode_data(names))

    async def send_runs(self, request: Request) -> Response:
        folders = [Path(name) for name in request.query_params.getlist("run")[:_MOST_RUNS]]
        stamp = await run_in_threadpool(stamp_runs, folders, self._root)
        record = b""
        is_file = await run_in_threadpool(is_other_file, folders)
        if not is_file and stamp.text != request.query_params.get("stamp", ""):
            record = await run_in_threadpool(read_runs, folders)
        return _send_json(encode_runs(stamp, record, is_file=is_file))

    async def send_watch(self, request: Request) -> Response:
        """Send what a log shows where it has grown since the stamp that the page has."""
        params = dict(request.query_params)
        try:
            log = Path(params.get("path", ""))
            stamp = await run_in_threadpool(stamp_log, log, self._root)
        except (BadInput, OSError) as error:
            return _send_json(encode_failure(error))
        record = b""
        if stamp.text != params.get("stamp", ""):
            record = await _while_connected(request, self._workers.ask("watch", params))
        return _send_json(encode_runs(stamp, record))

    async def take_trace(self, request: Request) -> Response:
        """Keep a trace or a log, and answer by which path a diagnosis finds it."""
        name = clean_name(request.query_params.get("name", "log"))
        if not name.endswith(_SUFFIXES):
            name += ".log"
        limit_bytes = LARGEST_TRACE_BYTES
        try:
            path = await self._folder.receive(request.stream(), name, limit_bytes=limit_bytes)
        except BadInput as error:
            return _send_json(encode_failure(error))
        return _send_json(encode_data({"run": os.path.relpath(path, self._root)}))

    async def take_model(self, request: Request) -> Response:
        return await self._answer_drop(request, "model", "config.json", LARGEST_TEXT_BYTES)

    async def take_script(self, request: Request) -> Response:
        return await self._answer_drop(request, "script", "script.sh", LARGEST_TEXT_BYTES)

    async def _answer_drop(
        self, request: Request, task: str, usual_name: str, limit_bytes: int
    ) -> Response:
        """Keep the body of a request as a file, and answer what a worker makes of it."""
        name = clean_name(request.query_params.get("name", usual_name))
        try:
            path = await self._folder.receive(request.stream(), name, limit_bytes=limit_bytes)
        except BadInput as error:
            return _send_json(encode_failure(error))
        params = {**request.query_params, "path": str(path)}
        return _send_json(await _while_connected(request, self._workers.ask(task, params)))

    async def stream_task(self, request: Request) -> Response:
        task = request.path_params["task"]
        if task not in _TASKS:
            return PlainTextResponse("no such task", status_code=404)
        lines = self._workers.run(task, dict(request.query_params))
        return StreamingResponse(lines, media_type="application/x-ndjson")


def _read_tables() -> None:
    _encode_names()
    open_chapters()


@cache
def _encode_names() -> bytes:
    """Return models and devices that have a name, precisions, and the words of the glossary.

    Every page begins with them, and counting the parameters of all models takes a third of a
    second.
    """
    names = {
        "models": [row["model"] for row in list_models().to_rows()],
        "devices": [row["device"] for row in list_hardware().to_rows()],
        "precisions": [dtype.value for dtype in Dtype],
        "terms": list_terms(),
    }
    return encode_data(names)


def _render_trace(params: Mapping[str, str]) -> str:
    """Return the timetable of a query's layout as a Chrome trace."""
    return json.dumps(build_trace(read_query(params).build()))


def _render_launch_file(params: Mapping[str, str]) -> str:
    """Return a query's plan as the launch file of the target that the address names."""
    target = params.get("to", "")
    plan = read_query(params).build()
    return export(plan, to=target, job=params.get("job", ""), image=params.get("image", ""))


async def _send_file(render: Callable[[], str], media_type: str) -> Response:
    """Send the text that a function renders, or why there is none, with status 422."""

    def run() -> Response:
        try:
            return Response(render(), media_type=media_type)
        except (BadInput, OSError) as error:
            content = encode_failure(error)
            return Response(content, status_code=422, media_type=_JSON)

    return await run_in_threadpool(run)


async def _answer(build: Callable[[], Record]) -> Response:
    """Send the record that a function builds, or why there is none."""
    return await _send_built(lambda: encode_record(build()))


async def _answer_data(build: Callable[[], object]) -> Response:
    """Send the data that a function builds, or why there is none."""
    return await _send_built(lambda: encode_data(build()))


async def _send_built(build: Callable[[], bytes]) -> Response:
    return _send_json(await run_in_threadpool(build_or_refuse, build))


def _send_json(content: bytes) -> Response:
    return Response(content, media_type=_JSON)


async def _while_connected(
    request: Request, work: Coroutine[Any, Any, _T], tell_gone: Callable[[], None] = lambda: None
) -> _T:
    """Return what comes of work, which is cancelled when the client goes away.

    `tell_gone` is called then, for a thread cannot be cancelled.

    Raises:
        ClientDisconnect: it has gone away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            tell_gone()
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task, gone))


async def _show_missing(request: Request, error: Exception) -> Response:
    """Answer an address that leads nowhere with the pages that there are."""
    name = request.url.path.strip("/")
    body = Html.write(
        '<section class="panel verdict refused"><h1>There is no such page</h1>'
        "<p>Nothing is called {}. The pages stand above; Plan is where a job begins.</p></section>",
        name,
    )
    page = render_course_page("There is no such page", body)
    return Response(page, status_code=404, media_type="text/html")


async def _leave_alone(_: Request, error: Exception) -> Response:
    """Answer a client that has gone away, so that nobody takes it for a fault of the server."""
    return Response(status_code=_GONE)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
