"""PyTorch's own operator database, run on the device under test and compared with the CPU."""
