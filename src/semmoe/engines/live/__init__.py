"""Swap the plan of a running server."""
