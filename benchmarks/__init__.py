"""Benchmarks: the one place where the speed of `acc` is measured and claimed (see run.py)."""
