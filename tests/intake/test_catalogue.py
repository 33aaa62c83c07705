"""Known models and devices by name, and hardware as people write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moewright.api.catalogues import models as list_models
from moewright.codec import write_toml
from moewright.intake import catalogue
from moewright.intake.devices import device_names, find_memory_gb
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware, Op
from moewright.spec.units import GIB, SourceKind
from moewright.spec.workload import Dtype


def test_names_with_and_without_organisation() -> None:
    full = catalogue.model("Qwen/Qwen3-235B-A22B")
    assert full == catalogue.model("qwen3-235b-a22b") == catalogue.model(" QWEN/qwen3-235B-A22B ")
    assert full.name == "Qwen/Qwen3-235B-A22B"
    mixtral = catalogue.model("mistralai/Mixtral-8x7B-v0.1")
    for name in ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-Instruct-v0.1"):
        assert catalogue.model(name) == mixtral


def test_every_name_is_found_with_the_endings_of_its_variants() -> None:
    endings = ("-Base", "-Instruct", "-Thinking-2507", "-Chat", "-FP8", "-hf")
    for name in catalogue.model_names():
        for ending in endings:
            assert catalogue.has_model(name + ending), name + ending
            assert catalogue.has_model(name.rpartition("/")[2].lower() + ending)


def test_every_name_gives_a_model_with_its_source() -> None:
    names = catalogue.model_names()
    assert len(names) >= 35
    for name in names:
        assert catalogue.model(name).name == name
        assert len(catalogue.model_entry(name).source) > 10
    assert tuple(entry.name for entry in catalogue.models()) == names


def test_every_device_is_listed_with_its_source() -> None:
    listed = catalogue.devices()
    assert tuple(entry.aliases[0] for entry in listed) == catalogue.hardware_names()
    assert all(len(entry.cited_source) > 10 for entry in listed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3-235B", "nearest legal value: Qwen/Qwen3-235B-A22B"),
        ("qwen3-30b", "nearest legal value: Qwen/Qwen3-30B-A3B"),
        ("llama3-70b", "nearest legal value: meta-llama/Meta-Llama-3-70B"),
        ("mixtral-8x8b", "nearest legal value: mistralai/Mixtral-8x7B-v0.1"),
        ("DeepSeek-V3.9", "nearest legal value: deepseek-ai/DeepSeek-V3"),
        ("zzzzzzzzzzzzzzz", "known: "),
        ("", "no model name"),
        ("missing/config.json", "no such file"),
    ],
)
def test_models_that_are_not(name: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        catalogue.model(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}', encoding="utf-8")
    with pytest.raises(BadInput, match='model_type="nonsense"'):
        catalogue.model(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("256xH800", "H800", 256),
        ("8 x h100", "H100", 8),
        ("72xGB200 NVL72", "GB200", 72),
        ("16xA100", "A100", 16),
        ("16xA100-40GB", "A100-40GB", 16),
        ("1_000_000xB300", "B300", 1_000_000),
        ("H20", "H20", 1),
        ("H100x8", "H100", 8),
        ("H100 x 8", "H100", 8),
        ("H100:8", "H100", 8),
        ("8*H100", "H100", 8),
        ("8 × H100", "H100", 8),
        ("80 H100", "H100", 80),
        ("A100-40GBx4", "A100-40GB", 4),
        ("8xH100-SXM5-80GB", "H100", 8),
        ("8 x A100 SXM 40 GB", "A100-40GB", 8),
        ("A100-SXM4", "A100", 1),
        ("B200-192GB", "B200", 1),
        ("NVIDIA H100 80GB HBM3", "H100", 1),
        ("16 x NVIDIA H100 80GB HBM3", "H100", 16),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 1),
        ("NVIDIA A100-SXM4-80GB", "A100", 1),
        ("NVIDIA H800", "H800", 1),
        ("NVIDIA H200", "H200", 1),
        ("NVIDIA H20", "H20", 1),
        ("NVIDIA B200", "B200", 1),
        ("NVIDIA GB200", "GB200", 1),
        ("NVIDIA B300 SXM6 AC", "B300", 1),
    ],
)
def test_hardware(text: str, name: str, count: int) -> None:
    result = catalogue.hardware(text)
    assert (result.name, result.count) == (name, count)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xH800", "nearest legal value: 1xH800"),
        ("-1xH800", "nearest legal value: 1xH800"),
        ("1e12xH800", "nearest legal value: 1000000xH800"),
        ("1e999xH800", "nearest legal value: 1000000xH800"),
        ("2.5xH800", "nearest legal value: 2xH800"),
        ("8xH80", "nearest legal value: 8xH800"),
        ("H80x8", "nearest legal value: 8xH800"),
        ("H800x", "nearest legal value: 1xH800"),
        ("H100x0", "nearest legal value: 1xH100"),
        ("8xA100 PCIe", "nearest legal value: 8xA100"),
        ("NVIDIA H800 PCIe", "nearest legal value: 1xH800"),
        ("H100-96GB", "nearest legal value: 1xH100"),
        ("RTX5090", "no device 'RTX5090'"),
        ("8xTPU", "known: "),
        ("", "known: "),
        ("2xnowhere/machine.toml", "no such file"),
    ],
)
def test_hardware_that_is_not(text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        catalogue.hardware(text)
    assert message in str(caught.value)


def test_every_device_has_rates_and_sources() -> None:
    for name in catalogue.hardware_names():
        hardware = catalogue.hardware(f"8x{name}")
        device = hardware.device
        peaks = {peak.dtype: peak.rate for peak in device.peaks}
        assert peaks[Dtype.FP16].kind is SourceKind.DATASHEET
        # On Hopper an 8-bit GEMM with a scale a block is another kernel than one with a scale a
        # tensor.
        blocks = {Dtype.MXFP8} if name in ("H100", "H800", "H200") else set()
        dtypes = {*peaks, *blocks}
        assert {(rate.op, rate.dtype) for rate in device.rates} == {
            (op, dtype) for op in Op for dtype in dtypes
        }
        for rate in device.rates:
            if rate.op in (Op.GEMM, Op.GROUPED_GEMM):
                peak = peaks[Dtype.FP8 if rate.dtype in blocks else rate.dtype].value
                assert all(0 < y < peak for _, y in rate.curve.points)
            assert rate.curve.source
        assert all(constant.value.source for constant in hardware.constants)


def test_usable_memory_is_what_runtimes_show() -> None:
    """79.2 GiB on 80 GB parts; about 184 GiB on GB200."""
    assert catalogue.hardware("1xH800").device.memory_bytes.value / GIB == pytest.approx(79.2)
    assert catalogue.hardware("1xGB200").device.memory_bytes.value / GIB == pytest.approx(
        184, abs=0.5
    )


def test_domains() -> None:
    assert catalogue.hardware("8xH100").fabric.domain_size == 8
    rack = catalogue.hardware("72xGB300").fabric
    assert (rack.domain_size, rack.devices_per_node) == (72, 4)


def test_hardware_file_and_its_count(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    made = catalogue.hardware("4xH100")
    write_toml(path, made)
    assert catalogue.hardware(str(path)) == made
    assert catalogue.hardware(f"2x{path}") == replace(made, count=2)


def _spoil(made: Hardware, what: str) -> Hardware:
    device, rate = made.device, made.device.rates[0]
    if what == "count":
        return replace(made, count=0)
    if what == "device.memory_bytes":
        return replace(
            made, device=replace(device, memory_bytes=replace(device.memory_bytes, value=-1.0))
        )
    points = ((2.0, 1.0), (1.0, 1.0)) if what == "device.rates[0].curve" else ()
    return replace(
        made,
        device=replace(device, rates=(replace(rate, curve=replace(rate.curve, points=points)),)),
    )


@pytest.mark.parametrize(
    "what", ["count", "device.memory_bytes", "device.rates[0].curve", "device.rates[0]"]
)
def test_spoilt_hardware_files(tmp_path: Path, what: str) -> None:
    path = tmp_path / "machine.toml"
    write_toml(path, _spoil(catalogue.hardware("4xH100"), what))
    with pytest.raises(BadInput) as caught:
        catalogue.hardware(str(path))
    assert f"machine.toml: {what}" in str(caught.value)


@pytest.mark.parametrize("name", catalogue.hardware_names())
def test_files_without_the_mx_formats_of_their_part_get_its_rate(name: str, tmp_path: Path) -> None:
    """Files of version 0.3 name no peak of MXFP8; their plans must go on to be made."""
    hardware = catalogue.hardware(f"8x{name}")
    peaks = tuple(peak for peak in hardware.device.peaks if peak.dtype is not Dtype.MXFP8)
    path = tmp_path / "machine.toml"
    write_toml(path, replace(hardware, device=replace(hardware.device, peaks=peaks)))
    again = catalogue.hardware(str(path)).device
    assert {(peak.dtype, peak.rate.value) for peak in again.peaks} == {
        (peak.dtype, peak.rate.value) for peak in hardware.device.peaks
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16h100", 16),
        ("2 nodes H100", 16),
        ("2 nodes of 8xH100", 16),
        ("two nodes of H100", 16),
        ("Two nodes of eight H100s", 16),
        ("a node of H200", 8),
        ("sixteen H100s", 16),
        ("2x8xH100", 16),
        ("2 x 8 H100s", 16),
        ("16 H100 GPUs", 16),
        ("3 nodes x 4 GB200", 12),
        ("2Nodes h100", 16),
        ("910C", 1),
        ("1 node RTX4090", 8),
    ],
)
def test_devices_are_counted_as_people_write_them(text: str, count: int) -> None:
    assert catalogue.hardware(text).count == count


@pytest.mark.parametrize("name", device_names())
def test_a_device_with_another_memory_is_the_same_device_by_the_name_that_it_has(name: str) -> None:
    own = catalogue.hardware(f"16x{name}")
    other = catalogue.hardware(f"16x{name} with {2 * find_memory_gb(own):g} GB")
    assert catalogue.hardware(f"{other.count}x{other.device.name}") == other
    assert other.device.memory_bytes.value == pytest.approx(2 * own.device.memory_bytes.value)
    same = replace(other.device, name=own.device.name, memory_bytes=own.device.memory_bytes)
    assert replace(other, device=same) == own


def test_devices_of_no_name_ask_for_one() -> None:
    with pytest.raises(BadInput, match=r"names no device, .*nearest legal value: 8xH100"):
        catalogue.hardware("8 gpus")


@pytest.mark.parametrize("text", ["8xH100 with 0GB", "8xH100 with 99999GB", "8xH1 with 96GB"])
def test_a_memory_that_no_device_has_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        catalogue.hardware(text)
    assert caught.value.reasons[0].nearest


@pytest.mark.parametrize("text", ["2 nodes 3 nodes H100", "0 nodes H100", "2 nodes X9"])
def test_nodes_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        catalogue.hardware(text)


def test_models_are_listed_by_parts_of_their_names() -> None:
    names = [summary.model for summary in list_models("qwen3 a3b").models]
    assert "Qwen/Qwen3-30B-A3B" in names
    assert all("qwen3" in name.casefold() and "a3b" in name.casefold() for name in names)
    with pytest.raises(BadInput, match="Qwen"):
        list_models("qwem")
