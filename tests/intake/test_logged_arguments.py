"""The dump of arguments that a log begins with, read back: none of them is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import moewright as mw
from megatron_cases import as_written, build_plan
from moewright.api.launch_scripts import read_log
from moewright.codec import parse_layout
from moewright.diagnosis.traces.megatron_log import parse_log
from moewright.exporters.megatron.script import all_flags
from moewright.intake import catalogue
from moewright.intake.megatron.logged_arguments import rebuild_command
from moewright.intake.megatron.options import option_table
from moewright.search.search import build_plan as build_search_plan
from moewright.spec.errors import BadInput
from moewright.spec.layout import DispatcherKind, Overlap, Recompute
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype, ExpertKernels, TrainerSpec, Workload

LINE = " iteration 2/ 10 | elapsed time per iteration (ms): 9000.0 | global batch size: {} |\n"
MOE = "Qwen/Qwen3-30B-A3B"
CASES = (
    ("meta-llama/Llama-3.1-8B", "8xH100", "tp2,zero1", {}),
    ("meta-llama/Llama-3.1-8B", "8xH100", "tp1,zero3", {}),
    ("meta-llama/Llama-3.1-8B", "16xH100", "tp2,cp2,pp2,vpp2,overlap=grad+param", {}),
    (MOE, "16xH100", "ep8,dispatcher=deepep,overlap=grad+param", {}),
    (MOE, "16xH100", "tp2,ep4,recompute=moe_act+layernorm,overlap=ep+wgrad", {}),
    (MOE, "16xH100", "ep8,recompute=full", {}),
    (MOE, "16xH100", "ep8,graphs=attn+moe_router", {}),
    (MOE, "16xH100", "ep8,offload=optimizer", {}),
    (MOE, "16xH100", "ep4,etp2,pp2", {"precision": Dtype.FP8}),
    (MOE, "16xH100", "ep8", {"trainer": TrainerSpec(expert_kernels=ExpertKernels.SEQUENTIAL)}),
)


def dumped_arguments(plan: Plan) -> dict[str, str]:
    """Return every argument of Megatron-LM's parser for a plan, as Python prints it."""
    table = option_table()
    values = {option.dest: option.default for option in table.values()}
    for name, *words in all_flags(plan):
        option = table[name]
        if option.value_count == "0":
            values[option.dest] = str(not option.clears)
        elif option.value_count in ("+", "*"):
            values[option.dest] = str(words)
        else:
            values[option.dest] = words[0]
    tp = plan.layout.tp
    vocabulary = int(values["vocab_size"])
    multiple = int(values["make_vocab_size_divisible_by"]) * tp
    derived = {
        "world_size": plan.layout.world_size,
        "rank": 0,
        "data_parallel_size": plan.layout.dp,
        "padded_vocab_size": -(-vocabulary // multiple) * multiple,
        "params_dtype": "torch.bfloat16",
        "transformer_pipeline_model_parallel_size": plan.layout.pp,
        "tensor_parallel_num_weight_shards": tp,
        "encoder_num_layers": plan.model.layers,
        "encoder_seq_length": plan.workload.seq_len,
    }
    return values | {name: str(value) for name, value in derived.items()}


def write_log(folder: Path, arguments: dict[str, str], batch: int) -> Path:
    lines = "".join(f"  {name} {'.' * (48 - len(name))} {arguments[name]}\n" for name in arguments)
    path = folder / "train.log"
    text = f"---- arguments ----\n{lines}---- end of arguments ----\n{LINE.format(batch)}"
    path.write_text(text)
    return path


def case_plan(model: str, on: str, layout: str, changes: dict[str, object]) -> Plan:
    hardware = catalogue.hardware(on)
    workload = replace(Workload(seq_len=4096, global_batch=64), **changes)
    plan = build_plan(model, parse_layout(layout, world_size=hardware.count), workload)
    return replace(plan, hardware=hardware)


@pytest.mark.parametrize(("model", "on", "layout", "changes"), CASES)
def test_a_dump_is_read_as_the_plan_that_its_command_was_written_from(
    model, on, layout, changes, tmp_path
):
    plan = as_written(case_plan(model, on, layout, changes))
    log = write_log(tmp_path, dumped_arguments(plan), plan.workload.global_batch)
    reading = read_log(log, on=plan.hardware)
    assert reading.plan.layout == plan.layout
    assert reading.plan.workload == plan.workload
    assert replace(reading.plan.model, name="") == replace(plan.model, name="")


def test_arguments_of_former_releases_at_their_defaults_change_nothing(tmp_path):
    plan = case_plan(*CASES[3])
    arguments = dumped_arguments(plan)
    former = {
        "async_tensor_model_parallel_allreduce": "True",
        "encoder_tensor_model_parallel_size": "0",
        "moe_extended_tp": "False",
        "retro_encoder_layers": "2",
        "pipeline_model_parallel_split_rank": "None",
    }
    plain = read_log(write_log(tmp_path, arguments, 64), on=plan.hardware)
    told = read_log(write_log(tmp_path, arguments | former, 64), on=plan.hardware)
    assert told.plan == plain.plan
    assert told.notes == plain.notes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_shuffle_degree", "4"),
        ("use_hetero_pipeline", "True"),
        ("encoder_tensor_model_parallel_size", "2"),
        ("attention_compression_heads", "8"),
    ],
)
def test_an_argument_that_nobody_here_reads_refuses_the_dump(name, value, tmp_path):
    plan = case_plan(*CASES[3])
    arguments = {**dumped_arguments(plan), name: value}
    with pytest.raises(BadInput) as refusal:
        read_log(write_log(tmp_path, arguments, 64), on=plan.hardware)
    assert name.replace("_", "-") in str(refusal.value)


