"""The reader of launch scripts and logs of Megatron-LM."""
