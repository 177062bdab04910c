"""A model with its tokenizer: loaded from a checkpoint, asked for logits or text, saved again."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.data.tokenizers import Tokenizer, load_tokenizer
from flaxen.errors import InputError
from flaxen.generate.batches import batches
from flaxen.generate.options import make_options
from flaxen.generate.run import Generator
from flaxen.generate.search import ended
from flaxen.hf import files, t5, weightmap
from flaxen.models.t5 import T5, Config
from flaxen.models.t5_decoding import Decoding
from flaxen.nn.param import initialise

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
Prompts = str | Sequence[Any]  # texts, or lists of ids


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

    model: T5
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)  # generation_config.json

    @property
    def config(self) -> Config:
        return self.model.config

    def logits(self, input_ids: Any, decoder_input_ids: Any, valid: Any = None) -> np.ndarray:
        """Logits [B, T, V] of decoder_input_ids [B, T] given input_ids [B, S]; `valid` is True for real inputs."""
        ids, decoder_ids = self._checked(input_ids, "input_ids"), self._checked(decoder_input_ids, "decoder_input_ids")
        mask = None if valid is None else jnp.asarray(np.asarray(valid, bool))
        if mask is not None and mask.shape != ids.shape:
            raise InputError(f"valid has shape {mask.shape}, input_ids {ids.shape}; they must be equal")
        return np.asarray(_logits(self.model, jnp.asarray(ids), jnp.asarray(decoder_ids), mask))

    def generate(self, prompts: Prompts, *, batch_size: int = 16, **options: Any) -> list[Generated]:
        """Outputs in the order of the prompts, num_return_sequences of each. The options are `flaxen.Options`."""
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        decode = self.tokenizer.decode if self.tokenizer else lambda ids: None
        outputs = self._generator(options).outputs(self.encode(prompts), batch_size)
        return [Generated(decode(one.tokens), *one) for one in sorted(outputs, key=lambda one: one.prompt)]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """The text of one output, piece by piece as it is made."""
        generator = self._generator(options)
        chosen = generator.options
        if chosen.beams != 1:
            raise InputError("a stream has one sequence: leave num_beams and num_return_sequences at 1")
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer; use generate() with ids")
        ((rows, ids, valid),) = batches(self.encode([prompt]), 1, self.config.pad_id)
        search, said = generator.begin(rows, ids, valid), ""
        for n in range(1, chosen.max_new_tokens + 1):
            search = generator.advance(search, n)
            over = bool(ended(search, chosen)) or n == chosen.max_new_tokens
            text = self.tokenizer.decode(np.asarray(search.tokens[0, 0, 1 : n + 1]).tolist())
            # A character may be half there: hold it back until its last byte has come.
            if text.startswith(said) and (over or not text.endswith("�")):
                yield text[len(said) :]
                said = text
            if over:
                return

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Prompts as ids, checked: in range, and something in each beside special tokens."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if prompts and isinstance(prompts[0], int | np.integer):
            raise InputError("prompts are texts or lists of ids, got a bare list of ids; wrap it in a list")
        encoded = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise InputError("this checkpoint has no tokenizer files; give lists of ids instead of texts")
                ids = self.tokenizer.encode(prompt)
            else:
                ids = self._checked(prompt, f"prompt {i}", axes=1).tolist()
            blank = isinstance(prompt, str) and self.tokenizer is not None and not self.tokenizer.decode(ids)
            if blank or not set(ids) - {self.config.pad_id, *self.config.eos_ids}:
                what = "is empty" if not len(prompt) else "holds only special tokens"
                raise InputError(f"prompt {i} {what}; there is nothing to generate from")
            encoded.append(ids)
        return encoded

    def save(self, directory: str | os.PathLike[str], shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face checkpoint that transformers 4 and 5 load with equal logits: all of it, or nothing."""
        dtype = str(jax.tree.leaves(self.model)[0].dtype)
        tensors = t5.with_copies(self.config, weightmap.save(self.model, t5.rows(self.config)))
        with files.whole_directory(Path(directory)) as fresh:
            files.write_json(fresh / "config.json", t5.write_config(self.config, dtype))
            files.write_json(fresh / "generation_config.json", {**t5.special_ids(self.config), **self.generation})
            files.write_tensors(fresh, tensors, shard_bytes)
            for name, content in (self.tokenizer.files if self.tokenizer else {}).items():
                (fresh / name).write_bytes(content)

    def _generator(self, given: dict[str, Any]) -> Generator:
        options = make_options(given, self.generation)
        forced = (options.forced_bos_token_id, options.forced_eos_token_id)
        for one in (*forced, *(options.eos_token_id or ()), *(i for word in options.bad_words_ids for i in word)):
            if one is not None and not 0 <= one < self.config.vocab_size:
                raise InputError(f"token id {one} in the options is not in 0 … {self.config.vocab_size - 1}")
        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        return Generator(Decoding, self.model, options, self.config.pad_id, eos)

    def _checked(self, ids: Any, what: str, axes: int = 2) -> np.ndarray:
        try:
            array = np.asarray(ids)
        except ValueError:
            raise InputError(f"{what}: rows of ids differ in length; pad them and pass `valid`") from None
        if array.size == 0 and axes == 1:
            return array.astype(np.int32)
        if array.ndim != axes or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise InputError(f"{what} must be integer ids with {axes} axes, got {array.dtype} of shape {array.shape}")
        if not 0 <= array.min() <= array.max() < self.config.vocab_size:
            wrong = array.min() if array.min() < 0 else array.max()
            raise InputError(f"{what}: id {wrong} is not in 0 … {self.config.vocab_size - 1}, the model's vocabulary")
        return array.astype(np.int32)


