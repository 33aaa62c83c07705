"""The lines of a script that tell a scheduler how many nodes and devices its job has."""

from __future__ import annotations

import re

_DIRECTIVE = re.compile(r"^#SBATCH\s+(.+)$", re.MULTILINE)
_OPTION = re.compile(
    r"(?:^|\s)(?:(?P<long>--(?:nodes|gpus-per-node|ntasks-per-node|ntasks|gres))[= ]"
    r"|(?P<short>-[Nn])[= ]?)(?P<value>\S+)"
)
_COUNT = re.compile(r"(?:[A-Za-z]\w*(?::\w+)??:)?(\d+)(?:\(.*\))?$")
# What Slurm calls them in the environment of the job.
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "-n": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def read_directives(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets in a job by what a script asks of it.

    Ranges of nodes and placeholders set none.
    """
    variables: dict[str, str] = {}
    for line in _DIRECTIVE.findall(text):
        request = line.partition(" #")[0].strip()
        for option in _OPTION.finditer(request):
            name = option["long"] or option["short"]
            number = _COUNT.match(option["value"])
            if number is not None:
                variables |= dict.fromkeys(_VARIABLES[name], number[1])
    nodes = variables.get("SLURM_NNODES", "")
    tasks = variables.get("SLURM_NTASKS_PER_NODE", "")
    if nodes and tasks:
        variables.setdefault("SLURM_NTASKS", str(int(nodes) * int(tasks)))
    return variables
