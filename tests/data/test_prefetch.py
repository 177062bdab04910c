"""Prefetching preserves order and errors, limits how far it runs in advance, and ends with its consumer."""

import threading
import time
from collections.abc import Iterator

import pytest

from flaxen.data.prefetch import prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flaxen-batches"]


def wait_for(condition: object, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    return bool(condition())  # type: ignore[operator]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_come_in_order(depth: int) -> None:
    assert list(prefetch(lambda n: n * n, range(50), depth)) == [n * n for n in range(50)]
    assert wait_for(lambda: not threads())


def test_no_items_give_no_results() -> None:
    assert list(prefetch(str, [])) == []


def test_error_is_raised_after_the_results_before_it() -> None:
    """Errors in `make`, and errors in the iterator of items."""

    def items() -> Iterator[int]:
        yield from (2, 1)
        raise OSError("gone")

    for results, error in (
        (prefetch(lambda n: 2 // n, [2, 1, 0, 5]), ZeroDivisionError),
        (prefetch(lambda n: 2 // n, items()), OSError),
    ):
        assert [next(results), next(results)] == [1, 2]
        with pytest.raises(error):
            next(results)
        assert list(results) == []
    assert wait_for(lambda: not threads())


@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_depth_results_are_prefetched(depth: int) -> None:
    """At most `depth` results are in the queue, and one more is computed and waits to be put there."""
    started: list[int] = []
    results = prefetch(lambda n: started.append(n) or n, range(100), depth)
    assert started == []  # nothing happens before the first result is requested
    for taken in range(1, 20):
        next(results)
        assert wait_for(lambda taken=taken: len(started) == taken + depth + 1)
        time.sleep(0.005)
        assert len(started) == taken + depth + 1
    results.close()


def test_thread_ends_when_the_consumer_stops() -> None:
    def forever() -> Iterator[int]:
        n = 0
        while True:
            yield n
            n += 1

    assert wait_for(lambda: not threads())
    results = prefetch(lambda n: n, forever())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(threads()) == 1
    results.close()
    assert wait_for(lambda: not threads())
