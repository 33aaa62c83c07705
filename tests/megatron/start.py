"""Starts of Megatron-LM on a machine without GPUs, up to the first forward pass of the schedule.

`python start.py MEGATRON_LM < commands.jsonl > verdicts.jsonl` runs Megatron-LM's own code: parser,
validation, configuration classes, process groups, stages of every pipeline rank, learning-rate
schedule and pipeline schedule. What needs a GPU or Transformer Engine is a stand-in: a device of
the named capability, kernels that exist and are never called, and torch's fake process group, in
which this process is rank 0 of the world.

A command is {"id", "flags", "environment", "world_size", "capability"}; its verdict has the same id
and `refusal`, "" where the first forward pass is reached.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import logging
import os
import sys
import types
import typing
import warnings
from types import SimpleNamespace

_ENGINE_VERSION = "2.16.0"  # of Transformer Engine; newer than every check of Megatron-LM's
_OWN_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "NVTE_CPU_OFFLOAD_V1")


_KERNEL_PACKAGES = (
    *("transformer_engine", "transformer_engine_torch", "deep_ep", "hybrid_ep_cpp"),
    *("apex", "fused_weight_gradient_mlp_cuda"),
)


class FirstForward(Exception):
    """The schedule has asked for its first forward pass."""


class _Kernel(type):
    """The type of stand-ins for modules; every name in them is another."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_kernel(cls, name)


class _KernelModule(types.ModuleType):
    """A module in which every name is a stand-in."""

    def __getattr__(self, name):
        if name == "__version__":
            return _ENGINE_VERSION
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_kernel(self, name)


def _make_kernel(owner, name: str):
    import torch

    if name == "get_cpu_offload_context":
        return lambda *arguments, **options: (contextlib.nullcontext(), None)
    members = {
        "__init__": _take_optimizer_options,
        "__getattr__": _give_weight,
        "set_num_sms": lambda count: None,
        "save_original_input": False,
    }
    # Names of modules are small; only in them every name is another stand-in.
    kind = _Kernel if name.islower() else type
    kernel = kind(name, (torch.nn.Module,), members)
    setattr(owner, name, kernel)
    return kernel


def _take_optimizer_options(
    self,
    *arguments,
    master_weight_dtype=None,
    exp_avg_dtype=None,
    exp_avg_sq_dtype=None,
    use_decoupled_grad=None,
    use_grouped_tensor=None,
    **options,
):
    import torch

    torch.nn.Module.__init__(self)


def _give_weight(self, name):
    """Give a module of the stand-in the weights and biases that it is asked for."""
    import torch

    if not name.startswith(("weight", "bias")):
        return torch.nn.Module.__getattr__(self, name)
    weight = torch.nn.Parameter(torch.empty(1))
    self._parameters[name] = weight
    return weight


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of stand-ins for Transformer Engine, DeepEP and Apex."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in _KERNEL_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _KernelModule(spec.name)

    def exec_module(self, module):
        pass


def start(command: dict) -> str:
    """Start Megatron-LM; return what it says against the command, "" for nothing."""
    for name in _OWN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(command["environment"], WORLD_SIZE=str(command["world_size"]), RANK="0")
    sys.argv = ["pretrain_gpt.py", *command["flags"]]
    _set_device(command["capability"])
    output = io.StringIO()
    steps: list[str] = []
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            for step, act in _STEPS:
                steps.append(step)
                act(command)
    except FirstForward:
        return ""
    except SystemExit:
        return f"{steps[-1]}: {output.getvalue().strip().splitlines()[-1]}"
    except Exception as error:
        return f"{steps[-1]}: {type(error).__name__}: {error}"
    finally:
        _forget()
    return "the schedule ends without a forward pass"


def _set_device(capability) -> None:
    import torch

    major, minor = capability
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=major, minor=minor)
    torch.cuda.current_device = lambda: torch.device("meta")
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = SimpleNamespace


def _read_arguments(command) -> None:
    from megatron.training.arguments import parse_and_validate_args

    parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})


def _build_configurations(command) -> None:
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.global_vars import get_args

    from megatron import training

    training.utils.has_nvrx_checkpointing_async_support = lambda: True
    args = get_args()
    args.config_of_test = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


def _form_groups(command) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.training.global_vars import get_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    args = get_args()
    torch.distributed.init_process_group(
        "fake", rank=0, world_size=args.world_size, store=FakeStore()
    )
    # The groups of both levels need einops, which is not in our own requirements.
    levels = args.hierarchical_context_parallel_sizes if parallel_state.HAVE_EINOPS else None
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=levels,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )


