"""A plan as files that engines read without semmoe: a relabelled checkpoint, or an expert-location file."""
