"""Feed mutated inputs to every reader: each is answered, or refused in one line, soon, in 1 GiB.

    python tests/faults/fuzz.py                  all of them (a part of `make faults`)
    python tests/faults/fuzz.py --share 0.1 KEY  a tenth of the inputs of some readers

What fails is printed with the number that makes the same input again; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import torch  # noqa: E402

import moewright as mw  # noqa: E402
from moewright.codec import read_bytes  # noqa: E402
from moewright.diagnosis.traces.kineto import read_traces  # noqa: E402
from moewright.engine.checkpoint import (  # noqa: E402
    LocalShard,
    read_index,
    save_checkpoint,
    single_process,
)
from moewright.exporters.megatron.script import render_megatron_script  # noqa: E402
from moewright.intake import hf  # noqa: E402
from moewright.intake.megatron.read import interpret_launch, read_launch  # noqa: E402
from moewright.spec.errors import BadInput  # noqa: E402

LIMIT_S = 10.0
LIMIT_BYTES = 1 << 30

# What is put in the place of a value of JSON.
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    10**9,
    10**400,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\x1b[31m",
    "\ud800",
    "../../etc/passwd",
    [],
    [[]],
    {},
    {"a": {"b": []}},
    [0] * 1000,
)
_WORDS = (
    *("tp", "cp", "pp", "vpp", "ep", "etp", "mbs", "dp", "zero", "sp", "recompute", "offload"),
    *("overlap", "graphs", "layout", "schedule", "capacity", "dispatcher", "cp_comm", "vpp_group"),
    *("=", ",", "+", "'", "|", "*", "0", "-1", "2", "8", "7", "10" * 30, "1e9", "full", "none"),
    *("select", "moe_act", "zbv", "dualpipev", "Et*12|t*12L", "a2a", "\x00", "é", " ", "--"),
)


def mutate_json(data: Any, rng: random.Random) -> Any:
    """Return plain data with some values replaced, removed, renamed or repeated."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 4)):
        inner = data
        while isinstance(inner, dict | list) and inner:
            key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.7:
                inner = inner[key]
                continue
            action = rng.randrange(5)
            if action == 0:
                del inner[key]
            elif action == 1 and isinstance(inner, dict):
                inner[key + rng.choice("_x\x00")] = inner.pop(key)
            elif action == 2 and isinstance(inner[key], int | float):
                inner[key] = inner[key] * rng.choice((-1, 0, 2, 1000, 10**12, 0.3))
            else:
                inner[key] = copy.deepcopy(rng.choice(_VALUES))
            break
    return data


def mutate_text(text: str, rng: random.Random) -> str:
    """Return text of which pieces were cut, doubled, swapped, or replaced by other characters."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.randint(0, 40))
        piece = rng.choice(
            ("", text[start:stop] * 2, rng.choice("\x00\\\"'`$(){}[]<>|&;\n"), "$((1/0))", "${x:=")
        )
        text = text[:start] + piece + text[stop:]
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A reader, how many inputs it gets, and what makes one of them and reads it."""

    key: str
    count: int
    read: Callable[[random.Random, Path], object]


def read_layout(rng: random.Random, folder: Path) -> object:
    words = rng.choices(_WORDS, k=rng.randint(1, 8))
    parts = [
        f"{rng.choice(_WORDS[:20])}{rng.choice(_WORDS[20:])}" for _ in range(rng.randint(0, 4))
    ]
    text = rng.choice((",".join(parts), "".join(words), f"tp2,ep8,{''.join(words)}"))
    return mw.estimate("Qwen3-30B-A3B", text, on="8xH100").estimate.step_s


def read_config(rng: random.Random, folder: Path) -> object:
    path = folder / "config.json"
    data = mutate_json(rng.choice(_CONFIGS), rng)
    text = json.dumps(data)
    if rng.random() < 0.1:
        text = mutate_text(text, rng)
    path.write_text(text, "utf-8", errors="surrogatepass")
    return hf.read_config(path)


def read_checkpoint_index(rng: random.Random, folder: Path) -> object:
    checkpoint = folder / "step-00000001"
    if not checkpoint.exists():
        shards = [
            LocalShard(name=name, global_shape=(4, 3), offsets=(0, 0), tensor=torch.ones(4, 3))
            for name in ("a.weight", "optim/exp_avg/a.weight")
        ]
        save_checkpoint(
            folder, step=1, shards=shards, extra={"a": {"b": 1}}, keep=1, comm=single_process()
        )
        (folder / "good.json").write_bytes((checkpoint / "index.json").read_bytes())
    text = (folder / "good.json").read_text()
    if rng.random() < 0.3:
        text = mutate_text(text, rng)
    else:  # with a checksum that holds, so that what is inside is looked at
        body = mutate_json(json.loads(text)["body"], rng)
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode(errors="replace")).hexdigest()
        text = f'{{"sha256":"{digest}","body":{canonical}}}\n'
    (checkpoint / "index.json").write_text(text, "utf-8", errors="surrogatepass")
    return read_index(checkpoint)


