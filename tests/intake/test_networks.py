"""Kinds of network: what they change in a fabric, and which dispatchers run over them."""

import pytest

from moewright.codec import write_toml
from moewright.cost.constants import Constants
from moewright.intake import catalogue
from moewright.intake.catalogue import read_hardware_file
from moewright.intake.job import read_job
from moewright.intake.networks import apply_network, read_networks
from moewright.rules.routing import message_path
from moewright.search.space import build_search_space, dispatcher_choices
from moewright.spec.errors import BadInput
from moewright.spec.hardware import MessagePath, NetworkKind
from moewright.spec.layout import DispatcherKind, Layout
from moewright.spec.workload import Workload


def _choices(hardware: str, network: str, ep: int) -> tuple[DispatcherKind, ...]:
    machines = catalogue.hardware(hardware, network)
    workload = Workload(seq_len=4096, global_batch=512)
    space = build_search_space(catalogue.model("Qwen3-30B-A3B"), workload, machines, fixed="")
    return dispatcher_choices(space, Layout(world_size=machines.count, ep=ep))


def test_every_kind_has_an_entry() -> None:
    assert set(read_networks()) == set(NetworkKind)


@pytest.mark.parametrize(("part", "domain"), [("TPU7x", "ici"), ("Ascend-910B", "hccs")])
def test_a_part_takes_its_own_network_by_name(part: str, domain: str) -> None:
    plain = catalogue.hardware(f"16x{part}")
    assert plain.fabric.domain == domain
    assert apply_network(plain, domain) == plain


def test_efa_keeps_the_node_and_changes_the_network() -> None:
    plain = catalogue.hardware("16xA100")
    efa = apply_network(plain, "efa")
    assert efa.fabric.network == NetworkKind.EFA
    assert efa.fabric.network_Bps.value == 6.25e9  # p4d: 400 Gb/s for 8 devices
    assert efa.fabric.network_latency_s.value > plain.fabric.network_latency_s.value
    assert efa.fabric.domain_Bps == plain.fabric.domain_Bps
    assert apply_network(efa, "efa") == efa


def test_four_gh200_of_a_board_are_a_node() -> None:
    plain = catalogue.hardware("16xGH200").fabric
    board = catalogue.hardware("16xGH200", "nvl4+slingshot").fabric
    assert (plain.domain_size, plain.devices_per_node) == (1, 1)
    assert (board.domain_size, board.devices_per_node) == (4, 4)
    assert board.network_Bps.value == 25e9
    with pytest.raises(BadInput):
        catalogue.hardware("16xH100", "nvl4")


def test_a_network_and_back_is_the_hardware_again() -> None:
    plain = catalogue.hardware("8xH100")
    there = apply_network(plain, "pcie")
    assert {c.name for c in there.constants if c.value.source.startswith("pcie")} == {
        "domain_efficiency",
        "dedup_domain_efficiency",
        "tp_efficiency",
    }
    back = apply_network(there, "nvlink")
    assert not [c for c in back.constants if c.value.source.startswith("pcie")]


def test_every_part_can_have_the_networks_it_ships_with() -> None:
    """A table may name what a part has anyway, as rows of TPUs name their torus."""
    for name in catalogue.hardware_names():
        hardware = catalogue.hardware(name)
        for kind in (hardware.fabric.domain, hardware.fabric.network):
            assert apply_network(hardware, kind) == hardware


def test_half_a_rack_is_a_domain_of_36() -> None:
    fabric = catalogue.hardware("72xGB200", "nvl36+roce").fabric
    assert (fabric.domain_size, fabric.domain, fabric.network) == (
        36,
        NetworkKind.NVL36,
        NetworkKind.ROCE,
    )


@pytest.mark.parametrize(
    ("network", "nearest"), [("nvl72", "nvlink"), ("efaa", "efa"), ("ib+", "ib")]
)
def test_a_network_that_the_part_cannot_have_is_refused(network: str, nearest: str) -> None:
    with pytest.raises(BadInput) as refusal:
        catalogue.hardware("8xH100", network)
    (reason,) = refusal.value.reasons
    assert reason.field == "network"
    assert reason.nearest == nearest


@pytest.mark.parametrize(
    ("hardware", "network", "ep", "library"),
    [
        ("16xH100", "", 16, DispatcherKind.DEEPEP),
        ("16xH100", "efa", 16, DispatcherKind.DEEPEP),
        ("16xH100", "pcie", 8, None),
        ("16xH100", "tcp", 16, None),
        ("16xH100", "tcp", 8, DispatcherKind.DEEPEP),
        ("72xGB200", "", 8, DispatcherKind.HYBRIDEP),
        ("144xGB300", "efa", 144, None),
    ],
)
def test_the_search_takes_the_library_that_runs(
    hardware: str, network: str, ep: int, library: DispatcherKind | None
) -> None:
    choices = _choices(hardware, network, ep)
    assert choices[0] is DispatcherKind.ALL_TO_ALL
    assert choices[1:] == (() if library is None else (library,))


def test_ncclep_runs_over_nvlink_and_infiniband_alone() -> None:
    for on, network, domains, path in (
        ("16xH100", "", 2, MessagePath.GPU),
        ("16xH100", "efa", 2, MessagePath.NONE),
        ("16xH100", "efa", 1, MessagePath.GPU),
        ("72xGB200", "", 1, MessagePath.NONE),
        ("16xV100", "", 1, MessagePath.NONE),
    ):
        fabric = catalogue.hardware(on, network).fabric
        assert message_path(fabric, DispatcherKind.NCCLEP, domains=domains) is path


def test_deepep_over_efa_goes_through_a_proxy() -> None:
    fabric = catalogue.hardware("16xH100", "efa").fabric
    assert message_path(fabric, DispatcherKind.DEEPEP, domains=2) is MessagePath.PROXY
    assert message_path(fabric, DispatcherKind.DEEPEP, domains=1) is MessagePath.GPU


def test_a_hardware_file_and_a_job_name_their_network(tmp_path) -> None:
    path = tmp_path / "machine.toml"
    write_toml(path, catalogue.hardware("8xH100", "efa"))
    assert 'network = "efa"' in path.read_text()
    machine = read_hardware_file(str(path))
    assert message_path(machine.fabric, DispatcherKind.DEEPEP, domains=2) is MessagePath.PROXY
    job = tmp_path / "job.toml"
    text = '[model]\nconfig = "Qwen3-30B-A3B"\n[train]\nseq_len = 8\nglobal_batch = 8\n'
    text += 'hardware = "H100"\nnetwork = "{}"\n'
    job.write_text(text.format("efa"))
    assert read_job(job).network == "efa"
    job.write_text(text.format("wifi"))
    with pytest.raises(BadInput, match=r"train\.network"):
        read_job(job)


@pytest.mark.parametrize(
    ("part", "share"), [("H100", 0.25), ("H200", 0.5), ("B200", 1.0), ("B300", 0.5)]
)
def test_a_library_takes_a_port_of_each_device_over_efa(part: str, share: float) -> None:
    """AWS builds 32, 16, 8 and 16 ports into nodes of eight; only p5 has the older cards.

    What a kind implies for a part goes with the kind.
    """
    hardware = catalogue.hardware(f"16x{part}", "efa")
    constants = Constants(hardware)
    assert constants["proxy_rail_share"] == share
    assert (constants["proxy_message_s"] < 1e-5) is (part != "H100")
    back = apply_network(hardware, "ib")
    assert Constants(back)["proxy_message_s"] == 1e-5
