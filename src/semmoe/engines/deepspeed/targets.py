"""The places where the adaptor hooks into DeepSpeed; importing this module imports no engine."""

from semmoe.engines.hooks import Hook

LAYER = "deepspeed.module_inject.auto_ep_layer"
# AutoEP uses this table as a dictionary, which it is in transformers 5.20.2 but not in 5.23.
RECORDED_OUTPUTS = Hook(
    "transformers.utils.output_capturing._CAN_RECORD_REGISTRY.get",
    "AutoEP's own: Mixtral and Qwen3-MoE are converted",
    ("default",),
)

HOOKS: tuple[Hook, ...] = (
    RECORDED_OUTPUTS,
    Hook(
        f"{LAYER}.AutoEPMoELayer.set_deepspeed_parallelism",
        "the layers that AutoEP made, and their groups",
        ("folding_group_handles",),
    ),
    Hook(f"{LAYER}.AutoEPMoELayer.forward", "runs on a rank's own tokens, unfolded", ("hidden_states",)),
    Hook(
        "deepspeed.moe.ep_router.TokenChoiceTopKRouter.forward",
        "logical experts become the plan's physical ones",
        ("x", "expert_bias"),
    ),
    Hook("deepspeed.moe.ep_count.count_tokens_per_expert", "tokens of each physical expert"),
    Hook("deepspeed.moe.ep_experts.GroupedExperts", "holds the weights that move", ("num_experts",)),
    Hook(
        "deepspeed.moe.ep_tp_dispatch.assignment_ordinals_by_expert",
        "what each rank of a group sends without a plan",
        ("expert_indices",),
    ),
    Hook("deepspeed.module_inject.layers.LinearAllreduce.forward", "attention's partial sums", ("input",)),
    Hook("deepspeed.comm.torch.TorchBackend.all_to_all_single", "its bytes are counted"),
    Hook("deepspeed.comm.torch.TorchBackend.all_reduce", "its bytes are counted"),
    Hook("deepspeed.comm.torch.TorchBackend.all_gather", "its bytes are counted"),
)