def _build_first_stage(command) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.global_vars import get_args

    config = get_args().config_of_test.model
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    vp_stage = 0 if config.virtual_pipeline_model_parallel_size else None
    config.transformer.perform_initialization = False
    config.transformer.init_model_with_meta_device = True
    with _without_memory():
        builder.build_model(groups, vp_stage=vp_stage)
        if get_args().transformer_impl == "local":
            from megatron.core.models.gpt.gpt_layer_specs import LNImpl

            # The norm before the head, which the last stage has.
            LNImpl(config=config.transformer, hidden_size=config.transformer.hidden_size)


class _Accepted(Exception):
    """The optimizer's checks are passed: it asks for gradient buffers."""


def _build_optimizer(command) -> None:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training.global_vars import get_args

    config = get_args().config_of_test
    chunk = _model_chunk(config.model.transformer)
    with contextlib.suppress(_Accepted):
        get_megatron_optimizer(config.optimizer, [chunk], use_gloo_process_groups=False)


@property
def _gradient_buffers(self):
    raise _Accepted


def _lay_out_stages(command) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.training.global_vars import get_args

    args = get_args()
    config = args.config_of_test.model.transformer
    if config.pipeline_model_parallel_layout is not None:
        return  # its own checks count the layers
    chunks = config.virtual_pipeline_model_parallel_size
    layers = 0
    for rank in range(config.pipeline_model_parallel_size):
        for chunk in range(chunks or 1):
            stage = chunk if chunks else None
            layers += get_num_layers_to_build(config, stage, rank)
            get_transformer_layer_offset(config, stage, rank)
    assert layers == config.num_layers, f"stages hold {layers} of {config.num_layers} layers"


def _build_learning_rate(command) -> None:
    from megatron.training.training import get_optimizer_param_scheduler

    get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))


def _run_schedule(command) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import schedules
    from megatron.training.global_vars import get_args

    args = get_args()
    config = args.config_of_test.model.transformer
    chunk_count = args.virtual_pipeline_model_parallel_size or 1
    chunks = [_model_chunk(config) for _ in range(chunk_count)]
    run = schedules.get_forward_backward_func()
    with _without_memory():
        run(
            forward_step_func=_first_forward,
            data_iterator=[iter(()) for _ in chunks] if chunk_count > 1 else iter(()),
            model=chunks,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )


def _model_chunk(config):
    import torch

    chunk_class = type("ModelChunk", (torch.nn.Module,), {"ddp_config": _gradient_buffers})
    chunk = chunk_class()
    chunk.config = config
    chunk.model_type = 1
    chunk.set_input_tensor = lambda tensor: None
    chunk.build_schedule_plan = _first_forward
    return chunk


def _first_forward(*arguments, **options):
    raise FirstForward


@contextlib.contextmanager
def _without_memory():
    """Make all tensors on torch's meta device, whatever device the code names."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Redirection(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            options = dict(options or {})
            if function is torch.Tensor.cuda:
                return arguments[0]
            if options.get("device") is not None:
                options["device"] = "meta"
            if options.get("pin_memory"):
                options["pin_memory"] = False
            return function(*arguments, **options)

    with torch.device("meta"), Redirection():
        yield


def _forget() -> None:
    """Forget all global state of a start."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.models import backends
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training import global_vars

    backends.LNImpl = FusedLayerNorm  # a local model with RMSNorm changes it for all after it
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    destroy_num_microbatches_calculator()
    for name in vars(global_vars):
        if name.startswith("_GLOBAL_"):
            setattr(global_vars, name, None)


_STEPS = (
    ("arguments", _read_arguments),
    ("configurations", _build_configurations),
    ("groups", _form_groups),
    ("stages", _lay_out_stages),
    ("model", _build_first_stage),
    ("optimizer", _build_optimizer),
    ("learning rate", _build_learning_rate),
    ("schedule", _run_schedule),
)


def main(megatron_lm: str) -> None:
    """Read commands from standard input, write a verdict for each to standard output."""
    sys.path.insert(0, megatron_lm)
    if not hasattr(typing, "override"):  # Python 3.11; Megatron-LM's own images have 3.12
        setattr(typing, "override", lambda method: method)  # noqa: B010
    sys.meta_path.insert(0, _KernelFinder())
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    verdicts = sys.stdout
    for line in sys.stdin:
        command = json.loads(line)
        refusal = " ".join(start(command).split())
        print(json.dumps({"id": command["id"], "refusal": refusal}), file=verdicts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
