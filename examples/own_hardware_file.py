"""Describe a cluster that the catalogue does not know, save it, and plan on the file.

`moewright bench machine` measures such a file on the machine at hand; here a datasheet is typed in.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import tomli_w

import moewright as mw
from moewright.spec.units import Sourced, SourceKind

# An H100 whose network has half the bandwidth: four 400 Gb/s cards for eight devices.
base = mw.hardware("8xH100")
slow_network = Sourced(value=25e9, kind=SourceKind.DATASHEET, source="four 400 Gb/s cards a node")
hardware = replace(
    base, name="H100, 4 cards", fabric=replace(base.fabric, network_Bps=slow_network)
)

path = Path(tempfile.mkdtemp()) / "h100_4cards.toml"
path.write_text(tomli_w.dumps(hardware.to_dict()))
print(f"wrote {path}")

for on in ("32xH100", f"32x{path}"):
    best = mw.plan("Qwen3-30B-A3B", on=on, global_batch=512, top=1).best
    print(f"{on}: {best.layout}, {best.estimate.step_s:.3g} s a step")