@jax.jit
def _logits(model: T5, input_ids: jax.Array, decoder_ids: jax.Array, valid: jax.Array | None) -> jax.Array:
    return model.logits(input_ids, decoder_ids, valid)


def load(source: str | os.PathLike[str], dtype: str = "float32", compute: str | None = None) -> Pretrained:
    """A checkpoint directory or hub id. Weights are kept in `dtype`; products are computed in `compute`, or `dtype`."""
    for name in (dtype, compute or dtype):
        if name not in DTYPES:
            raise InputError(f"dtype and compute must be one of {', '.join(DTYPES)}, got {name!r}")
    cache_compilations()
    directory = files.locate(source)
    config, tensors, generation = read_config(directory)
    config = dataclasses.replace(config, compute=compute or dtype)
    tokenizer = load_tokenizer(directory)
    if tokenizer is not None and tokenizer.size > config.vocab_size:
        raise InputError(
            f"{directory}: the tokenizer has {tokenizer.size} ids and the model only {config.vocab_size}; "
            "they do not belong together"
        )
    spare = functools.partial(t5.spare, tensors=tensors)
    model = weightmap.load(T5(config), t5.rows(config), tensors, DTYPES[dtype], spare)
    return Pretrained(model, tokenizer, generation)


def read_config(directory: Path) -> tuple[Config, files.Tensors, dict[str, Any]]:
    """config.json, the table of tensors beside it, and generation_config.json (empty if there is none)."""
    json = files.read_json(directory / "config.json")
    if json.get("model_type", "t5") not in t5.MODEL_TYPES:
        raise InputError(f"{directory}: model_type {json['model_type']!r}; supported: {', '.join(t5.MODEL_TYPES)}")
    tensors = files.Tensors(directory)
    path = directory / "generation_config.json"
    generation = files.read_json(path) if path.exists() else {}
    # Its ids win over config.json's, as in transformers.
    own = {name: value for name in t5.SPECIAL if (value := generation.get(name)) is not None}
    return t5.read_config({**json, **own}, tensors), tensors, generation


def create(config: Config, seed: int = 0, tokenizer: Tokenizer | None = None) -> Pretrained:
    """A model with random weights."""
    cache_compilations()
    return Pretrained(initialise(T5(config), seed), tokenizer)


def cache_compilations() -> None:
    """Keep compiled programs on disk between runs, unless JAX_COMPILATION_CACHE_DIR says where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(base / "flaxen" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
