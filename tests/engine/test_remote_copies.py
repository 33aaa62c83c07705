"""Copies of checkpoints elsewhere: whole or not there, verified, pruned, and come back."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from moewright.engine.checkpoint import (
    LocalShard,
    fetch_newer,
    find_latest,
    find_readable,
    list_checkpoints,
    load_checkpoint,
    put_damaged_aside,
    read_index,
    save_checkpoint,
    single_process,
)
from moewright.engine.checkpoint import copier as copier_module
from moewright.engine.checkpoint import remote as remote_module
from moewright.engine.checkpoint.copier import RemoteCopier
from moewright.engine.checkpoint.index import CheckpointIndex
from moewright.engine.checkpoint.remote import RemoteFolder, probe_copies
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import CheckpointSpec

fsspec = pytest.importorskip("fsspec")


def save(directory: Path, step: int, *, job: str = "a", value: float = 1.0) -> Path:
    shard = LocalShard(
        name="w", global_shape=(64, 8), offsets=(0, 0), tensor=torch.full((64, 8), value + step)
    )
    return save_checkpoint(
        directory, step=step, shards=[shard], extra={"job": job}, keep=2, comm=single_process()
    )


def accept_any(index: CheckpointIndex) -> None:
    pass


def ignore(activity: str) -> None:
    pass


@contextmanager
def serve_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an empty bucket of S3 on this machine: s3fs talks to moto's server."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    try:
        yield make_bucket("s3")
    finally:
        fsspec.filesystem("s3").clear_instance_cache()
        server.stop()


@contextmanager
def serve_gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an empty bucket of GCS on this machine: gcsfs talks to gcp-storage-emulator."""
    # Asked for when gcsfs is imported: what it does by gRPC, the emulator does not speak.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    port = server._api._httpd.server_address[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    try:
        yield make_bucket("gs")
    finally:
        fsspec.filesystem("gs").clear_instance_cache()
        server.stop()


def make_bucket(protocol: str) -> str:
    bucket = uuid.uuid4().hex
    fsspec.filesystem(protocol).mkdir(bucket)
    return f"{protocol}://{bucket}/copies"


SERVERS = {"s3": serve_s3, "gs": serve_gcs}


@pytest.fixture(params=["file", "path", "memory", *SERVERS])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param in SERVERS:
        with SERVERS[request.param](monkeypatch) as bucket:
            yield bucket
        return
    name = uuid.uuid4().hex
    urls = {
        "file": f"file://{tmp_path}/remote/{name}",
        "path": f"{tmp_path}/remote/{name}",
        "memory": f"memory://{name}",
    }
    yield urls[request.param]


def test_a_copy_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    remote = RemoteFolder(url)
    assert remote.list_steps() == []
    for step in (4, 8):
        remote.upload(save(tmp_path / "here", step), ignore)
    assert remote.list_steps() == [4, 8]
    there = tmp_path / "there"
    fetch_newer(url, there, accept_any)
    assert [path.name for path in list_checkpoints(there)] == ["step-00000008"]
    for path in (tmp_path / "here/step-00000008").iterdir():
        assert (there / "step-00000008" / path.name).read_bytes() == path.read_bytes()
    fetch_newer(url, there, accept_any)  # nothing newer
    assert not list(there.glob(".saving*"))


def test_the_oldest_copies_are_pruned(url: str, tmp_path: Path) -> None:
    remote = RemoteFolder(url)
    for step in (2, 4, 6, 8):
        remote.upload(save(tmp_path / "here", step), ignore)
        remote.prune(CheckpointSpec(copy_keep=2, keep_every_steps=4))
    assert remote.list_steps() == [4, 6, 8]


