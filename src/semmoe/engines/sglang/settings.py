"""Settings of the plug-in in SGLang."""

from dataclasses import dataclass

from semmoe.engines.settings import PluginSettings, check_switch


@dataclass(frozen=True, kw_only=True)
class SglangSettings(PluginSettings):
    fused: str = ""  # 1: the device's shuffle reads the buffers of all ranks, in Triton; never run on a GPU

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("FUSED", self.fused)
        shuffles = self.plan and self.shuffle != "off"
        if not shuffles and self.fused == "1":
            raise ValueError(
                "SEMMOE_FUSED=1 is a way to shuffle tokens on GPUs: it needs SEMMOE_PLAN, and not SEMMOE_SHUFFLE=off"
            )
