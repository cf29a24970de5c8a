"""One program per file: `run(device)` returns a list of tensors and values to compare."""