def read_trace(rng: random.Random, folder: Path) -> object:
    path = folder / "rank0.pt.trace.json"
    text = json.dumps(mutate_json(_TRACE, rng))
    if rng.random() < 0.3:
        text = mutate_text(text, rng)
    path.write_text(text, "utf-8", errors="surrogatepass")
    return read_traces(path)


def read_script(rng: random.Random, folder: Path) -> object:
    path = folder / "run.sh"
    path.write_text(mutate_text(rng.choice(_SCRIPTS), rng), "utf-8", errors="surrogatepass")
    command = read_launch(path, {"GBS": "2048", "TP": "2"})
    return interpret_launch(command, world_size=command.world_size or 8, folder=folder)


def _make_trace() -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for number in range(40):
        name = ("gemm", "ncclDevKernel_AllReduce_Sum_bf16", "Memcpy DtoD")[number % 3]
        events.append(
            {
                "ph": "X",
                "cat": "kernel" if number % 3 < 2 else "gpu_memcpy",
                "name": name,
                "pid": 0,
                "tid": 7 + number % 2,
                "ts": 10.0 * number,
                "dur": 8.0,
                "args": {"stream": 7 + number % 2, "device": 0, "correlation": number},
            }
        )
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "H100"}],
        "traceEvents": events,
    }


_MODELS = json.loads(resources.files("moewright.intake").joinpath("data/models.json").read_text())
_CONFIGS = [entry["config"] for entry in _MODELS.values() if "config" in entry]
_TRACE = _make_trace()
_SCRIPTS = [
    render_megatron_script(
        mw.estimate("Qwen3-30B-A3B", "tp2,pp2,vpp2,ep4,mbs1,recompute=full", on="8xH100")
    ),
    "TP=${TP:-2}\nif [ $TP -gt 1 ]; then SP=--sequence-parallel; fi\n"
    'for i in 1 2; do A="$A x"; done\n'
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 $SP "
    "--num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --global-batch-size $GBS "
    "--tensor-model-parallel-size $TP --vocab-size 32000 --max-position-embeddings 1024\n",
]
READERS = (
    Reader(key="layouts", count=2000, read=read_layout),
    Reader(key="configs", count=1000, read=read_config),
    Reader(key="indexes", count=500, read=read_checkpoint_index),
    Reader(key="traces", count=500, read=read_trace),
    Reader(key="scripts", count=500, read=read_script),
)


class TooSlow(BaseException):
    """An input that takes longer than the limit."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def try_input(reader: Reader, number: int, folder: Path) -> str:
    """Read an input, and return what was wrong with that; "" where it was answered or refused."""
    rng = random.Random(f"{reader.key} {number}")
    handler = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        reader.read(rng, folder)
    except BadInput as refusal:
        text = str(refusal)
        if "\n" in text or not text.isprintable():
            return f"a refusal that is not one line of print: {text!r}"
    except TooSlow:
        return f"took longer than {LIMIT_S:g} s"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
    return ""


def limit_memory() -> None:
    """Let this process grow by no more than the limit."""
    status = read_bytes(Path("/proc/self/statm")).split()
    used = int(status[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT_BYTES, resource.RLIM_INFINITY))


def main() -> int:
    """Feed the readers; return 1 where an input was neither answered nor refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", help="keys of readers; all when none is there")
    parser.add_argument("--share", type=float, default=1.0)
    arguments = parser.parse_args()
    failures = 0
    for reader in READERS:
        if arguments.readers and reader.key not in arguments.readers:
            continue
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            count = max(1, round(arguments.share * reader.count))
            longest_s = 0.0
            for number in range(count):
                start_s = time.monotonic()
                fault = try_input(reader, number, Path(folder))
                longest_s = max(longest_s, time.monotonic() - start_s)
                if fault:
                    failures += 1
                    print(f"{reader.key} {number}: {fault}", flush=True)
            spent_s = time.monotonic() - began_s
            print(f"{reader.key}: {count} inputs, the longest {longest_s:.2f} s, {spent_s:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    limit_memory()
    sys.exit(main())
