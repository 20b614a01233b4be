"""The places in vLLM that the plug-in hooks, and why. Importable without vLLM; tested with 0.32.0."""

from semmoe.engines.hooks import Hook

TRIED = "0.32.0"
# methods that vLLM's workers are given
ARM, READY = "semmoe_arm", "semmoe_ready"
STATE, STEP = "semmoe_state", "semmoe_step"
PREPARE = "semmoe_prepare"  # and its client
_MOE = "vllm.model_executor.layers.fused_moe."
_LINEAR = "vllm.model_executor.layers.linear."
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner."
_CLIENT = "vllm.v1.engine.core_client.DPLBAsyncMPClient."

LOAD_MODEL = Hook(_RUNNER + "load_model", "check the plan against the model and its ranks")
LOAD_MODEL_CPU = Hook("vllm.v1.worker.cpu_model_runner.CPUModelRunner.load_model", "the same on a CPU")
LOAD_MODEL_V2 = Hook(
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.load_model", "refuse the model runner that semmoe does not know"
)
FORWARD = Hook(_RUNNER + "_model_forward", "know the tokens of a forward pass", ("input_ids", "positions"))
UPDATE = Hook(_RUNNER + "_update_states", "know when a request ends", ("scheduler_output",))
RELOAD = Hook(
    _RUNNER + "reload_weights",
    "refuse weights loaded again",
    ("weights_iterator", "weights_path", "is_checkpoint_format"),
)
WORKER = Hook("vllm.v1.worker.worker_base.WorkerBase", "swap the plan between passes")
CLIENT = Hook(_CLIENT.removesuffix("."), "assign requests by the plan swapped to")
SAMPLE = Hook(
    _RUNNER + "_sample", "know which drafts of a speculating engine were accepted", ("logits", "spec_decode_metadata")
)
LOADER = Hook(
    "vllm.model_executor.model_loader.default_loader.DefaultModelLoader.load_weights",
    "prove that the weights of a family that was never run are where the plan has them",
    ("model", "model_config"),
)
EXPERT_COUNTS = Hook(
    _MOE + "layer.determine_expert_counts", "room for redundant experts", ("num_experts", "num_redundant_experts")
)
EXPERTS = Hook(_MOE + "routed_experts.RoutedExperts.__init__", "know the MoE layers", ("layer_name",))
WEIGHTS = Hook(
    _MOE + "routed_experts.RoutedExperts.weight_loader",
    "load experts where the plan has them",
    ("param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success"),
)
GPT_OSS = "vllm.model_executor.models.gpt_oss."
GPT_OSS_PACKED = Hook(GPT_OSS + "GptOssModel.load_weights", "split its packed experts", ("weights",))
GPT_OSS_WEIGHTS = Hook(GPT_OSS + "GptOssRoutedExperts.weight_loader", "the same of gpt-oss", WEIGHTS.parameters)
ROUTE = Hook(_MOE + "router.base_router.BaseRouter._compute_routing", "see each rank's routing", ("router_logits",))
TO_PHYSICAL = Hook(
    _MOE + "router.base_router.BaseRouter._apply_eplb_mapping",
    "choose the copy of each expert that this rank uses",
    ("topk_ids",),
)
SCHEDULE = Hook(_CLIENT + "get_core_engine_for_request", "send requests to data-parallel ranks", ("request",))
FINISHED = Hook(_CLIENT + "process_engine_outputs", "know which requests ended", ("outputs",))
SEQUENCE_PARALLEL = Hook(
    "vllm.config.parallel.ParallelConfig.use_sequence_parallel_moe",
    "split tokens around experts without data parallelism",
)
SPLIT_EXPERTS = Hook(
    _MOE + "layer.make_parallel_config",
    "tell experts that the rows of their attention group are split",
    ("is_sequence_parallel", "parallel_config"),
)
COLUMNS = Hook(_LINEAR + "MergedColumnParallelLinear.__init__", "shared experts whole on every rank", ("disable_tp",))
ROWS = Hook(_LINEAR + "RowParallelLinear.__init__", "the same", ("disable_tp",))

# Decoder layers around whose experts tokens can be split over the ranks of an attention group.
_LAYER = ("positions", "hidden_states", "residual")
LAYERS = tuple(
    Hook(f"vllm.model_executor.models.{name}.forward", f"split tokens around {family}'s experts", _LAYER)
    for name, family in (
        ("qwen3_moe.Qwen3MoeDecoderLayer", "Qwen3-MoE"),
        ("deepseek_v2.DeepseekV2DecoderLayer", "DeepSeek-V2"),
        ("mixtral.MixtralDecoderLayer", "Mixtral"),
        ("olmoe.OlmoeDecoderLayer", "OLMoE"),
        ("glm4_moe.Glm4MoeDecoderLayer", "GLM-4.5"),
        ("gpt_oss.TransformerBlock", "gpt-oss"),
    )
)

HOOKS = (*(value for value in list(globals().values()) if isinstance(value, Hook)), *LAYERS)
