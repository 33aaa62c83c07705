"""Which dispatchers run on a fabric, and how their messages leave a device."""

from __future__ import annotations

from moewright.spec.hardware import Fabric, MessagePath
from moewright.spec.layout import DispatcherKind


def message_path(fabric: Fabric, dispatcher: DispatcherKind, *, domains: int) -> MessagePath:
    """Return how a dispatcher's messages leave a device, in a group that spans so many domains.

    Collectives reach every device, and so does a library that the fabric says nothing about.
    """
    for path in fabric.library_paths:
        if path.dispatcher is dispatcher:
            if domains == 1:
                return path.inside
            return path.between
    return MessagePath.GPU


def runs_on(fabric: Fabric, dispatcher: DispatcherKind, *, domains: int) -> bool:
    """Return whether a dispatcher runs in a group that spans so many domains of a fabric."""
    return message_path(fabric, dispatcher, domains=domains) is not MessagePath.NONE
