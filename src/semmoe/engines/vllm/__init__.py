"""vLLM on a plan: entry point `vllm.general_plugins`."""
