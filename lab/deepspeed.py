"""DeepSpeed in `generate`, for tests and benchmarks: every rank's model is converted by AutoEP and put on a plan."""

import os
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from semmoe.core import Plan
from semmoe.engines.transformers.generate import Configuration
from semmoe.engines.transformers.planned import PlannedModel
from semmoe.runtime.collectives import Communicator


def set_up(name: str, plan: Plan, shuffle: str) -> Configuration:
    """A configuration for `generate`. shuffle: same as in `apply_plan`; `off` with a linear plan is plain DeepSpeed."""
    return Configuration(name=name, plan=plan, attach=partial(attach, shuffle=shuffle))


def attach(
    model: PreTrainedModel, chosen: Configuration, comm: Communicator, shuffle: str = "predicted"
) -> PlannedModel:
    """Put a model on the plan of a configuration, in a process that has already joined the other ranks."""
    from semmoe.engines.deepspeed.model import apply_plan

    return apply_plan(initialize(model, chosen.plan), chosen.plan, shuffle=shuffle)


def initialize(model: PreTrainedModel, plan: Plan) -> Any:
    """DeepSpeed's engine around the model, in processes that have already joined the plan's other ranks."""
    import deepspeed

    from semmoe.engines.deepspeed.config import config_for

    config = config_for(plan, model.config)
    join()
    return deepspeed.initialize(model=model, config=config)[0]


def join() -> None:
    """Register the existing process group with DeepSpeed."""
    import deepspeed

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    # Otherwise DeepSpeed compiles collectives over shared memory, which nothing here calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
