"""Adapters near GPUs, in made-up trees of /sys.

That of a DGX H100 has its adapters on the PCI buses of NVIDIA's user guide (table 6), each under a
switch with its GPU; what is chosen there is what operators of such machines write by hand into
NCCL_IB_HCA.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moewright.engine.run import adapter_binding, build_state, env
from moewright.engine.run.adapter_binding import PciDistance, PciPlace, choose_adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A made-up /sys and /dev/infiniband, and the addresses of its GPUs."""

    root: Path
    gpus: list[str] = field(default_factory=list)

    @property
    def device_files(self) -> Path:
        return self.root / "dev"

    def add_gpu(self, path: str, node: int = 0) -> None:
        self.gpus.append(self._add_device(path, node).name)

    def add_adapter(
        self,
        name: str,
        path: str,
        node: int = 0,
        *,
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        layer: str = "InfiniBand",
        may_open: bool = True,
    ) -> None:
        device = self._add_device(path, node)
        folder = self.root / "class/infiniband" / name
        write(folder / "ports/1/rate", rate)
        write(folder / "ports/1/state", state)
        write(folder / "ports/1/link_layer", layer)
        (folder / "device").symlink_to(device)
        (device / "infiniband_verbs" / f"uverbs_{name}").mkdir(parents=True)
        if may_open:
            write(self.device_files / f"uverbs_{name}", "")

    def _add_device(self, path: str, node: int) -> Path:
        device = self.root / "devices" / path
        write(device / "numa_node", str(node))
        link = self.root / "bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        return device

    def choose(self) -> adapter_binding.AdapterChoice:
        return choose_adapters(self.root, self.gpus, self.device_files)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path)


def below_switch(bus: int, port: int, device: str) -> str:
    """Return the folder of a device at a port of the switch on a host bridge of its own."""
    bridge = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    return f"{bridge}/0000:{bus + 2:02x}:{port:02x}.0/0000:{device}"


# Host bridge, GPU and compute adapter of each pair of a DGX H100.
DGX_PAIRS = (
    (0x15, "1b", "18", "mlx5_0"),
    (0x3D, "43", "40", "mlx5_3"),
    (0x4C, "52", "4f", "mlx5_4"),
    (0x5B, "61", "5e", "mlx5_5"),
    (0x97, "9d", "9a", "mlx5_6"),
    (0xBD, "c3", "c0", "mlx5_9"),
    (0xCB, "d1", "ce", "mlx5_10"),
    (0xD9, "df", "dc", "mlx5_11"),
)
DGX_OTHERS = (("mlx5_1", "29", 0), ("mlx5_2", "29", 1), ("mlx5_7", "aa", 0), ("mlx5_8", "aa", 1))


def build_dgx_h100(machine: Machine, storage_rate: str = "400 Gb/sec (4X NDR)") -> None:
    for bus, gpu, adapter, name in DGX_PAIRS:
        node = int(bus > 0x80)
        machine.add_adapter(name, below_switch(bus, 0, f"{adapter}:00.0"), node)
        machine.add_gpu(below_switch(bus, 2, f"{gpu}:00.0"), node)
    for name, bus_name, function in DGX_OTHERS:
        path = f"pci0000:{bus_name}/0000:{bus_name}:01.0/0000:{bus_name}:00.{function}"
        machine.add_adapter(name, path, int(bus_name > "80"), rate=storage_rate)


def test_a_dgx_h100_uses_its_eight_compute_adapters(machine: Machine) -> None:
    build_dgx_h100(machine)
    choice = machine.choose()
    published = {f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)}
    assert set(choice.names) == published
    assert "(PIX)" in choice.sentence
    assert choice.sentence.endswith("left out: mlx5_1 mlx5_2 mlx5_7 mlx5_8")


def test_half_of_the_gpus_use_their_own_adapters(machine: Machine) -> None:
    build_dgx_h100(machine)
    del machine.gpus[4:]
    assert set(machine.choose().names) == {"mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"}


