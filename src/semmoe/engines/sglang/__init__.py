"""A plug-in that runs SGLang on a plan: entry point `sglang.srt.plugins`, which calls `plugin.register`."""
