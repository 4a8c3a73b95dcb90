"""Several processes: collectives, joining those of torchrun, work of the first one, and microbatches."""

from doubly.distributed.collectives import SINGLE_PROCESS, Communicator, ProcessGroup
from doubly.distributed.launch import join_processes
from doubly.distributed.rank_zero import on_rank_zero, run_together

__all__ = ["SINGLE_PROCESS", "Communicator", "ProcessGroup", "join_processes", "on_rank_zero", "run_together"]
