"""Stand-ins for Slurm's commands and torchrun: a queue of this machine, in a folder of its own.

`install` writes sbatch, squeue, sacct, scancel, srun, scontrol and torchrun; jobs run at once. In
the folder `limit` says how many jobs the queue takes, and `fate` what becomes of the next job that
is submitted: the state in which it is lost. Tasks of a job array run at once, however many may;
where there is a file `no_arrays`, arrays are refused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_FULL = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job "
    "violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
)
_NO_ARRAYS = "sbatch: error: Batch job submission failed: Invalid job array specification\n"
_WRAPPER = """
bash "$1" > "$2" 2>&1; code=$?
[ "$(cat "$3")" = RUNNING ] && { [ $code = 0 ] && echo COMPLETED || echo FAILED; } > "$3.part"
[ -f "$3.part" ] && mv "$3.part" "$3"
"""
_SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
# torchrun with one process, which is the last rank of all.
_TORCHRUN = """#!/bin/bash
nodes=1
while [ "${1#-}" != "$1" ]; do
  case $1 in
    --standalone) shift;;
    --nnodes) nodes=$2; shift 2;;
    --nproc-per-node) each=$2; shift 2;;
    *) shift 2;;
  esac
done
export WORLD_SIZE=$((nodes * each)); export RANK=$((WORLD_SIZE - 1))
exec PYTHON "$@"
"""


def install(folder: Path) -> Path:
    """Write the commands and return their folder; PATH is the caller's."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    (folder / "jobs").mkdir()
    for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol"):
        _write(
            commands / name,
            f'#!/bin/sh\nexec {sys.executable} {__file__} {name} {folder} "$@"\n',
        )
    _write(commands / "srun", _SRUN)
    _write(commands / "torchrun", _TORCHRUN.replace("PYTHON", sys.executable))
    return commands


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def states(folder: Path) -> dict[str, str]:
    """Return the state of every job."""
    jobs = sorted((folder / "jobs").iterdir(), key=_order)
    return {path.name: (path / "state").read_text().strip() for path in jobs if _is_known(path)}


def _order(job: Path) -> list[int]:
    return [int(number) for number in job.name.split("_")]


def _is_known(job: Path) -> bool:
    return (job / "state").exists()


def _submit(folder: Path, script: Path) -> int:
    lines = script.read_text().splitlines()
    options = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in lines
        if line.startswith("#SBATCH --") and "=" in line
    )
    tasks = [""]
    if "array" in options:
        last = options["array"].partition("%")[0].removeprefix("0-")
        tasks = [str(task) for task in range(int(last) + 1)]
        if (folder / "no_arrays").exists():
            sys.stderr.write(_NO_ARRAYS)
            return 1
    active = [state for state in states(folder).values() if state == "RUNNING"]
    limit = folder / "limit"
    if limit.exists() and len(active) + len(tasks) > int(limit.read_text()):
        sys.stderr.write(_FULL)
        return 1
    number = str(100 + len(list((folder / "jobs").iterdir())))
    for task in tasks:
        _start(folder, script, options["output"], number, task)
    print(number)
    return 0


def _start(folder: Path, script: Path, output: str, number: str, task: str) -> None:
    """Start a job, or the task of a job array."""
    job = folder / "jobs" / (f"{number}_{task}" if task else number)
    job.mkdir()
    fate = folder / "fate"
    if fate.exists():
        (job / "state").write_text(fate.read_text())
        fate.unlink()
        return
    (job / "state").write_text("RUNNING\n")
    environment = os.environ | {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_ARRAY_TASK_ID": task,
    }
    output = output.replace("%a", task)
    process = subprocess.Popen(
        ["bash", "-c", _WRAPPER, "job", str(script), output, str(job / "state")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    (job / "pid").write_text(str(process.pid))


def cancel(folder: Path, number: str, state: str = "CANCELLED by 0") -> None:
    """End a job as scancel does, or leave it in another state that it was lost in."""
    job = folder / "jobs" / number
    if (job / "state").read_text().strip() != "RUNNING":
        return
    (job / "state").write_text(f"{state}\n")
    os.killpg(int((job / "pid").read_text()), signal.SIGKILL)


def main() -> int:
    name, folder, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if name == "sbatch":
        return _submit(folder, Path(words[-1]))
    if name == "scontrol":
        print("node1\nnode2")
        return 0
    if name == "scancel":
        for number in words:
            cancel(folder, number)
        return 0
    number = words[-1].rpartition("=")[2]
    known = states(folder)
    # squeue forgets jobs that have ended; sacct knows them.
    if name == "squeue" and known.get(number) != "RUNNING":
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    print(known.get(number, ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
