"""Work spread over the cores: the order of results, errors, and what is left behind."""

import multiprocessing
import os

import pytest
import torch

from fewshot_dpkl.parallel import on_every_core


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_from_workers_of_one_thread(workers):
    before = torch.get_num_threads()
    offset = torch.tensor(100)  # seen by the workers without being sent to them
    results = list(on_every_core(lambda i: (int(offset + i), torch.get_num_threads()), range(7), workers))
    assert results == [(100 + i, 1) for i in range(7)]
    assert torch.get_num_threads() == before


def test_results_come_as_they_are_ready_when_the_order_does_not_matter():
    last_begun = multiprocessing.Event()

    def work(item: int) -> int:
        if item == 0:
            assert last_begun.wait(60)
        if item == 2:
            last_begun.set()
        return item

    results = list(on_every_core(work, range(3), 2, ordered=False))
    assert results[0] == 1
    assert sorted(results) == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_worker_arrives_as_it_was_raised(workers):
    def work(item: int) -> int:
        if item == 2:
            raise ValueError("item 2 is bad")
        return item

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match=r"^item 2 is bad$"):
        list(on_every_core(work, range(5), workers))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("ordered", [True, False])
def test_workers_are_gone_when_the_results_are_not_wanted_to_the_end(ordered):
    results = on_every_core(lambda _: os.getpid(), range(50), 2, ordered)
    worker = next(results)
    results.close()
    if worker != os.getpid():
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
