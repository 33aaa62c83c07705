"""Kinds of network: what each allows, hardware whose fabric is another, and added catalogues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path

from moewright.codec import from_data, parse_toml, read_toml_data
from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, list_extensions, load_extension
from moewright.spec.hardware import (
    MAX_DEVICES,
    Constant,
    Fabric,
    Hardware,
    LibraryPath,
    MessagePath,
    NetworkKind,
    TopologyLevel,
    Wiring,
)
from moewright.spec.layout import DispatcherKind
from moewright.spec.names import closest_match
from moewright.spec.units import Sourced, SourceKind


def read_added_files(file_name: str) -> Iterator[tuple[str, str]]:
    """Yield where each package that has such a file has it, and its text.

    Raises:
        BadInput: a package cannot be imported.
    """
    for name, entry in list_extensions(ExtensionPoint.CATALOGUE).items():
        package = load_extension(ExtensionPoint.CATALOGUE, name)
        file = resources.files(package).joinpath(file_name)
        if file.is_file():
            yield f"{entry.value}/{file_name}", file.read_text(encoding="utf-8")


def check_new_names(names: Iterable[str], own_names: Iterable[str], *, where: str) -> None:
    """Refuse names that the catalogue has already: an estimate would not say which it used.

    Raises:
        BadInput: a name is known, whatever the case of its letters.
    """
    folded = {name.casefold() for name in own_names}
    for name in names:
        if name.casefold() in folded:
            rule = "is in the catalogue already; an added entry needs a name of its own"
            raise BadInput(Reason(field=where, value=name, rule=rule))


_NETWORKS = Path(__file__).parent / "data" / "networks.toml"
_ANY_PRODUCT = "any"


class NetworkLevel(StrEnum):
    """What a kind of network joins: the devices of a fast domain, or domains."""

    DOMAIN = "domain"
    NETWORK = "network"


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkEntry:
    """A kind of network as networks.toml has it, which says what each field means.

    A `domain_size` or `devices_per_node` of 0 leaves the part's own. `without_libraries` are parts
    that no library has kernels for. `part_constants` are those of a part alone, which win.
    """

    kind: str
    joins: NetworkLevel
    title: str
    source: str
    latency_s: float
    domain_size: int = 0
    devices_per_node: int = 0
    port_Bps: float = 0.0  # of a device to other domains, where the board decides it
    parts: tuple[str, ...] = ()
    without_libraries: tuple[str, ...] = ()
    Bps: dict[str, float] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    part_constants: dict[str, dict[str, float]] = field(default_factory=dict)

    def is_possible_for(self, hardware: Hardware) -> bool:
        """Return whether the part can have this network."""
        words = _product_words(hardware)
        return not self.parts or any(part.upper() in words for part in self.parts)

    def has_libraries_for(self, hardware: Hardware) -> bool:
        """Return whether libraries that move tokens have kernels for the part."""
        words = _product_words(hardware)
        return not any(part.upper() in words for part in self.without_libraries)

    def bandwidth(self, hardware: Hardware) -> float | None:
        """Return the bytes/s of a device of this part; None where the part's own stay."""
        words = _product_words(hardware)
        of_part = (rate for part, rate in self.Bps.items() if part.upper() in words)
        return next(of_part, self.Bps.get(_ANY_PRODUCT))

    def path(self, dispatcher: DispatcherKind) -> MessagePath:
        """Return how the messages of a dispatcher's library leave a device here."""
        if self.kind in dispatcher.facts.gpu_networks:
            return MessagePath.GPU
        if self.kind in dispatcher.facts.proxy_networks:
            return MessagePath.PROXY
        return MessagePath.NONE

    def sourced(self, value: float) -> Sourced:
        """Return a figure of this kind with its source."""
        return Sourced(value=value, kind=SourceKind.ASSUMED, source=f"{self.kind}: {self.source}")

    def sourced_constants(self, hardware: Hardware) -> tuple[Constant, ...]:
        """Return the constants that this kind implies for the part."""
        words = _product_words(hardware)
        own = (values for part, values in self.part_constants.items() if part.upper() in words)
        values = {**self.constants, **next(own, {})}
        return tuple(
            Constant(name=name, value=self.sourced(value)) for name, value in values.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _NetworkTable:
    network: tuple[NetworkEntry, ...]


@cache
def read_networks() -> dict[str, NetworkEntry]:
    """Return the kinds of network, in the order of the file, and then those of installed packages.

    Raises:
        BadInput: the file of a package is at fault.
    """
    table = from_data(_NetworkTable, read_toml_data(_NETWORKS), where=_NETWORKS.name)
    networks = {entry.kind: entry for entry in table.network}
    for where, text in read_added_files("networks.toml"):
        added = from_data(_NetworkTable, parse_toml(text, where=where), where=where)
        check_new_names([entry.kind for entry in added.network], networks, where=where)
        networks |= {entry.kind: entry for entry in added.network}
    return networks


def check_networks(names: Iterable[str], *, where: str) -> None:
    """Refuse kinds of network that nobody has described.

    Raises:
        BadInput: a kind is not known, with the nearest.
    """
    for name in names:
        if name not in read_networks():
            raise refuse_network(name, field=where, value=name[:60])


def refuse_network(name: str, *, field: str, value: str) -> BadInput:
    """Return the refusal of a kind of network that nobody has described, with the nearest."""
    kinds = tuple(read_networks())
    nearest = closest_match(name[:60], kinds) or NetworkKind.IB.value
    rule = f"must be one of {', '.join(kinds)}"
    return BadInput(Reason(field=field, value=value, rule=rule, nearest=nearest))


def apply_network(hardware: Hardware, text: str) -> Hardware:
    """Return the hardware with a fabric of the kinds that `text` names, such as "nvl36+efa".

    A kind that the fabric has already changes nothing, nor does an empty text. Levels of switches
    are named too, the lowest first: "rail:256+tree:3072:7" (parse_level).

    Raises:
        BadInput: a kind is not known, or this hardware cannot have it; the field is "network".
    """
    levels: list[TopologyLevel] = []
    for name in text.split("+") if text.strip() else ():
        if ":" in name:
            levels.append(parse_level(name.strip().casefold()))
            continue
        entry = _find_entry(name.strip().casefold(), hardware)
        if entry.joins is NetworkLevel.DOMAIN and entry.kind != hardware.fabric.domain:
            hardware = _change_domain(hardware, entry)
        elif entry.joins is NetworkLevel.NETWORK and entry.kind != hardware.fabric.network:
            hardware = _change_network(hardware, entry)
    if levels:
        hardware = replace(hardware, fabric=replace(hardware.fabric, levels=tuple(levels)))
    fault = next(find_level_faults(hardware.fabric), None)
    if fault is not None:
        raise BadInput(replace(fault, field="network"))
    return hardware


_LEVEL_FORM = "tree:3072:7"
_LEVEL_DEFAULTS = (1.0, 0.0, 0.0)  # oversubscription, background, latency


def parse_level(text: str) -> TopologyLevel:
    """Return the level of "WIRING:DEVICES", with what its links carry behind it.

    The numbers that may follow are oversubscription, the share that other jobs take, and the
    latency in seconds: "tree:3072:7", "dragonfly:512:1:0.3", "tree:8192:64:0:0.005".

    Raises:
        BadInput: a part of the text is none of these; the field is "network".
    """
    wiring, *words = text.split(":")
    if wiring not in list(Wiring) or len(words) > 1 + len(_LEVEL_DEFAULTS):
        rule = f"a level of switches must be {', '.join(Wiring)}, then devices and three numbers"
        raise BadInput(Reason(field="network", value=text[:60], rule=rule, nearest=_LEVEL_FORM))
    try:
        devices = int(words[0])
        numbers = [float(word) for word in words[1:]]
    except ValueError:
        rule = "a level of switches needs a number of devices, and numbers behind it"
        raise BadInput(
            Reason(field="network", value=text[:60], rule=rule, nearest=_LEVEL_FORM)
        ) from None
    oversubscription, background, latency_s = (*numbers, *_LEVEL_DEFAULTS[len(numbers) :])
    return TopologyLevel(
        wiring=Wiring(wiring),
        devices=devices,
        oversubscription=oversubscription,
        background=background,
        latency_s=latency_s,
    )


def find_level_faults(fabric: Fabric) -> Iterator[Reason]:
    """Yield what is wrong with the levels and the placement of a fabric, by their fields."""
    unit = fabric.domain_size
    for index, level in enumerate(fabric.levels):
        where = f"fabric.levels[{index}]"
        if level.devices < unit or level.devices % unit:
            rule = f"must be a multiple of {unit}, what lies below it"
            near = str(max(1, round(level.devices / unit)) * unit)
            value = str(level.devices)
            yield Reason(field=f"{where}.devices", value=value, rule=rule, nearest=near)
            return
        # Levels above are counted in units of this one.
        unit = level.devices
        if index and level.wiring is Wiring.RAIL:
            rule = "rails must be the lowest level"
            yield Reason(field=f"{where}.wiring", value=level.wiring, rule=rule, nearest="tree")
        for name, low, high in (
            ("oversubscription", 0.01, 1e4),
            ("background", 0.0, 0.99),
            ("latency_s", 0.0, 10.0),
        ):
            value = getattr(level, name)
            if not low <= value <= high:
                near = f"{min(max(value, low), high):g}"
                rule = f"{name} must be in {low:g}..{high:g}"
                yield Reason(field=f"{where}.{name}", value=f"{value:g}", rule=rule, nearest=near)
    places = fabric.placement
    is_inside = all(0 <= place < MAX_DEVICES for place in places)
    if not is_inside or len(set(places)) < len(places):
        rule = f"must be places in 0..{MAX_DEVICES - 1}, each once"
        yield Reason(field="fabric.placement", rule=rule)


def complete_fabric(hardware: Hardware) -> Hardware:
    """Return the hardware with what its kinds of network imply: paths of libraries, constants.

    Constants that the hardware has already win.

    Raises:
        BadInput: a kind of its fabric is not known.
    """
    fabric = hardware.fabric
    check_networks((fabric.domain, fabric.network), where="fabric")
    entries = (read_networks()[fabric.domain], read_networks()[fabric.network])
    own_names = {constant.name for constant in hardware.constants}
    implied = [
        constant
        for entry in entries
        for constant in entry.sourced_constants(hardware)
        if constant.name not in own_names
    ]
    return replace(
        hardware,
        fabric=replace(fabric, library_paths=_library_paths(hardware)),
        constants=(*hardware.constants, *implied),
    )


def _find_entry(name: str, hardware: Hardware) -> NetworkEntry:
    """Return the entry of a name; refuse one that is unknown or that the hardware cannot have."""
    networks = read_networks()
    own = (hardware.fabric.domain, hardware.fabric.network)
    possible = [
        entry.kind
        for entry in networks.values()
        if entry.kind in own or entry.is_possible_for(hardware)
    ]
    entry = networks.get(name)
    if entry is not None and entry.kind in possible:
        return entry
    rule = f"must be one of {', '.join(possible)}"
    if entry is not None:
        rule = f"{hardware.device.name} cannot have it; {rule}"
    nearest = closest_match(name, possible) or str(hardware.fabric.network)
    raise BadInput(Reason(field="network", value=name[:60], rule=rule, nearest=nearest))


def _change_domain(hardware: Hardware, entry: NetworkEntry) -> Hardware:
    fabric = hardware.fabric
    rate = entry.bandwidth(hardware)
    # Curves and links, emptied below, were measured in the old domain.
    fabric = replace(
        fabric,
        domain=entry.kind,
        domain_size=entry.domain_size or fabric.domain_size,
        devices_per_node=entry.devices_per_node or fabric.devices_per_node,
        domain_Bps=fabric.domain_Bps if rate is None else entry.sourced(rate),
        network_Bps=entry.sourced(entry.port_Bps) if entry.port_Bps else fabric.network_Bps,
        domain_latency_s=entry.sourced(entry.latency_s),
        times=(),
        links=(),
    )
    constants = _change_constants(hardware, read_networks()[hardware.fabric.domain], entry)
    return complete_fabric(replace(hardware, fabric=fabric, constants=constants))


def _change_network(hardware: Hardware, entry: NetworkEntry) -> Hardware:
    fabric = hardware.fabric
    rate = entry.bandwidth(hardware)
    fabric = replace(
        fabric,
        network=entry.kind,
        network_Bps=fabric.network_Bps if rate is None else entry.sourced(rate),
        network_latency_s=entry.sourced(entry.latency_s),
    )
    constants = _change_constants(hardware, read_networks()[hardware.fabric.network], entry)
    return complete_fabric(replace(hardware, fabric=fabric, constants=constants))


def _change_constants(
    hardware: Hardware, old: NetworkEntry, new: NetworkEntry
) -> tuple[Constant, ...]:
    """Return the hardware's constants without those of the old kind, and with the new one's."""
    implied = new.sourced_constants(hardware)
    replaced = {constant.name for constant in implied}
    dropped = old.sourced_constants(hardware)
    kept = [
        constant
        for constant in hardware.constants
        # A constant with another value than the old kind's was set in a file: it stays.
        if constant not in dropped and constant.name not in replaced
    ]
    return (*kept, *implied)


def _library_paths(hardware: Hardware) -> tuple[LibraryPath, ...]:
    """Return how each library moves tokens: between domains only where it runs inside them."""
    domain = read_networks()[hardware.fabric.domain]
    network = read_networks()[hardware.fabric.network]
    has_libraries = domain.has_libraries_for(hardware)
    paths = []
    for dispatcher in DispatcherKind:
        if not dispatcher.facts.is_library:
            continue
        inside = domain.path(dispatcher) if has_libraries else MessagePath.NONE
        between = network.path(dispatcher)
        # A library that cannot run inside a domain has nothing to hand over to a network.
        if inside is MessagePath.NONE:
            between = MessagePath.NONE
        paths.append(LibraryPath(dispatcher=dispatcher, inside=inside, between=between))
    return tuple(paths)


def _product_words(hardware: Hardware) -> frozenset[str]:
    """Return the words of a part's names: H100 and PCIE of both "H100-PCIe" and "H100 PCIe"."""
    names = f"{hardware.name} {hardware.device.name}".upper().replace("-", " ")
    return frozenset(names.split())
