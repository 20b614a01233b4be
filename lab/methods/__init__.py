"""Methods of the field that the package leaves out.

From the root of a checkout: `PYTHONPATH=. semmoe replay TRACE --method lab.methods.exflow`.
"""

from semmoe.placement.methods import METHODS

FIELD = tuple(f"lab.methods.{name}" for name in ("eldr", "exflow", "moetuner", "grace"))
ALL = (*METHODS, *FIELD)


def short(method: str) -> str:
    """Return the name of a method in tables."""
    return method.rpartition(".")[2]
