"""What the embedded engine uses of transformers and torch; importing this module imports neither."""

from semmoe.engines.hooks import Hook

HOOKS: tuple[Hook, ...] = (
    Hook("transformers.AutoConfig.from_pretrained", "a plan's fingerprint is compared with the model's"),
    Hook("transformers.AutoTokenizer.from_pretrained", "the vocabulary is part of the fingerprint"),
    Hook("transformers.AutoModelForCausalLM.from_pretrained", "loads the model that is profiled and run"),
    Hook("transformers.AutoModelForImageTextToText.from_pretrained", "the same for a model with images"),
    Hook("transformers.DynamicCache", "keys and values of requests that decode"),
    Hook(
        "torch.nn.Module.register_forward_pre_hook",
        "sees what experts are called with: the routing",
        ("hook", "with_kwargs"),
    ),
)
