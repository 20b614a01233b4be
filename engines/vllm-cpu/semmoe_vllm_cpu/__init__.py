"""What vLLM 0.32.0 lacks on a CPU for expert parallelism; semmoe's plug-in registers it there."""
