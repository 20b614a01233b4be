"""The places in SGLang that the plug-in hooks, and why. Importable without SGLang; tested with 0.5.23."""

from semmoe.engines.hooks import Hook

TRIED = "0.5.23"
# settings by which `semmoe swap` reaches SGLang's processes, through `/set_internal_state`
SWAP = "semmoe_swap"  # the number of a plan
LAYERS = "semmoe_layers_per_pass"  # before it
REQUESTS = "semmoe_requests"  # the number of the plan that the controller is to assign requests by
_SRT = "sglang.srt."
_BOUNDARY = _SRT + "layers.layer_boundary."
_MOE = _SRT + "layers.moe."

LOAD_MODEL = Hook(
    _SRT + "model_executor.model_runner.ModelRunner.load_model", "check the plan against the model and its ranks"
)
_LOADER = _SRT + "model_loader.loader.DefaultModelLoader."
ALL_WEIGHTS = Hook(
    _LOADER + "_get_all_weights", "read the weights of an untried family twice", ("model_config", "model")
)
LOADER = Hook(
    _LOADER + "load_weights_only", "prove that they are where the plan has them", ("model", "weights", "target_device")
)
TIED = Hook(
    _SRT + "models.qwen3_moe.Qwen3MoeForCausalLM.load_weights", "fill the output layer of tied models", ("weights",)
)
GUARD = Hook(
    _SRT + "managers.tokenizer_manager.TokenizerManager._validate_one_request",
    "refuse token ids that would end the server",
    ("obj", "input_ids"),
)
FORWARD = Hook(
    _SRT + "model_executor.model_runner.ModelRunner.forward", "know the tokens of a forward pass", ("forward_batch",)
)
ROUTED = Hook(
    _MOE + "fused_moe_triton.layer.FusedMoE.forward", "see each rank's routing", ("hidden_states", "topk_output")
)
ROUTED_DEEPEP = Hook(_MOE + "ep_moe.layer.DeepEPMoE.forward", "the same under DeepEP", ("hidden_states", "topk_output"))
SCHEDULE = Hook(
    _SRT + "managers.data_parallel_controller.DataParallelController.dispatching_with_trace",
    "send requests to data-parallel ranks",
    ("req",),
)
REDUCE_SCATTER = Hook(
    _BOUNDARY + "prepare._attn_tp_reduce_scatter_update_read",
    "shuffle tokens in the reduce-scatter",
    ("hidden_states", "residual", "forward_batch", "norm", "read", "update"),
)
GATHER = Hook(
    _BOUNDARY + "prepare._update_read",
    "restore their order in the all-gather",
    ("hidden_states", "residual", "forward_batch", "norm", "read", "update"),
)
LAST_GATHER = Hook(
    _BOUNDARY + "ops.update_attn_tp_gather_output",
    "restore it after the last layer",
    ("hidden_states", "residual", "forward_batch", "update"),
)
PADDING = Hook(_MOE + "topk.resolve_routing_inputs", "the first rows of a shuffled slice are tokens", ())
CAPTURE = Hook(
    _SRT + "state_capturer.routed_experts.RoutedExpertsCapturer.capture",
    "return routed experts in the tokens' own order",
    ("layer_id", "topk_indices"),
)
RELEASE = Hook(_SRT + "mem_cache.common.release_kv_cache", "know when a recorded request ends", ("req",))
SETTINGS = Hook(
    _SRT + "managers.scheduler_components.internal_state.SchedulerInternalStateController._update_handlers",
    "take the order to swap the plan",
)
CONTROL = Hook(
    _SRT + "managers.data_parallel_controller.DataParallelController.send_control_message",
    "assign requests by the plan swapped to",
    ("obj",),
)
NEW_WEIGHTS = Hook(
    _SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
    "refuse weights that do not go through the model's own loader, which places experts",
    ("load_format",),
)
EXPERT_SIZES = Hook(
    _SRT + "eplb.expert_location.ModelConfigForExpertLocation.from_model_config",
    "place the experts of models whose classes do not say how many they have",
    ("model_config",),
)
EXPERT_LAYER = Hook(
    _MOE + "fused_moe_triton.layer.FusedMoE.__init__", "make room for copies in these models", ("num_experts",)
)
COPIES = Hook(
    _SRT + "eplb.expert_location_dispatch._topk_ids_logical_to_physical_static",
    "choose copies token by token",
    ("topk_ids", "info"),
)

HOOKS = tuple(value for value in list(globals().values()) if isinstance(value, Hook))
