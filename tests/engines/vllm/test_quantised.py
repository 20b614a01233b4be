"""Quantised experts go to the plan's slots, each with all tensors that are its own: scales, zeros, packed weights.

No CPU computes most of these layouts, so what vLLM has loaded is compared tensor by tensor: with a plan and copies, the
slots of every expert hold what vLLM loads for that expert without one.
"""

import json
from pathlib import Path

import pytest
import torch
from models import build
from safetensors.torch import load_file, save_file
from two_ranks import HEADS, loaded_experts, make_plan

from semmoe.plan import load_plan

pytestmark = pytest.mark.timeout(600)  # for machines under load
HIDDEN, WIDTH, EXPERTS = 256, 256, 8
GROUP, BLOCK, PACK = 64, 128, 8  # weights per scale, per side of an FP8 block, and per packed int32
PLAIN = [f"model.layers.{layer}.{name}" for layer in range(3)
         for name in (*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate")]  # fmt: skip


def packed(rows: int, columns: int, names: str) -> dict[str, tuple]:
    """The tensors of an int4 weight of (rows, columns) that is stored transposed: AWQ by columns, GPTQ by rows."""
    weight = (columns, rows // PACK) if names == "awq" else (columns // PACK, rows)
    own = {"qweight": (torch.int32, weight), "qzeros": (torch.int32, (columns // GROUP, rows // PACK)),
           "scales": (torch.float16, (columns // GROUP, rows))}  # fmt: skip
    return own | ({"g_idx": (torch.int32, (columns,))} if names == "gptq" else {})


LAYOUTS = {  # (rows, columns) of a projection -> its tensors
    "fp8": lambda rows, columns: {"weight": (torch.float8_e4m3fn, (rows, columns)),
                                  "weight_scale_inv": (torch.float32, (rows // BLOCK, columns // BLOCK))},
    "awq": lambda rows, columns: packed(rows, columns, "awq"),
    "gptq": lambda rows, columns: packed(rows, columns, "gptq"),
    "compressed-tensors": lambda rows, columns: {"weight_packed": (torch.int32, (rows, columns // PACK)),
                                                 "weight_scale": (torch.float16, (rows, columns // GROUP)),
                                                 "weight_shape": (torch.int64, (2,))},
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
CONFIGS = {
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": PLAIN},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["self_attn", "gate.", "mlp.gate", "lm_head"]},
    "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False,
             "dynamic": {"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}},
    "compressed-tensors": {"format": "pack-quantized", "quantization_status": "compressed",
                           "ignore": ["lm_head", *PLAIN],
                           "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}},
    "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                         "lm_head"]},
}  # fmt: skip
FAMILY = {method: "gpt_oss" if method == "mxfp4" else "qwen3_moe" for method in CONFIGS}


def random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes; FP8's two bytes that are no number are left out, since they equal nothing."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 127, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def of_one_expert(layout: str, mlp: str, expert: int) -> dict[str, torch.Tensor]:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {
        f"{mlp}.experts.{expert}.{name}_proj.{part}": random(*told)
        for name, shape in shapes.items()
        for part, told in LAYOUTS[layout](*shape).items()
    }


def of_all_experts(mlp: str) -> dict[str, torch.Tensor]:
    """As gpt-oss stores them: 32 weights of four bits, then their scale."""
    out = {}
    for name, rows, columns in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        own = f"{mlp}.experts.{name}_proj_"
        out[own + "blocks"] = random(torch.uint8, (EXPERTS, rows, columns // 32, 16))
        out[own + "scales"] = random(torch.uint8, (EXPERTS, rows, columns // 32))
        out[own + "bias"] = torch.randn(EXPERTS, rows).to(torch.bfloat16)
    return out


def quantised(model: Path, layout: str) -> None:
    """Replace the experts of a checkpoint by quantised ones, of random weights."""
    torch.manual_seed(0)
    path = model / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}
    for mlp in [f"model.layers.{layer}.mlp" for layer in range(3)]:
        if layout == "mxfp4":
            kept |= of_all_experts(mlp)
        else:
            for expert in range(EXPERTS):
                kept |= of_one_expert(layout, mlp, expert)
    save_file(kept, path, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": layout, **CONFIGS[layout]}
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_slot_holds_its_expert(layout, texts, tmp_path):
    width = {"intermediate_size" if layout == "mxfp4" else "moe_intermediate_size": WIDTH}
    model = build(FAMILY[layout], tmp_path, hidden_size=HIDDEN, **HEADS, **width)
    plan = make_plan(model, texts, tmp_path, "tp2", 2)
    quantised(Path(model), layout)
    given = {"dtype": "bfloat16" if layout in ("fp8", "mxfp4") else "float16"}
    vanilla = loaded_experts(model, tmp_path / "vanilla", **given)
    planned = loaded_experts(model, tmp_path / "planned", variables={"SEMMOE_PLAN": plan}, **given)
    assert vanilla.keys() == planned.keys()
    slots = torch.as_tensor(load_plan(plan).placement.physical_to_logical_map)  # (3, 10)
    compared = set()
    for name, tensor in vanilla.items():
        layer = int(name.split(".layers.")[1].split(".")[0])
        assert (len(planned[name]), len(tensor)) == (EXPERTS + 2, EXPERTS)
        moved = tensor.view(torch.uint8)[slots[layer]]
        assert torch.equal(planned[name].view(torch.uint8), moved), name
        compared.add(name.rsplit(".", 1)[1])
    assert len(compared) >= 4
    assert not torch.equal(slots[:, :EXPERTS], torch.arange(EXPERTS).expand(3, -1))
