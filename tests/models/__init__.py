"""Whole models, trained on the device under test and on the CPU."""
