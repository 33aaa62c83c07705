"""The torchrun commands that start a plan's processes, on one node or several."""

from __future__ import annotations

from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell

# How often torchrun's agent starts the ranks again, and a cluster the whole job.
RANK_RESTARTS = 3
JOB_RESTARTS = 10


def render_engine_command(plan: Plan, *, job: str, run_dir: str) -> Shell:
    """Return the line that starts moewright's engine on every node.

    It trains the job in the run folder that holds the plan.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    return Shell.write("{} {}", torchrun_command(plan), Shell.words(engine_words(job, run_dir)))


def engine_words(job: str, run_dir: str) -> tuple[str, ...]:
    """Return the words behind torchrun that start the engine, again where ranks fail."""
    restarts = ("--max-restarts", str(RANK_RESTARTS))
    engine = ("moewright", "train", job, "--out", run_dir, "--supervise")
    return (*restarts, "--no-python", *engine)


def torchrun_command(plan: Plan) -> Shell:
    """Return torchrun with its nodes and ranks.

    Several nodes meet at $MASTER_ADDR and are numbered by $NODE_RANK.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    nodes, ranks_per_node = split_into_nodes(plan)
    if nodes == 1:
        return Shell.write("torchrun --standalone --nproc-per-node {}", ranks_per_node)
    return Shell.write(
        'torchrun --nnodes {} --nproc-per-node {} --node-rank "$NODE_RANK" '
        '--master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}"',
        nodes,
        ranks_per_node,
    )


def split_into_nodes(plan: Plan) -> tuple[int, int]:
    """Return the number of nodes, and of ranks on each.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    world_size = plan.layout.world_size
    per_node = plan.hardware.fabric.devices_per_node
    if world_size <= per_node:
        return 1, world_size
    nodes, remainder = divmod(world_size, per_node)
    if remainder:
        raise BadInput(
            Reason(
                field="layout.world_size",
                value=str(world_size),
                rule=f"must fill whole nodes of {per_node} devices",
                nearest=str(nodes * per_node),
            )
        )
    return nodes, per_node
