"""Chats that are trees of messages: OpenAssistant's, and exports of ChatGPT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moewright.spec.errors import BadInput, Reason

_MOST_MESSAGES = 10_000  # of one tree
_MOST_REPLIES = 200  # one to the other
_NODE_FIELDS = frozenset(("message_id", "parent_id", "role", "text"))
Node = Mapping[str, Any]


def find_tree_path(record: Mapping[str, Any], where: str) -> list[Any]:
    """Return the messages from a tree's root along its best replies; [] of a record that is none.

    OpenAssistant's replies have ranks; an export of ChatGPT names the message that was shown last.

    Raises:
        BadInput: naming the tree, where its messages lead to no root.
    """
    root = record.get("prompt")
    if isinstance(root, dict) and "replies" in root:
        return _follow_replies(root, where)
    nodes = record.get("mapping")
    if isinstance(nodes, dict) and isinstance(record.get("current_node"), str):
        return _follow_parents(nodes, record["current_node"], where)
    return []


def _follow_replies(root: Node, where: str) -> list[Any]:
    path = []
    node: Node | None = root
    while node is not None:
        path.append({"role": node.get("role"), "content": node.get("text")})
        replies = node.get("replies")
        replies = replies if isinstance(replies, list) else []
        kept = [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]
        if len(kept) > 1 and any("rank" not in reply for reply in kept):
            rule = "has several replies, and not each has a 'rank'"
            raise BadInput(Reason(field=f"{where}: replies", rule=rule))
        # Rank 0 is the best.
        node = min(kept, key=_rank, default=None)
    return path


def _rank(reply: Node) -> float:
    rank = reply.get("rank")
    return float(rank) if isinstance(rank, int | float) else float("inf")


def _follow_parents(nodes: Mapping[str, Any], last: str, where: str) -> list[Any]:
    path: list[Any] = []
    names = set()
    name: Any = last
    while name is not None:
        node = nodes.get(name) if isinstance(name, str) else None
        if not isinstance(node, dict) or "parent" not in node:
            rule = f"has no message {str(name)[:60]} with a 'parent'"
            raise BadInput(Reason(field=f"{where}: mapping", rule=rule))
        if name in names:
            raise BadInput(Reason(field=f"{where}: mapping", rule="goes in a circle"))
        names.add(name)
        message = node.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        # The hidden first turn of the system says nothing.
        if content and not (isinstance(content, dict) and content.get("parts") == [""]):
            path.append(message)
        name = node["parent"]
    return path[::-1]


def join_trees(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield rows; those that are messages of one tree, one after the other, are one record.

    OpenAssistant's tables have a message a row, after the message that it answers. A row that
    answers none before it is its Reason in the record's place.
    """
    first = ""
    nodes: dict[str, dict[str, Any]] = {}
    depths: dict[str, int] = {}
    root: dict[str, Any] = {}
    for where, row in rows:
        is_message = isinstance(row, dict) and set(row) >= _NODE_FIELDS
        above = str(row["parent_id"] or "") if is_message else ""
        parent = nodes.get(above)
        # A root, or a row that is no message, ends the tree before it.
        if root and not above:
            yield first, {"prompt": root}
            root, nodes, depths = {}, {}, {}
        if not is_message:
            yield where, row
            continue
        depth = depths.get(above, 0)
        if (above and parent is None) or len(nodes) >= _MOST_MESSAGES or depth >= _MOST_REPLIES:
            rule = "answers a message that is not before it in the same tree, or far too many"
            nearest = "rows in the order of OpenAssistant's tables"
            yield where, Reason(field=where, rule=rule, nearest=nearest)
            continue
        node = {**row, "replies": []}
        nodes[str(row["message_id"])] = node
        depths[str(row["message_id"])] = depth + 1
        if parent is None:
            first, root = where, node
        else:
            parent["replies"].append(node)
    if root:
        yield first, {"prompt": root}
