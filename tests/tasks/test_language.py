"""Language-model batches are pure functions of step and row; every token except padding is a label."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from ids import Ids

from flaxen.data.stream_store import Splits
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.models import vq_language
from flaxen.models.vq_config import PRESETS, Config
from flaxen.tasks.language import Language
from flaxen.tasks.objective import LanguageObjective
from flaxen.tree import leaves

CONFIG = replace(PRESETS["vq-tiny"], block=8, window=8)


def task(config: Config = CONFIG, **objective: object) -> Language:
    ids = Ids(np.random.default_rng(0).choice([1, 3, 4, 5], 1000).astype(np.int32))
    opened = Splits({"train": ids, "validation": ids}, ())
    return Language(vq_language, config, LanguageObjective(48, 16, **objective), ByteTokenizer.plain(), opened, 7)


def test_batch_depends_only_on_step_and_rows() -> None:
    """Selected rows equal those of the full batch; chunks are consecutive; an epoch has each sequence once."""
    one, other = task(), task()
    batches = [one.batch(step, 7) for step in range(9)]
    for step in (8, 0, 3):
        for name, array in other.batch(step, 7, slice(2, 5)).items():
            np.testing.assert_array_equal(array, batches[step][name][2:5])
    assert [batch["fresh"].tolist() for batch in batches[:3]] == [[True] * 7, [False] * 7, [False] * 7]
    np.testing.assert_array_equal(batches[1]["inputs"][:, 0], batches[0]["labels"][:, -1])
    seen = np.concatenate([np.concatenate([b["labels"] for b in batches[i : i + 3]], 1) for i in (0, 3, 6)])
    assert one.sequences == 21 == len({row.tobytes() for row in seen})
    assert (seen >= 0).sum() == 1000


@pytest.mark.parametrize("pad", [0, 1])
def test_end_token_is_a_label_even_if_it_is_also_the_padding(pad: int) -> None:
    """GPT-2's vocabulary has one token for both."""
    language = task(replace(CONFIG, pad_id=pad))
    expected = np.asarray(language.train.ids)
    labels = np.concatenate([batch["labels"] for batch in language.evaluation(1)]).reshape(-1)
    np.testing.assert_array_equal(labels[:1000], expected)
    assert (labels[1000:] == -1).all()


def test_gradient_divisor() -> None:
    batch = jax.device_put(task().batch(0, 3))
    assert task().divisor(batch) is None
    assert task(normalise="positions").divisor(batch) == 3 * 16


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_names_and_shapes_of_the_carry(attention: str) -> None:
    """Checkpoints store the carry by these names, rows first: renaming one makes older checkpoints unreadable."""
    c = replace(CONFIG, attention=attention)
    language = task(c) if attention == "vq" else Language(
        vq_language, c, LanguageObjective(48), ByteTokenizer.plain(), task().data, 7
    )  # fmt: skip
    carry = {name: leaf.shape for name, leaf in leaves({"carry": language.carry(3)}).items()}
    shapes = {"codes": (8,), "keys": (8, 32), "values": (8, 256), "counts": (64,), "means": (64, 256)}
    caches = {
        f"carry.caches.{unit}.{name}": (3, c.n_layers, 1, *shape) for unit in (0, 1) for name, shape in shapes.items()
    }
    expected = {"carry.position": (3,), "carry.documents": (3, 8), "carry.latest": (3,), "carry.key": (3, 2)}
    assert carry == expected | (caches if attention == "vq" else {})
