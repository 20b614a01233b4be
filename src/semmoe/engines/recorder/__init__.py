"""Record the routing of a running server; `semmoe.engines.recorder.recorder` states the rules."""
