"""What the plug-in in SGLang is told."""

from dataclasses import dataclass

from semmoe.core import require
from semmoe.engines.settings import PluginSettings


@dataclass(frozen=True, kw_only=True)
class SglangSettings(PluginSettings):
    static: str = ""  # 1: shuffle on the device with static shapes, as CUDA graphs need, on a CPU too; 0: not on a GPU

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.static in ("", "0", "1"), f"SEMMOE_STATIC must be 0, 1 or empty, not {self.static!r}")
