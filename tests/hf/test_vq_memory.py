"""Memory files of Transformer-VQ. Names and shapes are a file format: older files must stay readable."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.hf.vq_memory import Memory
from flaxen.models import vq_lm
from flaxen.models.vq_config import Config
from flaxen.models.vq_lm import VQLM
from flaxen.nn.param import initialise
from flaxen.tree import leaves

CONFIG = Config(vocab_size=23, d_model=16, d_k=8, d_v=12, n_layers=2, n_codes=5, block=4, window=6, n_heads=3)


def test_memory_file_has_stable_names_and_axes(tmp_path: Path) -> None:
    """Caches have the layer axis first, the dropout key is not saved, and loading restores the saved state."""
    model = initialise(VQLM(CONFIG), 0)
    _, state, _ = jax.jit(lambda model: model(jnp.arange(12)[None] % 23))(model)
    Memory(state, (3,), "digest").save(tmp_path / "memory.npz")
    with np.load(tmp_path / "memory.npz") as file:
        actual = {name: file[name].shape for name in file.files}
        np.testing.assert_array_equal(file["caches.1.codes"][1, 0], state.caches[1].codes[0, 1])
    shapes = {"codes": (6,), "keys": (6, 8), "values": (6, 12), "counts": (5,), "means": (5, 12)}
    caches = {f"caches.{unit}.{name}": (2, 1, 3, *shape) for unit in (0, 1) for name, shape in shapes.items()}
    assert actual == {
        "unread": (1,),
        "model": (),
        "position": (1,),
        "seen.documents": (1, 6),
        "seen.latest": (1,),
        **caches,
    }
    loaded = Memory.load(tmp_path / "memory.npz", CONFIG)
    assert (loaded.unread, loaded.model) == ((3,), "digest")
    expected = leaves(state)
    for name, leaf in leaves(loaded.state).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    assert jax.tree.structure(loaded.state) == jax.tree.structure(vq_lm.initial_state(CONFIG, 1))
