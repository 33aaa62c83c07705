"""Checkpoints: any sharding to any other, damage is named, nothing is lost when a save fails."""

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moewright.codec.folder_lock import lock_folder
from moewright.engine.checkpoint import (
    Coordinator,
    LocalShard,
    find_latest,
    find_resume_point,
    list_checkpoints,
    load_checkpoint,
    offer_older,
    put_damaged_aside,
    read_index,
    refuse_mismatch,
    save_checkpoint,
    single_process,
)
from moewright.engine.checkpoint import index as index_module
from moewright.engine.run.restore import build_identity, read_steps_done
from moewright.spec.errors import BadInput
from moewright.spec.workload import DataSpec, DocumentMasking
from sharded import LAYOUTS, blank_shards, full_state, run_on_ranks, shard_bytes, shard_state
from tiny_jobs import build_plan, build_workload

EXTRA = {"step": 5, "seed": 1234, "fingerprints": {"model": "ab12", "data": "cd34"}, "lr": 0.1}


def save_sharded(
    directory: Path, *, step: int = 5, layout: str = "rows", world: int = 2, keep: int = 9
) -> Path:
    state = full_state(step)
    results = run_on_ranks(
        world,
        lambda comm: save_checkpoint(
            directory,
            step=step,
            shards=shard_state(state, layout, comm.rank, world),
            extra=EXTRA,
            keep=keep,
            comm=comm,
        ),
    )
    assert results == [directory / f"step-{step:08d}"] * world
    return directory / f"step-{step:08d}"


def refused_load(checkpoint: Path) -> str:
    """Return the one line with which both ranks refuse to load, their tensors untouched."""
    untouched = [blank_shards(shard_state(full_state(), "columns", rank, 2)) for rank in range(2)]
    targets = [blank_shards(shards) for shards in untouched]
    results = run_on_ranks(
        2, lambda comm: load_checkpoint(checkpoint, shards=targets[comm.rank], comm=comm)
    )
    assert all(isinstance(result, BadInput) for result in results), results
    assert [shard_bytes(shards) for shards in targets] == [
        shard_bytes(shards) for shards in untouched
    ]
    (text,) = {str(result) for result in results}
    assert "\n" not in text
    return text


@pytest.mark.core
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 4), (4, 2), (4, 1), (3, 4)])
def test_any_sharding_loads_into_any_other_bit_for_bit(
    tmp_path: Path, source: str, target: str, before: int, after: int
) -> None:
    checkpoint = save_sharded(tmp_path, layout=source, world=before)
    truth = full_state(5)
    targets = [blank_shards(shard_state(truth, target, rank, after)) for rank in range(after)]
    extras = run_on_ranks(
        after, lambda comm: load_checkpoint(checkpoint, shards=targets[comm.rank], comm=comm)
    )
    assert extras == [EXTRA] * after
    for rank in range(after):
        assert shard_bytes(targets[rank]) == shard_bytes(shard_state(truth, target, rank, after))


def test_what_every_rank_holds_is_written_once_and_shared_out(tmp_path: Path) -> None:
    checkpoint = save_sharded(tmp_path, layout="replicated", world=4)
    index = read_index(checkpoint)
    payload = sum(tensor.nbytes for tensor in full_state(5).values())
    stored = [load_file(checkpoint / file.name) for file in index.files]
    assert sum(tensor.nbytes for file in stored for tensor in file.values()) == payload
    written = [sum(tensor.numel() for tensor in file.values()) for file in stored]
    widths = {tensor.itemsize for tensor in full_state(5).values()}
    assert len(written) == 4
    assert max(written) - min(written) <= len(widths)


def test_payload_is_plain_safetensors(tmp_path: Path) -> None:
    checkpoint = save_sharded(tmp_path, layout="rows", world=2)
    payloads = load_file(checkpoint / "rank-00001.safetensors")
    truth = full_state(5)["layers.0.moe.experts.gate_up.weight"][2:]
    assert torch.equal(payloads["layers.0.moe.experts.gate_up.weight@2,0,0,0"], truth)


