"""DeepSpeed in `generate`: every rank's model converted by AutoEP and put on the set-up's plan."""

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
    """shuffle: as of `apply_plan`; DeepSpeed's own way is `off` and a plan that leaves experts where they are."""
    return Configuration(name=name, plan=plan, attach=partial(attach, shuffle=shuffle))


def attach(
    model: PreTrainedModel, chosen: Configuration, comm: Communicator, shuffle: str = "predicted"
) -> PlannedModel:
    """In a process that has joined the others already."""
    from semmoe.engines.deepspeed.model import apply_plan

    return apply_plan(initialize(model, chosen.plan), chosen.plan, shuffle=shuffle)


def initialize(model: PreTrainedModel, plan: Plan) -> Any:
    """DeepSpeed's engine around the model, in processes that have joined the plan's other ranks already."""
    import deepspeed

    from semmoe.engines.deepspeed.config import config_for

    config = config_for(plan, model.config)
    join()
    return deepspeed.initialize(model=model, config=config)[0]


def join() -> None:
    """Tell DeepSpeed of the process group there is."""
    import deepspeed

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    # Else it compiles collectives over shared memory, for ranks of one machine: nothing here calls them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
