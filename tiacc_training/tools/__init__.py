"""TI-ACC's commands for data: `python -m tiacc_training.tools.NAME --help`."""
