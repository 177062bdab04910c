"""Embeddings: the hidden states of an encoder, pooled to one vector for each text."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError
from flaxen.generate.batches import batches
from flaxen.hf.sentence import Modules

if TYPE_CHECKING:
    from flaxen.pretrained.model import Pretrained

POOLINGS = ("mean", "first", "cls", "max", "none")  # cls is first by its other name; none keeps every token
ACTIVATIONS = {"Identity": lambda x: x, "Tanh": jnp.tanh, "ReLU": jax.nn.relu}
UNLIMITED = 10**9  # a tokenizer without a limit of its own says 10**30


class Embedder:
    """A model, and how it embeds texts. What is None is the checkpoint's own, else mean and not normalised."""

    def __init__(
        self,
        pretrained: "Pretrained",
        pooling: str | None = None,
        normalise: bool | None = None,
        batch_size: int = 16,
        length: int | None = None,
    ):
        family = pretrained.family
        if family.encode is None:
            raise InputError(
                f"a {family.name} has no text encoder; embeddings are made with a T5, whole or its encoder"
            )
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        for name, value in (("batch_size", batch_size), ("length", length)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        own = pretrained.modules or Modules()
        self.pooling = {"cls": "first"}.get(chosen := pooling or own.pooling, chosen)
        self.normalise = own.normalise and self.pooling != "none" if normalise is None else normalise
        self.dense = own.dense if self.pooling != "none" else ()
        self.length = length or own.length or _limit(pretrained.tokenizer)
        self.cut = 0  # texts that were longer, so far
        self._pretrained, self._batch_size, self._prefix = pretrained, batch_size, own.prefix

    @property
    def width(self) -> int:
        """Numbers in an embedding."""
        return len(self.dense[-1].weight) if self.dense else self._pretrained.config.d_model

    def __call__(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """The embedding of each text, [D]; or without pooling the states of its tokens, [T, D]. In float32."""
        ids = [self._ids(text, f"text {i}") for i, text in enumerate(texts)]
        found: list[Any] = [None] * len(ids)
        dense = [(one.weight, one.bias) for one in self.dense]
        for rows, inputs in batches(ids, self._batch_size, self._pretrained.config.pad_id, left=False):
            arrays = tuple(map(jnp.asarray, inputs))
            how = (self.pooling, tuple(one.activation for one in self.dense), bool(self.normalise))
            made = np.asarray(_embed(self._pretrained.family.encode, how, self._pretrained.model, dense, *arrays))
            for row, number in enumerate(rows):
                if number >= 0:
                    found[number] = made[row, : len(ids[number])] if self.pooling == "none" else made[row]
        return found

    def _ids(self, text: Any, what: str) -> list[int]:
        """With the end token, which a cut text keeps."""
        read = f"{self._prefix}{text}" if isinstance(text, str) else text
        ids = self._pretrained.prompts.ids(read, what)
        if not ids:
            raise InputError(f"{what} has no ids; there is nothing to embed")
        if self.length is None or len(ids) <= self.length:
            return ids
        self.cut += 1
        return [*ids[: self.length - 1], ids[-1]] if isinstance(text, str) else ids[: self.length]


@partial(jax.jit, static_argnums=(0, 1))
def _embed(encode: Any, how: tuple, model: Any, dense: list, ids: Array, valid: Array) -> Array:
    pooling, activations, normalise = how
    x = encode(model, ids, valid).astype(jnp.float32)
    x = x if pooling == "none" else pool(x, valid, pooling)
    for (weight, bias), activation in zip(dense, activations):
        x = ACTIVATIONS[activation](x @ weight.T + (0.0 if bias is None else bias))
    if normalise:
        x = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
    return x


def pool(x: Float[Array, "B T D"], valid: Bool[Array, "B T"], pooling: str) -> Float[Array, "B D"]:
    """One vector for each row, of its real tokens."""
    if pooling == "first":
        return x[:, 0]
    if pooling == "max":
        return jnp.where(valid[..., None], x, -jnp.inf).max(axis=1)
    total = jnp.where(valid[..., None], x, 0.0).sum(axis=1)
    return total / jnp.maximum(valid.sum(axis=1), 1)[:, None]


def _limit(tokenizer: Tokenizer | None) -> int | None:
    """Tokens that a tokenizer cuts texts to, as its settings say."""
    says = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}")) if tokenizer else {}
    limit = says.get("model_max_length")
    return int(limit) if limit is not None and limit < UNLIMITED else None
