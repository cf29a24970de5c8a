"""The names of TI-ACC's package for training that programs and command lines use."""
