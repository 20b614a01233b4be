"""Jobs on several ranks: real gloo processes, or threads of this one for groups that are too wide for that."""

import os

import torch.distributed as dist

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.launch import run_ranks

# Most tests on ranks import this module. The process that forks ranks imports only what the first test names.
ENGINE = "semmoe.engines.transformers.generate"


def on_ranks(size, job, tmp_path):
    """Run `job(comm)` on `size` real gloo processes; what each returned, in rank order."""
    folder = tmp_path / f"{job.__name__}-{size}"
    folder.mkdir()
    return run_ranks(size, _run, (job, folder), lambda what, done: None, [ENGINE])


def _run(rank, size, asked, report):
    job, folder = asked
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    dist.barrier()  # else a job without collectives could end while another rank still connects
    result = job(Communicator(dist.group.WORLD, rank, size))
    dist.destroy_process_group()
    return result


def on_threads(size, job):
    """Run `job(comm)` on `size` threads in torch's multi-threaded process group; what each returned."""
    from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

    results = {}

    @spawn_threads_and_init_comms(world_size=size)
    def main(_):
        comm = Communicator(dist.group.WORLD, dist.get_rank(), size)
        results[comm.rank] = job(comm)

    main(None)
    return [results[r] for r in range(size)]
