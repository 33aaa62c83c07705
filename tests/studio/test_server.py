"""A studio as users start it: what it reads, writes, keeps and ends."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest

import moewright as mw
from moewright.codec import write_json
from moewright.intake import catalogue, hf
from sample_run import record, write_run

pytest.importorskip("uvicorn", reason="the studio extra is not installed")

from moewright.studio.folder import StudioFolder, list_run_folders

pytestmark = pytest.mark.waits


class Studio:
    """A studio that runs, and a client of it."""

    def __init__(self, root, *options):
        command = [sys.executable, "-m", "moewright", "studio", *options]
        self.process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        self.lines = []
        while not self.lines or "token=" not in self.lines[-1]:
            self.lines.append(self.process.stdout.readline())
            assert self.lines[-1], "the studio has ended"
        address, self.token = re.search(r"http://([^/]+)/\?token=(\S+)", self.lines[-1]).groups()
        self.port = int(address.rpartition(":")[2])

    def connect(self):
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path, *, body=None):
        connection = self.connect()
        method = "GET" if body is None else "POST"
        connection.request(method, path, body, {"authorization": f"Bearer {self.token}"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)

    def workers(self):
        """Return the process ids of its workers, which the one that it keeps warm has forked."""
        (warm,) = list_children(self.process.pid)
        return list_children(warm)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            assert self.process.wait(30) == 0
        self.process.stdout.close()


def list_children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def why(answer):
    """Return the reasons of a refusal."""
    status, data = answer
    assert status == 200
    refusals = [item for item in data.get("records", [data]) if item["kind"] == "RefusalView"]
    assert refusals, data
    return "; ".join(reason["text"] for item in refusals for reason in item["reasons"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a root with a run, and a folder beside it that nobody may read."""
    place = tmp_path_factory.mktemp("place")
    for folder in (place / "root" / "runs" / "mine", place / "private" / "run"):
        folder.mkdir(parents=True)
        write_run(folder, record())
    (place / "private" / "h.toml").write_text("name = 1\n")
    write_json(place / "private" / "p.json", mw.estimate("Mixtral-8x7B", "ep8", on="8xH100"))
    (place / "root" / "link").symlink_to(place / "private")
    return place


@pytest.fixture(scope="module")
def studio(place):
    with Studio(place, "--root", "root", "--port", "0") as studio:
        yield studio


def test_nothing_outside_of_the_root_is_read(place, studio):
    private = place / "private"
    for path in (private, Path("link"), Path("runs/../link"), Path("runs/../../private")):
        for query in (f"run?run={path}/run", f"plan?model={path}/p.json&on=8xH100"):
            assert "outside" in why(studio.ask(f"/api/{query}"))
        hardware = f"plan?model=Mixtral-8x7B&on={path}/h.toml"
        assert "outside" in why(studio.ask(f"/api/{hardware}"))
        assert "outside" in why(studio.ask(f"/api/task/diagnosis?path={path}/p.json"))
    assert studio.ask("/api/runs")[1] == ["runs/mine"]
    assert studio.ask("/api/run?run=runs/mine")[1]["records"][0]["kind"] == "RunView"
    script = f"source {private}/p.json\npython pretrain_gpt.py\n".encode()
    why(studio.ask("/api/script?on=H100", body=script))


def test_a_log_that_grows_is_told_anew_and_one_outside_is_not_told_of(place, studio):
    log = place / "root" / "watched.log"
    line = " iteration {0:8d}/ 500 | elapsed time per iteration (ms): {1:.1f} | lm loss: 2.0 |\n"
    log.write_text("".join(line.format(step, 1000 + step % 7) for step in range(1, 201)))
    asked = "/api/watch?path=watched.log"
    first = studio.ask(asked)[1]
    shown = first["records"][0]
    assert (shown["kind"], first["live"]) == ("WatchView", True)
    assert shown["watch"]["recent"] == list(range(1, 201))
    assert studio.ask(f"{asked}&stamp={first['stamp']}")[1]["records"] == []
    with log.open("a") as file:
        file.write("".join(line.format(step, 1200 + step % 7) for step in range(201, 301)))
    later = studio.ask(f"{asked}&stamp={first['stamp']}")[1]["records"][0]
    assert [alarm["step"] for alarm in later["watch"]["alarms"]] == [201]
    assert later["document"]["heading"].startswith("step 300")
    for name in (place / "private" / "run", "link/run", "%00"):
        assert "outside" in why(studio.ask(f"/api/watch?path={name}"))


