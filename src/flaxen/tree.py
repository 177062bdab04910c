"""Pytree utilities: dotted leaf paths, and rule tables that match them by glob."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def name(path: tuple[Any, ...]) -> str:
    """Format a JAX key path as a dotted name such as 'encoder.layers.attention.q.weight'."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    # An nnx.Variable holds its array under 'value': a detail of Flax that does not belong in our names.
    return ".".join(part for part in parts if part != "value")


def leaves(tree: Any) -> dict[str, Any]:
    """Return all leaves by dotted path, in tree order."""
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_leaves(function: Callable[[str, Any], Any], tree: T) -> T:
    """Replace each leaf of `tree` by function(path, leaf)."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(name(path), leaf), tree)


def size(tree: Any) -> int:
    """Total number of array elements in the tree, such as the parameter count of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def first_match(rules: Sequence[tuple[str, T]], path: str) -> T:
    """Return the value of the first rule whose glob matches the path; the last rule should be '*'."""
    for glob, value in rules:
        if fnmatchcase(path, glob):
            return value
    raise KeyError(f"no rule matches {path!r}; rules: {', '.join(glob for glob, _ in rules)}")
