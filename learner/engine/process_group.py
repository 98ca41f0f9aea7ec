"""The process group of the ranks: they meet in a store on a free port of rank 0.

Rank 0 holds the port from the moment it is chosen, so that no other process can take it.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

STORE_SECONDS = 300.0
"""Deadline for every rank to arrive."""
COLLECTIVE_SECONDS = 1800.0
"""Deadline of one collective operation, longer than the longest step of the slowest rank."""


def open_store(host: str) -> TCPStore:
    """Open the store of a group on a free port of this address alone; called by rank 0."""
    listening = socket.create_server((host, 0))
    return TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=listening.detach(),  # by itself it would listen at every address
    )


def find_store(address: tuple[str, int]) -> TCPStore:
    """Connect to the store from another rank."""
    return TCPStore(*address, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))


def join(store: Store, rank: int, ranks: int) -> None:
    """Make this process a rank of a group; wait until all have joined.

    Raises:
        torch.distributed.DistError: A rank did not join within `STORE_SECONDS`.
    """
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )


def join_alone() -> None:
    """Make this process a group of its own, unless it has joined one; opens no port."""
    if not dist.is_initialized():
        join(HashStore(), 0, 1)