def test_a_run_outside_of_the_root_tells_no_time_and_no_name_is_a_failure(place, studio):
    (place / "root" / "bare").mkdir()
    (place / "root" / "bare" / "steps.jsonl").symlink_to(place / "private" / "run" / "steps.jsonl")
    for name in (
        place / "private" / "run",
        "../private/run",
        "link/run",
        "bare",
        "a" * 5000,
        "%00",
    ):
        status, answer = studio.ask(f"/api/run?run={name}")
        assert (status, answer["stamp"], answer["live"]) == (200, "0", False)
    assert studio.ask("/api/run?run=runs/mine")[1]["stamp"] != "0"


def test_dropped_files_stay_in_the_folder(place, studio):
    before = set(place.rglob("*"))
    hostile = b'{"architectures": ["../../x/Qwen3MoeForCausalLM"], "model_type": "nothing"}'
    why(studio.ask("/api/model", body=hostile))
    assert "UTF-8" in why(studio.ask("/api/script", body=b"\xff\xfe"))
    kept = studio.ask("/api/drop?name=../../x.json.sh", body=b"x")[1]["run"]
    assert kept.startswith("runs/studio/dropped/")
    assert "not a log" in why(studio.ask(f"/api/task/diagnosis?path={kept}"))
    folder = place / "root" / "runs" / "studio" / "dropped"
    written = {path for path in set(place.rglob("*")) - before if path.is_file()}
    assert len(written) == 3
    assert all(folder in path.parents for path in written)


def test_a_dropped_config_lives_in_its_address(studio):
    config = json.dumps(hf.build_config(catalogue.model("OLMoE-1B-7B-0924"))).encode()
    model = studio.ask("/api/model", body=config)[1]["query"]["model"]
    assert model.startswith("OlmoeForCausalLM~")
    answer = studio.ask(f"/api/plan?model={model}&on=8xH100&layout=ep8")[1]
    assert answer["job"]["model"] == "OlmoeForCausalLM"
    named = studio.ask("/api/model?name=mine%20v2.json", body=config)[1]["query"]["model"]
    assert named.startswith("minev2~")


def test_a_dropped_file_is_called_by_its_own_name(studio):
    assert "mine.sh" in why(studio.ask("/api/script?name=mine.sh", body=b"\xff\xfe"))
    for name, kept in (
        ("w0.171.pt.trace.json", "w0.171.pt.trace.json"),
        ("../../a b.out", "ab.out.log"),
    ):
        path = studio.ask(f"/api/drop?{urlencode({'name': name})}", body=b"x")[1]["run"]
        assert path.rpartition("/")[2] == kept


def test_a_config_with_much_that_says_nothing_lives_in_its_address(place, studio):
    config = hf.build_config(catalogue.model("OLMoE-1B-7B-0924"))
    draws = random.Random(34)
    config["id2label"] = {f"LABEL_{number}": draws.random() for number in range(3000)}
    answer = studio.ask("/api/model", body=json.dumps(config).encode())[1]
    assert answer["notes"] == []
    assert len(answer["query"]["model"]) < 3500
    assert str(place) not in json.dumps(answer)
    plan = studio.ask(f"/api/plan?model={answer['query']['model']}&on=8xH100&layout=ep8")[1]
    assert plan["job"]["model"] == "OlmoeForCausalLM"


