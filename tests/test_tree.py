"""Paths, rules, casting."""

import jax.numpy as jnp

from flaxen.models.t5 import T5, Config
from flaxen.nn.param import initialise
from flaxen.tree import cast, first_match, leaves, map_leaves, size

TINY = Config(vocab_size=8, d_model=4, d_head=2, d_ff=4, n_layers=2, n_decoder_layers=1, n_heads=2)


def test_paths_are_dotted_names_without_flax_details() -> None:
    names = set(leaves(T5(TINY)))
    assert {"embedding.weight", "encoder.layers.attention.q.weight", "decoder.layers.cross.o.weight"} <= names
    assert not any("value" in name for name in names)


def test_the_first_rule_that_matches_wins() -> None:
    rules = [("*.mlp.*", 1), ("encoder.*", 2)]
    assert first_match("encoder.layers.mlp.wi.weight", rules, 0) == 1
    assert first_match("encoder.norm.weight", rules, 0) == 2
    assert first_match("embedding.weight", rules, 0) == 0


def test_cast_touches_floats_only() -> None:
    tree = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)}
    assert {name: leaf.dtype for name, leaf in cast(tree, jnp.bfloat16).items()} == {"a": jnp.bfloat16, "b": jnp.int32}


def test_map_leaves_keeps_the_structure() -> None:
    model = initialise(T5(TINY), 0)
    doubled = map_leaves(lambda path, leaf: 2 * leaf if path == "embedding.weight" else leaf, model)
    assert (leaves(doubled)["embedding.weight"] == 2 * leaves(model)["embedding.weight"]).all()
    assert size(doubled) == size(T5(TINY))
