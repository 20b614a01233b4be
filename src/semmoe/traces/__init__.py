"""Routing traces and the texts that they are made from."""
