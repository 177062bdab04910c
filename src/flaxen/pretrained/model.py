"""`Pretrained`: a model and what belongs to it."""

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
from flaxen.data.images import ImageProcessor
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError
from flaxen.families import Family
from flaxen.generate.options import make_options
from flaxen.generate.run import Generator
from flaxen.generate.search import Decoder, ended, prepare
from flaxen.hf import files, sentence
from flaxen.hf.sentence import Modules
from flaxen.hf.vq_memory import Memory
from flaxen.pretrained import memory as memories
from flaxen.pretrained.embedding import Embedder
from flaxen.pretrained.prompts import PromptReader, Prompts
from flaxen.tree import leaves


@dataclass(frozen=True)
class Generated:
    """One output. `tokens` ends with the end token if there was one; `logprobs` are the model's own, per token."""

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    score: float  # of beam search: transformers' length-normalised score; else the sum of logprobs
    index: int  # of its input


@dataclass(frozen=True)
class Pretrained:
    """A model and what belongs to it."""

    model: Any
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)  # generation_config.json
    processor: ImageProcessor | None = None  # preprocessor_config.json
    modules: Modules | None = None  # of sentence-transformers: what makes embeddings of hidden states

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def family(self) -> Family:
        return families.of_model(self.model)

    @cached_property
    def prompts(self) -> PromptReader:
        return PromptReader(self.family, self.config, self.tokenizer, self.processor)

    @property
    def decoder(self) -> Decoder:
        """The model with its weights laid out for decoding: once for all calls, unless it was changed in place."""
        now = jax.tree.leaves(self.model)
        then, decoder = self.__dict__.get("_prepared", ([], None))
        if decoder is None or len(then) != len(now) or any(a is not b for a, b in zip(then, now)):
            decoder = prepare(self.family.decoder, self.model)
            self.__dict__["_prepared"] = (now, decoder)
        return decoder

    def logits(self, inputs: Any, decoder_input_ids: Any = None, valid: Any = None) -> np.ndarray:
        """Logits [B, T, V]. A T5 takes input_ids [B, S] and decoder_input_ids [B, T], a captioner images and the
        latter, a GPT-2 ids [B, T] alone; `valid` is True for real inputs."""
        if self.family.decoder is None:
            raise InputError(f"a {self.family.name} has no output head, and so no logits")
        rule, check = self.family.prompting, self.prompts.checked
        decoder_ids = None if rule.continues else jnp.asarray(check(decoder_input_ids, "decoder_input_ids"))
        if rule.reads == "image":
            return np.asarray(_logits(self.model, jnp.asarray(self.pixels(inputs)), decoder_ids))
        ids = check(inputs, "input_ids")
        mask = None if valid is None else jnp.asarray(np.asarray(valid, bool))
        if mask is not None and mask.shape != ids.shape:
            raise InputError(f"valid has shape {mask.shape}, input_ids {ids.shape}; they must be equal")
        return np.asarray(_logits(self.model, jnp.asarray(ids), decoder_ids, mask))

    def generate(
        self, prompts: Prompts, *, batch_size: int = 16, memory: Memory | None = None, first: int = 0, **options: Any
    ) -> list[Generated]:
        """Outputs in the order of the prompts, num_return_sequences of each. The options are `flaxen.Options`. A
        Transformer-VQ can continue from a `memory`, with one prompt that may be empty. Prompts that are a part of more
        begin with number `first`, so that samples are those of the whole."""
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        generator = self._generator(options)
        found = self._batches(prompts, batch_size, generator.options.max_new_tokens, memory)
        outputs = generator.outputs((np.where(rows < 0, rows, rows + first), inputs) for rows, inputs in found)
        return [Generated(self._decode(one.tokens), *one) for one in sorted(outputs, key=lambda one: one.prompt)]

    def embed(
        self,
        texts: Prompts,
        pooling: str | None = None,
        normalise: bool | None = None,
        batch_size: int = 16,
        length: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Embeddings [N, D] in float32, of texts or lists of ids. `pooling` is over the real tokens, the end token
        included: mean, max, first (or cls), or none for a list of [T, D]. Texts are cut to `length` tokens. What is
        None is as the checkpoint has it; one that says nothing has mean, not normalised."""
        embedder = Embedder(self, pooling, normalise, batch_size, length)
        every = self.prompts.listed(texts)
        found = embedder(every)
        if embedder.cut:
            warnings.warn(
                f"{embedder.cut:,} of {len(every):,} texts were cut to {embedder.length} tokens", stacklevel=2
            )
        if embedder.pooling == "none":
            return found
        return np.stack(found) if found else np.zeros((0, embedder.width), np.float32)

    def stream(self, prompt: Any, memory: Memory | None = None, **options: Any) -> Iterator[str]:
        """The text of one output, piece by piece as it is generated."""
        generator = self._generator(options)
        chosen = generator.options
        if chosen.beams != 1:
            raise InputError("a stream has one sequence: leave num_beams and num_return_sequences at 1")
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer; use generate() with ids")
        ((rows, inputs),) = self._batches([prompt], 1, chosen.max_new_tokens, memory)
        search, said = generator.begin(rows, inputs), ""
        first = int(search.begun)
        for n in range(1, chosen.max_new_tokens + 1):
            search = generator.advance(search, n)
            over = bool(ended(search, chosen)) or n == chosen.max_new_tokens
            text = self.tokenizer.decode(np.asarray(search.tokens)[0, 0, first : first + n].tolist())
            # A character may be half there: hold it back until its last byte has come.
            if text.startswith(said) and (over or not text.endswith("�")):
                yield text[len(said) :]
                said = text
            if over:
                return

    def remember(self, prompt: str | Sequence[int], memory: Memory | None = None) -> Memory:
        """What a Transformer-VQ keeps of a text, to continue from at any time. Its size is that of any other."""
        return memories.remember(self, prompt, memory)

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Prompts as ids, checked: in range, and something in each beside special tokens."""
        return self.prompts.encode(prompts)

    def pixels(self, images: Any) -> np.ndarray:
        """Images as the model takes them, [B, C, height, width]: paths, PIL images, or arrays that are so already."""
        return self.prompts.pixels(images)

    def save(self, directory: str | os.PathLike[str], shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face checkpoint that transformers 4 and 5 load with equal logits: all of it, or nothing."""
        from flaxen.pretrained import loading  # which makes objects of this class

        with files.atomic_directory(Path(directory)) as fresh:
            loading.write(self.model, fresh, self.generation, shard_bytes)
            for name, content in (self.tokenizer.files if self.tokenizer else {}).items():
                (fresh / name).write_bytes(content)
            if self.processor is not None:
                files.write_json(fresh / "preprocessor_config.json", self.processor.to_json())
            if self.modules is not None:
                sentence.write(self.modules, self.config.d_model, fresh)

    @cached_property
    def digest(self) -> str:
        """Of the weights, the same for f32 ones and for bf16 ones made of them."""
        found = hashlib.blake2b(digest_size=16)
        for path, leaf in leaves(self.model).items():
            found.update(path.encode() + np.asarray(leaf.astype(jnp.bfloat16)).tobytes())
        return found.hexdigest()

    @classmethod
    def over_bytes(cls, model: Any) -> "Pretrained":
        """A model whose ids are those of bytes, if there are as many."""
        bytewise = ByteTokenizer.plain()
        return cls(model, bytewise if model.config.vocab_size == bytewise.size else None)

    def _batches(
        self, prompts: Prompts, batch_size: int, new: int, memory: Memory | None
    ) -> Iterable[tuple[np.ndarray, Any]]:
        if memory is not None:
            return [memories.continued(self, prompts, memory)]
        return self.prompts.batches(prompts, batch_size, new)

    def _decode(self, ids: list[int]) -> str | None:
        return self.tokenizer.decode(ids) if self.tokenizer else None

    def _generator(self, given: dict[str, Any]) -> Generator:
        if self.family.decoder is None:
            raise InputError(f"a {self.family.name} generates nothing by itself")
        options = make_options(given, self.generation)
        forced = (options.forced_bos_token_id, options.forced_eos_token_id)
        for one in (*forced, *(options.eos_token_id or ()), *(i for word in options.bad_words_ids for i in word)):
            if one is not None and not 0 <= one < self.config.vocab_size:
                raise InputError(f"token id {one} in the options is not in 0 … {self.config.vocab_size - 1}")
        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        return Generator(self.decoder, options, self.config.pad_id, eos)


@jax.jit
def _logits(model: Any, inputs: jax.Array, decoder_ids: jax.Array | None, *valid: jax.Array | None) -> jax.Array:
    return model.logits(inputs, decoder_ids, *valid)
