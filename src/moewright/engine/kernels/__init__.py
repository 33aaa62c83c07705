"""Kernels: matrix products, attention, and what lies between them."""
