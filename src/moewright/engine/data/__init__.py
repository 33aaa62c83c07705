"""Text to tokens to batches: tokenizer, Megatron .bin/.idx files, and the layout-independent
sampler."""
