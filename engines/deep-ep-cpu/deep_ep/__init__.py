"""A stand-in for DeepEP's public interface over gloo, so that engines' own DeepEP dispatchers run on a CPU.

Rows really go from rank to rank as DeepEP sends them: in normal mode one to each remote node and from there to the
ranks inside it, in low-latency mode one for each (token, expert), in V2 one to each rank. What an engine may not read,
because DeepEP leaves it undefined, holds NaN. The stand-in knows nothing of semmoe, whose tests hold it against
DeepEP's published interface; README.md says of which version, and what differs.

    PYTHONPATH=engines/deep-ep-cpu ...        # only where it is asked for
"""

import torch

from deep_ep.elastic import ElasticBuffer, EPHandle
from deep_ep.events import EventHandle, EventOverlap
from deep_ep.legacy import Buffer, Config

__version__ = "0.0.0+semmoe.cpu"
__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
topk_idx_t = torch.int64
