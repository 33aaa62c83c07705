"""Plans as launch scripts of Megatron-LM."""