def test_a_copy_without_an_index_is_none_and_a_damaged_one_is_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copies = tmp_path / "remote"
    remote = RemoteFolder(str(copies))
    for step in (2, 4, 6):
        remote.upload(save(tmp_path / "here", step), ignore)
    (copies / "step-00000006/index.json").unlink()
    payload = next((copies / "step-00000004").glob("rank-*"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"\x07")
    fetch_newer(str(copies), tmp_path / "there", accept_any)
    newest = find_latest(tmp_path / "there")
    assert newest is not None
    assert read_index(newest).step == 2
    assert "the copy of step 4" in capfd.readouterr().err


def test_a_copy_that_is_not_accepted_is_not_brought_here(tmp_path: Path) -> None:
    remote = RemoteFolder(str(tmp_path / "remote"))
    remote.upload(save(tmp_path / "here", 2), ignore)

    def refuse(index: CheckpointIndex) -> None:
        raise BadInput(Reason(field="resume", rule="is another job"))

    with pytest.raises(BadInput, match="another job"):
        fetch_newer(str(tmp_path / "remote"), tmp_path / "there", refuse)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [".fetch"]


def test_a_copy_of_another_job_is_not_overwritten(tmp_path: Path) -> None:
    remote = RemoteFolder(str(tmp_path / "remote"))
    remote.upload(save(tmp_path / "a", 2), ignore)
    with pytest.raises(OSError, match="same step of another job"):
        remote.upload(save(tmp_path / "b", 2, job="b"), ignore)
    remote.upload(save(tmp_path / "c", 2, value=9.0), ignore)  # the same job went this way again
    index = (tmp_path / "c/step-00000002/index.json").read_bytes()
    assert (tmp_path / "remote/step-00000002/index.json").read_bytes() == index


def test_an_upload_that_comes_out_otherwise_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first upload loses a bit on its way; the next checkpoint is copied all the same."""
    put = RemoteFolder._put
    uploads = iter(range(100))

    def lose_a_bit(self: Any, source: Path, target: str, note: Any) -> None:
        put(self, source, target, note)
        if next(uploads) == 0:
            content = bytearray(Path(target).read_bytes())
            content[-1] ^= 1
            Path(target).write_bytes(content)

    monkeypatch.setattr(RemoteFolder, "_put", lose_a_bit)
    spec = CheckpointSpec(copy_to=str(tmp_path / "remote"))
    copier = RemoteCopier(tmp_path / "here", spec, ignore)
    copier.submit(save(tmp_path / "here", 2))
    while not (failures := copier.take_failures()):
        time.sleep(0.01)
    # Only now: `readouterr` truncates its file, and a thread that still writes would lose a letter.
    error = capfd.readouterr().err
    assert "step-00000002 was not copied" in error
    assert "is not what was written" in error
    assert len(failures) == 1
    copier.submit(save(tmp_path / "here", 4))
    copier.close()
    assert RemoteFolder(spec.copy_to).list_steps() == [4]
    assert not list((tmp_path / "here").glob(".copying*"))


def test_a_silent_server_delays_nothing_for_long_and_the_next_copy_goes_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first upload never answers, as behind a firewall that drops what it gets."""
    monkeypatch.setattr(copier_module, "PATIENCE_S", 0.5)
    upload = RemoteFolder.upload
    answers = Event()
    uploads = iter(range(100))

    def hang(self: RemoteFolder, *args: Any, **options: Any) -> int:
        if next(uploads) in (0, 2):
            answers.wait(60)
        return upload(self, *args, **options)

    monkeypatch.setattr(RemoteFolder, "upload", hang)
    spec = CheckpointSpec(copy_to=str(tmp_path / "remote"))
    copier = RemoteCopier(tmp_path / "here", spec, ignore)
    copier.submit(save(tmp_path / "here", 2))
    failures: list[str] = []
    deadline_s = time.monotonic() + 20
    while not failures and time.monotonic() < deadline_s:
        failures = copier.take_failures()
    assert failures == [f"{spec.copy_to} shows no sign of life"]
    assert copier.take_failures() == []  # it is one outage
    copier.submit(save(tmp_path / "here", 4))
    while copier.copied_step != 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert RemoteFolder(spec.copy_to).list_steps() == [4]
    copier.submit(save(tmp_path / "here", 6))
    begin_s = time.monotonic()
    copier.close()
    assert time.monotonic() - begin_s < 5
    assert copier.take_failures() == [f"{spec.copy_to} does not answer: the last copy is left out"]
    answers.set()  # what was left behind ends, and makes no copy any more
    time.sleep(0.3)
    assert RemoteFolder(spec.copy_to).list_steps() == [4]


def test_the_records_of_a_run_go_with_its_copies_and_come_back(url: str, tmp_path: Path) -> None:
    spec = CheckpointSpec(copy_to=url)
    here = tmp_path / "run" / "checkpoints"
    copier = RemoteCopier(here, spec, ignore)
    checkpoint = save(here, 2)
    records = "".join(f'{{"kind": "step", "step": {step}}}\n' for step in (1, 2))
    (tmp_path / "run" / "steps.jsonl").write_text(records)
    (tmp_path / "run" / "incidents.jsonl").write_text("")
    copier.submit(checkpoint)
    copier.close()
    for earlier in (None, records.splitlines(keepends=True)[0], records + records):
        there = tmp_path / f"there-{len(earlier or '')}"
        there.mkdir()
        if earlier is not None:
            (there / "steps.jsonl").write_text(earlier)
        fetch_newer(url, there / "checkpoints", accept_any)
        expected = earlier if earlier and len(earlier) > len(records) else records
        assert (there / "steps.jsonl").read_text() == expected  # newer ones here stay
        assert (there / "incidents.jsonl").read_text() == ""


def test_a_destination_is_tried_before_it_is_needed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe_copies(url, tmp_path / "run") == ""
    assert RemoteFolder(url).list_steps() == []
    (tmp_path / "file").touch()
    assert "cannot be written" in probe_copies(str(tmp_path / "file" / "copies"), tmp_path / "run")
    monkeypatch.setattr(remote_module, "_PROBE_S", 0.3)
    monkeypatch.setattr(RemoteFolder, "probe", lambda self, note: time.sleep(5))
    begin_s = time.monotonic()
    assert "no sign of life" in probe_copies(url, tmp_path / "run")
    assert time.monotonic() - begin_s < 2


@pytest.mark.parametrize("place", ["", "checkpoints", "copies/of/it", "../link/copies"])
@pytest.mark.parametrize("kind", ["", "file://"])
def test_a_copy_in_the_folder_of_the_run_is_none(kind: str, place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "link").symlink_to(run_dir)
    with pytest.raises(BadInput, match="is in the folder of the run"):
        probe_copies(f"{kind}{run_dir / place}", run_dir)
    assert not list(run_dir.iterdir())


def test_what_is_purged_here_is_copied_all_the_same(tmp_path: Path) -> None:
    spec = CheckpointSpec(copy_to=str(tmp_path / "remote"))
    checkpoint = save(tmp_path / "here", 2)
    copier = RemoteCopier(tmp_path / "here", spec, ignore)  # finds it, and holds it
    shutil.rmtree(checkpoint)
    copier.close()
    assert RemoteFolder(spec.copy_to).list_steps() == [2]


def test_what_does_not_answer_is_refused_only_where_nothing_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(self: RemoteFolder) -> list[int]:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(RemoteFolder, "list_steps", fail)
    with pytest.raises(BadInput, match="no route to host"):
        fetch_newer(str(tmp_path / "remote"), tmp_path / "here", accept_any)
    save(tmp_path / "here", 2)
    fetch_newer(str(tmp_path / "remote"), tmp_path / "here", accept_any)
    assert "going on from step-00000002" in capfd.readouterr().err
    with pytest.raises(BadInput, match=r"checkpoint\.copy_to=nosuch://x: cannot be opened"):
        fetch_newer("nosuch://x", tmp_path / "here", accept_any)


def damage_payload(checkpoint: Path) -> None:
    payload = next(checkpoint.glob("rank-*"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"\x07")


def fall_back(directory: Path, url: str) -> None:
    def fetch(newest: Path | None) -> Path | None:
        return fetch_newer(url, directory, accept_any, find_newest=lambda folder: newest)

    put_damaged_aside(directory, single_process(), fetch)


@pytest.mark.parametrize("copied", [(2,), (2, 4), (2, 4, 6)], ids=str)
def test_a_damaged_checkpoint_is_replaced_by_the_newest_whole_one_here_or_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], copied: tuple[int, ...]
) -> None:
    here = tmp_path / "here"
    remote = RemoteFolder(str(tmp_path / "remote"))
    for step in (2, 4, 6):
        checkpoint = save(here, step)
        if step in copied:
            remote.upload(checkpoint, ignore)
    damage_payload(here / "step-00000006")
    fall_back(here, remote.url)
    newest = find_latest(here)
    assert newest is not None
    assert read_index(newest).step == max(4, *copied)
    load_checkpoint(newest, shards=[], comm=single_process())
    assert (here / ".damaged-step-00000006").is_dir()
    assert f"going on from {newest.name}" in capfd.readouterr().err


