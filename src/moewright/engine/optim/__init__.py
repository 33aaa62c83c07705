"""Optimizers: buckets of parameters, their reduction, ZeRO, and the update rules."""
