"""`Pretrained`: a model with its tokenizer and settings, and the methods to use it."""

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen import families
from flaxen.atomic_directory import atomic_directory
from flaxen.data.images import ImageProcessor
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError
from flaxen.families import Family
from flaxen.generate.options import make_options
from flaxen.generate.run import Generator
from flaxen.generate.search import Decoder, ended, prepare
from flaxen.hf.sentence import Modules
from flaxen.hf.vq_memory import Memory
from flaxen.pretrained import memory as memories
from flaxen.pretrained.embedding import Embedder
from flaxen.pretrained.prompts import PromptReader, Prompts
from flaxen.tree import leaves


@dataclass(frozen=True)
class Generated:
    """One generated output."""

    text: str | None  # decoded tokens; None without a tokenizer
    tokens: list[int]  # generated ids, including the end token if there is one
    logprobs: list[float]  # log-probability of each token under the model itself, before logits processors
    score: float  # beam search: transformers' length-normalised score; otherwise the sum of logprobs
    index: int  # index of its prompt


@dataclass(frozen=True)
class Pretrained:
    """A model with its tokenizer, image processor and generation defaults.

    Created by `flaxen.load` and `flaxen.create`:

        model = flaxen.load("google/flan-t5-small")
        outputs = model.generate(["translate English to German: Good morning."], num_beams=4, max_new_tokens=32)
        print(outputs[0].text)
        model.save("my-model")
    """

    model: Any
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)  # generation_config.json
    processor: ImageProcessor | None = None  # preprocessor_config.json: how images become pixels
    modules: Modules | None = None  # sentence-transformers modules: pooling and dense layers of `embed`

    @property
    def config(self) -> Any:
        """The model's configuration, such as `flaxen.models.t5.Config`."""
        return self.model.config

    @cached_property
    def family(self) -> Family:
        """The model's architecture, as a record of `flaxen.families`."""
        return families.of_model(self.model)

    @cached_property
    def prompts(self) -> PromptReader:
        """Converter from prompts to model inputs."""
        return PromptReader(self.family, self.config, self.tokenizer, self.processor)

    @property
    def decoder(self) -> Decoder:
        """The model with its weights laid out for decoding; cached until a weight is replaced in place."""
        # JAX arrays are immutable, so the same objects are the same weights.
        now = jax.tree.leaves(self.model)
        then, decoder = self.__dict__.get("_prepared", ([], None))
        if decoder is None or len(then) != len(now) or any(a is not b for a, b in zip(then, now)):
            decoder = prepare(self.family.decoder, self.model)
            # The dataclass is frozen, so the cache is written to __dict__, as functools.cached_property does.
            self.__dict__["_prepared"] = (now, decoder)
        return decoder

    def logits(self, inputs: Any, decoder_input_ids: Any = None, valid: Any = None) -> np.ndarray:
        """Compute logits [B, T, V], one row of scores over the vocabulary per position.

        Args:
            inputs: token ids [B, S] of a T5, token ids [B, T] of a decoder-only model, or images of a captioner.
            decoder_input_ids: token ids [B, T] that the decoder reads, for T5 and captioners; they begin with the start
                token.
            valid: mask [B, S] of `inputs`, True for real tokens and False for padding. All are real if None.
        """
        if self.family.decoder is None:
            raise InputError(f"a {self.family.name} has no output head and therefore no logits")
        rule, check = self.family.prompting, self.prompts.check_ids
        decoder_ids = None if rule.continues else jnp.asarray(check(decoder_input_ids, "decoder_input_ids"))
        if rule.reads == "image":
            return np.asarray(_logits(self.model, jnp.asarray(self.pixels(inputs)), decoder_ids))
        ids = check(inputs, "input_ids")
        mask = None if valid is None else jnp.asarray(np.asarray(valid, bool))
        if mask is not None and mask.shape != ids.shape:
            raise InputError(f"valid must have the shape of input_ids, {ids.shape}, got {mask.shape}")
        return np.asarray(_logits(self.model, jnp.asarray(ids), decoder_ids, mask))

    def generate(
        self, prompts: Prompts, *, batch_size: int = 16, memory: Memory | None = None, first: int = 0, **options: Any
    ) -> list[Generated]:
        """Generate outputs for one or several prompts, by greedy search, beam search or sampling.

        Args:
            prompts: texts or lists of token ids; for a captioner images, as paths, PIL images or pixel arrays.
            batch_size: number of prompts to decode in parallel. It does not affect the outputs.
            memory: state of a Transformer-VQ, from `remember`. The model starts from this state, reads a single prompt,
                which may be empty, and then generates.
            first: index of the first prompt, if `prompts` is a slice of a longer list; sampling depends on the index.
            **options: fields of `flaxen.Options`, such as `max_new_tokens`, `num_beams` or `do_sample`. They override
                the checkpoint's generation_config.json.

        Returns:
            The outputs in the order of the prompts, `num_return_sequences` for each.
        """
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        generator = self._generator(options)
        batches = self._batches(prompts, batch_size, generator.options.max_new_tokens, memory)
        # Filler rows (index -1) keep their index.
        outputs = generator.outputs((np.where(rows < 0, rows, rows + first), inputs) for rows, inputs in batches)
        ordered = sorted(outputs, key=lambda output: output.prompt)  # batches are sorted by length
        return [Generated(self._decode(output.tokens), *output) for output in ordered]

    def embed(
        self,
        texts: Prompts,
        pooling: str | None = None,
        normalise: bool | None = None,
        batch_size: int = 16,
        length: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Compute embeddings of texts with the model's encoder, as a float32 array [N, D].

        Args:
            texts: texts or lists of token ids.
            pooling: how the vectors of all real tokens, including the end token, are combined into one: 'mean', 'max',
                'first' (also called 'cls'), or 'none' for a list of arrays [T, D] with one vector per token.
            normalise: scale each embedding to length 1.
            batch_size: number of texts to encode in parallel. It does not affect the embeddings.
            length: maximum number of tokens; longer texts are truncated, with a warning.

        `pooling`, `normalise` and `length` default to the checkpoint's own settings, if it has sentence-transformers
        files; otherwise to mean pooling, no normalisation and the tokenizer's limit.
        """
        embedder = Embedder(self, pooling, normalise, batch_size, length)
        items = self.prompts.as_list(texts)
        embeddings = embedder(items)
        if embedder.cut:
            warnings.warn(
                f"{embedder.cut:,} of {len(items):,} texts were truncated to {embedder.length} tokens", stacklevel=2
            )
        if embedder.pooling == "none":
            return embeddings
        return np.stack(embeddings) if embeddings else np.zeros((0, embedder.width), np.float32)

    def stream(self, prompt: Any, memory: Memory | None = None, **options: Any) -> Iterator[str]:
        """Generate one output and yield its text piece by piece, by greedy search or sampling.

        The pieces together equal the text of `generate` with the same options.
        """
        generator = self._generator(options)
        settings = generator.options
        if settings.beams != 1:
            raise InputError("num_beams and num_return_sequences must be 1 with stream, which generates one sequence")
        if self.tokenizer is None:
            raise InputError("the checkpoint has no tokenizer; use generate() with lists of token ids")
        ((rows, inputs),) = self._batches([prompt], 1, settings.max_new_tokens, memory)
        search, emitted = generator.begin(rows, inputs), ""
        first = int(search.begun)
        for n in range(1, settings.max_new_tokens + 1):
            search = generator.advance(search, n)
            complete = bool(ended(search, settings)) or n == settings.max_new_tokens
            text = self.tokenizer.decode(np.asarray(search.tokens)[0, 0, first : first + n].tolist())
            # Tokens can split a character: hold an incomplete one back until its last byte has been generated.
            if text.startswith(emitted) and (complete or not text.endswith("�")):
                yield text[len(emitted) :]
                emitted = text
            if complete:
                return

    def remember(self, prompt: str | Sequence[int], memory: Memory | None = None) -> Memory:
        """Read a text with a Transformer-VQ and return the model's state, for `generate` and `stream` to continue from.

        With `memory` the text continues an earlier one. The size of the result does not depend on the length of the
        text.
        """
        return memories.remember(self, prompt, memory)

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Convert prompts to lists of token ids; raise an error if one is empty and the model needs a prompt."""
        return self.prompts.encode(prompts)

    def pixels(self, images: Any) -> np.ndarray:
        """Convert images (paths, PIL images or pixel arrays) to model inputs of shape [B, C, height, width]."""
        return self.prompts.pixels(images)

    def save(self, directory: str | os.PathLike[str], shard_bytes: int = 5 * 10**9, overwrite: bool = False) -> None:
        """Save as a Hugging Face checkpoint.

        transformers 4 and 5 can load it and compute the same outputs, except for a Transformer-VQ, which they do not
        support.

        An existing directory is replaced only once the new one is complete, and only if Flaxen wrote everything in it
        or `overwrite` is set. Weights are split into files of at most `shard_bytes` bytes.
        """
        from flaxen.pretrained import loading  # imported here because loading imports this module

        with atomic_directory(Path(directory), overwrite) as fresh:
            loading.write_all_but_weights(self, fresh)
            loading.write_weights(self.model, fresh, shard_bytes)

    @cached_property
    def digest(self) -> str:
        """Hash of the weights; the same for float32 weights and their bfloat16 copies."""
        digest = hashlib.blake2b(digest_size=16)
        for path, leaf in leaves(self.model).items():
            digest.update(path.encode() + np.asarray(leaf.astype(jnp.bfloat16)).tobytes())
        return digest.hexdigest()

    @classmethod
    def over_bytes(cls, model: Any) -> "Pretrained":
        """Wrap a model, with a byte tokenizer if the two vocabularies have the same size."""
        tokenizer = ByteTokenizer.plain()
        return cls(model, tokenizer if model.config.vocab_size == tokenizer.size else None)

    def _batches(
        self, prompts: Prompts, batch_size: int, new: int, memory: Memory | None
    ) -> Iterable[tuple[np.ndarray, Any]]:
        """Convert prompts to batches of (prompt indices, inputs); with a memory there is only one batch."""
        if memory is not None:
            return [memories.continued(self, prompts, memory)]
        return self.prompts.batches(prompts, batch_size, new)

    def _decode(self, ids: list[int]) -> str | None:
        return self.tokenizer.decode(ids) if self.tokenizer else None

    def _generator(self, given: dict[str, Any]) -> Generator:
        """Check the options and return a Generator for this model."""
        if self.family.decoder is None:
            raise InputError(f"a {self.family.name} cannot generate text by itself")
        options = make_options(given, self.generation)
        forced = (options.forced_bos_token_id, options.forced_eos_token_id)
        for token in (*forced, *(options.eos_token_id or ()), *(i for word in options.bad_words_ids for i in word)):
            if token is not None and not 0 <= token < self.config.vocab_size:
                raise InputError(
                    f"token ids in options must be between 0 and {self.config.vocab_size - 1}, got {token}"
                )
        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        return Generator(self.decoder, options, self.config.pad_id, eos)


@jax.jit
def _logits(model: Any, inputs: jax.Array, decoder_ids: jax.Array | None, *valid: jax.Array | None) -> jax.Array:
    return model.logits(inputs, decoder_ids, *valid)
