"""Made ahead of their use, in order, and no longer than they are wanted."""

import threading
import time
from collections.abc import Iterator

import pytest

from flaxen.data.prefetch import prefetch


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "flaxen-batches"]


def wait_for(condition: object, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    return bool(condition())  # type: ignore[operator]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_order(depth: int) -> None:
    assert list(prefetch(lambda n: n * n, range(50), depth)) == [n * n for n in range(50)]
    assert wait_for(lambda: not threads())


def test_nothing() -> None:
    assert list(prefetch(str, [])) == []


def test_an_error_comes_after_what_was_made_before_it() -> None:
    """Of making, and of the items themselves."""

    def items() -> Iterator[int]:
        yield from (2, 1)
        raise OSError("gone")

    for made, error in (
        (prefetch(lambda n: 2 // n, [2, 1, 0, 5]), ZeroDivisionError),
        (prefetch(lambda n: 2 // n, items()), OSError),
    ):
        assert [next(made), next(made)] == [1, 2]
        with pytest.raises(error):
            next(made)
        assert list(made) == []
    assert wait_for(lambda: not threads())


@pytest.mark.parametrize("depth", [1, 3])
def test_never_far_ahead(depth: int) -> None:
    """At most `depth` wait, and one more is being handed over."""
    begun: list[int] = []
    made = prefetch(lambda n: begun.append(n) or n, range(100), depth)
    assert begun == []  # nothing before the first is asked for
    for taken in range(1, 20):
        next(made)
        assert wait_for(lambda taken=taken: len(begun) == taken + depth + 1)
        time.sleep(0.005)
        assert len(begun) == taken + depth + 1
    made.close()


def test_the_thread_ends_when_the_consumer_stops() -> None:
    def forever() -> Iterator[int]:
        n = 0
        while True:
            yield n
            n += 1

    assert wait_for(lambda: not threads())
    made = prefetch(lambda n: n, forever())
    assert [next(made) for _ in range(3)] == [0, 1, 2]
    assert len(threads()) == 1
    made.close()
    assert wait_for(lambda: not threads())
