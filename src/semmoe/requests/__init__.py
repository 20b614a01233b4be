"""Attention-DP: choose the group of each request from its prompt and the load of the groups."""
