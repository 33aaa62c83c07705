#!/bin/bash
# Submits itself, and leaves paths to be written.
if [ -z "$SLURM_JOB_ID" ]; then
    sbatch "$0" "$@"
    exit 0
fi
DATA_PATH="your data path"
torchrun --nnodes=2 --nproc_per_node=8 pretrain_gpt.py \
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 \
    --num-experts 8 --moe-router-topk 2 --moe-intermediate-size 128 --n-shared-experts 2 \
    --first-k-dense-replace 1 --moe-token-dispatcher-type alltoall_seq --moe-tp-extend-ep \
    --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --context-parallel-size 2 \
    --context-parallel-algo ulysses_cp_algo --swap-optimizer --reuse-fp32-param \
    --use-fused-rmsnorm --gemm-gradient-accumulation-fusion --use-distributed-optimizer \
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 32 \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path $DATA_PATH --data-path $DATA_PATH \
    --padded-vocab-size 32000 --vocab-size 32000 --bf16 --swiglu --disable-bias-linear \
    --lr 1e-4 --train-iters 10 --log-interval 1