def test_two_adapters_of_a_machine_with_eight_gpus(machine: Machine) -> None:
    for index in range(8):
        bus, node = 0x10 + 0x10 * index, index // 4
        machine.add_gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", node)
    for node, bus in enumerate(("98", "a8")):
        machine.add_adapter(f"mlx5_{node}", f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:00.0", node)
    choice = machine.choose()
    assert choice.names == ("mlx5_0", "mlx5_1")
    assert "(NODE)" in choice.sentence
    # With a third one as near to none, nobody knows whether it is there for the GPUs.
    machine.add_adapter("mlx5_2", "pci0000:b8/0000:b8:01.0/0000:b8:00.0", 7)
    assert machine.choose().names == ()
    assert "fewer than GPUs" in machine.choose().sentence


def test_a_faster_adapter_is_never_left_out(machine: Machine) -> None:
    build_dgx_h100(machine, storage_rate="800 Gb/sec (4X XDR)")
    choice = machine.choose()
    assert choice.names == ()
    assert "of other rates" in choice.sentence


def test_a_slow_adapter_below_the_same_switch_is_left_out(machine: Machine) -> None:
    build_dgx_h100(machine)
    machine.add_adapter("mlx5_12", below_switch(0x15, 4, "1c:00.0"), rate="200 Gb/sec (2X NDR)")
    assert "mlx5_12" not in machine.choose().names
    assert len(machine.choose().names) == 8


def test_without_adapters_nccl_chooses(machine: Machine) -> None:
    machine.add_gpu("pci0000:15/0000:15:01.0/0000:16:00.0")
    assert machine.choose().names == ()
    path = "pci0000:17/0000:17:0{}.0/0000:18:0{}.0"
    machine.add_adapter("mlx5_0", path.format(1, 1), state="1: DOWN")
    machine.add_adapter("rdmap0", path.format(2, 2), layer="Unspecified")  # EFA
    machine.add_adapter("mlx5_1", path.format(3, 3), may_open=False)
    choice = machine.choose()
    assert choice.names == ()
    assert choice.sentence.startswith("no active InfiniBand or RoCE adapter")


PATH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0")


@pytest.mark.parametrize(
    ("path", "node", "kind", "bridges"),
    [
        ((*PATH[:3], "0000:17:02.0", "0000:1b:00.0"), "0", PciDistance.PIX, 2),
        (
            (*PATH[:2], "0000:19:00.0", "0000:1a:00.0", "0000:1b:00.0"),
            "0",
            PciDistance.PXB,
            4,
        ),
        ((*PATH[:1], "0000:15:03.0", "0000:1b:00.0"), "0", PciDistance.PHB, 4),
        (("pci0000:20", "0000:20:01.0", "0000:21:00.0"), "0", PciDistance.NODE, 0),
        (("pci0000:80", "0000:80:01.0", "0000:81:00.0"), "1", PciDistance.SYS, 0),
        (("pci0000:80", "0000:80:01.0", "0000:81:00.0"), "-1", PciDistance.SYS, 0),
    ],
)
def test_distances_are_those_of_nvidia_smi(
    path: tuple[str, ...], node: str, kind: PciDistance, bridges: int
) -> None:
    own = PciPlace(path=PATH, numa_node="0")
    other = PciPlace(path=path, numa_node=node)
    assert own.distance(other) == other.distance(own) == (kind, bridges)


@pytest.fixture
def torchrun(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> pytest.MonkeyPatch:
    """Make this process a rank of a job over two made-up DGX H100."""
    build_dgx_h100(machine)

    def properties(device: torch.device) -> SimpleNamespace:
        bus = int(machine.gpus[device.index or 0].split(":")[1], 16)
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(adapter_binding, "SYSFS", machine.root)
    monkeypatch.setattr(adapter_binding, "DEVICE_FILES", machine.device_files)
    monkeypatch.setattr(env, "_NCCL_FILES", (tmp_path / "nccl.conf", tmp_path / "own.conf"))
    for name in (*env._ADAPTER_SETTINGS, "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_IB_HCA", "")  # so that it is restored
    monkeypatch.delenv("NCCL_IB_HCA")
    values = {"RANK": 8, "WORLD_SIZE": 16, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 8}
    for name, value in {**values, "MASTER_ADDR": "host", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    return monkeypatch


def bind(local_rank: int = 0) -> str | None:
    build_state._bind_adapters(SimpleNamespace(local_rank=local_rank))  # type: ignore[arg-type]
    return os.environ.get("NCCL_IB_HCA")


def test_every_rank_of_a_machine_names_the_same_adapters(
    torchrun: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "=mlx5_0,mlx5_10,mlx5_11,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9"
    assert bind() == expected
    assert "NCCL_IB_HCA set to the adapters nearest to 8 GPUs" in capsys.readouterr().err
    torchrun.delenv("NCCL_IB_HCA")
    assert bind(local_rank=5) == expected
    assert capsys.readouterr().err == ""


def test_one_machine_needs_no_adapters(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setenv("LOCAL_WORLD_SIZE", "16")
    assert bind() is None


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "NCCL_NET_PLUGIN", "NCCL_TOPO_FILE"])
def test_what_the_user_has_chosen_stays(
    name: str, torchrun: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun.setenv(name, "mlx5_7")
    assert bind() == ("mlx5_7" if name == "NCCL_IB_HCA" else None)
    assert f"adapters are chosen by {name}" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["nccl.conf", "own.conf", "named.conf"])
def test_what_a_file_of_nccl_says_stays(
    file: str, torchrun: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("NCCL_DEBUG=WARN\nNCCL_IB_HCA=mlx5_7\n")
    if file == "named.conf":
        torchrun.setenv("NCCL_CONF_FILE", str(tmp_path / file))
    assert bind() is None