def test_the_job_of_a_dropped_script_lives_in_its_address(place, studio):
    script = Path("examples/qwen3_30b_16h100.sh").read_bytes()
    answer = studio.ask("/api/script?on=16xH100", body=script)[1]
    assert answer["query"]["model"].startswith("Qwen3-30B-A3B~job~")
    assert str(place) not in json.dumps(answer)
    assert "dropped" not in json.dumps(answer)
    plan = studio.ask(f"/api/plan?{urlencode(answer['query'])}")[1]
    assert plan["kind"] == "PlanView"
    assert plan["job"]["layout"] == answer["query"]["layout"]


def test_a_large_file_is_refused_while_it_comes(place, studio):
    folder = place / "root" / "runs" / "studio" / "dropped"
    before = set(folder.iterdir())
    large = bytes(20 << 20)
    assert "at most 16 MiB" in why(studio.ask("/api/model", body=large))
    assert set(folder.iterdir()) == before


def test_workers_end_when_nobody_waits_and_are_few(studio):
    search = "/api/task/search?model=deepseek-ai/DeepSeek-V3&on=2048xH800&global_batch=15360"
    connections = [studio.connect() for _ in range(12)]
    for connection in connections:
        connection.request("GET", search, headers={"authorization": f"Bearer {studio.token}"})
    refused = connections[-1].getresponse().read()
    assert b"more questions" in refused
    assert len(studio.workers()) <= 2
    for connection in connections:
        connection.close()
    deadline_s = time.monotonic() + 20
    while studio.workers() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(0.5)
    assert studio.workers() == []  # nobody's search goes on


@pytest.mark.slow
def test_questions_are_answered_by_forks_of_a_warm_process_and_of_a_new_one_where_it_was_killed(
    place,
):
    budget = "/api/task/budget?model=allenai/OLMoE-1B-7B-0924&on=4xH100&tokens=x"
    with Studio(place, "--root", "root", "--port", "0", "--read-only") as studio:
        assert "must be" in why(studio.ask(budget))
        (warm,) = list_children(studio.process.pid)
        assert "must be" in why(studio.ask(budget))
        assert list_children(studio.process.pid) == [warm]
        os.kill(int(warm), signal.SIGKILL)
        assert "must be" in why(studio.ask(budget))
        assert list_children(studio.process.pid) != [warm]


def test_connections_that_ask_nothing_do_not_keep_the_places_of_others(studio):
    silent = [socket.create_connection(("127.0.0.1", studio.port)) for _ in range(80)]
    for connection in silent:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
    with closing(studio.connect()) as connection:
        connection.request("GET", "/")
        assert connection.getresponse().status == 503
    for connection in silent:
        connection.settimeout(30)
        connection.recv(4096)  # its end, after a refusal where there was one
    assert studio.ask("/api/runs")[0] == 200
    for connection in silent:
        connection.close()


def test_a_socket_is_for_its_user_alone(place):
    path = place / "socket"
    with Studio(place / "root", "--socket", str(path), "--read-only") as studio:
        assert oct(path.stat().st_mode & 0o777) == "0o600"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost:1\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 403")
        taken = subprocess.run(
            [sys.executable, "-m", "moewright", "studio", "--socket", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert taken.returncode == 2
        assert "--socket" in taken.stderr
        studio.process.terminate()
        assert studio.process.wait(30) == -signal.SIGTERM
    assert not path.exists()


def test_the_files_that_were_dropped_first_go(tmp_path):
    dropped = tmp_path / "dropped"
    for number in range(120):
        folder = dropped / f"m-{number}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder, (number, number))
    StudioFolder(tmp_path).prune()
    assert {path.name for path in dropped.iterdir()} == {f"m-{n}" for n in range(20, 120)}


def test_a_walk_ends_when_whoever_asked_is_gone(tmp_path):
    source = tmp_path / "a" / "run"
    source.mkdir(parents=True)
    write_run(source, record())
    shutil.copytree(source, tmp_path / "run")
    shutil.copytree(source, tmp_path / ".hidden" / "run")
    (tmp_path / "link").symlink_to(tmp_path)
    assert set(list_run_folders(tmp_path)) == {"run", "a/run"}
    calls = iter(range(100))
    assert list_run_folders(tmp_path, lambda: next(calls) > 2) == ["run"]
