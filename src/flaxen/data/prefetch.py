"""Prefetch batches in a background thread, so that NumPy prepares data while the model computes."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def prefetch(make: Callable[[S], T], items: Iterable[S], depth: int = 2) -> Generator[T, None, None]:
    """Yield make(item) for each item, in order, computing up to `depth` results in advance."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def put(result: tuple[T | None, BaseException | None]) -> None:
        # The timeout lets the thread notice that the consumer has stopped while the queue is full.
        while not stop.is_set():
            try:
                ready.put(result, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                if stop.is_set():
                    return
                put((make(item), None))
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))  # raised again in the consumer's thread

    thread = threading.Thread(target=work, name="flaxen-batches", daemon=True)
    thread.start()
    try:
        while True:
            result, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield result  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()  # a thread that is still inside JAX at interpreter exit would crash the process
