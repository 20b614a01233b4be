"""Attention-TP: choose the rank of its group that gets each token's row, from the experts that it is expected to use."""
