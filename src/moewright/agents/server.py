"""The server of the Model Context Protocol: tools and resources over standard input, or http."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import anyio
import mcp_types as wire
import uvicorn
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from moewright.agents.tools import TOOLS
from moewright.agents.worker import encode_refusal
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.studio.confinement import Confinement
from moewright.studio.guard import Access, LocalGuard
from moewright.studio.serve import HOST, listen_at_port
from moewright.studio.tasks import Workers
from moewright.version import __version__

PATH = "/mcp"
_INSTRUCTIONS = """\
moewright plans, estimates and diagnoses the training of Mixture-of-Experts language models. Ask \
`plan` for the best layout, `estimate` for one layout, `read_flags` and `improve_script` about a \
launch script, `diagnose` about a slow or failed run, `check` about a change. A refusal names the \
field, the rule and the nearest legal value: mend that field and ask again. Figures are \
predictions with intervals; bytes, calls and FLOPs are counts."""
# Resources: a table of all names, and those of a name, by the tool that lists them.
_LISTS = {
    "moewright://models": ("models", "The models that are known by name, with their sources."),
    "moewright://hardware": ("hardware", "The devices that are known by name, with their figures."),
}

# Clients give up on what says nothing for a minute, unless progress comes.
_BEAT_S = 10.0

Report = Callable[[float, float], Awaitable[None]]  # seconds so far, and those that it may take
Ask = Callable[[str, Mapping[str, Any], Report], Awaitable[dict[str, Any]]]


def build_server(workers: Workers, limit_s: float) -> Server[Any]:
    """Build the server; an answer that takes longer than the limits of its tool is refused."""

    async def ask(name: str, arguments: Mapping[str, Any], report: Report) -> dict[str, Any]:
        own_limit_s = limit_s * TOOLS[name].limits
        beats = asyncio.create_task(_report_time(report, own_limit_s))
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as limit:
                # Waiting for others' questions is not counted.
                line = await workers.ask(
                    name, arguments, on_turn=lambda: limit.reschedule(clock() + own_limit_s)
                )
        except TimeoutError:
            rule = f"takes more than {own_limit_s:g} s, which an answer may take here"
            line = encode_refusal(Reason(field=name, rule=rule, nearest="a smaller question"))
        finally:
            beats.cancel()
        answer: dict[str, Any] = json.loads(line)
        return answer

    @asynccontextmanager
    async def prepare(_: Server[Any]) -> AsyncIterator[None]:
        await workers.prepare()
        try:
            yield
        finally:
            await workers.close()

    return Server(
        "moewright",
        version=__version__,
        title="moewright",
        instructions=_INSTRUCTIONS,
        lifespan=prepare,
        on_list_tools=_list_tools,
        on_call_tool=_answer_calls(ask),
        on_list_resources=_list_resources,
        on_list_resource_templates=_list_templates,
        on_read_resource=_answer_reads(ask),
    )


async def _report_time(report: Report, limit_s: float) -> None:
    """Report how long an answer has taken, again and again."""
    start = time.monotonic()
    while True:
        await asyncio.sleep(_BEAT_S)
        await report(time.monotonic() - start, limit_s)


async def _list_tools(
    _: ServerRequestContext[Any], __: wire.PaginatedRequestParams | None
) -> wire.ListToolsResult:
    hints = wire.ToolAnnotations(read_only_hint=True, open_world_hint=False)
    return wire.ListToolsResult(
        tools=[
            wire.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=tool.schema,
                annotations=hints,
            )
            for tool in TOOLS.values()
        ]
    )


def _answer_calls(
    ask: Ask,
) -> Callable[
    [ServerRequestContext[Any], wire.CallToolRequestParams], Awaitable[wire.CallToolResult]
]:
    async def call(
        context: ServerRequestContext[Any], params: wire.CallToolRequestParams
    ) -> wire.CallToolResult:
        if params.name not in TOOLS:
            near = closest_match(params.name[:60], list(TOOLS))
            reason = Reason(field=params.name[:60], rule="is no tool", nearest=near)
            return _refuse(json.loads(encode_refusal(reason)))
        report = context.session.report_progress
        answer = await ask(params.name, params.arguments or {}, report)
        if "refusal" in answer:
            return _refuse(answer)
        return wire.CallToolResult(
            content=[wire.TextContent(text=answer["text"])], structured_content=answer["answer"]
        )

    return call


def _refuse(answer: dict[str, Any]) -> wire.CallToolResult:
    """Return the reasons of a refusal, as data and as the line that the command line prints."""
    text = str(BadInput(*(Reason(**reason) for reason in answer["refusal"])))
    return wire.CallToolResult(
        content=[wire.TextContent(text=text)], structured_content=answer, is_error=True
    )


async def _list_resources(
    _: ServerRequestContext[Any], __: wire.PaginatedRequestParams | None
) -> wire.ListResourcesResult:
    return wire.ListResourcesResult(
        resources=[
            wire.Resource(uri=uri, name=name, description=text, mime_type="application/json")
            for uri, (name, text) in _LISTS.items()
        ]
    )


async def _list_templates(
    _: ServerRequestContext[Any], __: wire.PaginatedRequestParams | None
) -> wire.ListResourceTemplatesResult:
    return wire.ListResourceTemplatesResult(
        resource_templates=[
            wire.ResourceTemplate(
                uri_template=f"{uri}/{{+name}}",
                name=name,
                description=f"{text} Those of a name.",
                mime_type="application/json",
            )
            for uri, (name, text) in _LISTS.items()
        ]
    )


def _answer_reads(
    ask: Ask,
) -> Callable[
    [ServerRequestContext[Any], wire.ReadResourceRequestParams],
    Awaitable[wire.ReadResourceResult],
]:
    async def read(
        context: ServerRequestContext[Any], params: wire.ReadResourceRequestParams
    ) -> wire.ReadResourceResult:
        uri = str(params.uri)
        base = next((base for base in _LISTS if uri == base or uri.startswith(f"{base}/")), None)
        if base is None:
            raise MCPError(code=wire.INVALID_PARAMS, message=f"no resource {uri[:80]}")
        words = unquote(uri.removeprefix(base).removeprefix("/"))
        answer = await ask(_LISTS[base][0], {"name": words}, context.session.report_progress)
        if "refusal" in answer:
            text = str(BadInput(*(Reason(**reason) for reason in answer["refusal"])))
            raise MCPError(code=wire.INVALID_PARAMS, message=text, data=answer["refusal"])
        content = wire.TextResourceContents(
            uri=uri, mime_type="application/json", text=json.dumps(answer["answer"])
        )
        return wire.ReadResourceResult(contents=[content])

    return read


def serve_stdio(confinement: Confinement, limit_s: float) -> None:
    """Serve the agent that has started this process, until it closes standard input."""

    async def serve() -> None:
        server = build_server(_hire(confinement), limit_s)
        async with stdio_server() as (reader, writer):
            await server.run(reader, writer, server.create_initialization_options())

    confinement.enter()
    anyio.run(serve)


def serve_http(
    confinement: Confinement,
    limit_s: float,
    tell: Callable[[str], None],
    *,
    port: int,
    token: str = "",
) -> None:
    """Serve agents of this machine that send the token; `tell` gets the address, and a new token.

    Raises:
        BadInput: the port is taken or no port.
    """
    listener = listen_at_port(port)
    port = listener.getsockname()[1]
    access = Access(port=port, token=token) if token else Access(port=port)
    server = build_server(_hire(confinement), limit_s)
    app = LocalGuard(server.streamable_http_app(streamable_http_path=PATH, host=HOST), access)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    confinement.enter()
    tell(f"tools are at http://{HOST}:{port}{PATH} (Ctrl-C ends it)")
    if not token:
        tell(f"send the header Authorization: Bearer {access.token}")
    uvicorn.Server(config).run(sockets=[listener])


def _hire(confinement: Confinement) -> Workers:
    return Workers(confinement, module="moewright.agents.worker", refuse=encode_refusal)
