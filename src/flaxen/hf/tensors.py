"""Protocol for the tensors of a checkpoint. To support another file format, write a class that implements `Tensors`."""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Tensors(Protocol):
    """Tensors by name. Names, shapes and dtypes are known without reading data; `tensors[name]` reads a tensor."""

    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> np.ndarray: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...


class InMemory:
    """Tensors from a dictionary of arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return np.shape(self._arrays[name])

    def dtype(self, name: str) -> str:
        return str(self._arrays[name].dtype)
