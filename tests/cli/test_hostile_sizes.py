"""Files that are small and ask for much: one line, exit code 2, seconds of a core, within 1 GiB."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.cli.main import main
from moewright.codec import to_data
from moewright.engine.checkpoint import LocalShard, save_checkpoint, single_process
from moewright.engine.checkpoint.index import INDEX_FILE
from moewright.spec.workload import DataSpec

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
NSYS_TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "NVTX_EVENTS", "TARGET_INFO_GPU")
CPU_S = 10.0
MEMORY_KIB = 1 << 20

Arguments = list[str]


def write_config(folder: Path, extra: str) -> Arguments:
    text = json.dumps(CONFIG)[:-1] + f", {extra}: 1}}"
    (folder / "config.json").write_text(text)
    return ["estimate", str(folder), "--on", "8xH100"]


def write_surrogate(folder: Path) -> Arguments:
    return write_config(folder, '"\\ud800"')


def write_escaped_esc(folder: Path) -> Arguments:
    return write_config(folder, '"rope\\u001b[2J"')


def write_raw_esc(folder: Path) -> Arguments:
    return write_config(folder, '"rope\x1b[2J"')


def write_nested_esc(folder: Path) -> Arguments:
    return write_config(folder, '"rope_parameters": {"a\\u001b[2J": 1}, "any"')


def write_raw_esc_of_toml(folder: Path) -> Arguments:
    (folder / "job.toml").write_text('[model]\nname = "a\x1b[2Jb"\n')
    return ["train", str(folder / "job.toml")]


def write_long_key(folder: Path) -> Arguments:
    (folder / "job.toml").write_text(".".join(["a"] * 200_000) + " = 1\n")
    return ["train", str(folder / "job.toml")]


def write_million_names(folder: Path) -> Arguments:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = {f"model.layers.{number}.w": f"{number % 7}.safetensors" for number in range(10**6)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return ["convert", "import", str(folder), "--out", str(folder / "out")]


def write_endless_view(folder: Path) -> Arguments:
    columns = "start, end, deviceId, streamId, shortName, id, value, text, globalTid, correlationId"
    counter = "with recursive c(x) as (select 1 union all select x + 1 from c)"
    with sqlite3.connect(folder / "trace.sqlite") as connection:
        for table in NSYS_TABLES:
            values = ", ".join(f"x as {name}" for name in columns.split(", "))
            connection.execute(f"create view {table} as {counter} select {values} from c")
    return ["diagnose", str(folder / "trace.sqlite")]


def write_open_brackets(folder: Path) -> Arguments:
    (folder / "run.sh").write_text(f"torchrun pretrain_gpt.py --num-layers {'$(' * 5000}\n")
    return ["estimate", "--from-flags", str(folder / "run.sh")]


def write_nested_commands(folder: Path) -> Arguments:
    text = f"X={'$(' * 5000}echo 1{')' * 5000}\ntorchrun pretrain_gpt.py --num-layers $X\n"
    (folder / "run.sh").write_text(text)
    return ["estimate", "--from-flags", str(folder / "run.sh")]


TRAINING = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 512"
)


def write_script(folder: Path, before: str = "", after: str = "") -> Arguments:
    (folder / "run.sh").write_text(f"{before}\n{TRAINING} {after}\n")
    return ["estimate", "--from-flags", str(folder / "run.sh"), "--on", "8xH100"]


def write_long_word(folder: Path) -> Arguments:
    return write_script(folder, after="--foo " + "x" * 10_000_000)


def write_many_options(folder: Path) -> Arguments:
    return write_script(folder, after=" ".join(f"--foo{n} {n}" for n in range(100_000)))


def write_growing_text(folder: Path) -> Arguments:
    before = f"x={'a' * 100_000}; y=${{x//a/{'b' * 50}}}; z=${{y//b/{'c' * 1000}}}"
    return write_script(folder, before=before)


def write_many_settings(folder: Path) -> Arguments:
    (folder / "run.yaml").write_text("\n".join(f"k{n}: 1" for n in range(300_000)))
    return ["estimate", "--from-flags", str(folder / "run.yaml"), "--on", "8xH100"]


def write_checkpoint(folder: Path, change: Callable[[dict[str, Any]], None]) -> Arguments:
    """Write a checkpoint whose index is changed, with the checksum that it then has."""
    shard = LocalShard(name="w", global_shape=(4,), offsets=(0,), tensor=torch.zeros(4))
    checkpoint = save_checkpoint(
        folder / "checkpoints",
        step=1,
        shards=[shard],
        extra={"model": to_data(tiny_jobs.MODEL)},
        keep=2,
        comm=single_process(),
    )
    body = json.loads((checkpoint / INDEX_FILE).read_text())["body"]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    (checkpoint / INDEX_FILE).write_text(json.dumps({"sha256": digest, "body": body}))
    return ["convert", "export", str(checkpoint), "--out", str(folder / "out")]


def write_far_step(folder: Path) -> Arguments:
    return write_checkpoint(folder, lambda body: body.update(step=10**30))


def write_many_layers(folder: Path) -> Arguments:
    return write_checkpoint(folder, lambda body: body["extra"]["model"].update(layers=10**9))


def write_layers_beside(folder: Path) -> Arguments:
    return write_checkpoint(folder, lambda body: body["extra"].update(layers=10**9))


def write_plan_of_many_layers(folder: Path) -> Arguments:
    workload = tiny_jobs.build_workload(DataSpec(), steps=2)
    plan = to_data(tiny_jobs.build_plan(workload, "ep2,mbs1", world_size=2))
    plan["model"]["layers"] = 10**9
    (folder / "plan.json").write_text(json.dumps(plan))
    return ["estimate", str(folder / "plan.json")]


@pytest.mark.parametrize(
    ("write", "rule"),
    [
        (write_surrogate, "do not print"),
        pytest.param(write_escaped_esc, "do not print", marks=pytest.mark.thorough),
        (write_nested_esc, "do not print"),
        pytest.param(write_raw_esc, "Invalid control character", marks=pytest.mark.thorough),
        pytest.param(write_raw_esc_of_toml, "Illegal character", marks=pytest.mark.thorough),
        pytest.param(write_long_key, "to be read", marks=pytest.mark.thorough),
        pytest.param(write_million_names, "no such file", marks=pytest.mark.thorough),
        pytest.param(write_endless_view, "more work than", marks=pytest.mark.thorough),
        pytest.param(write_open_brackets, "is not closed", marks=pytest.mark.thorough),
        (write_nested_commands, "too deep"),
        (write_long_word, "s of processor time"),
        (write_many_options, "s of processor time"),
        (write_growing_text, "s of processor time"),
        (write_many_settings, "s of processor time"),
        (write_far_step, "step is not in"),
        pytest.param(
            write_many_layers, "layers=1000000000: must be in 1..1024", marks=pytest.mark.thorough
        ),
        pytest.param(write_layers_beside, "is not in the checkpoint", marks=pytest.mark.thorough),
        (write_plan_of_many_layers, "layers=1000000000: must be in 1..1024"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_small_files_that_ask_for_much_are_refused(
    write: Callable[[Path], Arguments], rule: str, tmp_path: Path
) -> None:
    arguments = write(tmp_path)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pid = os.fork()
    if pid == 0:
        with (
            (tmp_path / "said").open("w") as sys.stdout,
            (tmp_path / "told").open("w") as sys.stderr,
        ):
            code = main(arguments)
        os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    told = (tmp_path / "told").read_text()
    assert os.waitstatus_to_exitcode(status) == 2, told
    assert told.count("\n") == 1
    assert rule in told
    assert "\x1b" not in told
    assert not (tmp_path / "said").read_text()
    assert usage.ru_utime + usage.ru_stime < CPU_S
    assert usage.ru_maxrss - before_kib < MEMORY_KIB
