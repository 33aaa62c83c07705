"""What the verbs share that read a Megatron-LM launch script: the job in it, on hardware it does
not name."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.intake.megatron.options import LaunchCommand
    from moewright.intake.megatron.read import ScriptJob
    from moewright.spec.plan import Plan

_BESIDE = 3  # of the planner's layouts shown beside the script's
_SPELLED = {
    "layout.tp": "--tensor-model-parallel-size",
    "layout.sp": "--sequence-parallel",
    "layout.cp": "--context-parallel-size",
    "layout.cp_comm": "--cp-comm-type",
    "layout.pp": "--pipeline-model-parallel-size",
    "layout.vpp": "--num-virtual-stages-per-pipeline-rank",
    "layout.vpp_group": "--microbatch-group-size-per-virtual-pipeline-stage",
    "layout.ep": "--expert-model-parallel-size",
    "layout.etp": "--expert-tensor-parallel-size",
    "layout.mbs": "--micro-batch-size",
    "layout.stages": "--pipeline-model-parallel-layout",
    "layout.dispatcher": "--moe-token-dispatcher-type",
    "layout.capacity": "--moe-expert-capacity-factor",
    "layout.recompute": "--recompute-modules",
    "layout.offload": "--offload-modules",
    "layout.graphs": "--cuda-graph-modules",
    "layout.world_size": "--on",
    "workload.seq_len": "--seq-length",
    "workload.global_batch": "--global-batch-size",
    "workload.ramp_start": "--rampup-batch-size",
    "workload.ramp_increment": "--rampup-batch-size",
}


def read_plan_from_script(
    script: Path, *, model: str, on: str, arguments: str = ""
) -> tuple[Plan, ScriptJob]:
    """The plan that a launch script asks for, estimated on the hardware `on`; and how it was read.

    `arguments` stand behind the script's name, as a shell reads them. `on` may leave out how many
    devices: the script says it. `model` stands in where the script gives no sizes.
    """
    from moewright.intake.megatron.read import read_launch

    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise BadInput(
            Reason(field="--script-args", value=arguments[:60], rule=f"is not read: {error}")
        ) from None
    return _plan_of(read_launch(script, os.environ, words), script, model=model, on=on)


def read_plan_from_log(
    arguments: Sequence[tuple[str, str]], log: Path, *, model: str, on: str
) -> tuple[Plan, ScriptJob] | None:
    """The plan of the arguments that a log printed; None when it does not say how many ranks there
    were."""
    from moewright.intake.megatron.bash import read_commands
    from moewright.intake.megatron.logged_arguments import rebuild_command
    from moewright.intake.megatron.options import find_launch

    text = rebuild_command(arguments)
    return _plan_of(find_launch(read_commands(text, {})), log, model=model, on=on) if text else None


def _plan_of(
    command: LaunchCommand, script: Path, *, model: str, on: str
) -> tuple[Plan, ScriptJob]:
    from moewright.cli.plan_request import translate_fields
    from moewright.intake import catalogue
    from moewright.intake.megatron.read import interpret_launch
    from moewright.search.search import build_plan

    if not on:
        raise BadInput(
            Reason(
                field="--on",
                rule="is needed: a script does not name its devices",
                nearest="--on H100",
            )
        )
    with translate_fields(lambda field: "--on" if field == "hardware" else field):
        hardware = catalogue.hardware(on)
    if command.world_size and not on.strip()[0].isdigit():
        hardware = replace(hardware, count=command.world_size)
    if command.world_size not in (0, hardware.count):
        rule = f"the script starts {command.nodes} x {command.ranks_per_node} = {command.world_size} ranks"
        raise BadInput(
            Reason(field="--on", value=on[:60], rule=rule, nearest=f"{command.world_size}x...")
        )
    named = catalogue.model(model) if model else None
    found = interpret_launch(
        command, world_size=hardware.count, folder=script.parent, named_model=named
    )
    with translate_fields(to_script_options(script)):
        return build_plan(found.model, found.workload, hardware, found.layout), found


def to_script_options(script: Path) -> Callable[[str], str]:
    """Fields as the options of a script that say them."""
    return lambda field: f"{script.name}: {_SPELLED.get(field, field)}"


def print_better_layouts(console: Console, plan: Plan) -> None:
    """The planner's best few layouts for the plan's job, the plan's own among them and marked."""
    from moewright.codec import format_layout
    from moewright.report.console import print_ranking
    from moewright.search.search import search
    from moewright.spec.plan import Verdict

    free = search(plan.model, plan.workload, plan.hardware, top=_BESIDE).plans
    console.print("What would be better", style="bold")
    if not free:
        console.print(f"nothing: no layout fits {plan.hardware.count} devices")
        return
    own = next((one for one in free if one.layout == plan.layout), plan)
    shown = free if own in free else (*free, own)
    print_ranking(console, shown, picked=(own,))
    best, estimate = free[0], plan.estimate
    if best.layout == plan.layout:
        console.print("nothing that is planned here: the script's layout comes first")
    elif estimate.verdict is Verdict.OOM:
        console.print(
            f"{format_layout(best.layout)} fits, the script's layout does not", soft_wrap=True
        )
    else:
        gain = estimate.step_s / best.estimate.step_s - 1
        change = (
            f"{gain:.1%} more tokens/s" if gain > 0 else f"{-gain:.1%} fewer tokens/s, but it fits"
        )
        console.print(
            f"{format_layout(best.layout)}: {change} than the script's, by estimate", soft_wrap=True
        )
