"""What is known of a choice of a layout, stated once: the records of its fields and members.

A record is data alone. What a choice does stands where it is done, and why it is refused in the
functions of rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Payload(StrEnum):
    """What a dispatcher sends of the tokens that a rank has routed."""

    TOKENS = "tokens"  # every token to every rank of the experts
    ROWS = "rows"  # a row for each expert that a token chose
    COPIES = "copies"  # a copy for each rank that has a chosen expert, however many it has


class RegisteredMemory(StrEnum):
    """What a dispatcher registers before it moves anything, however much it will send."""

    NOTHING = "nothing"
    RINGS = "rings"  # of tokens, for each peer of the node and each node, both ways
    EVERY_TOKEN = "every_token"  # room for all tokens of the group on one rank, both ways


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherFacts:
    """What is known of a dispatcher besides how it works.

    One that needs `packages` leaves the moving to the kernels of a library. They write to a peer
    or post messages themselves on `gpu_networks`, have a CPU thread post them on `proxy_networks`
    (values of NetworkKind), and do not run on others.
    """

    title: str
    payload: Payload
    packages: tuple[str, ...] = ()
    home: str = ""  # where the packages come from
    gpu_networks: tuple[str, ...] = ()
    proxy_networks: tuple[str, ...] = ()
    max_ranks: int = 0  # of an expert group; 0: any number
    max_tokens: int = 0  # of a rank and micro-batch; 0: any number
    registers: RegisteredMemory = RegisteredMemory.NOTHING
    knows_nodes: bool = False  # may send to a node before it sends to a rank
    pads_rows: bool = False  # to a capacity of experts, or to a budget of a rank
    has_static_shapes: bool = False  # whatever the router chooses
    waits_for_counts: bool = False  # the host, for those of a library's peers
    brings_local_probs: bool = False  # with a copy come those of all experts of the rank
    frees_received_rows: bool = False  # before another micro-batch beside them ends
    is_searched: bool = False  # how fast it is has been published
    megatron: tuple[str, ...] = ()  # its type, and the backend of the flexible one; () for none
    torchtitan: str = ""  # its backend; "" for none
    is_in_bridge: bool = False  # Megatron Bridge sets it up
    no_bridge_devices: str = ""  # how the names of devices begin on which it does not

    @property
    def is_library(self) -> bool:
        """Whether kernels of a library move the tokens."""
        return bool(self.packages)
