"""The cores of one machine, a piece of work on each: threads, because the work lets go of Python's lock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Unwanted(BaseException):
    """Raised in a worker whose results nobody waits for any more; never seen outside of it."""


class Worker(threading.Thread):
    """A daemon: it never keeps a process from ending."""

    def __init__(self, work: Callable[[], None], unwanted: threading.Event) -> None:
        super().__init__(target=work, daemon=True)
        self.unwanted = unwanted


def stop_if_unwanted() -> None:
    """For long work, several times a second: end here if nobody waits for this worker any more."""
    worker = threading.current_thread()
    if isinstance(worker, Worker) and worker.unwanted.is_set():
        raise Unwanted


def on_every_core(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ordered: bool = True
) -> Iterator[Result]:
    """`map` over `workers` threads of one core each; with `ordered=False` results come as they are ready.

    A batch of episodes is a long chain of operations on small tensors: cutting every one of them in two for
    two cores costs more than it saves, two chains side by side do not. After an error, Ctrl-C or when the
    results are not wanted to the end, nothing new is begun, and what runs ends at its next
    `stop_if_unwanted`.
    """
    waiting: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, Result | None, BaseException | None]] = queue.SimpleQueue()
    count = 0
    for item in items:
        waiting.put((count, item))
        count += 1
    unwanted = threading.Event()

    def work() -> None:
        torch.set_num_threads(1)
        while not unwanted.is_set():
            try:
                number, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((number, function(item), None))
            except Unwanted:
                return
            except BaseException as error:
                finished.put((number, None, error))

    threads = [Worker(work, unwanted) for _ in range(min(workers, count))]
    with _torch_threads_as_before():
        try:
            for thread in threads:
                thread.start()
            early: dict[int, Any] = {}
            for place in range(count):
                while not ordered or place not in early:
                    number, result, error = finished.get()
                    if error is not None:
                        raise error
                    if not ordered:
                        early[place] = result
                        break
                    early[number] = result
                yield early.pop(place)
        finally:
            unwanted.set()
            for thread in threads:
                thread.join(1.0)  # a second at most, so that Ctrl-C is obeyed whatever they do


_lock = threading.Lock()
_runs, _before = 0, 0


def cores() -> int:
    """How many threads torch was given: the cores to use."""
    with _lock:
        return _before if _runs else torch.get_num_threads()


@contextmanager
def _torch_threads_as_before() -> Iterator[None]:
    """Put torch's number of threads back when the last of several runs at once has ended.

    torch has one number for all threads that ask for it, and each worker needs it to be one.
    """
    global _runs, _before
    with _lock:
        if _runs == 0:
            _before = torch.get_num_threads()
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0:
                torch.set_num_threads(_before)
