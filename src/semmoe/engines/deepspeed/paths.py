"""Measure a planned model's passes on every path, before it runs: see `semmoe.engines.paths`."""

from functools import partial

import torch
import torch.distributed as dist

from semmoe.engines.paths import SIZES, measured_choice, only, text_ids
from semmoe.engines.transformers.planned import PlannedModel


def choose_paths(planned: PlannedModel) -> None:
    """From now on every pass takes the path that was quickest for its tokens; all ranks, of one group, must call it."""
    group, device = dist.new_group(backend="gloo"), planned.model.device
    most = min(SIZES[-1], getattr(planned.model.config, "max_position_embeddings", SIZES[-1]))
    planned.rows.choice = measured_choice(partial(_run_dummy, planned), most, group, device)
    planned.reset_counts()


@torch.no_grad()
def _run_dummy(planned: PlannedModel, path: str, num_tokens: int) -> None:
    """A pass over so many tokens of text, a prompt of one request, on one path."""
    model = planned.model
    ids = text_ids(model.config.name_or_path, planned.plan.fingerprint.vocab_size)[None, :num_tokens]
    tokens = torch.from_numpy(ids)
    planned.rows.choice = only(path)
    planned.begin(tokens, torch.ones_like(tokens, dtype=torch.bool), True)
    model(input_ids=tokens.to(model.device), use_cache=False)
