"""Fused kernels: their interface, the reference, and the Triton kernels."""
