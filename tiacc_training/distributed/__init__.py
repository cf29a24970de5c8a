"""What TI-ACC's second generation has for training by several processes: the launcher."""
