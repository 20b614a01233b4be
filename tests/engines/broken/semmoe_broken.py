"""A plug-in that takes semmoe's order of the tokens away: what the tests of exactness must notice."""


def register() -> None:
    from semmoe.engines.layer import TokenRows

    restore = TokenRows.restore

    def shuffled(self, rows):
        whole = restore(self, rows)
        return whole.roll(1, 0) if len(whole) > 1 else whole

    TokenRows.restore = shuffled
