"""Check that AutoEP runs with the installed versions, by inspection, so that a release that fixes it is not refused."""

import importlib.metadata

from semmoe.engines.deepspeed.targets import RECORDED_OUTPUTS
from semmoe.engines.hooks import problem

WORKING = "deepspeed 0.19.8 with transformers 5.20.2"
# Presets whose conversion replaces an entry in transformers' table of recorded outputs.
RECORDED = ("mixtral", "qwen2_moe", "qwen3_moe")


def check_versions(model_type: str) -> None:
    """Raise ValueError if AutoEP cannot convert models of this type with the installed packages."""
    found = f"{version('deepspeed')} with {version('transformers')}"
    try:
        from deepspeed.module_inject import auto_ep, auto_ep_layer  # noqa: F401
        from deepspeed.moe import ep_tp_dispatch  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{found} has no AutoEP folded with AutoTP ({error}): {WORKING} has") from None
    if model_type in RECORDED and problem(RECORDED_OUTPUTS) is not None:
        raise ValueError(
            f"AutoEP cannot convert {model_type} with {found}: it reads a table of recorded outputs that transformers "
            f"has changed; use {WORKING}"
        )


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"
