"""Starts of torchtitan on a machine without GPUs, up to the tokenizer.

`python start.py TORCHTITAN < modules.jsonl > verdicts.jsonl` runs torchtitan's own code: the
configuration, its checks, meshes, the model on torch's meta device, its sharding and its pipeline,
the optimizer and the schedule of its rate. What needs a GPU or another package is a stand-in:
kernels, data, and torch's fake process group, in which this process is rank 0 of the world. FSDP
itself is torch's, and left out; spmd_types, which checks the sharding, is needed.

A module is {"id", "text", "world_size"}; its verdict has the same id and `refusal`, "" where the
trainer asks for its tokenizer.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

_PACKAGES = (
    *("tyro", "grain", "datasets", "torchdata", "tokenizers", "tensorboard", "wandb", "torchao"),
    *("torch_checkpointing", "einops", "safetensors", "huggingface_hub", "jinja2", "renderers"),
    *("triton", "torchvision", "PIL", "transformers", "deep_ep"),
)


class StartReached(Exception):
    """The trainer asks for its tokenizer."""


class _StandIn(type):
    """The type of stand-ins: each name in one is another, and each call gives what it is given."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _make_stand_in(name)
        setattr(cls, name, value)
        return value

    def __getitem__(cls, key):
        return cls

    def __call__(cls, *arguments, **options):
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if is_decorator else object.__new__(cls)


def _make_stand_in(name: str) -> _StandIn:
    call = _StandIn.__call__
    members = {
        "__call__": lambda self, *a, **k: call(type(self), *a, **k),
        "__getattr__": lambda self, member: getattr(type(self), member),
    }
    return _StandIn(name, (), members)


class _Package(types.ModuleType):
    """A module in which every name is a stand-in."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _make_stand_in(name)
        setattr(self, name, value)
        return value


class _PackageFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of stand-ins for packages that are not there."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        pass


def _prepare() -> types.ModuleType:
    """Replace what needs a GPU, and return torchtitan's trainer."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(set_device=lambda device: None)
    utils.get_local_device = lambda: torch.device("meta")
    utils.get_peak_flops = lambda name: 1.0
    from torchtitan.distributed import fsdp
    from torchtitan.distributed import utils as distributed_utils

    fsdp.apply_fsdp_to_decoder = lambda *arguments, **options: None
    distributed_utils.set_determinism = lambda *arguments, **options: None
    from torchtitan import trainer

    torch.nn.Module.to_empty = lambda self, **options: self
    for model in (trainer.BaseModel, *trainer.BaseModel.__subclasses__()):
        model.init_weights = lambda self, **options: None
    return trainer


def start(trainer, text: str, world_size: int) -> str:
    """Start torchtitan; return what it says against a module, "" for nothing."""
    from torchtitan.distributed.parallel_dims import ParallelDims

    def join_fake_group(self):
        distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        return ParallelDims.from_config(self.config.parallelism, world_size)

    def stop(self, **options):
        raise StartReached

    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(world_size))
    trainer.Trainer.init_distributed = join_fake_group
    try:
        space = {"__name__": "moewright_plan"}
        exec(compile(text, "moewright_plan.py", "exec"), space)
        config = space["config"]()
        type(config.metrics).build = lambda self, **options: _Metrics()
        type(config.tokenizer).build = stop
        trainer.Trainer(config)
    except StartReached:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return "the trainer asks for no tokenizer"


class _Metrics:
    """Stands in for what shows figures of a device."""

    color = SimpleNamespace(blue="", red="", reset="", green="", yellow="")
    device_memory_monitor = SimpleNamespace(
        device_name="GPU",
        get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0),
    )


def main(torchtitan: str) -> None:
    """Read modules from standard input, write a verdict for each to standard output."""
    sys.path.insert(0, torchtitan)
    if importlib.util.find_spec("spmd_types") is None:
        sys.exit("spmd_types is missing: pip install --no-deps spmd_types==0.2.3")
    sys.meta_path.append(_PackageFinder())
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    trainer = _prepare()
    verdicts = sys.stdout
    for line in sys.stdin:
        module = json.loads(line)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            refusal = " ".join(start(trainer, module["text"], module["world_size"]).split())
        print(json.dumps({"id": module["id"], "refusal": refusal}), file=verdicts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
