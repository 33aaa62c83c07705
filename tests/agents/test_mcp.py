"""Tools of an agent: the answers of the command line, through the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the mcp extra is not installed")

import httpx2
from jsonschema import Draft202012Validator
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from moewright.agents.tools import TOOLS, call_tool
from moewright.agents.worker import encode_refusal
from moewright.cli.main import main
from moewright.spec.errors import BadInput
from moewright.spec.record import format_json, to_plain_data
from moewright.studio.confinement import Confinement
from moewright.studio.tasks import Workers

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "skills" / "moewright"
CASES = tomllib.loads((SKILL / "evaluation.toml").read_text())["case"]
JOB = {"model": "OLMoE-1B-7B-0924", "on": "4xH100", "layout": "ep4"}
SERVE = ["-m", "moewright", "mcp"]


def ask_command_line(verb: str, folder: Path) -> Any:
    answer = folder / "answer.json"
    assert main([*shlex.split(verb), "--json", str(answer)]) in (0, 3)
    return json.loads(answer.read_text())


def find(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data[int(key)] if key.isdecimal() else data[key]
    return data


def holds(value: Any, expected: Any) -> bool:
    if isinstance(expected, str) and expected[:1] == "~":
        return expected[1:] in value
    if isinstance(expected, str) and expected[:1] == "<":
        return value < float(expected[1:])
    if isinstance(expected, str) and expected[:1] == ">":
        return value > float(expected[1:])
    return value == expected


@pytest.mark.turns
@pytest.mark.parametrize("case", CASES, ids=[case["question"] for case in CASES])
def test_a_task_is_answered_as_the_command_line_answers(
    case: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    if "refusal" in case:
        with pytest.raises(BadInput) as refused:
            call_tool(case["tool"], case["arguments"])
        reason = to_plain_data(refused.value.reasons[0])
        for key, text in case["refusal"].items():
            assert reason[key] == text
        if "verb" in case:
            assert main(shlex.split(case["verb"])) == 2
            assert capsys.readouterr().err == f"moewright: {refused.value}\n"
        return
    schema = Draft202012Validator(TOOLS[case["tool"]].schema)
    schema.validate(case["arguments"])
    answer = json.loads(format_json(call_tool(case["tool"], case["arguments"])))
    for path, expected in case["holds"].items():
        assert holds(find(answer, path), expected), (path, find(answer, path))
    if "verb" in case:
        assert answer == ask_command_line(case["verb"], tmp_path)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"attention_kinds": ["linear"]}, "--attention-kinds=linear"),
        ({"kv_heads": [0]}, "--kv-heads=0"),
        ({"vocab_sizes": [3]}, "--vocab-sizes=3"),
        ({"shared_experts": [1]}, "--shared-experts"),
        ({"days": 0, "until": 99}, "--until=99"),
        ({"served_tokens": "many"}, "--served-tokens"),
    ],
)
def test_an_agent_s_design_varies_what_the_command_line_varies(
    asked: dict[str, Any], rule: str
) -> None:
    with pytest.raises(BadInput, match=rule):
        call_tool("design", {"on": "8xH100", "days": 7, **asked})


def test_every_tool_has_a_task_and_a_schema_without_other_fields() -> None:
    assert {case["tool"] for case in CASES} == set(TOOLS)
    assert len(CASES) >= 30
    for tool in TOOLS.values():
        Draft202012Validator.check_schema(tool.schema)
        assert not Draft202012Validator(tool.schema).is_valid({"no_such_field": 1})
        assert f"`{tool.name}`" in (SKILL / "SKILL.md").read_text() or tool.name in (
            "models",
            "hardware",
        )


@pytest.mark.waits
def test_an_agent_is_served_over_standard_input(tmp_path: Path) -> None:
    async def talk() -> None:
        server = StdioServerParameters(
            command=sys.executable, args=[*SERVE, "--root", str(ROOT)], cwd=str(tmp_path)
        )
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools] == list(TOOLS)
            assert all(tool.input_schema == TOOLS[tool.name].schema for tool in tools)
            answer = await client.call_tool("estimate", JOB)
            assert not answer.is_error
            verb = "estimate OLMoE-1B-7B-0924 --on 4xH100 --layout ep4"
            assert answer.structured_content == ask_command_line(verb, tmp_path)
            answer = await client.call_tool("estimate", {**JOB, "layout": "ep3"})
            assert answer.is_error
            reason = answer.structured_content["refusal"][0]
            assert (reason["field"], reason["nearest"]) == ("--layout ep", "2 or 4")
            assert answer.content[0].text.startswith("--layout ep=3: ")
            answer = await client.call_tool("estimatee", JOB)
            assert answer.structured_content["refusal"][0]["nearest"] == "estimate"
            answer = await client.call_tool("read_flags", {"script": "/etc/passwd", "on": "H100"})
            assert "lies outside" in answer.content[0].text
            text = (await client.read_resource("moewright://models/olmoe")).contents[0].text
            assert json.loads(text) == ask_command_line("models olmoe", tmp_path)
            with pytest.raises(MCPError, match="no resource"):
                await client.read_resource("moewright://secrets")

    asyncio.run(talk())


@pytest.mark.waits
def test_a_question_that_waits_for_its_turn_has_not_begun(tmp_path: Path) -> None:
    """The limit of time begins with the turn: a third question has as much of it as the first."""
    told: list[str] = []

    async def ask(workers: Workers, name: str) -> None:
        await workers.ask(
            "hardware", {"name": "H100"}, on_turn=lambda: told.append(f"begin {name}")
        )
        told.append(f"end {name}")

    async def talk() -> None:
        walls = Confinement(root=tmp_path, folder=tmp_path, hub_cache=tmp_path, is_read_only=True)
        workers = Workers(walls, module="moewright.agents.worker", refuse=encode_refusal)
        await asyncio.gather(*(ask(workers, name) for name in "abc"))
        await workers.close()

    asyncio.run(talk())
    assert told[:2] == ["begin a", "begin b"]
    assert told[2] in ("end a", "end b")
    assert told.index("begin c") > 2


@pytest.mark.waits
def test_an_agent_is_served_over_http_for_its_token_and_within_its_time(tmp_path: Path) -> None:
    command = [sys.executable, *SERVE, "--http", "--port", "0", "--time-limit", "0.001"]
    environment = {**os.environ, "MOEWRIGHT_MCP_TOKEN": "a-token-of-mine"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http"))

        async def talk() -> None:
            async with httpx2.AsyncClient() as stranger:
                assert (await stranger.post(url, json={})).status_code == 403
            headers = {"authorization": "Bearer a-token-of-mine"}
            async with (
                httpx2.AsyncClient(headers=headers, timeout=60) as http,
                Client(streamable_http_client(url, http_client=http)) as client,
            ):
                assert len((await client.list_tools()).tools) == len(TOOLS)
                answer = await client.call_tool("plan", {"model": "Qwen3-30B-A3B", "on": "8xH100"})
                assert answer.is_error
                rule = answer.structured_content["refusal"][0]["rule"]
                assert rule == "takes more than 0.001 s, which an answer may take here"

        asyncio.run(talk())
    finally:
        process.terminate()
        process.wait()


def test_an_agent_s_job_of_a_log_has_the_sizes_that_the_log_states(tmp_path: Path) -> None:
    log = str(SKILL / "files" / "slow.log")
    job = {"model": "gpt-oss-20b", "on": "16xH100", "layout": "ep8"}
    verb = f"diagnose {log} --model gpt-oss-20b --on 16xH100 --layout ep8"
    answer = json.loads(format_json(call_tool("diagnose", {"run": log, **job})))
    assert answer == ask_command_line(verb, tmp_path)
    with pytest.raises(BadInput, match="the log's global_batch_size is 512"):
        call_tool("diagnose", {"run": log, **job, "global_batch": 256})


def test_a_check_where_git_may_not_be_started_names_the_file_that_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "lies outside of --root", "git")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(BadInput, match=r"none\.sh: no such file"):
        call_tool("check", {"before": "none.sh", "after": "none.sh", "on": "H100"})
