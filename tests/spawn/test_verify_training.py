"""`moewright verify` of a job: its layout trains what one process trains, or exit code 1 tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.cli.main import main
from moewright.codec import fingerprint, write_json
from moewright.engine.comm.collectives import AsyncCollective
from moewright.engine.kernels.products import NarrowProducts
from moewright.engine.model import router_losses
from moewright.engine.model.transformer import ModelOutput
from moewright.engine.optim import flat_buffers
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run import micro_batch_passes, step
from moewright.rules.timetable.stages import Chunk
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, LossSpec

pytestmark = pytest.mark.spawn


def write_plan(
    folder: Path, layout: str, precision: Dtype, model: ModelSpec = tiny_jobs.MODEL
) -> Path:
    """Write a plan of two ranks with every loss and a norm that clips each step."""
    data = tiny_jobs.write_corpus(folder / "corpus")
    loss = LossSpec(aux_coeff=0.05, seq_aux_coeff=0.01, z_coeff=0.001)
    workload = tiny_jobs.build_workload(data, precision=precision, loss=loss)
    workload = replace(workload, optimizer=replace(workload.optimizer, clip_norm=1.0))
    plan = tiny_jobs.build_plan(workload, layout, world_size=2, model=model)
    own = fingerprint(plan.model, plan.workload, plan.hardware, plan.layout)
    path = folder / "plan.json"
    write_json(path, replace(plan, fingerprint=own))
    return path


def test_a_layout_trains_what_one_process_trains_in_fp32_and_in_eight_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(tiny_jobs.MODEL, mtp_layers=1)
    path = write_plan(tmp_path, "ep2,mbs2", Dtype.MXFP8, model)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"))) == 0
    wide, narrow = json.loads((tmp_path / "out" / "training.json").read_text())["checks"]
    assert (wide["precision"], narrow["precision"]) == ("fp32", "mxfp8")
    assert wide["clipped_steps"] == wide["steps"] == 3
    kinds = {line["kind"] for line in wide["lines"]}
    assert kinds == {
        "loss",
        "auxiliary loss",
        "gradient norm",
        "gradient",
        "size of gradient",
        "slope of the loss",
        "weight",
    }
    losses = ("aux_coeff", "seq_aux_coeff", "z_coeff", "mtp_coeff")
    update = ("lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm")
    names = [line["name"] for line in wide["settings"]]
    assert names == [f"train.{name}" for name in (*losses, *update, "seed")]
    slopes = [line for line in wide["lines"] if line["kind"] == "slope of the loss"]
    assert len(slopes) >= 16  # a line for each kind of weight
    assert max(line["bound"] for line in slopes) < 0.05
    assert all(line["changed"] for line in wide["settings"])
    # Bounds in fp32 are those of sums in another order, in 8 bits what rounding does there.
    assert max(line["bound"] for line in wide["lines"] if line["kind"] == "gradient") < 1e-3
    assert max(line["bound"] for line in narrow["lines"] if line["kind"] == "gradient") > 1e-2
    assert "3 steps in mxfp8, 3 clipped" in capsys.readouterr().out


def test_an_auxiliary_loss_that_is_not_divided_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layout divides it then, so that all agree: each micro-batch twice shows it."""
    monkeypatch.setattr(
        micro_batch_passes.MicroBatchPasses, "_aux_divisor", lambda passes, micro_batch: 1.0
    )
    path = write_plan(tmp_path, "ep2,mbs2", Dtype.FP32)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"), "--steps", "1")) == 1
    output = capsys.readouterr().out
    assert "each micro-batch twice: auxiliary loss 1: 1.0e+00 apart, at most 1.0e-05" in output
    (check,) = json.loads((tmp_path / "out" / "training.json").read_text())["checks"]
    failed = {(line["run"], line["name"]) for line in check["lines"] if not line["holds"]}
    assert ("each micro-batch twice", "layers.0.moe.router.weight") in failed
    assert {run for run, _ in failed} == {"each micro-batch twice"}


