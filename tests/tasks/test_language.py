"""Batches of a language model: pure functions of step and row, and every token but padding a label."""

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


def test_rows_and_steps_stand_alone() -> None:
    """Some rows of a batch are those of the whole; chunks follow each other; each sequence comes once an epoch."""
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
def test_an_end_is_a_label_even_where_padding_is_one(pad: int) -> None:
    """As in GPT-2's vocabulary, which has one token for both."""
    made = task(replace(CONFIG, pad_id=pad))
    wanted = np.asarray(made.train.ids)
    labels = np.concatenate([batch["labels"] for batch in made.evaluation(1)]).reshape(-1)
    np.testing.assert_array_equal(labels[:1000], wanted)
    assert (labels[1000:] == -1).all()


def test_what_a_gradient_is_divided_by() -> None:
    batch = jax.device_put(task().batch(0, 3))
    assert task().divisor(batch) is None
    assert task(normalise="positions").divisor(batch) == 3 * 16


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_names_of_the_carry(attention: str) -> None:
    """Checkpoints of a run hold it by these names, rows first: a name that changes makes older ones unreadable."""
    c = replace(CONFIG, attention=attention)
    made = task(c) if attention == "vq" else Language(
        vq_language, c, LanguageObjective(48), ByteTokenizer.plain(), task().data, 7
    )  # fmt: skip
    found = {name: leaf.shape for name, leaf in leaves({"carry": made.carry(3)}).items()}
    shapes = {"codes": (8,), "keys": (8, 32), "values": (8, 256), "counts": (64,), "means": (64, 256)}
    caches = {
        f"carry.caches.{unit}.{name}": (3, c.n_layers, 1, *shape) for unit in (0, 1) for name, shape in shapes.items()
    }
    expected = {"carry.position": (3,), "carry.documents": (3, 8), "carry.latest": (3,), "carry.key": (3, 2)}
    assert found == expected | (caches if attention == "vq" else {})
