"""SGLang on a plan, as a plug-in: entry point `sglang.srt.plugins`, no fork. `plugin.register` is where it begins."""
