"""What TI-ACC has for PyTorch."""
