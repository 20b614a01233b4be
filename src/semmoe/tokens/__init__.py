"""Attention-TP: which rank of its group each token's row goes to, from what its experts can be expected to be."""
