"""`make bridge` and `make torchtitan`: their own code starts the best plans of searches.

`python tests/peers/run.py TRAINER COUNT CHECKOUT...` searches models on several machines, writes
each plan for the trainer and has it started by start_TRAINER.py, which is given the checkouts:
torchtitan at b5bcd76c6; Megatron Bridge at 067f987d and Megatron-LM at d98e8a64.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import moewright as mw
from moewright.codec import format_layout
from moewright.exporters.bridge import bridge_refusals, list_converted, render_bridge_recipe
from moewright.exporters.torchtitan import render_torchtitan_config
from moewright.families.table import find_family
from moewright.intake import catalogue
from moewright.rules.limits.torchtitan_limits import FLAVOURS
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan

sys.path[:0] = [str(Path(__file__).parents[1] / "megatron"), str(Path(__file__).parents[1])]
from cases import capability  # noqa: E402

MACHINES = ("64xH100", "8xH100", "256xH200", "16xB200")
_PLANS_A_SEARCH = 5
# What searches bind their layouts to.
_RUNS_ON = {"torchtitan": "torchtitan", "bridge": "megatron"}


def main(trainer: str, count: str, *checkouts: str) -> int:
    """Start every plan, and print what came of it."""
    began_s = time.monotonic()
    plans = list(islice(_best_plans(trainer), int(count)))
    lines = (
        json.dumps({"id": place, "world_size": plan.layout.world_size, **_write(trainer, plan)})
        for place, plan in enumerate(plans)
    )
    program = Path(__file__).with_name(f"start_{trainer}.py")
    result = subprocess.run(
        [sys.executable, str(program), *checkouts],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    refusals = [json.loads(line)["refusal"] for line in result.stdout.splitlines()]
    refused = [(plan, text) for plan, text in zip(plans, refusals, strict=True) if text]
    models = len({plan.model.name for plan in plans})
    print(f"{len(plans) - len(refused)} of {len(plans)} best plans start, of {models} models")
    for text, number in Counter(text[:150] for _, text in refused).most_common():
        print(f"  {number:5}  {text}")
    for plan, text in refused:
        where = f"{plan.model.name} on {plan.layout.world_size}: {format_layout(plan.layout)}"
        print(f"REFUSED {where}\n    {text[:300]}")
    print(f"in {time.monotonic() - began_s:.0f} s")
    return 1 if refused or not plans else 0


def _best_plans(trainer: str) -> Iterator[Plan]:
    """Yield the best plans of searches, a machine after the other, all models of each."""
    models = tuple(FLAVOURS if trainer == "torchtitan" else _list_bridged())
    for machine in MACHINES:
        for model in models:
            with suppress(BadInput):  # larger than the machine
                found = mw.plan(model, on=machine, top=_PLANS_A_SEARCH, runs_on=_RUNS_ON[trainer])
                for plan in found.plans:
                    if trainer == "torchtitan" or not any(bridge_refusals(plan)):
                        yield plan


def _list_bridged() -> Iterator[str]:
    """Yield the models of the catalogue that Bridge knows by name and converts."""
    for name in catalogue.model_names():
        architecture = find_family(catalogue.model(name).family).architecture
        if "/" in name and architecture in list_converted():
            yield name


def _write(trainer: str, plan: Plan) -> dict[str, Any]:
    if trainer == "torchtitan":
        return {"text": str(render_torchtitan_config(plan))}
    return {
        "text": str(render_bridge_recipe(plan)),
        "capability": capability(plan.hardware.device.name),
        "config": find_family(plan.model.family).write_config(plan.model),
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
