"""Tests of the device `acc`: one folder per kind, shared code in `tests.helpers`."""
