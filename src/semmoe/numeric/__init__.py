"""Compiled functions, assignments to groups of bounded size, digests of arrays."""