def test_what_is_lost_in_every_layout_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that are not added, gradients that pull half as strongly, and clipping."""
    sum_losses = micro_batch_passes.MicroBatchPasses._sum_losses

    def halve_auxiliary_gradients(
        passes: micro_batch_passes.MicroBatchPasses, chunk: Chunk, number: int, out: ModelOutput
    ) -> torch.Tensor:
        divisor = passes._aux_divisor(number)
        return sum_losses(passes, chunk, number, out) - out.aux_losses.sum() / divisor / 2

    monkeypatch.setattr(
        router_losses, "aux_loss_coefficients", lambda loss: (loss.aux_coeff, 0.0, 0.0, 0.0)
    )
    monkeypatch.setattr(
        micro_batch_passes.MicroBatchPasses, "_sum_losses", halve_auxiliary_gradients
    )
    monkeypatch.setattr(step, "clipping_factor", lambda workload, grad_norm: 1.0)
    path = write_plan(tmp_path, "mbs2", Dtype.FP32)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"), "--steps", "2")) == 1
    output = capsys.readouterr().out
    for lost in ("seq_aux_coeff", "z_coeff", "clip_norm"):
        assert f"with another train.{lost}: nothing changes" in output
    (check,) = json.loads((tmp_path / "out" / "training.json").read_text())["checks"]
    failed = {(line["run"], line["name"]) for line in check["lines"] if not line["holds"]}
    assert ("weights moved along a gradient", "moe.router") in failed
    assert {run for run, _ in failed} == {
        "weights moved along a gradient",
        "AdamW as it is written",
    }


def test_a_moment_that_a_checkpoint_loses_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = DistributedOptimizer.load

    def lose(optimizer: DistributedOptimizer, *read: Any) -> None:
        take(optimizer, *read)
        for bucket in optimizer.buckets:
            for segment in bucket.segments:
                for tensor in segment.exp_avg_sq.tensors:
                    tensor.zero_()

    monkeypatch.setattr(DistributedOptimizer, "load", lose)
    path = write_plan(tmp_path, "ep2,mbs2", Dtype.FP32)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"), "--steps", "2")) == 1
    (check,) = json.loads((tmp_path / "out" / "training.json").read_text())["checks"]
    failed = {(line["run"], line["kind"]) for line in check["lines"] if not line["holds"]}
    assert failed == {("saved and restored", "weight")}
    assert "saved and restored: weight" in capsys.readouterr().out


def test_an_expert_whose_gradient_is_a_fifth_too_small_in_eight_bits_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding moves a gradient by a seventh, but hardly along itself."""
    contract = NarrowProducts._contract_columns

    def shrink_the_last(products: NarrowProducts, *operands: Any) -> torch.Tensor:
        grads = contract(products, *operands)
        if grads.dim() == 3:
            grads[-1].mul_(0.8)
        return grads

    monkeypatch.setattr(NarrowProducts, "_contract_columns", shrink_the_last)
    path = write_plan(tmp_path, "ep2,mbs2", Dtype.MXFP8)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"))) == 1
    assert "layout: size of gradient layers.0.moe.experts.down.weight[3]: 2.0e-01 apart" in (
        capsys.readouterr().out
    )
    wide, narrow = json.loads((tmp_path / "out" / "training.json").read_text())["checks"]
    assert all(line["holds"] for line in wide["lines"])
    too_far = {line["name"] for line in narrow["lines"] if not line["holds"]}
    assert all(name.endswith("[3]") for name in too_far)


def test_gradients_of_one_rank_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        flat_buffers,
        "start_reduce_scatter",
        lambda out, tensor, group: AsyncCollective(
            out=out.copy_(tensor[: len(out)]), tensor=tensor, work=None
        ),
    )
    path = write_plan(tmp_path, "mbs2", Dtype.FP32)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"), "--steps", "1")) == 1
    assert "layout: gradient norm 1: " in capsys.readouterr().out


def test_what_one_process_cannot_compute_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_plan(tmp_path, "ep2,mbs2,capacity1.0", Dtype.FP32)
    assert main(("verify", str(path), "--out", str(tmp_path / "out"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "layout.capacity=1: drops rows by the tokens of a rank" in line
    assert main(("verify", str(path), "--out", str(tmp_path), "--lr", "0.1")) == 2
    assert "are for a checkpoint" in capsys.readouterr().err
    assert main(("verify", str(tmp_path), "--out", str(tmp_path / "out"))) == 2
    assert "--batch: is needed with a checkpoint" in capsys.readouterr().err
