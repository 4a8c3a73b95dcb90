"""Collective operations: of a single process, and of three processes that this file starts as a program."""

import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

from doubly.distributed import (
    SINGLE_PROCESS,
    Communicator,
    ProcessGroup,
    collectives,
    join_processes,
    on_rank_zero,
    run_together,
)
from doubly.errors import NonFiniteError, ProcessLost, UsageError
from doubly.seeding import Rows

SIZE = 3


def test_a_single_process_gets_back_what_it_gives():
    values = torch.arange(3.0)
    one = SINGLE_PROCESS
    assert (one.rank, one.world_size, one.is_first) == (0, 1, True)
    assert one.all_gather(values) is values and one.assemble(values, 0, 3) is values and one.sum(values) is values
    assert one.mean([values]) == [values] and one.all_gather_text("a") == ["a"] and one.broadcast_value(7) == 7
    assert one.rows(4) == Rows(0, 4) and one.share(7) == (0, 7)
    assert one.average_gradients([values], flags=[True, False]) == [True, False]
    one.broadcast([values])
    one.barrier()
    one.require_equal("settings", "a", "do something")


def test_a_process_group_of_one_process_gets_back_what_it_gives(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting")
    try:
        with join_processes() as communicator:
            assert communicator is SINGLE_PROCESS
        assert dist.is_initialized()  # a group of the caller is left open
        group, values = ProcessGroup(), torch.arange(3.0, requires_grad=True)
        assert (group.rank, group.world_size, group.is_first) == (0, 1, True)
        for result in (group.all_gather(values), group.assemble(values.detach(), 0, 3), *group.mean([values])):
            assert torch.equal(result, values) and not result.requires_grad
        (gradient,) = torch.autograd.grad((group.sum(values) ** 2).sum(), values)
        assert torch.equal(gradient, 2 * values)
        values.grad = torch.ones(3)
        assert group.average_gradients([values], [torch.ones(2)], [True, False]) == [True, False]
        assert group.average_gradients([torch.ones(1)], flags=[True]) == [True]
        group.broadcast([values])
        assert group.broadcast_value({"a": 1}) == {"a": 1} and group.all_gather_text("é") == ["é"]
        assert group.all_gather_text("") == [""]
    finally:
        dist.destroy_process_group()


class Differing(Communicator):
    """Another process has another text."""

    def all_gather_text(self, text):
        return [text, text[:-1] + "!"]


def test_a_difference_is_shown_with_what_surrounds_it():
    with pytest.raises(UsageError) as error:
        Differing().require_equal("settings", "a" * 80 + "seed=0", "give the same command")
    assert str(error.value) == (
        "process 1 has other settings than process 0 (…aaaaaaaaaaaaaaaseed=!… and …aaaaaaaaaaaaaaaseed=0…): "
        "give the same command"
    )


class ErrorElsewhere(Communicator):
    def all_gather_text(self, text):
        return [text, "UsageError:refused: there"]


def test_an_error_of_another_process_is_raised_in_this_one():
    with pytest.raises(UsageError, match=r"^refused: there$"):
        run_together(ErrorElsewhere(), lambda: 7)


def test_a_failed_exchange_means_that_a_process_is_lost_unless_memory_ran_out():
    for error, expected in [(RuntimeError("reset by peer\nmore"), ProcessLost), (torch.OutOfMemoryError(), None)]:
        with pytest.raises(expected or torch.OutOfMemoryError) as caught_error:
            collectives._exchange(lambda error=error: raise_error(error))
        assert expected is None or "(reset by peer)" in str(caught_error.value)


def test_work_of_a_single_process_is_done_and_its_errors_are_raised():
    assert run_together(SINGLE_PROCESS, lambda: 7, patient=True) == 7
    done = []
    on_rank_zero(SINGLE_PROCESS, lambda: done.append(1))
    assert done == [1]
    for error in (UsageError("no"), NonFiniteError("nan"), KeyError("other")):
        with pytest.raises(type(error)):
            run_together(SINGLE_PROCESS, lambda error=error: raise_error(error))


def raise_error(error):
    raise error


@pytest.fixture(scope="module")
def results():
    """Return the results of each of three processes."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def everywhere(results, name):
    """Return a result that has to be the same on all processes."""
    first = results[0][name]
    assert all(result[name] == first for result in results)
    return first


def test_tensors_are_gathered_assembled_averaged_and_broadcast(results):
    assert everywhere(results, "all_gather") == [0, 0, 1, 10, 2, 20]
    assert everywhere(results, "assemble") == list(range(7))
    assert everywhere(results, "mean") == [1.0, [20.0, 10.0]]
    assert everywhere(results, "broadcast") == [[[0.0, 0.0], [0.0, 0.0]], [5.0]]
    assert [result["share"] for result in results] == [[0, 2], [2, 4], [4, 7]]
    assert [result["rows"] for result in results] == [[0, 12], [4, 12], [8, 12]]


def test_a_sum_can_be_differentiated_twice(results):
    # s = 1 + 2 + 3, and f = s^3 on each of three processes: d/dx of all f is 9 s^2, and d/dx of all those 54 s.
    assert everywhere(results, "sum") == [6.0, 9 * 6.0**2, 54 * 6.0]


def test_texts_and_values_are_exchanged(results):
    assert everywhere(results, "texts") == ["", "é", "éé"]
    assert everywhere(results, "value") == {"from": 0}


def test_gradients_are_averaged_with_buffers_and_flags(results):
    assert everywhere(results, "gradients") == [[1.0, 1.0], None, [3.0]]
    assert everywhere(results, "flags") == [False, True]
    assert [result["flags alone"] for result in results] == [[True], [False], [False]]  # without gradients: its own


def test_a_difference_or_an_error_on_one_process_is_raised_on_all(results):
    message = everywhere(results, "differs")
    assert message == "process 2 has other settings than process 0 (…seed=2… and …seed=0…): give the same command"
    assert everywhere(results, "refused") == "UsageError: refused on 1"
    assert everywhere(results, "not finite") == "NonFiniteError: nan on 2"
    assert [result["first alone"] for result in results] == [[1], [], []]


def test_a_process_that_ends_is_noticed_by_the_others(results):
    assert results[2]["lost"] is None
    for result in results[:2]:
        assert result["lost"].startswith("another process of this run has ended or cannot be reached")


def caught(work):
    try:
        work()
    except (UsageError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}" if "than process" not in str(error) else str(error)
    return None


def raised_by(group, rank, error):
    return caught(lambda: run_together(group, lambda: group.rank == rank and raise_error(error)))


def check_tensors(group):
    rank = group.rank
    rows = torch.tensor([[0, 1, 2], [0, 10, 20]])[:, rank]
    start, end = group.share(7)
    mean = group.mean([torch.tensor(float(rank)), torch.tensor([20.0, 10.0 * rank])])
    buffers = [torch.full((2, 2), float(rank)).T, torch.tensor([5.0 + rank])]
    group.broadcast(buffers)
    x = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
    total = group.sum(x)
    (slope,) = torch.autograd.grad(total**3, x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, x)
    return {
        "all_gather": group.all_gather(rows).tolist(),
        "share": [start, end],
        "rows": group.rows(4),
        "assemble": group.assemble(torch.arange(start, end), start, 7).tolist(),
        "mean": [tensor.tolist() for tensor in mean],
        "broadcast": [tensor.tolist() for tensor in buffers],
        "sum": [total.item(), slope.item(), curvature.item()],
    }


def check_exchanges(group):
    rank = group.rank
    used, unused = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    used.grad = torch.full((2,), float(rank))
    buffer = torch.tensor([3.0 * rank])
    flags = group.average_gradients([used, unused], [buffer], [False, rank == 1])
    alone = []
    on_rank_zero(group, lambda: alone.append(1), patient=True)
    group.barrier()
    return {
        "texts": group.all_gather_text("é" * rank),
        "value": group.broadcast_value({"from": rank}),
        "gradients": [used.grad.tolist(), unused.grad, buffer.tolist()],
        "flags": flags,
        "flags alone": group.average_gradients([unused], flags=[rank == 0]),
        "differs": caught(lambda: group.require_equal("settings", f"seed={rank // 2 * 2}", "give the same command")),
        "refused": caught(lambda: run_together(group, lambda: rank == 1 and raise_error(UsageError("refused on 1")))),
        "not finite": caught(
            lambda: run_together(group, lambda: rank == 2 and raise_error(NonFiniteError("nan on 2")))
        ),
        "first alone": alone,
    }


def process(port_pipe, folder, rank, pipe):
    """Join the others as torchrun would have it, and write the results to a pipe."""
    port = int(os.read(port_pipe, 10))
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({**address, "RANK": str(rank), "WORLD_SIZE": str(SIZE)})
    with join_processes() as group:
        assert isinstance(group, ProcessGroup)
        result = check_tensors(group) | check_exchanges(group) | {"lost": None}
    assert not dist.is_initialized()
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, init_method=f"file://{folder}/meeting")
    with join_processes() as group:  # a group that the caller has initialized is used, and left open
        pass
    assert dist.is_initialized()
    try:
        group.barrier()  # all have connected, and the last process leaves
        while rank < 2:
            group.all_gather_text("are you there?")
    except ProcessLost as error:
        result["lost"] = str(error)
    os.write(pipe, (json.dumps(result) + "\n").encode())
    os._exit(0)


def program():
    """Fork the processes; this one holds the store, as torchrun does."""
    torch.set_num_threads(1)
    children, ports = {}, []
    with TemporaryDirectory() as folder:
        for rank in range(SIZE):
            (reading, writing), (port_reading, port_writing) = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                process(port_reading, folder, rank, writing)
            os.close(writing)
            children[child] = reading
            ports.append(port_writing)
        # Opened after the forks: a lock that a thread of the store holds would stay locked in a child for ever.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for pipe in ports:
            os.write(pipe, str(store.port).encode())
        for reading in children.values():
            with os.fdopen(reading) as stream:
                print(stream.read().strip())
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    program()
