"""Trials of layouts as jobs: of this machine or of Slurm, of our engine or of Megatron-LM."""
