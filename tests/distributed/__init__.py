"""Several processes: meshes, wrappers, launchers, and the documents' scripts under torchrun."""
