"""Load or recompute, decided by measurement."""
