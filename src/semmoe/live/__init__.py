"""Running servers: recordings, swaps, status files, the client, the control loop."""
