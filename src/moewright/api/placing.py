"""Ranks placed onto the nodes that a scheduler gave."""

from __future__ import annotations

from pathlib import Path

from moewright.codec import write_text
from moewright.search.node_places import NodePlaces, place_nodes
from moewright.spec.plan import Plan


def place(plan: Plan) -> NodePlaces:
    """Choose which node has which ranks of a plan, over the levels of switches of its network.

    Args:
        plan: its hardware has levels, and lists the nodes that a scheduler gave as
            `fabric.placement`; without, the job has the first ones.

    Raises:
        BadInput: the network has no levels, over which all orders are alike.

    Example:
        >>> import moewright as mw
        >>> machine = mw.hardware("32xH100", network="tree:16:4")
        >>> plan = mw.estimate("Qwen3-30B-A3B", "ep16,mbs1", on=machine)
        >>> mw.place(plan).places
        (0, 1, 2, 3)
    """
    return place_nodes(plan)


def write_places(plan: Plan, path: Path) -> NodePlaces:
    """Write the place of each fast domain to a file, a line each in rank order.

    Raises:
        BadInput: the network has no levels, or the file cannot be written.
    """
    chosen = place(plan)
    write_text(path, "".join(f"{domain}\n" for domain in chosen.places))
    return chosen
