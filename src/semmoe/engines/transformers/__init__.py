"""The embedded engine on Hugging Face transformers: profile a model, and run it expert-parallel on a plan."""
