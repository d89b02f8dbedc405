"""Varuna: train PyTorch models too large for one GPU on whatever machines there are."""
