"""Layers on GPUs, by kernels in Triton."""
