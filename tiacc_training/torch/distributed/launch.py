"""`python -m tiacc_training.torch.distributed.launch`: starts a program in several processes."""

from tiacc_training.launcher import launch

if __name__ == "__main__":
    launch()
