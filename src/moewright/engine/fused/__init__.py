"""Chains of small operations, each as torch operations and as one Triton kernel, behind one seam."""