def test_where_none_is_whole_here_a_copy_is_taken_and_without_one_nothing_is_touched(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    remote = RemoteFolder(str(tmp_path / "remote"))
    checkpoint = save(here, 2)
    whole = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    damage_payload(checkpoint)
    with pytest.raises(BadInput, match="its checksum does not hold"):
        fall_back(here, remote.url)
    assert [path.name for path in list_checkpoints(here)] == ["step-00000002"]
    remote.upload(save(tmp_path / "elsewhere", 2), ignore)
    fall_back(here, remote.url)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == whole
    assert (here / ".damaged-step-00000002").is_dir()


def test_an_index_that_cannot_be_read_is_passed_over_where_a_run_falls_back(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    remote = RemoteFolder(str(tmp_path / "remote"))
    for step in (2, 4):
        remote.upload(save(here, step), ignore)
    (here / "step-00000004/index.json").write_text("{")
    assert fetch_newer(remote.url, here, accept_any) is None
    fetched = fetch_newer(remote.url, here, accept_any, find_newest=find_readable)
    assert fetched == here / "step-00000004"
    assert read_index(fetched).step == 4
    assert (here / ".damaged-step-00000004").is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", SERVERS)
def test_a_copy_that_goes_in_parts_comes_back_as_it_was(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients cut a file of 120 MB; a read takes several blocks."""
    shard = LocalShard(
        name="w", global_shape=(30_000_000,), offsets=(0,), tensor=torch.rand(30_000_000)
    )
    path = save_checkpoint(
        tmp_path / "here", step=2, shards=[shard], extra={}, keep=2, comm=single_process()
    )
    with SERVERS[protocol](monkeypatch) as url:
        RemoteFolder(url).upload(path, ignore)
        fetch_newer(url, tmp_path / "there", accept_any)
    for file in path.iterdir():
        assert (tmp_path / "there" / path.name / file.name).read_bytes() == file.read_bytes()
