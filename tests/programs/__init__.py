"""Short scripts that must give the same results on every device."""
