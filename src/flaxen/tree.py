"""Models as trees: dotted paths of leaves, and tables of rules over them."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def name(path: tuple[Any, ...]) -> str:
    """A key path of JAX as 'encoder.layers.attention.q.weight'."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    # The array inside an nnx.Variable is its 'value': a detail of Flax, not a part of our names.
    return ".".join(part for part in parts if part != "value")


def leaves(tree: Any) -> dict[str, Any]:
    """Every leaf by its dotted path, in tree order."""
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_leaves(function: Callable[[str, Any], Any], tree: T) -> T:
    """`tree` with each leaf replaced by function(path, leaf)."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(name(path), leaf), tree)


def size(tree: Any) -> int:
    """How many numbers the tree holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def first_match(rules: Sequence[tuple[str, T]], path: str) -> T:
    """What the first rule says whose glob matches the path; the last rule should be '*'."""
    for glob, value in rules:
        if fnmatchcase(path, glob):
            return value
    raise KeyError(f"no rule matches {path!r}; rules: {', '.join(glob for glob, _ in rules)}")
