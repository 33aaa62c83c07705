"""How a plan's processes are started by torchrun, on one node or several."""

from __future__ import annotations

from shlex import quote

from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan


def render_engine_command(plan: Plan, *, job: str, run_dir: str) -> str:
    """The line that starts our own engine on every node: the job, in the run folder that holds the
    plan."""
    return (
        f"{torchrun_command(plan)} --no-python moewright train {quote(job)} --out {quote(run_dir)}"
    )


def torchrun_command(plan: Plan) -> str:
    """torchrun with its degrees: all ranks of one node, or nodes that meet at $MASTER_ADDR,
    numbered by $NODE_RANK.

    Raises BadInput when the ranks do not fill whole nodes.
    """
    nodes, ranks = split_into_nodes(plan)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {ranks}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {ranks} --node-rank $NODE_RANK "
        "--master-addr $MASTER_ADDR --master-port ${MASTER_PORT:-29500}"
    )


def split_into_nodes(plan: Plan) -> tuple[int, int]:
    """Nodes, and ranks on each. Raises BadInput when the ranks do not fill whole nodes."""
    world, per_node = plan.layout.world_size, plan.hardware.fabric.devices_per_node
    if world <= per_node:
        return 1, world
    nodes, rest = divmod(world, per_node)
    if rest:
        rule = f"must fill whole nodes of {per_node} devices"
        raise BadInput(
            Reason(
                field="layout.world_size",
                value=str(world),
                rule=rule,
                nearest=str(nodes * per_node),
            )
        )
    return nodes, per_node
