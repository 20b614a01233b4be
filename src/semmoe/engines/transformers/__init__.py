"""Hugging Face transformers, embedded: profile a model from outside, and run it expert-parallel on a plan."""
