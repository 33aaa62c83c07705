"""The Triton kernels compile for an H100 and a B200 where there is none.

The interpreter runs programs that the compiler refuses.

Run as a program, since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moewright.engine.kernels import fused, scaled_products
from moewright.engine.kernels.columns import ColumnForm, NarrowInput
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.router_losses import RouterLossTerms
from moewright.engine.kernels.low_precision import Groups, pad_groups
from moewright.engine.kernels.scaled_products import ScaledProduct
from moewright.rules.low_precision import find_recipe
from moewright.spec.model import RouterSpec, ScoreFunction
from moewright.spec.workload import Dtype, TensorScaling, Workload
from selection import thorough

RECIPES = (
    (Dtype.FP8, TensorScaling.CURRENT),
    (Dtype.FP8, TensorScaling.BLOCKWISE),
    (Dtype.MXFP8, TensorScaling.CURRENT),
    (Dtype.NVFP4, TensorScaling.CURRENT),
)
TOKENS, WIDTH, HEADS, HEAD, EXPERTS, VOCABULARY = 24, 96, 3, 64, 8, 5000


def call_all() -> None:
    """Call every kernel in bf16, and each of its branches."""
    from moewright.engine.kernels.fused.table import triton_kernels

    kernels = triton_kernels()
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.ones(WIDTH, dtype=torch.bfloat16)
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    ones = torch.ones(TOKENS)
    kernels.permute(x, ids)
    kernels.unpermute(x, ids[:, None], True)
    for row_weights, clamped in ((None, False), (ones, True)):
        kernels.swiglu(x, row_weights, clamped)
        kernels.swiglu_backward(x[:, : WIDTH // 2], x, row_weights, clamped)
    kernels.rms_norm(x, weight, 1e-6)
    for scale in (None, ones[:, None]):
        kernels.rms_norm_backward(x, x, weight, 1e-6, scale, slice(1, 9))
    angle = torch.zeros(TOKENS // 2, HEAD // 2)
    for heads in (1, HEADS):
        kernels.rotate(torch.zeros(2, TOKENS // 2, heads, HEAD, dtype=torch.bfloat16), angle, angle)
    logits = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bfloat16)
    kernels.cross_entropy(logits, ids)
    kernels.sum_exp(logits[:, :-3], ones)
    for log_sum in (None, ones):
        kernels.cross_entropy_backward(ones, logits, ids, log_sum, VOCABULARY - 3)
    for score in set(ScoreFunction) - {ScoreFunction.SPARSE_MIXER}:  # which has no kernel
        scores = torch.zeros(TOKENS, EXPERTS, requires_grad=True)
        _, weights, scored = kernels.route_tokens(
            scores, RouterSpec(top_k=2, score=score), torch.zeros(EXPERTS), None
        )
        (weights.sum() + scored.sum()).backward()
    grouped = RouterSpec(
        top_k=2, score=ScoreFunction.SIGMOID, groups=4, top_groups=2, group_scores=2
    )
    kernels.route_tokens(torch.zeros(TOKENS, EXPERTS), grouped, torch.zeros(EXPERTS), None)
    logits, scores = torch.zeros(2, TOKENS, EXPERTS, requires_grad=True)
    share, weights = torch.zeros(EXPERTS), torch.zeros(TOKENS)
    terms = RouterLossTerms(
        coefficients=(1.0, 1.0, 1.0, 1.0),
        shares=(share, torch.zeros(TOKENS, EXPERTS), share),
        is_normalized=True,
        ranks=1,
    )
    masked = replace(terms, mask=weights, sequence_weights=weights, total=1, sequences=1)
    for some in (terms, masked):
        kernels.router_losses(logits, scores, some).sum().backward()
    generator = torch.Generator().manual_seed(0)
    for precision, scaling in RECIPES:
        workload = Workload(seq_len=1, global_batch=1, precision=precision, tensor_scaling=scaling)
        recipe = find_recipe(workload)
        assert recipe is not None
        for operand in (recipe.inputs, recipe.weights, recipe.gradients):
            for tensor in (x, x.mT):
                kernels.convert(tensor, operand, Groups(), generator)
        kernels.convert_weight(x, recipe.weights)
        padding = pad_groups(torch.tensor([5, TOKENS], dtype=torch.int32), TOKENS, 128)
        rotated = recipe.hadamard_rows
        kept = None if rotated else recipe.inputs
        paddings = (None, padding) if precision is Dtype.MXFP8 else (padding,)
        for spread in paddings if recipe.gradients.block else ():
            form = ColumnForm(operand=recipe.gradients, padding=spread, hadamard_rows=rotated)
            kernels.convert_gradient(x, form)
            kernels.convert_columns(x, replace(form, kept=kept), generator)
            if not rotated:
                rows = kernels.convert(x, recipe.inputs, Groups(), None)
                form = replace(form, operand=recipe.inputs)
                kernels.convert_columns(NarrowInput(dtype=x.dtype, rows=rows), form, None)
        for operand in (recipe.inputs, recipe.gradients):
            kernels.convert(x, operand, Groups(), None).widen(torch.bfloat16)
    has = frozenset(ScaledProduct)
    with patch.object(scaled_products, "_products_of", lambda device: has):
        call_in_tiles(kernels, torch.zeros(128, 128, dtype=torch.bfloat16), generator)


def call_in_tiles(kernels: KernelSet, x: torch.Tensor, generator: torch.Generator) -> None:
    """Call what writes scales, or reads them, in the order of tensor cores."""
    for precision in (Dtype.MXFP8, Dtype.NVFP4):
        recipe = find_recipe(Workload(seq_len=1, global_batch=1, precision=precision))
        assert recipe is not None
        rows = kernels.convert(x, recipe.inputs, Groups(), None)
        assert rows.in_tiles
        rows.widen(torch.bfloat16)
        kernels.convert(x, recipe.gradients, Groups(), generator)
        kernels.convert_weight(x, recipe.weights)
        form = ColumnForm(operand=recipe.gradients, hadamard_rows=recipe.hadamard_rows)
        kernels.convert_columns(x, form, generator)
        kernels.convert_gradient(x, form)
        if not recipe.hadamard_rows:
            kernels.convert_columns(NarrowInput(dtype=x.dtype, rows=rows), form, None)


def compile_all(capability: int) -> None:
    """Compile each kernel that is launched, instead of running it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Card:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled = set()
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, **settings: Any) -> None:
        result = run(kernel, *args, **{**settings, "warmup": True})
        assert result.asm["cubin"]
        compiled.add(kernel.__name__)

    triton.runtime.driver.set_active(Card())
    JITFunction.run = compile_only
    call_all()
    print(*sorted(compiled))


def list_launched() -> list[str]:
    """List the kernels in the sources: private Triton functions that no other one calls."""
    launched = set()
    for path in Path(fused.__file__).parent.glob("triton_*.py"):
        functions = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
        ]
        called = {
            node.func.id
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        names = {function.name for function in functions} - called
        launched |= {name for name in names if name.startswith("_")}
    return sorted(launched)


@pytest.mark.thorough
@pytest.mark.parametrize("capability", ["90", thorough("100")])
def test_every_kernel_compiles(capability: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs the package triton")
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, __file__, capability],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list_launched()


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
