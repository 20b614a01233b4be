"""Let the plan of a running server follow its traffic."""
