"""Attention-TP: choose the rank of its group that gets each token's row, from the experts it is expected to use."""
