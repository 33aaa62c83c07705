"""Checkpoints of Megatron-LM in its format torch_dist: read, and written."""
