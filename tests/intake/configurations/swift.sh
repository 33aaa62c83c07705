#!/bin/bash
NPROC_PER_NODE=8 NNODES=2 megatron sft \
    --model Qwen/Qwen3-30B-A3B-Base --tuner_type full --dataset 'a/b#100' 'c/d' \
    --tensor_model_parallel_size 2 --expert_model_parallel_size 4 --sequence_parallel true \
    --micro_batch_size 2 --global_batch_size 32 --max_length 8192 --packing true \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --moe_expert_capacity_factor 1.5 --moe_permute_fusion true \
    --optimizer_cpu_offload true --optimizer_offload_fraction 0.5 \
    --use_precision_aware_optimizer true --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16 \
    --lr 1e-5 --min_lr 1e-6 --save_steps 200 --output_dir out --dataset_num_proc 8
