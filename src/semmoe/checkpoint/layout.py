"""Which tensors of a checkpoint depend on expert numbers, and how: by name, or as a row of the leading dimension.

Known layouts are: one tensor per expert (`mlp.experts.3.up_proj.weight`, `block_sparse_moe.experts.3.w1.weight`, with
any suffix: FP8 scales, AWQ and GPTQ parts); packed tensors with E rows (`mlp.experts.gate_up_proj`, its bias, MXFP4
blocks and scales); the rows of the router (`gate` or `router`: weight, bias, correction bias); and the table of a
hash-routed layer (`gate.tid2eid`), whose values are expert numbers. Shared experts have no number. Layers for
multi-token prediction are not part of a plan and do not change. A tensor that matches no rule but may depend on expert
numbers is refused by name: a relabelling that is nearly right is wrong.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from semmoe.checkpoint.directory import Checkpoint, config_count, read_config, tensor_names
from semmoe.checkpoint.shards import FLOATS, INTEGERS, Tensor
from semmoe.io.bounds import MOST_LAYERS

BLOCK = re.compile(r"(?P<prefix>(?P<stack>.*?)\blayers\.(?P<layer>\d{1,6})\.\w+\.)(?P<rest>.+)")
EXPERT = re.compile(r"experts\.(?P<expert>\d{1,6})\.(?P<part>.+)")
PACKED = re.compile(
    r"experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)(?:[._]\w+)*|(?:in|out)put_linear\.weight"
)
EXPERTS = re.compile(r"experts\.|(?<=block_sparse_moe\.)(?:in|out)put_linear\.")  # Granite's names are the latter
GATE = re.compile(
    r"(?:gate|router)\.(?:wg\.|layer\.|gate\.)?(?P<part>weight|bias|e_score_correction_bias)"
    r"|(?:moe_statics\.)?(?P<bare>e_score_correction_bias|expert_bias)"
)
TABLE = re.compile(r"(?:gate|router)\.tid2eid")
NUMBERED = re.compile(r"(?:experts|gate|router)\b.*")  # such a tensor must match one of the rules above
SHARED = re.compile(r"shared_(?:experts?|mlp)\b.*|shared_expert_gate\b.*")
PREDICTION = re.compile(r"\b(?:mtp|nextn)\b")  # stacks of layers for multi-token prediction


@dataclass
class MoeLayer:
    """The tensors of a MoE layer that depend on expert numbers, by full name."""

    index: int  # index of the decoder layer
    prefix: str  # with the final dot, such as "model.layers.3.mlp."
    parts: dict[int, set[str]] = field(default_factory=dict)  # per expert, suffixes such as "up_proj.weight"
    packed: list[str] = field(default_factory=list)
    gate: dict[str, str] = field(default_factory=dict)  # weight, bias, e_score_correction_bias -> name
    tables: list[str] = field(default_factory=list)  # of a hash-routed layer: its (V, K) experts of each token id

    @property
    def by_row(self) -> list[str]:
        """Names of tensors whose leading dimension counts experts."""
        return self.packed + list(self.gate.values())

    def expert_tensor(self, expert: int, part: str) -> str:
        return f"{self.prefix}experts.{expert}.{part}"

    def pieces(self, tensors: dict[str, Tensor], expert: int, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored parts of an expert by name; not `whole`: its rows of the router alone."""
        for name in self.by_row if whole else self.gate.values():
            yield f"row {expert} of {name}", tensors[name].row(expert)
        for part in sorted(self.parts.get(expert, ())) if whole else ():
            name = self.expert_tensor(expert, part)
            yield name, tensors[name]


def decoder_layers(model: Path) -> tuple[list[int], int]:
    """Indices of the decoder layers that have experts, ascending, and the number of decoder layers; no weights."""
    depth = config_count(read_config(model), "num_hidden_layers")
    if depth > MOST_LAYERS:
        raise ValueError(f"{model}/config.json claims {depth} layers, more than {MOST_LAYERS}")
    return sorted(_expert_blocks(tensor_names(model), depth)), depth


