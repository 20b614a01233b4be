"""A plug-in that runs vLLM on a plan: entry point `vllm.general_plugins`."""
