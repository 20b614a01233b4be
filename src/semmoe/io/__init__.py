"""Files, archives and values that are checked before they are trusted, and the terminal."""
