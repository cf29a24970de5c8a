"""`python -m tiacc_training.distributed.launch`: the launcher's name in the second generation."""

from tiacc_training.launcher import launch

if __name__ == "__main__":
    launch(program="python -m tiacc_training.distributed.launch")
