"""What a Megatron-LM command says about kernels, dropout and its vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moewright.api.launch_scripts import read_flags
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.intake.megatron.bash import read_commands
from moewright.intake.megatron.launch import find_launch
from moewright.intake.megatron.read import ScriptJob, interpret_launch
from moewright.rules.limits.engine_limits import unsupported_model
from moewright.spec.errors import BadInput
from moewright.spec.ledger import Component, Module
from moewright.spec.model import Activation, MixerKind
from moewright.spec.workload import (
    AttentionBackend,
    CrossEntropyKernel,
    ExpertKernels,
    Fusion,
    TrainerSpec,
    Workload,
)

SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --bf16 "
)
GPT2 = "--vocab-file ${DATA}/vocab.json --merge-file ${DATA}/merges.txt "


def read(options: str, exports: str = "", world: int = 8) -> ScriptJob:
    script = f"{exports}\ntorchrun --nproc-per-node {world} pretrain_gpt.py {SIZES} {options}"
    command = find_launch(read_commands(script, {}, ()))
    return interpret_launch(command, world_size=world, folder=Path())


def trainer(options: str, exports: str = "") -> TrainerSpec:
    return read(f"{GPT2} {options}", exports).workload.trainer


@pytest.mark.parametrize(
    ("options", "exports", "backend"),
    [
        ("", "", AttentionBackend.FLASH),
        ("--use-flash-attn", "", AttentionBackend.FLASH),
        ("--attention-backend unfused", "", AttentionBackend.UNFUSED),
        ("--attention-backend fused", "", AttentionBackend.FUSED),
        ("--transformer-impl local", "", AttentionBackend.LOCAL),
        ("", "export NVTE_FLASH_ATTN=0", AttentionBackend.FUSED),
        ("", "export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", AttentionBackend.UNFUSED),
    ],
)
def test_the_attention_backend_comes_from_options_and_environment(
    options: str, exports: str, backend: AttentionBackend
) -> None:
    assert trainer(options, exports).attention_backend is backend


def test_dropout_is_on_unless_the_command_says_otherwise() -> None:
    assert (trainer("").attention_dropout, trainer("").hidden_dropout) == (0.1, 0.1)
    off = trainer("--attention-dropout 0 --hidden-dropout 0.0")
    assert (off.attention_dropout, off.hidden_dropout) == (0.0, 0.0)


def test_fusions_that_are_switched_off_are_listed() -> None:
    plain = trainer("--swiglu --no-gradient-accumulation-fusion --no-bias-gelu-fusion")
    assert plain.unfused == (Fusion.WEIGHT_GRAD,)
    both = trainer("--swiglu --no-gradient-accumulation-fusion --no-bias-swiglu-fusion")
    assert both.unfused == (Fusion.ACTIVATION, Fusion.WEIGHT_GRAD)
    in_place = trainer("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    assert in_place.cross_entropy is CrossEntropyKernel.IN_PLACE
    assert trainer("--num-experts 8").expert_kernels is ExpertKernels.SEQUENTIAL
    grouped = trainer("--num-experts 8 --moe-grouped-gemm")
    assert grouped.expert_kernels is ExpertKernels.GROUPED
    fused = trainer("--num-experts 8 --moe-grouped-gemm --use-transformer-engine-op-fuser")
    assert fused.expert_kernels is ExpertKernels.FUSED


def test_rows_are_permuted_by_plain_operations_unless_the_command_fuses_them() -> None:
    options = "--swiglu --num-experts 8 --moe-grouped-gemm"
    assert trainer(options).unfused == (Fusion.PERMUTE,)
    assert trainer(f"{options} --moe-permute-fusion").unfused == ()
    assert trainer("--swiglu").unfused == ()


def test_layers_stay_in_16_bits_where_the_command_keeps_them() -> None:
    last = "--num-layers-at-end-in-bf16 14"
    assert trainer(last).bf16_last_layers == 0
    kept = trainer(f"--first-last-layers-bf16 {last}")
    assert (kept.bf16_first_layers, kept.bf16_last_layers) == (1, 14)


def test_the_tokenizer_tells_the_vocabulary_and_tensor_parallelism_pads_it() -> None:
    assert read(GPT2).model.vocab_size == 50304  # 50,257 in steps of 128
    assert read(f"{GPT2} --tensor-model-parallel-size 2").model.vocab_size == 50432
    assert read(f"{GPT2} --no-pad-vocab-size").model.vocab_size == 50257
    nemotron = (
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $D/nemotron_2_256k.model"
    )
    assert read(nemotron).model.vocab_size == 256000
    assert read("--vocab-size 1000 --make-vocab-size-divisible-by 3").model.vocab_size == 1002


def test_score_matrices_are_kept_once_and_twice_more_under_dropout() -> None:
    model = catalogue.model("Qwen3-8B")
    hardware = catalogue.hardware("8xH100")
    layout = parse_layout("tp2", world_size=8)
    workload = Workload(seq_len=2048, global_batch=64)

    def saved(**choices: object) -> int:
        changed = replace(workload, trainer=TrainerSpec(**choices))
        ledger = estimate(model, changed, hardware, layout).ledgers[0]
        return sum(
            row.bytes
            for row in ledger.memory
            if (row.component, row.module) == (Component.ACTIVATIONS, Module.ATTENTION)
        )

    heads = model.attention.heads // 2
    scores = model.layers * heads * 2048 * 2048
    log_sums = model.layers * heads * 2048 * 4
    unfused = AttentionBackend.UNFUSED
    flash = saved()
    assert saved(attention_backend=AttentionBackend.FUSED) == flash
    assert saved(attention_backend=unfused) - flash == 2 * scores - log_sums
    dropped = saved(attention_backend=unfused, attention_dropout=0.1)
    assert dropped - flash == (2 + 1 + 2) * scores - log_sums
    assert saved(attention_dropout=0.1) == flash


def test_the_engine_refuses_kernels_and_dropout_that_it_lacks() -> None:
    model = catalogue.model("Qwen3-30B-A3B")
    workload = Workload(seq_len=32, global_batch=8)
    assert not unsupported_model(model, workload)
    other = TrainerSpec(attention_backend=AttentionBackend.UNFUSED, hidden_dropout=0.1)
    fields = [reason.field for reason in unsupported_model(model, replace(workload, trainer=other))]
    assert fields == ["train.attention_backend", "train.hidden_dropout"]


def test_a_pattern_of_layers_is_a_hybrid_model() -> None:
    """Read Mamba-2, attention, experts and an MLP, and two MTP depths that share their weights."""
    options = (
        f"{GPT2} --hybrid-layer-pattern ME*-ME/*E/*E --mtp-use-repeated-layer --squared-relu "
        "--mamba-num-heads 4 --mamba-head-dim 32 --mamba-state-dim 16 --mamba-num-groups 2 "
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --disable-bias-linear"
    )
    model = read(options).model
    recurrent, attention, none = MixerKind.RECURRENT, MixerKind.ATTENTION, MixerKind.NONE
    assert model.mixers == (recurrent, none, attention, none, recurrent, none)
    assert model.mlp_layers == (False, True, False, True, False, True)
    assert model.moe_layers == (False, True, False, False, False, True)
    assert (model.layers, model.mtp_layers, model.mtp_shared) == (6, 2, True)
    assert model.activation is Activation.RELU_SQUARED
    assert model.recurrent is not None
    assert (model.recurrent.heads, model.recurrent.value_width) == (4, 128)
    with pytest.raises(BadInput, match="layers of the kinds M"):
        read(f"{GPT2} --hybrid-layer-pattern MGM")
    with pytest.raises(BadInput, match="MTP depths other than"):
        read(f"{GPT2} --hybrid-layer-pattern M*/MM")


@pytest.mark.parametrize("position", ["", "--position-embedding-type learned_absolute"])
@pytest.mark.parametrize("rows", ["", "--max-position-embeddings 0"])
def test_learned_positions_are_asked_for_by_name(tmp_path, position: str, rows: str) -> None:
    sizes = SIZES.replace("--max-position-embeddings 32", rows)
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes} --vocab-size 512 {position}"
    )
    with pytest.raises(BadInput) as caught:
        read_flags(script, on="8xH100")
    (reason,) = caught.value.reasons
    assert reason.field == "--max-position-embeddings"
    assert reason.nearest == "--set --max-position-embeddings=32"


def test_rotary_positions_need_no_rows(tmp_path) -> None:
    sizes = SIZES.replace("--max-position-embeddings 32", "--position-embedding-type rope")
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes} --vocab-size 512")
    assert read_flags(script, on="8xH100").plan.model.max_position == 0
