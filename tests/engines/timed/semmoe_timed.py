"""A plug-in that gives the times of passes in place of measured ones, which differ from machine to machine."""


def register() -> None:
    import numpy as np

    from semmoe.engines import paths

    seconds = {"shuffled": np.array([2.0, 3.0]), "whole": np.array([1.0, 33.0])}  # equal at 33 tokens
    paths.measure = lambda *args: paths.PathTimes(np.array([1, 1000]), seconds)
