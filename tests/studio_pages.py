"""Addresses of the studio's pages, and what the command line says of the same."""

import json
import subprocess
import sys

QWEN = "model=Qwen/Qwen3-235B-A22B&on=256xH800&seq_len=4096&global_batch=2048&precision=bf16"


def estimate_json(folder, query, layout):
    """Return what `moewright estimate --json` says of a query."""
    path = folder / "plan.json"
    command = [sys.executable, "-m", "moewright", "estimate", query["model"], "--on", query["on"]]
    command += ["--seq-len", query["seq_len"], "--global-batch", query["global_batch"]]
    command += ["--layout", layout, "--json", str(path)]
    subprocess.run(command, capture_output=True, check=False)
    return json.loads(path.read_text())
