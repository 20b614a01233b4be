"""Attention-DP: which group each request goes to, from its prompt and the load of the groups."""
