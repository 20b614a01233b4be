"""Time per output token, time to first token and throughput of a whole model, with a plan and without."""
