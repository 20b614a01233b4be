"""Rows that an all-to-all sends, links, and the time that both take."""