def test_any_argument_that_is_set_otherwise_is_read_refused_or_of_no_plan(tmp_path):
    """What a command says of an option, a dump with its argument says too."""
    plan = case_plan(*CASES[3])
    arguments = dumped_arguments(plan)
    plain = read_log(write_log(tmp_path, arguments, 64), on=plan.hardware)
    draw = random.Random(32)
    switches = [option for option in option_table().values() if option.value_count == "0"]
    for option in draw.sample(switches, 60):
        arguments_set = arguments | {option.dest: str(not option.clears)}
        if arguments_set == arguments:
            continue
        path = write_log(tmp_path, arguments_set, 64)
        words = rebuild_command(parse_log(path.read_text()).arguments)
        spellings = [o.name for o in option_table().values() if o.dest == option.dest]
        assert any(f" {name}" in words for name in spellings), option.name
    assert plain.plan.layout == plan.layout


@pytest.mark.parametrize(
    ("changes", "field", "nearest"),
    [
        ({"recompute": (Recompute.FULL,)}, "layout.recompute", "none"),
        ({"dispatcher": DispatcherKind.ALL_TO_ALL}, "layout.dispatcher", "deepep"),
        ({"zero": 0, "overlap": (Overlap.GRAD,)}, "layout.zero", "1"),
    ],
)
def test_a_job_whose_choices_are_not_those_of_its_log_is_refused(changes, field, nearest, tmp_path):
    plan = case_plan(*CASES[3])
    log = write_log(tmp_path, dumped_arguments(plan), plan.workload.global_batch)
    other = build_search_plan(plan.model, plan.workload, plan.hardware, plan.layout)
    assert mw.diagnose(log, plan=other).job == other
    layout = replace(plan.layout, **changes)
    other = build_search_plan(plan.model, plan.workload, plan.hardware, layout)
    with pytest.raises(BadInput) as refusal:
        mw.diagnose(log, plan=other)
    (reason,) = refusal.value.reasons
    assert (reason.field, reason.nearest) == (field, nearest)


def test_what_a_refusal_of_a_dump_asks_for_is_given_beside_it(tmp_path):
    plan = case_plan(*CASES[3])
    arguments = dumped_arguments(plan)
    plain = read_log(write_log(tmp_path, arguments, 64), on=plan.hardware)
    log = write_log(tmp_path, arguments | {"expert_shuffle_degree": "4"}, 64)
    with pytest.raises(BadInput) as refusal:
        read_log(log, on=plan.hardware)
    option, _, setting = refusal.value.reasons[0].nearest.partition(" ")
    assert option == "--set"
    assert read_log(log, on=plan.hardware, overrides=[setting]).plan == plain.plan
    without_experts = {name: text for name, text in arguments.items() if name != "num_experts"}
    with pytest.raises(BadInput) as refusal:
        read_log(write_log(tmp_path, without_experts, 64), on=plan.hardware)
    assert refusal.value.reasons[0].nearest == "--set --num-experts=..."
