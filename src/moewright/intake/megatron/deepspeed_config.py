"""DeepSpeed's configuration as far as a plan depends on it, every one of its leaves accounted for.

A leaf is read, is known to change no plan, or is off. One that is about what a plan consists of and
is none of these is refused by name; the rest is named in a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moewright.codec import parse_json
from moewright.codec.files import as_table
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.intake.megatron.unread import find_topic
from moewright.spec.errors import BadInput, Reason

_BATCH = "train_batch_size"
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_STAGE = "zero_optimization.stage"
_OFFLOAD = "zero_optimization.offload_optimizer"
_OLD_OFFLOAD = "zero_optimization.cpu_offload"
_READ = frozenset({_BATCH, _MICRO_BATCH, _ACCUMULATION, _STAGE, _OLD_OFFLOAD})
_PRECISIONS = MappingProxyType(
    {"fp16.enabled": "--fp16", "bf16.enabled": "--bf16", "bfloat16.enabled": "--bf16"}
)
# Sections and settings of DeepSpeed 0.18 (deepspeed/runtime/config.py, runtime/zero/config.py) that
# change no plan: they log, schedule, check or size buffers, or the trainer itself says them.
_HARMLESS = re.compile(
    r"(optimizer|scheduler|amp|tensorboard|wandb|comet|csv_monitor|monitor_config|comms_logger"
    r"|flops_profiler|aio|checkpoint|nebula|hybrid_engine)\..*"
    r"|(fp16|bf16|bfloat16)\.(loss_scale(_window)?|(consecutive_)?hysteresis|min_loss_scale"
    r"|initial_scale_power|auto_cast|check_grad_overflow|immediate_grad_update)"
    r"|steps_per_print|wall_clock_breakdown|memory_breakdown|dump_state|gradient_clipping"
    r"|prescale_gradients|gradient_predivide_factor|sparse_gradients|zero_allow_untested_optimizer"
    r"|zero_force_ds_cpu_optimizer|dataloader_drop_last|seed|disable_allgather|graph_harvesting"
    r"|zero_optimization\.(allgather_\w+|reduce_\w+|contiguous_gradients|sub_group_size"
    r"|round_robin_gradients|stage3_\w+|ignore_unused_parameters|elastic_checkpoint"
    r"|load_from_fp32_weights|legacy_stage1|use_multi_rank_bucket_allreduce|cpu_offload_use_pin_memory"
    r"|gather_16bit_weights_on_model_save|prefetch_bucket_size|param_persistence_threshold"
    r"|max_live_parameters|max_reuse_distance|memory_efficient_linear|grad_hooks|log_\w+"
    r"|override_module_apply|module_granularity_threshold)"
    r"|zero_optimization\.offload_optimizer\.(pin_memory|buffer_count|fast_init|ratio)"
    r"|activation_checkpointing\.(contiguous_memory_optimization|number_checkpoints"
    r"|synchronize_checkpoint_boundary|profile)"
)
# On, these sections change the tokens, the sizes or the ranks of a step; their switches say so.
_SWITCHED = MappingProxyType(
    {
        "elasticity": "the batch",
        "autotuning": "the batch",
        "curriculum_learning": "the batch",
        "data_efficiency": "the batch",
        "compression_training": "the model",
    }
)
# What a plan counts in full, or otherwise, and is told.
_NOTED = re.compile(
    r"zero_optimization\.overlap_comm|data_types\.grad_accum_dtype|communication_data_type"
    r"|activation_checkpointing\.partition_activations|zero_optimization\.use_all_reduce\w*"
)
_OFF = ("", "0", "none", "null", "false", "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """What a configuration of DeepSpeed says: the leaves by their full names, "" where unknown."""

    where: str
    leaves: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        """The ZeRO stage; "" where only running tells."""
        return self.leaves.get(_STAGE, "0")

    def offload_options(self) -> dict[str, tuple[str, ...]]:
        """Return the options of Megatron-LM that move the optimizer to the host as it says."""
        device = self.leaves.get(f"{_OFFLOAD}.device", "none").casefold()
        is_old = self.leaves.get(_OLD_OFFLOAD, "false") == "true"
        if device != "cpu" and not is_old:
            return {}
        options: dict[str, tuple[str, ...]] = {"--optimizer-cpu-offload": ()}
        ratio = self.leaves.get(f"{_OFFLOAD}.ratio", "")
        if ratio:
            options["--optimizer-offload-fraction"] = (ratio,)
        return options

    def check_precision(self, options: Mapping[str, tuple[str, ...]]) -> None:
        """Check that the options have the precision that the configuration has.

        Raises:
            BadInput: they have another.
        """
        for name, option in _PRECISIONS.items():
            other = "--bf16" if option == "--fp16" else "--fp16"
            if self.leaves.get(name) == "true" and other in options and option not in options:
                rule = f"the options say {other}"
                nearest = f"--set {other}=null --set {option}=true"
                raise BadInput(self._contradiction(name, "true", rule, nearest))

    def check_batch(self, batch: int, micro_batch: int, dp: int) -> None:
        """Check that the options have the batch that the configuration has.

        Raises:
            BadInput: they have another, or more data-parallel ranks than the batch has texts.
        """
        own = self._number(_BATCH)
        micro = self._number(_MICRO_BATCH) or (micro_batch if own else 0)
        if micro and micro != micro_batch:
            rule = f"--micro-batch-size is {micro_batch}"
            nearest = f"--set --micro-batch-size={micro}"
            raise BadInput(self._contradiction(_MICRO_BATCH, str(micro), rule, nearest))
        if own and own % (micro * dp):
            ranks = own // micro
            rule = f"{own} = micro-batch {micro} x accumulation x data-parallel ranks, not {dp}"
            reason = self._contradiction(_BATCH, str(own), f"{rule}: at most {ranks} of these", "")
            raise BadInput(reason)
        own = own or micro * dp * self._number(_ACCUMULATION)
        if own and own != batch:
            rule = f"--global-batch-size is {batch}"
            nearest = f"--set --global-batch-size={own}"
            raise BadInput(self._contradiction(_BATCH, str(own), rule, nearest))

    def _number(self, name: str) -> int:
        text = self.leaves.get(name, "")
        return int(text) if text.isdecimal() else 0

    def _contradiction(self, name: str, value: str, rule: str, nearest: str) -> Reason:
        return Reason(field=f"{self.where}: {name}", value=value, rule=rule, nearest=nearest)


def read_deepspeed_config(text: str, where: str) -> DeepSpeedConfig:
    """Read a configuration of DeepSpeed, in which values may be unknown.

    Raises:
        BadInput: it is no JSON, or sets something that a plan consists of and is not read.
    """
    data = parse_json(UNKNOWN_VALUE.sub("null", text), where=where)
    leaves = dict(_flatten(as_table(data), ""))
    unread: list[str] = []
    noted: list[str] = []
    refused: list[Reason] = []
    for name, value in leaves.items():
        section = name.partition(".")[0]
        topic = _SWITCHED.get(section, "") or find_topic(name) or _find_section(name)
        is_off = value.casefold() in _OFF
        if name in _READ or name in _PRECISIONS or is_off:
            continue
        if name == f"{_OFFLOAD}.device" and value.casefold() == "cpu":
            continue
        if section in _SWITCHED and _is_off(section, leaves):
            continue
        if _NOTED.fullmatch(name):
            noted.append(f"{name}={value}")
        elif not _HARMLESS.fullmatch(name):
            if topic:
                rule = f"is about {topic} and cannot be planned here; set it to null in the file"
                refused.append(Reason(field=f"{where}: {name}", value=value[:60], rule=rule))
            else:
                unread.append(name)
    if refused:
        raise BadInput(*refused)
    notes = [f"{where}: a plan is a little off with {', '.join(noted)}"] if noted else []
    if unread:
        notes.append(f"{where}: not read: {', '.join(unread)}")
    return DeepSpeedConfig(where=where, leaves=leaves, notes=tuple(notes))


def _flatten(data: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        name = f"{section}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, bool):
            yield name, str(value).casefold()
        else:
            yield name, "" if value is None else str(value)


def _is_off(section: str, leaves: Mapping[str, str]) -> bool:
    """Whether all switches of a section are off, and it has some."""
    switches = [
        value.casefold() in _OFF
        for name, value in leaves.items()
        if name.startswith(f"{section}.") and name.endswith(".enabled")
    ]
    return bool(switches) and all(switches)


def _find_section(name: str) -> str:
    """Return what the sections are about in which each leaf changes a step."""
    if name.startswith("zero_optimization."):
        return "parallelism"
    if name.startswith(("fp16.", "bf16.", "bfloat16.")):
        return "precision"
    return "recompute" if name.startswith("activation_checkpointing.") else ""
