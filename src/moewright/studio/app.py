"""The studio's routes: pages, records of the Python interface as JSON, and streams of searches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from moewright.api.catalogues import hardware as list_hardware
from moewright.api.catalogues import models as list_models
from moewright.api.running import export
from moewright.api.views import view_comparison, view_plan, view_timetable
from moewright.report.trace import build_trace
from moewright.spec.errors import BadInput
from moewright.spec.options import ExportTarget
from moewright.spec.record import Record, format_json
from moewright.spec.workload import Dtype
from moewright.studio.drops import read_dropped_model, read_dropped_script
from moewright.studio.folder import StudioFolder
from moewright.studio.guard import LocalGuard
from moewright.studio.queries import read_query
from moewright.studio.runs import diagnose_dropped, follow_runs, list_run_folders
from moewright.studio.tasks import Workers
from moewright.studio.wire import encode_data, encode_record
from moewright.view.page import read_asset, render_page, render_shell
from moewright.view.plan_view import build_refusal

_PAGES = ("/", "/top", "/timetable", "/compare", "/budget", "/runs", "/share")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_JSON = "application/json"
_MOST_COMPARED = 3
_MOST_BODY_BYTES = 64 * 2**20
_TASKS = ("search", "budget")


def build_app(folder: Path, port: int) -> Starlette:
    """Build the application that serves this machine on a port."""
    studio = _Studio(folder)
    routes = [
        *(Route(path, studio.show_page) for path in _PAGES),
        Route("/assets/{name}", studio.send_asset),
        Route("/api/catalogue", studio.list_catalogue),
        Route("/api/plan", studio.send_plan),
        Route("/api/timetable", studio.send_timetable),
        Route("/api/compare", studio.send_comparison),
        Route("/api/task/{task}", studio.stream_task),
        Route("/api/page", studio.send_page),
        Route("/api/plan.json", studio.send_plan_file),
        Route("/api/trace", studio.send_trace),
        Route("/api/export", studio.send_launch_file),
        Route("/api/runs", studio.list_runs),
        Route("/api/run", studio.send_runs),
        Route("/api/drop", studio.diagnose_drop, methods=["POST"]),
        Route("/api/model", studio.take_model, methods=["POST"]),
        Route("/api/script", studio.take_script, methods=["POST"]),
    ]
    guard = Middleware(LocalGuard, port=port)
    return Starlette(routes=routes, middleware=[guard], lifespan=studio.live)


class _Studio:
    """The handlers of a server, with its folder and its workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = StudioFolder(folder)
        self._workers = Workers()

    @asynccontextmanager
    async def live(self, _: Starlette) -> AsyncIterator[None]:
        """Keep a worker ready while the server runs."""
        await self._workers.prepare()
        yield
        await self._workers.close()

    async def show_page(self, _: Request) -> Response:
        return Response(render_shell(), media_type="text/html")

    async def send_asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = read_asset(name)
        if content is None:
            return PlainTextResponse("no such file", status_code=404)
        media_type = _TYPES.get(Path(name).suffix, "text/plain")
        headers = {"cache-control": "no-cache"}
        return Response(content, media_type=media_type, headers=headers)

    async def list_catalogue(self, _: Request) -> Response:
        rows = await run_in_threadpool(_list_names)
        return _send_json(encode_data(rows))

    async def send_plan(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer(lambda: view_plan(read_query(params)))

    async def send_timetable(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer(lambda: view_timetable(read_query(params)))

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

    async def send_trace(self, request: Request) -> Response:
        params = dict(request.query_params)
        build = partial(_render_trace, params)
        return await _send_file(build, _JSON)

    async def send_launch_file(self, request: Request) -> Response:
        params = dict(request.query_params)
        return await _answer_data(lambda: {"text": _render_launch_file(params)})

    async def list_runs(self, _: Request) -> Response:
        return _send_json(encode_data(await run_in_threadpool(list_run_folders, Path("runs"))))

    async def send_runs(self, request: Request) -> Response:
        folders = [Path(name) for name in request.query_params.getlist("run")]
        stamp = request.query_params.get("stamp", "")
        return _send_json(await run_in_threadpool(follow_runs, folders, stamp))

    async def diagnose_drop(self, request: Request) -> Response:
        content = await _read_body(request)
        name = request.query_params.get("name", "")
        return await _answer(partial(diagnose_dropped, self._folder, content, name))

    async def stream_task(self, request: Request) -> Response:
        task = request.path_params["task"]
        if task not in _TASKS:
            return PlainTextResponse("no such task", status_code=404)
        lines = self._workers.run(task, dict(request.query_params))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def take_model(self, request: Request) -> Response:
        content = await _read_body(request)
        return await _answer_data(partial(read_dropped_model, self._folder, content))

    async def take_script(self, request: Request) -> Response:
        content = await _read_body(request)
        params = dict(request.query_params)
        return await _answer_data(partial(read_dropped_script, self._folder, content, params))


def _list_names() -> dict[str, object]:
    """Return the models and devices that are known by name, and the precisions."""
    return {
        "models": list_models().to_rows(),
        "devices": list_hardware().to_rows(),
        "precisions": [dtype.value for dtype in Dtype],
    }


def _render_trace(params: Mapping[str, str]) -> str:
    """Return the timetable of a query's layout as a Chrome trace."""
    return json.dumps(build_trace(read_query(params).build()))


def _render_launch_file(params: Mapping[str, str]) -> str:
    """Return a query's plan as the launch file of the target that the address names."""
    target = params.get("to", "")
    plan = read_query(params).build()
    return export(plan, to=cast(ExportTarget, target), job=params.get("job", ""))


async def _send_file(render: Callable[[], str], media_type: str) -> Response:
    """Send the text that a function renders, or why there is none, with status 422."""

    def run() -> Response:
        try:
            return Response(render(), media_type=media_type)
        except BadInput as error:
            content = encode_record(build_refusal(error.reasons))
            return Response(content, status_code=422, media_type=_JSON)

    return await run_in_threadpool(run)


async def _answer(build: Callable[[], Record]) -> Response:
    """Send the record that a function builds, or why there is none."""
    return await _send_built(lambda: encode_record(build()))


async def _answer_data(build: Callable[[], object]) -> Response:
    """Send the data that a function builds, or why there is none."""
    return await _send_built(lambda: encode_data(build()))


async def _send_built(build: Callable[[], bytes]) -> Response:
    def run() -> bytes:
        try:
            return build()
        except BadInput as error:
            return encode_record(build_refusal(error.reasons))

    return _send_json(await run_in_threadpool(run))


def _send_json(content: bytes) -> Response:
    return Response(content, media_type=_JSON)


async def _read_body(request: Request) -> bytes:
    """Return the body of a request, cut where it is too long: its reader refuses it then."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BODY_BYTES:
            break
    return content
