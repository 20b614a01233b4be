"""Settings of the plug-in in vLLM."""

from dataclasses import dataclass

from semmoe.engines.settings import PluginSettings, check_switch


@dataclass(frozen=True, kw_only=True)
class VllmSettings(PluginSettings):
    sequence_parallel: str = ""  # 1: split an attention-TP group's tokens around its experts without data parallelism

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("SEQUENCE_PARALLEL", self.sequence_parallel)
