"""The cores of one machine, a piece of work on each."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_every_core(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ordered: bool = True
) -> Iterator[Result]:
    """`map` over `workers` workers of one core each; with `ordered=False` results come as they are ready.

    A batch of episodes is a long chain of operations on small tensors: cutting every one of them in two for
    two cores costs more than it saves, two chains side by side do not. On Linux the workers are forked
    processes, which see the memory of this one; Python's lock would make threads wait for each other at
    every operation. Elsewhere forking is not safe, and the workers are threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if workers == 1:
            yield from map(function, items)
        elif sys.platform == "linux":
            yield from _in_processes(function, items, workers, ordered)
        else:
            with ThreadPoolExecutor(workers) as pool:
                yield from _results(pool, function, items, ordered)
    finally:
        torch.set_num_threads(before)


def _in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ordered: bool
) -> Iterator[Result]:
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(function,))
    try:
        yield from _results(pool, _work, items, ordered)
    except BaseException:  # an error or Ctrl-C: do not wait for work that will not be used
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _results(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ordered: bool
) -> Iterator[Result]:
    futures = [pool.submit(function, item) for item in items]
    try:
        for future in futures if ordered else as_completed(futures):
            yield future.result()
    finally:  # what is not wanted any more need not begin
        for future in futures:
            future.cancel()


_function: Callable[[Any], Any]  # of this worker; inherited by the fork, so it need not be pickled


def _start_worker(function: Callable[[Any], Any]) -> None:
    """Leave Ctrl-C to the parent, and keep memory from one piece of work to the next."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory()
    end_with_parent()


def keep_memory() -> None:
    """Ask the C library (glibc) not to return freed buffers to the system, however large.

    The next batch of episodes takes as much again, and fresh, zeroed pages cost some milliseconds an
    episode. Does nothing where there is no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # names in malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def end_with_parent() -> None:
    """End this worker when its parent does: a killed run leaves no worker behind."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _work(item: Any) -> Any:
    return _function(item)
