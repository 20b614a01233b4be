"""Which tensors of a checkpoint carry an expert's number, and how: by name, or as a row of the leading dimension.

Known layouts: one tensor per expert (`mlp.experts.3.up_proj.weight`, `block_sparse_moe.experts.3.w1.weight`, with
whatever follows the number: FP8 scales, AWQ and GPTQ parts); packed tensors with E rows (`mlp.experts.gate_up_proj`,
its bias, MXFP4 blocks and scales); and the router's rows (`gate` or `router`, weight, bias, correction bias). Shared
experts have no number. Layers for multi-token prediction are not in a plan and stay as they are. A tensor that no rule
knows, where an expert's number could hide in it, is refused by name: a relabelling that is nearly right is wrong.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from semmoe.checkpoint.shards import Tensor

BLOCK = re.compile(r"(?P<stack>.*?)\blayers\.(?P<layer>\d{1,6})\.(?P<block>\w+)\.(?P<rest>.+)")
EXPERT = re.compile(r"experts\.(?P<expert>\d{1,6})\.(?P<part>.+)")
PACKED = re.compile(r"experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)(?:[._]\w+)*")
GATE = re.compile(r"(?:gate|router)\.(?P<part>weight|bias|e_score_correction_bias)|(?P<bare>e_score_correction_bias)")
NUMBERED = re.compile(r"(?:experts|gate|router)\b.*")  # where a tensor must be known by one of the rules above
SHARED = re.compile(r"shared_(?:experts?|mlp)\b.*|shared_expert_gate\b.*")
PREDICTION = re.compile(r"\b(?:mtp|nextn)\b")  # stacks of layers for multi-token prediction
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class MoeLayer:
    """The tensors of one MoE layer that carry an expert's number; names are whole."""

    index: int  # of the decoder layer
    prefix: str  # with its dot: model.layers.3.mlp.
    parts: dict[int, set[str]] = field(default_factory=dict)  # what follows each expert's number: up_proj.weight, ...
    packed: list[str] = field(default_factory=list)
    gate: dict[str, str] = field(default_factory=dict)  # weight, bias, e_score_correction_bias -> name

    @property
    def by_row(self) -> list[str]:
        """Tensors whose leading dimension counts experts."""
        return self.packed + list(self.gate.values())

    def expert_tensor(self, expert: int, part: str) -> str:
        return f"{self.prefix}experts.{expert}.{part}"


def moe_layer_indices(names: Iterable[str], num_hidden_layers: int) -> list[int]:
    """The decoder layers that have experts, ascending; layers for multi-token prediction are left out."""
    return sorted(_expert_blocks(names, num_hidden_layers))


def _expert_blocks(names: Iterable[str], num_hidden_layers: int) -> dict[int, str]:
    """Layer index -> the prefix of its MoE block's tensors. Raises ValueError if there are several stacks, or none."""
    blocks: dict[int, str] = {}
    stacks = set()
    for name in names:
        match = BLOCK.fullmatch(name)
        if match is None or not match["rest"].startswith("experts."):
            continue
        if int(match["layer"]) >= num_hidden_layers or PREDICTION.search(match["stack"]):
            continue
        stacks.add(match["stack"])
        same = blocks.setdefault(int(match["layer"]), _prefix(match)) == _prefix(match) and len(stacks) == 1
        if not same:
            raise ValueError(f"{name}: experts in more than one stack of layers are not supported")
    if not blocks:
        raise ValueError("no tensor is named like an expert of a layout that semmoe knows")
    return blocks


def _prefix(match: re.Match[str]) -> str:
    return match.string[: match.start("rest")]


def find_moe_layers(tensors: dict[str, Tensor], num_hidden_layers: int, num_experts: int) -> list[MoeLayer]:
    """The MoE layers, ascending; raises ValueError naming the tensor if one is unknown, missing or of another size."""
    blocks = _expert_blocks(tensors, num_hidden_layers)
    layers = {prefix: MoeLayer(index, prefix) for index, prefix in sorted(blocks.items())}
    for name, tensor in tensors.items():
        match = BLOCK.fullmatch(name)
        if match is not None and (layer := layers.get(_prefix(match))) is not None:
            _sort_in(layer, name, match["rest"], tensor, num_experts)
    for layer in layers.values():
        _check_complete(layer, num_experts)
    return list(layers.values())


def _sort_in(layer: MoeLayer, name: str, rest: str, tensor: Tensor, num_experts: int) -> None:
    """Note a tensor of a MoE block by the rule that knows it, or raise ValueError."""
    if match := EXPERT.fullmatch(rest):
        canonical = str(int(match["expert"])) == match["expert"]
        if not canonical or int(match["expert"]) >= num_experts:
            raise ValueError(f"{name}: there are {num_experts} experts a layer")
        layer.parts.setdefault(int(match["expert"]), set()).add(match["part"])
    elif match := GATE.fullmatch(rest):
        _check_rows(name, tensor, num_experts)
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}: a quantised router is not supported")
        part = match["part"] or match["bare"]
        if part in layer.gate:
            raise ValueError(f"{name}: this layer has another {part} of a router: {layer.gate.get(part)}")
        layer.gate[part] = name
    elif PACKED.fullmatch(rest):
        _check_rows(name, tensor, num_experts)
        layer.packed.append(name)
    elif not SHARED.fullmatch(rest):
        hidden = NUMBERED.fullmatch(rest) is not None or num_experts in tensor.shape
        shape = list(tensor.shape)
        if hidden:
            raise ValueError(f"{name}, shape {shape}: may number experts in a way that semmoe does not know")


def _check_rows(name: str, tensor: Tensor, num_experts: int) -> None:
    by_expert = bool(tensor.shape) and tensor.shape[0] == num_experts
    if not by_expert:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: its leading dimension must count {num_experts} experts"
        )
    if tensor.nbytes % num_experts != 0:
        raise ValueError(f"{name}: an expert's share of it is not a whole number of bytes")


def _check_complete(layer: MoeLayer, num_experts: int) -> None:
    if "weight" not in layer.gate:
        raise ValueError(f"{layer.prefix}gate.weight is missing, and so is {layer.prefix}router.weight")
    if layer.parts or not layer.packed:
        missing = next((e for e in range(num_experts) if e not in layer.parts), None)
        if missing is not None:
            raise ValueError(f"{layer.prefix}experts.{missing} is missing: experts must be 0 to {num_experts - 1}")
    every = set().union(*layer.parts.values())
    for expert, parts in layer.parts.items():
        lacking = sorted(every - parts)
        if lacking:
            raise ValueError(f"{layer.expert_tensor(expert, lacking[0] if lacking else '')} is missing")
