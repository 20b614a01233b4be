"""Engines' servers and clients for the benchmarks; `engine.py` says what is the engine's own."""
