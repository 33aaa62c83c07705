"""The private names of torch that the engine uses, and what rests on each.

torch promises nothing of them: a new release may move or change one. No other module of the package
takes a private name from torch (tests/packaging/test_private_names_of_torch.py), so what a new
torch breaks fails here. What takes a second to import is imported where it is first used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

# The stores of a rendezvous. torch.distributed has them too, but its types do not say so.
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

# A profile of passes that run on threads of their own: without it their operations are missing.
from torch._C._profiler import _ExperimentalConfig as ProfilerConfig

# A model without memory: without it there is no dry run of one rank of a large world.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler

# The modes of a thread: the thread of a pass beside another enters those of the main thread, or
# the ledger would not count what the pass does.
from torch.overrides import _get_current_function_mode_stack as function_modes

# Every operation as it is dispatched: the ledger's counts, recorded graphs, dry runs.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

# The tensors in nested arguments of operations.
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = (
    "DEVICE_QUESTION",
    "FLASH",
    "FLASH_BACKWARD",
    "FLASH_FOR_CPU",
    "FLASH_FOR_CPU_BACKWARD",
    "FLASH_ROWS",
    "FLASH_ROWS_BACKWARD",
    "HOST_READ",
    "ONEDNN_LINEAR",
    "SOFTMAX_BACKWARD",
    "AllGather",
    "FakeTensorMode",
    "FileStore",
    "PrefixStore",
    "ProfilerConfig",
    "ReduceScatter",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "communicator",
    "compile_counters",
    "count_uses",
    "create_fake_store",
    "disable_modes",
    "dispatch_modes",
    "foreach_norm",
    "function_modes",
    "group_timeout",
    "has_dispatch_modes",
    "has_fake_mode",
    "is_profiling",
    "is_view",
    "keep_shards",
    "keeps_graph",
    "mark_dynamic",
    "qualified_name",
    "record_memory",
    "storage_id",
    "tree_iter",
    "tree_leaves",
    "tree_map_only",
    "write_memory_snapshot",
)


def __getattr__(name: str) -> Any:
    # The collectives of fully_shard, which ours replace to book their bytes (ZeRO-2 and -3). Ranks
    # without them do not wait 1.5 s for the import.
    if name in ("AllGather", "ReduceScatter"):
        from torch.distributed.fsdp._fully_shard import _fsdp_api

        return getattr(_fsdp_api, name)
    raise AttributeError(name)


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage for as long as the storage lives.

    Tensors without data have one too, unlike an address.
    """
    return int(tensor.untyped_storage()._cdata)


# The operation by which the host reads a value of a device (`item`): dry runs answer it, and graphs
# refuse it.
HOST_READ: Any = torch.ops.aten._local_scalar_dense

# The question of a tensor's device, which torch dispatches too for tensors of Python's own: half of
# what a dry run dispatches. It computes nothing, so nobody counts it.
DEVICE_QUESTION: Any = torch.ops.prim.device.default

# The gradient of softmax from its output, as torch's own autograd calls it.
SOFTMAX_BACKWARD: Any = torch.ops.aten._softmax_backward_data

# FlashAttention and its gradient: of sequences on a GPU, on a CPU, and of rows with their ends.
FLASH_ROWS: Any = torch.ops.aten._flash_attention_forward
FLASH_ROWS_BACKWARD: Any = torch.ops.aten._flash_attention_backward
FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
FLASH_FOR_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_FOR_CPU_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# x @ w.T; what torch.compile calls on a CPU. None where torch was built without oneDNN.
ONEDNN_LINEAR: Any = (
    torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
)


def foreach_norm(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor, in `dtype`, by one kernel for all."""
    return list(torch._foreach_norm(list(tensors), dtype=dtype))


def count_uses(tensor: torch.Tensor) -> int:
    """Count who holds a tensor: Python's objects are one together, each holder in C++ is another.

    Threads of gloo hold the tensors of a collective for a moment after it is over.
    """
    of_private_api: Any = tensor
    return int(of_private_api._use_count())


def has_dispatch_modes() -> bool:
    """Tell whether somebody looks at every operation: a compiled kernel would hide its own."""
    return torch._C._len_torch_dispatch_stack() > 0


def has_fake_mode() -> bool:
    """Tell whether tensors are made without memory, as in a dry run."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def keep_shards(module: FSDPModule) -> None:
    """Let fully_shard keep the shards of a module that it has made; weights are not assigned anew.

    A shard with fewer rows than others is padded when it is made. At the first forward fully_shard
    tells by its address whether it is still that one, and pads it once more where tensors have no
    memory, in a dry run.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    parameters: Sequence[Any] = () if group is None else group.fsdp_params
    for parameter in parameters:
        parameter.reset_sharded_param = lambda: None


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Say that the first dim changes from call to call, so that it is compiled once for all."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """Return what torch.compile counted in this process: graphs, and breaks by their reasons."""
    from torch._dynamo.utils import counters

    return counters


def is_profiling() -> bool:
    """Tell whether a profiler of torch runs, which ranges with names are for."""
    return profiler._is_profiler_enabled


def is_view(tensor: torch.Tensor) -> bool:
    """Tell whether autograd takes a tensor for a view of another."""
    return tensor._is_view()


def keeps_graph() -> bool:
    """Tell, inside a backward, whether the graph that it goes through is kept for another."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def qualified_name(operation: Any) -> str:
    """Return the name of an operation with its namespace, without its overload."""
    return str(operation.overloadpacket._qualified_op_name)


def communicator(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the address of the NCCL communicator by which a group sends on a device."""
    return int(_find_backend(group, device)._comm_ptr())


def _find_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what a group communicates by on a device: its options, NCCL's communicator."""
    return group._get_backend(device)


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the time that collectives of a group may take, None for a fake one."""
    options = _find_backend(group, device).options
    return None if options is None else options._timeout


def create_fake_store() -> Store:
    """Return the store of a world in which no other rank runs; its backend is "fake"."""
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return cast(Store, FakeStore())


def record_memory(*, enabled: bool) -> None:
    """Record every allocation of the CUDA allocator from now on, or no longer."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def write_memory_snapshot(path: Path) -> None:
    """Write what `record_memory` recorded, as pytorch.org/memory_viz reads it."""
    torch.cuda.memory._dump_snapshot(str(path))
