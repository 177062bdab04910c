"""Dotted leaf paths of models."""

from flaxen.models.t5 import T5, Config
from flaxen.nn.param import initialise
from flaxen.tree import leaves, map_leaves, size

TINY = Config(vocab_size=8, d_model=4, d_head=2, d_ff=4, n_layers=2, n_decoder_layers=1, n_heads=2)


def test_paths_are_dotted_names_without_flax_details() -> None:
    names = set(leaves(T5(TINY)))
    assert {"embedding.weight", "encoder.layers.attention.q.weight", "decoder.layers.cross.o.weight"} <= names
    assert not any("value" in name for name in names)


def test_map_leaves_keeps_the_structure() -> None:
    model = initialise(T5(TINY), 0)
    doubled = map_leaves(lambda path, leaf: 2 * leaf if path == "embedding.weight" else leaf, model)
    assert (leaves(doubled)["embedding.weight"] == 2 * leaves(model)["embedding.weight"]).all()
    assert size(doubled) == size(T5(TINY))
