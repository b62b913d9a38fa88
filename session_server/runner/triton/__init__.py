"""Linears on GPUs, by kernels in Triton."""
