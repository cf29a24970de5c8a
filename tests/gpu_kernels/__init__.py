"""Kernels that the other tests made, for every generation of GPUs."""
