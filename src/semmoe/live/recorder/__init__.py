"""Record the routing of a running server; `semmoe.live.recorder.recorder` states the rules."""
