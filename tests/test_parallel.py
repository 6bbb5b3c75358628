"""Work spread over the cores: the order of results, errors, and what is left behind."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from fewshot_dpkl.parallel import cores, on_every_core, stop_if_unwanted


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_from_workers_of_one_thread(workers):
    before = torch.get_num_threads()
    offset = torch.tensor(100)  # seen by the workers without being sent to them
    results = list(on_every_core(lambda i: (int(offset + i), torch.get_num_threads()), range(7), workers))
    assert results == [(100 + i, 1) for i in range(7)]
    assert torch.get_num_threads() == before


def test_results_come_as_they_are_ready_when_the_order_does_not_matter():
    last_begun = threading.Event()

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
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        while item > 0:  # for ever, but for this:
            stop_if_unwanted()
        return item

    before = threading.active_count()
    results = on_every_core(work, range(50), 2, ordered)
    assert next(results) == 0
    results.close()
    assert threading.active_count() == before
    assert len(begun) <= 3


def test_several_runs_at_once_leave_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    sums = []

    def run(first: int) -> None:
        sums.append(sum(on_every_core(lambda i: first + i, range(20), 2)))

    runs = [threading.Thread(target=run, args=(100 * i,)) for i in range(4)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join(60)
    assert sorted(sums) == [190 + 2000 * i for i in range(4)]
    assert torch.get_num_threads() == before == cores()


SCRIPT = """
import multiprocessing, signal, sys, threading, numpy, torch
from fewshot_dpkl import DBLRHead, EpisodeSampler, FeatureSet, evaluate

def run(times, epochs):
    x = numpy.random.default_rng(0).normal(size=(40, 30)).astype(numpy.float32)
    features = FeatureSet(x, numpy.arange(40) % 4, ["a", "b", "c", "d"])
    head = DBLRHead(latent=16, particles=2, epochs=epochs)
    for _ in range(times):
        evaluate({"dblr": head}, features, EpisodeSampler(features, way=3, query=2), 4)

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.rand(600, 600) @ torch.rand(600, 600)
    if sys.argv[1] == "long":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
        print(flush=True)
        run(1, 10**5)
    run(5, 2)
    others = [threading.Thread(target=run, args=(5, 2)) for _ in range(4)]
    others.append(multiprocessing.get_context("spawn").Process(target=run, args=(2, 2), daemon=True))
    for other in others:
        other.start()
    for other in others:
        other.join()
    print(torch.get_num_threads(), multiprocessing.active_children(), others[-1].exitcode)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def test_evaluate_can_be_called_from_anywhere_after_any_use_of_torch(script):
    """The main thread, four threads at once and a daemon process beside them."""
    done = subprocess.run([*script, "often"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 [] 0\n", done.stderr


def test_ctrl_c_ends_a_run_at_once(script):
    process = subprocess.Popen([*script, "long"], stdout=-1, stderr=-1, text=True)
    process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=20)[1]
