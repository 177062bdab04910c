"""Text embeddings: the hidden states of an encoder, pooled to one vector per text."""

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

POOLINGS = ("mean", "first", "cls", "max", "none")  # cls is an alias of first; none returns one vector per token
ACTIVATIONS = {"Identity": lambda x: x, "Tanh": jnp.tanh, "ReLU": jax.nn.relu}
UNLIMITED = 10**9  # tokenizers without a length limit have model_max_length = 10**30


class Embedder:
    """Embeds texts with a model's encoder.

    Options that are None come from the checkpoint's sentence-transformers modules. Without those, the defaults are mean
    pooling, no normalisation, and the tokenizer's length limit.
    """

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
            raise InputError(f"a {family.name} has no text encoder; use a T5 or a T5 encoder for embeddings")
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        for name, value in (("batch_size", batch_size), ("length", length)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        modules = pretrained.modules or Modules()
        self.pooling = {"cls": "first"}.get(requested := pooling or modules.pooling, requested)
        self.normalise = modules.normalise and self.pooling != "none" if normalise is None else normalise
        self.dense = modules.dense if self.pooling != "none" else ()
        self.length = length or modules.length or _length_limit(pretrained.tokenizer)
        self.cut = 0  # number of texts truncated to `length` so far
        self._pretrained, self._batch_size, self._prefix = pretrained, batch_size, modules.prefix

    @property
    def width(self) -> int:
        """Dimension of an embedding."""
        return len(self.dense[-1].weight) if self.dense else self._pretrained.config.d_model

    def __call__(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Embed each text as a float32 vector [D], or as one vector per token, [T, D], if pooling is "none"."""
        ids = [self._ids(text, f"text {i}") for i, text in enumerate(texts)]
        embeddings: list[Any] = [None] * len(ids)
        dense = [(layer.weight, layer.bias) for layer in self.dense]
        for rows, inputs in batches(ids, self._batch_size, self._pretrained.config.pad_id, left=False):
            arrays = tuple(map(jnp.asarray, inputs))
            static = (self.pooling, tuple(layer.activation for layer in self.dense), bool(self.normalise))
            output = np.asarray(_embed(self._pretrained.family.encode, static, self._pretrained.model, dense, *arrays))
            for row, index in enumerate(rows):
                if index >= 0:  # -1 marks a filler row
                    embeddings[index] = output[row, : len(ids[index])] if self.pooling == "none" else output[row]
        return embeddings

    def _ids(self, text: Any, what: str) -> list[int]:
        """Convert a text to ids, truncated to `length`; a truncated text keeps its end token."""
        prompt = f"{self._prefix}{text}" if isinstance(text, str) else text
        ids = self._pretrained.prompts.ids(prompt, what)
        if not ids:
            raise InputError(f"{what} has no tokens, so there is nothing to embed; remove it")
        if self.length is None or len(ids) <= self.length:
            return ids
        self.cut += 1
        return [*ids[: self.length - 1], ids[-1]] if isinstance(text, str) else ids[: self.length]


@partial(jax.jit, static_argnums=(0, 1))
def _embed(encode: Any, static: tuple, model: Any, dense: list, ids: Array, valid: Array) -> Array:
    """Encode, pool, apply the dense layers and normalise. `static` is (pooling, activations, normalise)."""
    pooling, activations, normalise = static
    x = encode(model, ids, valid).astype(jnp.float32)
    x = x if pooling == "none" else pool(x, valid, pooling)
    for (weight, bias), activation in zip(dense, activations):
        x = ACTIVATIONS[activation](x @ weight.T + (0.0 if bias is None else bias))
    if normalise:
        # The bound of torch.nn.functional.normalize.
        x = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
    return x


def pool(x: Float[Array, "B T D"], valid: Bool[Array, "B T"], pooling: str) -> Float[Array, "B D"]:
    """Pool the hidden states of each row's valid tokens to one vector: the first, the maximum or the mean."""
    if pooling == "first":
        # Texts are padded on the right, so the first token is a real one.
        return x[:, 0]
    if pooling == "max":
        return jnp.where(valid[..., None], x, -jnp.inf).max(axis=1)
    total = jnp.where(valid[..., None], x, 0.0).sum(axis=1)
    # Rows that fill up a batch have no valid tokens.
    return total / jnp.maximum(valid.sum(axis=1), 1)[:, None]


def _length_limit(tokenizer: Tokenizer | None) -> int | None:
    """Return the length limit in a tokenizer's tokenizer_config.json, if it has one."""
    settings = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}")) if tokenizer else {}
    limit = settings.get("model_max_length")
    return int(limit) if limit is not None and limit < UNLIMITED else None
