"""Jobs on several ranks: real gloo processes, or threads of this one for groups that are too wide for that."""

import multiprocessing
import os
import traceback

import torch.distributed as dist

from semmoe.runtime.collectives import Communicator


def on_ranks(size, job, tmp_path):
    """Run `job(comm)` on `size` real gloo processes; what each returned, in rank order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["semmoe.runtime.dispatch"])
    queue = context.Queue()
    store = str(tmp_path / f"store-{job.__name__}-{size}")
    ranks = [context.Process(target=_run, args=(r, size, store, job, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    results = {}
    try:
        while len(results) < size:
            rank, result = queue.get(timeout=240)
            assert not isinstance(result, str), result
            results[rank] = result
    except BaseException:
        for process in ranks:  # the others wait for the one that failed
            process.kill()
        raise
    finally:
        for process in ranks:
            process.join()
    return [results[r] for r in range(size)]


def _run(rank, size, store, job, queue):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        queue.put((rank, job(Communicator(dist.group.WORLD, rank, size))))
        dist.destroy_process_group()
    except Exception:
        queue.put((rank, traceback.format_exc()))


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
