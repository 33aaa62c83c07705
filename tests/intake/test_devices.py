"""Every part of the catalogue against what no accelerator can be."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from moewright.intake import catalogue
from moewright.rules.limits.legality import check_precision
from moewright.rules.routing import runs_on
from moewright.spec.errors import BadInput
from moewright.spec.hardware import NetworkKind, Op
from moewright.spec.layout import DispatcherKind
from moewright.spec.units import GIB, TERA, SourceKind
from moewright.spec.workload import Dtype, Workload

WITHOUT_FP8 = ("V100", "A100", "A800", "TPU-v5p", "TPU-v6e", "Ascend")
PARTS = catalogue.hardware_names()
FILE = Path(__file__).parents[2] / "src/moewright/intake/data/hardware.json"


def test_all_parts_are_there() -> None:
    assert set(PARTS) >= {
        "A100-40GB",
        "A100",
        "H100",
        "H800",
        "H200",
        "H20",
        "B200",
        "GB200",
        "B300",
        "GB300",
        *("A800", "H100-PCIe", "H100-NVL", "GH200", "H20-3e", "L40S", "RTX-4090", "RTX-PRO-6000"),
        *(
            "MI300X",
            "MI325X",
            "MI355X",
            "TPU-v5p",
            "TPU-v6e",
            "TPU7x",
            "Ascend-910B",
            "Ascend-910C",
        ),
    }


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H20-3e", "H20-3e"),
        ("H20 141GB", "H20-3e"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI325X OAM", "MI325X"),
        ("mi355x", "MI355X"),
        ("TPU v5p", "TPU-v5p"),
        ("v6e", "TPU-v6e"),
        ("TPU7x Ironwood", "TPU7x"),
        ("Ascend 910B", "Ascend-910B"),
        ("910c", "Ascend-910C"),
    ],
)
def test_parts_are_known_by_the_names_that_people_and_drivers_write(
    spelling: str, name: str
) -> None:
    assert catalogue.hardware(f"8x{spelling}").name == name


def test_datasheet_parts_say_so() -> None:
    """No rate or constant of a part that no run was fitted on claims a fit."""
    for name in ("H200", "H20", "MI300X", "TPU-v6e", "Ascend-910B", "RTX-4090"):
        hardware = catalogue.hardware(name)
        grouped = (Op.GROUPED_GEMM, Op.OPTIMIZER)
        kinds = {rate.curve.kind for rate in hardware.device.rates if rate.op not in grouped}
        kinds |= {constant.value.kind for constant in hardware.constants}
        assert SourceKind.FITTED not in kinds, name


@pytest.mark.parametrize("name", PARTS)
def test_figures_hang_together(name: str) -> None:
    hardware = catalogue.hardware(f"8x{name}")
    device, fabric = hardware.device, hardware.fabric
    peaks = {peak.dtype: peak.rate.value for peak in device.peaks}
    assert 15 < device.memory_bytes.value / GIB < 300
    assert 0.8 < device.memory_Bps.value / TERA < 10
    # FLOP a byte at the ridge: about 150 (A100) to 620 (B300); H20 is cut to 37.
    assert 30 < peaks[Dtype.FP16] / device.memory_Bps.value < 700
    assert name.startswith("V100") or peaks[Dtype.FP16] == peaks[Dtype.BF16]
    for narrow in (Dtype.FP8, Dtype.MXFP8):
        if narrow in peaks:
            assert peaks[narrow] == pytest.approx(2 * peaks[Dtype.BF16], rel=0.02)
    assert (Dtype.FP8 in peaks) == (not name.startswith(WITHOUT_FP8))
    margin = 1 if fabric.domain == NetworkKind.PCIE else 4
    assert margin * fabric.network_Bps.value <= fabric.domain_Bps.value < device.memory_Bps.value
    assert fabric.domain_size % fabric.devices_per_node == 0
    assert 0 < fabric.domain_latency_s.value <= fabric.network_latency_s.value < 1e-3


@pytest.mark.parametrize("name", PARTS)
def test_every_figure_has_a_source(name: str) -> None:
    device, fabric = catalogue.hardware(name).device, catalogue.hardware(name).fabric
    cited = [device.memory_bytes, device.memory_Bps, *(peak.rate for peak in device.peaks)]
    cited += [fabric.domain_Bps, fabric.network_Bps]
    assert all(len(item.source) > 10 for item in cited)
    assert device.memory_Bps.kind is SourceKind.DATASHEET


def test_later_parts_of_a_line_are_no_slower() -> None:
    for line in (
        ("A100", "H100", "B200", "B300"),
        ("H100", "H200"),
        ("GB200", "GB300"),
        ("A100-40GB", "A100"),
    ):
        devices = [catalogue.hardware(name).device for name in line]
        for earlier, later in pairwise(devices):
            assert later.memory_Bps.value >= earlier.memory_Bps.value
            assert later.memory_bytes.value >= earlier.memory_bytes.value


def test_names_are_one_part_each() -> None:
    parts = json.loads(FILE.read_text(encoding="utf-8"))["parts"]
    names = [name.casefold() for part in parts for name in {part["name"], *part["aliases"]}]
    assert len(names) == len(set(names))


def test_a_v100_trains_in_fp16_without_libraries_that_move_tokens() -> None:
    hardware = catalogue.hardware("8xV100")
    (reason,) = check_precision(Workload(seq_len=32, global_batch=8), hardware)
    assert (reason.value, reason.nearest) == (Dtype.BF16, Dtype.FP16)
    half = Workload(seq_len=32, global_batch=8, precision=Dtype.FP16)
    assert check_precision(half, hardware) == ()
    for library in (DispatcherKind.DEEPEP, DispatcherKind.HYBRIDEP):
        assert not runs_on(hardware.fabric, library, domains=1)
        assert runs_on(catalogue.hardware("8xA100").fabric, library, domains=1)


def test_a_count_alone_is_told_the_form_of_hardware() -> None:
    with pytest.raises(BadInput, match=r"16: names no device, in the form count x device") as error:
        catalogue.hardware("16")
    assert error.value.reasons[0].nearest == "16xH100"


# torchtitan/tools/utils.py, get_peak_flops, at b5bcd76c6: what it divides by for its MFU, TFLOP/s.
TORCHTITAN_PEAKS = {
    "A100": 312,
    "H100": 989,
    "H100-NVL": 835,
    "H100-PCIe": 756,
    "H200": 989,
    "H20": 148,
    "GB200": 2500,
    "GB300": 2500,
    "B200": 2250,
    "B300": 2250,
    "MI355X": 2500,
    "MI300X": 1300,
    "MI325X": 1300,
    "L40S": 362,
}


@pytest.mark.parametrize("name", TORCHTITAN_PEAKS)
def test_peaks_are_those_that_torchtitan_divides_by(name: str) -> None:
    """It rounds those of AMD to hundreds."""
    (peak,) = (item for item in catalogue.hardware(name).device.peaks if item.dtype is Dtype.BF16)
    assert peak.rate.value / TERA == pytest.approx(TORCHTITAN_PEAKS[name], rel=0.01)