def _expert_blocks(names: Iterable[str], num_hidden_layers: int) -> dict[int, str]:
    """Prefix of the MoE block's tensors by layer index, without layers for multi-token prediction.

    Raises ValueError unless there is one stack of layers.
    """
    blocks: dict[int, str] = {}
    stacks = set()
    for match in filter(None, map(BLOCK.fullmatch, names)):
        layer = int(match["layer"])
        prediction = layer >= num_hidden_layers or PREDICTION.search(match["stack"])
        if prediction or not EXPERTS.match(match.string, match.start("rest")):
            continue
        stacks.add(match["stack"])
        if blocks.setdefault(layer, match["prefix"]) != match["prefix"] or len(stacks) > 1:
            raise ValueError(f"{match.string}: experts in more than one stack of layers are not supported")
    if not blocks:
        raise ValueError("no tensor is named like an expert in a layout that semmoe knows")
    return blocks


def find_moe_layers(source: Checkpoint, num_experts: int) -> list[MoeLayer]:
    """The MoE layers, ascending. Raises ValueError that names a tensor which is unknown, missing or of a wrong size."""
    blocks = _expert_blocks(source.tensors, config_count(source.config, "num_hidden_layers"))
    layers = {prefix: MoeLayer(index, prefix) for index, prefix in sorted(blocks.items())}
    for name, tensor in source.tensors.items():
        match = BLOCK.fullmatch(name)
        if match is not None and (layer := layers.get(match["prefix"])) is not None:
            _add(layer, name, match["rest"], tensor, num_experts)
    for layer in layers.values():
        _check_complete(layer, num_experts)
    return list(layers.values())


def _add(layer: MoeLayer, name: str, rest: str, tensor: Tensor, num_experts: int) -> None:
    """Add a tensor of a MoE block to `layer` by the rule that it matches, or raise ValueError."""
    shape = list(tensor.shape)
    if match := EXPERT.fullmatch(rest):
        expert = int(match["expert"])
        if str(expert) != match["expert"] or expert >= num_experts:
            raise ValueError(f"{name}: there are {num_experts} experts per layer")
        layer.parts.setdefault(expert, set()).add(match["part"])
    elif match := GATE.fullmatch(rest):
        _check_rows(name, tensor, num_experts)
        part = match["part"] or match["bare"]
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}: a quantised router is not supported")
        if part in layer.gate:
            raise ValueError(f"{name}: this layer has another router {part}: {layer.gate[part]}")
        layer.gate[part] = name
    elif TABLE.fullmatch(rest):
        if tensor.dtype not in INTEGERS or len(tensor.shape) != 2:
            raise ValueError(f"{name} is {tensor.dtype} of shape {shape}: not a table of expert numbers")
        layer.tables.append(name)
    elif PACKED.fullmatch(rest):
        _check_rows(name, tensor, num_experts)
        layer.packed.append(name)
    elif not SHARED.fullmatch(rest) and (NUMBERED.fullmatch(rest) or num_experts in tensor.shape):
        raise ValueError(f"{name}, shape {shape}: may number experts in a way that semmoe does not know")


def _check_rows(name: str, tensor: Tensor, num_experts: int) -> None:
    if tensor.rows != num_experts:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: the leading dimension must be {num_experts} experts")
    if tensor.nbytes % num_experts != 0:
        raise ValueError(f"{name}: an expert's share of it is not a whole number of bytes")


def _check_complete(layer: MoeLayer, num_experts: int) -> None:
    if "weight" not in layer.gate:
        raise ValueError(f"{layer.prefix}gate.weight is missing, and so is {layer.prefix}router.weight")
    missing = sorted(set(range(num_experts)) - layer.parts.keys())
    if missing and (layer.parts or not layer.packed):
        raise ValueError(f"{layer.prefix}experts.{missing[0]} is missing: experts must be 0 to {num_experts - 1}")
    every = set().union(*layer.parts.values())
    for expert, parts in layer.parts.items():
        lacking = sorted(every - parts)
        if lacking:
            raise ValueError(f"{layer.expert_tensor(expert, lacking[0])} is missing")
