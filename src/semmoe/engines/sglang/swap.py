"""Names of the settings by which `semmoe swap` reaches SGLang's processes, through `/set_internal_state`."""

SWAP = "semmoe_swap"  # the number of a plan
LAYERS = "semmoe_layers_per_pass"  # before it
REQUESTS = "semmoe_requests"  # the number of the plan that the controller is to assign requests by