@pytest.mark.parametrize("name", [f"rank-0000{rank}.safetensors" for rank in range(4)])
@pytest.mark.parametrize(
    "fault", ["truncated", "longer", "flipped", "zeroed", "deleted", "swapped", "linked"]
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, fault: str) -> None:
    checkpoint = save_sharded(tmp_path, world=4)
    path = checkpoint / name
    data = path.read_bytes()
    if fault == "deleted":
        path.unlink()
    elif fault == "swapped":
        other = next(entry for entry in checkpoint.glob("rank-*") if entry.name != name)
        shutil.copy(other, path)
    elif fault == "linked":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        flipped = bytearray(data)
        flipped[-9] ^= 4
        path.write_bytes(
            {
                "truncated": data[:-1],
                "longer": data + b"x",
                "flipped": bytes(flipped),
                "zeroed": bytes(len(data)),
            }[fault]
        )
    assert name in refused_load(checkpoint)


def test_a_flipped_bit_in_any_byte_of_the_index_is_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(
        tmp_path,
        step=1,
        shards=[LocalShard(name="w", global_shape=(2,), offsets=(0,), tensor=torch.ones(2))],
        extra={"seed": 7},
        keep=1,
        comm=single_process(),
    )
    path = checkpoint / "index.json"
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(BadInput, match=r"index\.json"):
            read_index(checkpoint)


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the body of an index and give it a checksum that holds."""
    body = json.loads((checkpoint / "index.json").read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (checkpoint / "index.json").write_text(
        json.dumps({"sha256": index_module._digest(text), "body": body})
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["files"][0].update(name="../../../etc/passwd"), "file name"),
        (lambda b: b["files"][0].update(name="/etc/passwd"), "file name"),
        (lambda b: b["files"][0].update(name="rank-00000.safetensors/../x"), "file name"),
        (lambda b: b["files"].append(b["files"][0]), "names a file twice"),
        (lambda b: b["tensors"].append(b["tensors"][0]), "names a tensor twice"),
        (lambda b: b["tensors"][0].update(name="a/../../b"), "tensor name"),
        (lambda b: b["tensors"][0].update(dtype="PICKLE"), "dtype"),
        (lambda b: b["tensors"][0].update(shape=[10**12]), "cover"),
        (lambda b: b["tensors"][0].update(shape=[-1]), "whole numbers"),
        (lambda b: b["tensors"][0].update(shape=[True]), "whole numbers"),
        (lambda b: b["tensors"][0]["boxes"][0].__setitem__(0, 7), "file 7 of 2"),
        (lambda b: b["tensors"][0]["boxes"].append(b["tensors"][0]["boxes"][0]), "overlap"),
        (lambda b: b["tensors"][0]["boxes"].pop(), "cover"),
        (lambda b: b["tensors"][0]["boxes"].append([0, [99], [1]]), "not within"),
        (lambda b: b.update(more=1), "keys"),
        (lambda b: b.pop("extra"), "keys"),
        (lambda b: b.update(step="5"), "step is not int"),
        (lambda b: b.update(step=-5), "negative"),
        (lambda b: b.update(version=2), "version"),
        (lambda b: b.update(format="other"), "format"),
    ],
)
def test_a_forged_index_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    checkpoint = save_sharded(tmp_path)
    forge(checkpoint, change)
    text = refused_load(checkpoint)
    assert message in text
    assert "index.json" in text


def test_an_index_that_disagrees_with_its_file_is_refused(tmp_path: Path) -> None:
    checkpoint = save_sharded(tmp_path)
    forge(
        checkpoint,
        lambda b: next(t for t in b["tensors"] if t["name"] == "final_norm.weight").update(
            dtype="I32"
        ),
    )
    assert "final_norm.weight (dtype)" in refused_load(checkpoint)
    targets = LocalShard(
        name="final_norm.weight",
        global_shape=(7,),
        offsets=(0,),
        tensor=torch.zeros(7, dtype=torch.int32),
    )
    with pytest.raises(BadInput, match=r"rank-0000\d\.safetensors.* is F32"):
        load_checkpoint(checkpoint, shards=[targets], comm=single_process())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 200_000,
        "\0binary",
        '{"a": 1, "a": 2}',
        '{"sha256": NaN, "body": {}}',
        "9" * 5000,
        '"text"',
    ],
)
def test_text_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    checkpoint = save_sharded(tmp_path)
    (checkpoint / "index.json").write_text(text)
    assert "index.json" in refused_load(checkpoint)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in (".metadata", "__0_0.distcp", "model.pt", "pytorch_model.bin"):
        (foreign / name).write_bytes(pickle.dumps(Canary(canary)))
    torch.save({"w": Canary(canary)}, foreign / "zipped.pt")
    assert "is not a checkpoint" in refused_load(foreign)
    assert "is a file" in refused_load(foreign / "model.pt")
    (foreign / "index.json").write_bytes(pickle.dumps(Canary(canary)))
    assert "index.json" in refused_load(foreign)
    checkpoint = save_sharded(tmp_path)
    payload = pickle.dumps(Canary(canary))
    (checkpoint / "rank-00000.safetensors").write_bytes(payload)
    digest = hashlib.sha256(payload).hexdigest()
    forge(checkpoint, lambda b: b["files"][0].update(bytes=len(payload), sha256=digest))
    targets = [blank_shards(shard_state(full_state(), "rows", rank, 2)) for rank in range(2)]
    results = run_on_ranks(
        2, lambda comm: load_checkpoint(checkpoint, shards=targets[comm.rank], comm=comm)
    )
    assert all("rank-00000.safetensors" in str(result) for result in results)
    assert not canary.exists()
    os.mkdir(canary)  # the canary works:
    with pytest.raises(FileExistsError):
        pickle.loads(pickle.dumps(Canary(canary)))


def test_the_newest_committed_checkpoint_is_found_among_strays(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert find_latest(directory) is None
    save_sharded(directory, step=20)
    good = save_sharded(directory, step=30)
    (directory / ".saving-step-00000040").mkdir()
    (directory / "step-00000050").mkdir()
    (directory / "step-00000050" / "rank-00000.safetensors").write_bytes(b"half")
    (directory / "step-60").mkdir()
    (directory / "step-00000070").write_text("a file")
    (directory / "notes.txt").write_text("stray")
    assert find_latest(directory) == good
    assert find_latest(directory / "notes.txt") is None
    later = save_sharded(directory, step=50)  # replaces the half-written one
    assert find_latest(directory) == later
    assert not (directory / ".saving-step-00000040").exists()


def test_what_is_newer_than_the_newest_checkpoint_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert find_resume_point(directory) == (None, ())
    good = save_sharded(directory, step=30)
    assert find_resume_point(directory) == (good, ())
    (directory / ".saving-step-00000040").mkdir()
    half = directory / "step-00000050"
    half.mkdir()
    (directory / "notes.txt").write_text("stray")
    assert find_resume_point(directory) == (good, (half,))


@pytest.mark.parametrize(
    "name", ["model.pt", "step-00000003/.metadata", "step-00000003/model.pt", "step-00000003"]
)
def test_what_is_offered_in_place_of_a_checkpoint_is_refused_unopened(
    tmp_path: Path, name: str
) -> None:
    directory = tmp_path / "checkpoints"
    canary = tmp_path / "canary"
    path = directory / name
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(BadInput, match="a checkpoint"):
        find_resume_point(directory)
    assert not canary.exists()


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save_sharded(directory, step=3).rename(directory / "step-00000009")
    with pytest.raises(BadInput, match=r"holds step 3; nearest legal value: .*step-00000003"):
        find_resume_point(directory)


def test_a_checkpoint_that_lost_its_index_is_refused(tmp_path: Path) -> None:
    checkpoint = save_sharded(tmp_path / "checkpoints", step=3)
    (checkpoint / "index.json").unlink()
    with pytest.raises(BadInput, match=r"it has no index\.json but rank-00000"):
        find_resume_point(checkpoint.parent)


def test_old_checkpoints_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_sharded(tmp_path, step=step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    # An earlier step than those in the folder is kept, being the one just written.
    save_sharded(tmp_path, step=1, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def test_an_old_checkpoint_that_cannot_be_removed_stays_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_sharded(tmp_path, step=1)
    rename = Path.rename

    def rename_no_old(path: Path, target: Path) -> Path:
        if path == old:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_no_old)
        new = save_sharded(tmp_path, step=2, keep=1)
    assert list_checkpoints(tmp_path) == (old, new)
    newest = save_sharded(tmp_path, step=3, keep=1)
    assert list_checkpoints(tmp_path) == (newest,)


def failed_save(directory: Path) -> str:
    """Return the line with which both ranks give up saving step 6."""
    state = full_state(6)
    results = run_on_ranks(
        2,
        lambda comm: save_checkpoint(
            directory,
            step=6,
            shards=shard_state(state, "rows", comm.rank, 2),
            extra=EXTRA,
            keep=1,
            comm=comm,
        ),
    )
    assert all(isinstance(result, BadInput) for result in results), results
    (text,) = {str(result) for result in results}
    return text


def test_a_disk_that_is_full_beforehand_or_midway_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_sharded(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100)
        )
        text = failed_save(tmp_path)
    assert str(tmp_path) in text
    assert "100 bytes are free" in text
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))  # writes past it fail, as on a full disk
    try:
        text = failed_save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "limit on the size of files" in text
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    targets = blank_shards(shard_state(full_state(5), "flat", 0, 1))
    load_checkpoint(old, shards=targets, comm=single_process())
    assert shard_bytes(targets) == shard_bytes(shard_state(full_state(5), "flat", 0, 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
)
def test_a_state_that_is_not_finite_is_not_committed(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    """Rank 1 alone has a bad number, the last of its tensor; both ranks say the same."""
    spoiled = torch.full((3, 4), 2.0)
    spoiled[-1, -1] = value

    def save(comm: Coordinator, step: int, tensor: torch.Tensor) -> Path:
        shard = LocalShard(
            name="optim/exp_avg_sq/w",
            global_shape=(6, 4),
            offsets=(3 * comm.rank, 0),
            tensor=(tensor if comm.rank else torch.ones(3, 4)).to(dtype),
        )
        return save_checkpoint(tmp_path, step=step, shards=[shard], extra=EXTRA, keep=1, comm=comm)

    old, _ = run_on_ranks(2, lambda comm: save(comm, 5, torch.ones(3, 4)))
    results = run_on_ranks(2, lambda comm: save(comm, 6, spoiled))
    assert all(isinstance(result, FloatingPointError) for result in results), results
    assert {str(result) for result in results} == {
        "optim/exp_avg_sq/w of rank 1 is not finite: the checkpoint of step 6 is not committed, "
        "step-00000005 stays the newest"
    }
    assert [path.name for path in tmp_path.iterdir()] == [Path(str(old)).name]


def damage(checkpoint: Path, name: str) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("name", ["index.json", "rank-00001.safetensors"])
def test_damaged_checkpoints_are_put_aside_up_to_the_newest_whole_one(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [save_sharded(tmp_path, step=step) for step in (4, 5, 6)]
    for path in paths[1:]:
        damage(path, name)
    with pytest.raises(BadInput, match=r"--fall-back, which goes on from step-00000005"):
        offer_older(paths[2], partial(load_checkpoint, shards=[], comm=single_process()))
    assert run_on_ranks(2, lambda comm: put_damaged_aside(tmp_path, comm)) == [None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".damaged-step-00000005",
        ".damaged-step-00000006",
        "step-00000004",
    ]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("going on from step-00000004") for line in lines)
    damage(paths[0], name)
    results = run_on_ranks(2, lambda comm: put_damaged_aside(tmp_path, comm))
    assert all(f"{paths[0].name}/{name}: " in str(result) for result in results)
    assert paths[0].exists()  # nothing is left to go on from, so nothing is touched


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in failed_save(tmp_path / "file")
    assert "Not a directory" in failed_save(tmp_path / "file" / "below")
    assert "/proc" in failed_save(Path("/proc/moewright/checkpoints"))


def test_saving_a_step_again_keeps_it_and_another_job_is_refused(tmp_path: Path) -> None:
    def identify(file: Path) -> tuple[int, int, int]:  # not by when it was read last
        stat = file.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns

    before = identify(save_sharded(tmp_path) / "index.json")
    assert identify(save_sharded(tmp_path) / "index.json") == before
    with pytest.raises(BadInput, match="same step of another job"):
        save_checkpoint(
            tmp_path, step=5, shards=[], extra={"seed": 2}, keep=1, comm=single_process()
        )


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            LocalShard(name="absent", global_shape=(3,), offsets=(0,), tensor=torch.zeros(3)),
            "absent: is not in the checkpoint",
        ),
        (
            LocalShard(
                name="final_norm.weight", global_shape=(8,), offsets=(0,), tensor=torch.zeros(8)
            ),
            r"final_norm.weight \(shape\)=\[8\].*nearest legal value: \[7\]",
        ),
        (
            LocalShard(
                name="final_norm.weight",
                global_shape=(7,),
                offsets=(0,),
                tensor=torch.zeros(7).bfloat16(),
            ),
            r"final_norm.weight \(dtype\)=BF16.*F32",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, shard: LocalShard, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_checkpoint(save_sharded(tmp_path), shards=[shard], comm=single_process())


def box(
    name: str, offset: int, size: int, *, extent: int = 4, dtype: torch.dtype = torch.float32
) -> LocalShard:
    return LocalShard(
        name=name, global_shape=(extent,), offsets=(offset,), tensor=torch.zeros(size, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([[box("w", 0, 2)], [box("w", 3, 1)]], "w: boxes cover 3 of 4"),
        ([[box("w", 0, 2)], []], "w: boxes cover 2 of 4"),
        ([[box("w", 0, 3)], [box("w", 2, 2)]], "w: boxes at .* overlap"),
        ([[box("w", 0, 4)], [box("w", 0, 2)]], "w: boxes at .* overlap"),
        ([[box("w", 0, 4), box("w", 0, 4)], []], "w: rank 0 holds the box .* twice"),
        ([[box("w", 0, 4)], [box("w", 0, 4, dtype=torch.int32)]], "w: rank 1 holds"),
        ([[box("w", 0, 4)], [box("w", 4, 2, extent=6)]], "w: rank 1 holds"),
    ],
)
def test_pieces_that_do_not_tile_a_tensor_are_refused_on_every_rank(
    tmp_path: Path, by_rank: list[list[LocalShard]], message: str
) -> None:
    results = run_on_ranks(
        2,
        lambda comm: save_checkpoint(
            tmp_path / "c", step=1, shards=by_rank[comm.rank], extra={}, keep=1, comm=comm
        ),
    )
    for result in results:
        with pytest.raises(ValueError, match=message):
            raise result
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "extra", [{"loss": float("nan")}, {"shape": (1, 2)}, {"tensor": torch.ones(1)}]
)
def test_extra_must_be_plain_json(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        save_checkpoint(tmp_path, step=1, shards=[], extra=extra, keep=1, comm=single_process())
    assert not list(tmp_path.iterdir())


def test_a_piece_must_be_a_box_of_its_tensor() -> None:
    with pytest.raises(ValueError, match="not within"):
        box("w", 3, 2)
    with pytest.raises(ValueError, match="is not a name"):
        box("../w", 0, 4)
    with pytest.raises(ValueError, match="complex64"):
        box("w", 0, 4, dtype=torch.complex64)


def test_a_mismatch_names_each_differing_field() -> None:
    saved_extra = {"model": {"hidden_size": 64, "layers": 2}, "seed": 1, "layout": "tp2"}
    refuse_mismatch(
        saved_extra, {"model": {"layers": 2, "hidden_size": 64}, "seed": 1, "layout": "tp2"}
    )
    with pytest.raises(BadInput) as refused:
        refuse_mismatch(
            saved_extra, {"model": {"hidden_size": 128, "layers": 2}, "seed": 1, "data": "ab"}
        )
    text = str(refused.value)
    for part in (
        "model.hidden_size is 64 in the checkpoint and 128 in the job",
        "layout is tp2",
        "data is absent",
    ):
        assert part in text
    assert "layers" not in text
    assert "seed" not in text


def test_a_checkpoint_older_than_a_field_was_made_with_its_default(tmp_path: Path) -> None:
    """Fields of the model, of a part of it and of training are absent, and so are documents."""
    job = build_plan(build_workload(DataSpec()), "", world_size=1)
    extra = json.loads(json.dumps(build_identity(job, "ab")))
    for lacking in (
        "model.mlp_bias",
        "model.moe.expert_bias",
        "train.optimizer.moment_dtype",
        "train.loss.z_coeff",
    ):
        *folders, name = lacking.split(".")
        reduce(lambda data, part: data[part], folders, extra).pop(name)
    shards = shard_state(full_state(5), "rows", 0, 1)
    save_checkpoint(
        tmp_path / "checkpoints", step=5, shards=shards, extra=extra, keep=1, comm=single_process()
    )
    as_then = replace(
        job, workload=replace(job.workload, loss=replace(job.workload.loss, z_coeff=0.0))
    )
    assert read_steps_done(as_then, tmp_path, build_identity(as_then, "ab")) == 5
    work = as_then.workload
    for other, message in (
        (job, "train.loss.z_coeff is 0.0 in the checkpoint and 0.001 in the job"),
        (
            replace(as_then, model=replace(job.model, mlp_bias=True)),
            "model.mlp_bias is False in the checkpoint",
        ),
        (
            replace(
                as_then, workload=replace(work, data=DataSpec(documents=DocumentMasking.BOUNDED))
            ),
            "data.documents is joined in the checkpoint and bounded in the job",
        ),
    ):
        with pytest.raises(BadInput) as refused:
            read_steps_done(other, tmp_path, build_identity(other, "ab"))
        assert str(refused.value).startswith(f"resume: {message}")
        assert ";" not in str(refused.value).split(" in the job")[0]


def test_a_run_directory_takes_one_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with (
        lock_folder(run_dir),
        pytest.raises(BadInput, match=f"in use by another job .process {os.getpid()}"),
        lock_folder(run_dir),
    ):
        pass
    with lock_folder(run_dir):  # the file that was left behind does not matter
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="File exists"), lock_folder(tmp_path / "file"):
        pass
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / "lock")
    with pytest.raises(BadInput, match="not a regular file"), lock_folder(tmp_path / "other"):
        pass


def test_ranks_that_outlive_a_killed_launcher_are_waited_for(tmp_path: Path) -> None:
    ready, tell_ready = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        with lock_folder(tmp_path):
            if os.fork() == 0:  # a rank, which has the lock too
                time.sleep(1.5)
                os._exit(0)
            os.write(tell_ready, b"1")
            time.sleep(60)
    os.read(ready, 1)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    with lock_folder(tmp_path):
        pass
