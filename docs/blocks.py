"""Replace a generated block of a page: the text between `<!-- NAME -->` and `<!-- end of NAME -->`."""


def filled(page: str, name: str, block: str) -> str:
    """A page with a new text in the block of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no block {name}")
    return f"{before}{begin}\n{block.strip()}\n\n{end}{after}"
