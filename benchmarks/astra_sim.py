"""ASTRA-sim runs the traces of plans; its steps beside the planner's.

    python -m benchmarks.astra_sim DIR

DIR is a checkout of ASTRA-sim with its submodules, whose analytical network is built by its own
script where that has not been done (cmake, protoc and libprotobuf are needed). Nothing shares a
link here: the network without congestion is the one to agree with.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import moewright as mw

# Model, layout, hardware, sequences a step: pipelines, interleaved and zero-bubble ones, tensor
# and context parallelism, and one node.
CASES = (
    ("Qwen3-30B-A3B", "ep8,recompute=full", "8xH100", 32),
    ("Qwen3-30B-A3B", "pp2,ep8,mbs1,recompute=full", "32xH100", 64),
    ("Qwen3-30B-A3B", "pp4,ep8,mbs1,recompute=full", "32xH100", 64),
    ("Qwen3-30B-A3B", "pp4,vpp2,ep8,mbs1,recompute=full", "32xH100", 32),
    ("allenai/OLMoE-1B-7B-0924", "ep8,mbs2", "16xH100", 64),
    ("allenai/OLMoE-1B-7B-0924", "pp2,ep4,mbs2,schedule=zb-h1", "16xH100", 64),
    ("mistralai/Mixtral-8x7B-v0.1", "tp4,pp2,ep4,mbs1", "32xH100", 64),
    ("mistralai/Mixtral-8x7B-v0.1", "cp2,pp2,ep8,mbs1,recompute=full", "32xH100", 32),
)
TOLERANCE = 0.05
_BINARY = "bin/AstraSim_Analytical_Congestion_Unaware"
_FINISHED = re.compile(r"sys\[\d+\] finished, (\d+) cycles")


def build(checkout: Path) -> Path:
    """Return the simulator's binary, built where it is not there."""
    folder = checkout / "build" / "astra_analytical"
    binary = folder / "build" / _BINARY
    if not binary.exists():
        subprocess.run([folder / "build.sh"], check=True)
    return binary


def run(binary: Path, folder: Path) -> float:
    """Return the seconds after which the last rank has finished its trace."""
    words = [
        str(binary),
        f"--workload-configuration={folder / 'step'}",
        f"--comm-group-configuration={folder / 'groups.json'}",
        f"--system-configuration={folder / 'system.json'}",
        f"--remote-memory-configuration={folder / 'memory.json'}",
        f"--network-configuration={folder / 'network.yml'}",
        f"--logging-folder={folder / 'log'}",
    ]
    result = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder)
    return max(map(int, _FINISHED.findall(result.stdout))) / 1e9


def main() -> int:
    """Print a row for each case; 1 where one is further off than the tolerance."""
    binary = build(Path(sys.argv[1]).resolve())
    worst = 0.0
    print("| model | layout | hardware | planner, s | ASTRA-sim, s | off by |")
    print("|---|---|---|---:|---:|---:|")
    for model, layout, hardware, batch in CASES:
        plan = mw.estimate(model, layout, on=hardware, global_batch=batch)
        with tempfile.TemporaryDirectory() as name:
            mw.export_traces(plan, name)
            seconds = run(binary, Path(name))
        step_s = plan.estimate.step_s
        worst = max(worst, abs(seconds / step_s - 1))
        print(
            f"| {model} | {layout} | {hardware} | {step_s:.4g} | {seconds:.4g} "
            f"| {seconds / step_s - 1:+.2%} |",
            flush=True,
        )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
