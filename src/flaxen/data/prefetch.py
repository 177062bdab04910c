"""Batches made ahead of their use, by a thread: NumPy works while the model does."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def prefetch(make: Callable[[S], T], items: Iterable[S], depth: int = 2) -> Generator[T, None, None]:
    """make(item) for each item, in order, up to `depth` of them before they are asked for."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def put(result: tuple[T | None, BaseException | None]) -> None:
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
            put((None, error))  # raised where the batch is awaited

    thread = threading.Thread(target=work, name="flaxen-batches", daemon=True)
    thread.start()
    try:
        while True:
            made, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield made  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()  # a thread that is inside JAX when the interpreter ends takes the process down with it
