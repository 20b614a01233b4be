"""The architectures of an installed engine whose code can build its fused experts, read from sources without imports.

More than the models with experts: a class counts if it shares a file with one, or names or imports one. Drafts and
classes that generate nothing do not count.
"""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

EXPERTS = re.compile(r"FusedMoE|get_moe_impl_class")
IMPORTS = re.compile(r"from (?:\.|sglang\.srt\.models\.|vllm\.model_executor\.models\.|vllm\.models\.)([\w.]+) import")


def of_vllm() -> set[str]:
    """Those of vLLM's registry that generate text; classes by their module."""
    root = Path(find_spec("vllm").origin).parent
    tables = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
    registry = ast.parse((root / "model_executor/models/registry.py").read_text())
    found: dict[str, str] = {}
    for node in registry.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in tables:
            models = ast.literal_eval(
                node.value
            )  # those of transformers' own code are by their class, with experts or not
            found |= {n: module for n, (module, kind) in models.items() if module != "transformers" or "MoE" in kind}
    sources = {module: _source(root, module) for module in found.values()}
    return _with_experts(found, sources)


def of_sglang() -> set[str]:
    """Those that a module of SGLang's models registers as its `EntryClass`; classes by their module."""
    folder = Path(find_spec("sglang").origin).parent / "srt/models"
    sources = {path.stem: path.read_text() for path in folder.glob("*.py")}
    found: dict[str, str] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass":
                found |= {one.id: module for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    other = re.compile(
        r"MTP|NextN|Eagle|DSpark|DFlash|Assistant|Embedding|Classification|VisionModel|Transformers\w*Model"
    )
    return {name for name in _with_experts(found, sources) if not other.search(name)}


def _source(root: Path, module: str) -> str:
    """The text of a module, or of all modules of a package."""
    path = (
        root.parent / module.replace(".", "/")
        if module.startswith("vllm.")
        else root / "model_executor/models" / module
    )
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.rglob("*.py"))
    return "\n".join(file.read_text() for file in files)


def _with_experts(module_of: dict[str, str], sources: dict[str, str]) -> set[str]:
    """The architectures whose module builds experts, or imports from or names one that does."""
    modules = {module for module, source in sources.items() if EXPERTS.search(source)}
    imported = {module: set(IMPORTS.findall(source)) for module, source in sources.items()}
    while True:
        names = {name for name, module in module_of.items() if module in modules}
        more = {
            module
            for module, source in sources.items()
            if imported[module] & modules or any(f'"{name}"' in source for name in names)
        }
        if more <= modules:
            return names
        modules |= more
