"""A model with its tokenizer: loaded from a checkpoint, asked for logits or text, saved again."""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.data.images import Processor, Unreadable, open_image
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from flaxen.errors import InputError
from flaxen.generate.batches import batches, groups
from flaxen.generate.options import make_options
from flaxen.generate.run import Generator
from flaxen.generate.search import Decoder, ended, prepare
from flaxen.hf import families, files, peft
from flaxen.hf.families import Model
from flaxen.hf.vq_memory import Memory
from flaxen.models import vq_lm
from flaxen.models.captioner import Captioner
from flaxen.models.captioner import Config as PairConfig
from flaxen.models.gpt2 import GPT2
from flaxen.models.gpt2_decoding import CaptionDecoder, GPT2Decoder
from flaxen.models.t5 import T5
from flaxen.models.t5_decoding import T5Decoder
from flaxen.models.vit import ViT
from flaxen.models.vq_decoding import VQDecoder
from flaxen.models.vq_lm import VQLM
from flaxen.nn.param import initialise
from flaxen.train import lora
from flaxen.tree import leaves, map_leaves

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DECODERS: dict[type, Any] = {T5: T5Decoder, GPT2: GPT2Decoder, Captioner: CaptionDecoder, VQLM: VQDecoder}
ALONE = (GPT2, VQLM)  # they go on with a prompt, and need none
Prompts = (
    str | os.PathLike[str] | Sequence[Any] | np.ndarray
)  # texts, lists of ids, or pictures: paths, PIL images, arrays of pixels


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

    model: Model
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)  # generation_config.json
    processor: Processor | None = None  # preprocessor_config.json

    @property
    def config(self) -> Any:
        return self.model.config

    def logits(self, inputs: Any, decoder_input_ids: Any = None, valid: Any = None) -> np.ndarray:
        """Logits [B, T, V]. A T5 takes input_ids [B, S] and decoder_input_ids [B, T], a captioner pictures and the
        latter, a GPT-2 ids [B, T] alone; `valid` is True for real inputs."""
        mask = None if valid is None else jnp.asarray(np.asarray(valid, bool))
        if isinstance(self.model, Captioner):
            ids = self._checked(decoder_input_ids, "decoder_input_ids")
            return np.asarray(_logits(self.model, jnp.asarray(self.pixels(inputs)), jnp.asarray(ids)))
        ids = self._checked(inputs, "input_ids")
        if mask is not None and mask.shape != ids.shape:
            raise InputError(f"valid has shape {mask.shape}, input_ids {ids.shape}; they must be equal")
        if isinstance(self.model, T5):
            decoder_ids = self._checked(decoder_input_ids, "decoder_input_ids")
            return np.asarray(_logits(self.model, jnp.asarray(ids), jnp.asarray(decoder_ids), mask))
        return np.asarray(_logits(self.model, jnp.asarray(ids), None, mask))

    def generate(
        self, prompts: Prompts, *, batch_size: int = 16, memory: Memory | None = None, first: int = 0, **options: Any
    ) -> list[Generated]:
        """Outputs in the order of the prompts, num_return_sequences of each. The options are `flaxen.Options`. A
        Transformer-VQ can go on from a `memory`, with one prompt that may be empty. Prompts that are a part of more
        begin with number `first`, so that samples are those of the whole."""
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        decode = self.tokenizer.decode if self.tokenizer else lambda ids: None
        generator = self._generator(options)
        found = self._batches(prompts, batch_size, generator.options.max_new_tokens, memory)
        outputs = generator.outputs((np.where(rows < 0, rows, rows + first), inputs) for rows, inputs in found)
        return [Generated(decode(one.tokens), *one) for one in sorted(outputs, key=lambda one: one.prompt)]

    def stream(self, prompt: Any, memory: Memory | None = None, **options: Any) -> Iterator[str]:
        """The text of one output, piece by piece as it is made."""
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
        """What a Transformer-VQ keeps of a text, to go on from at any time. Its size is that of any other."""
        if not isinstance(self.model, VQLM) or self.config.attention != "vq":
            raise InputError("only a Transformer-VQ with attention vq keeps a memory")
        if memory is not None and memory.model != self.digest:
            raise InputError("this memory was made by a model with other weights; let this one read the text itself")
        (ids,) = self.encode([prompt]) if memory is None else [self._more(prompt)]
        read = list(memory.unread if memory else ()) + ids
        state = vq_lm.empty(self.config, 1) if memory is None else memory.state
        first, before = 0, read[:-1]  # the last one is read when something is to follow it
        for n in _sizes(len(before), self.config.block):
            state = _read(self.model, min(n, self.config.block), jnp.asarray([before[first : first + n]]), state)
            first += n
        return Memory(state, tuple(read[-1:]), self.digest)

    @cached_property
    def digest(self) -> str:
        """Of the weights, the same for f32 ones and for bf16 ones made of them."""
        found = hashlib.blake2b(digest_size=16)
        for path, leaf in leaves(self.model).items():
            found.update(path.encode() + np.asarray(leaf.astype(jnp.bfloat16)).tobytes())
        return found.hexdigest()

    @classmethod
    def over_bytes(cls, model: VQLM) -> "Pretrained":
        """A model whose ids are those of bytes, if there are as many."""
        bytewise = ByteTokenizer.plain()
        return cls(model, bytewise if model.config.vocab_size == bytewise.size else None)

    def _more(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return self._checked(prompt, "prompt", axes=1).tolist()
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer files; give lists of ids instead of texts")
        return self.tokenizer.encode(prompt, eos=False, specials=False) if prompt else []

    def _batches(
        self, prompts: Prompts, batch_size: int, new: int, memory: Memory | None = None
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """The inputs of some prompts at a time, with their numbers."""
        if memory is not None:
            if isinstance(prompts, os.PathLike):
                raise InputError("a memory goes on with a text or with ids, not with a file")
            (prompt,) = [prompts] if isinstance(prompts, str) else list(prompts)
            now = self.remember(prompt, memory)
            yield np.zeros(1, np.int32), (np.array([now.unread], np.int32), np.ones((1, 1), bool), now.state)
            return
        if isinstance(self.model, Captioner):
            pictures = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
            for rows in groups(range(len(pictures)), batch_size):
                yield rows, self.pixels([pictures[max(row, 0)] for row in rows])
            return
        encoded = self.encode(prompts)
        if isinstance(self.model, GPT2):
            limit = self.config.n_positions
            for i, ids in enumerate(encoded):
                if len(ids) + new > limit:
                    raise InputError(
                        f"prompt {i} has {len(ids):,} tokens and max_new_tokens={new:,} are to follow, but the model "
                        f"has {limit:,} positions; shorten it, or ask for fewer"
                    )
        for rows, inputs in batches(encoded, batch_size, self.config.pad_id, left=isinstance(self.model, ALONE)):
            yield rows, (*inputs, None) if isinstance(self.model, VQLM) else inputs

    def pixels(self, pictures: Any) -> np.ndarray:
        """Pictures as the model takes them, [B, C, height, width]: paths, PIL images, or arrays that are so already."""
        if isinstance(pictures, np.ndarray | jax.Array):
            found = np.asarray(pictures, np.float32)
        else:
            found = np.stack([self._picture(picture, i) for i, picture in enumerate(pictures)])
        want = (self.config.encoder.n_channels, *self.config.encoder.image_size)
        if found.ndim != 4 or (found.shape[1:] != want and not self.config.encoder.interpolate):
            raise InputError(f"expected pixels of shape (pictures, {', '.join(map(str, want))}), got {found.shape}")
        return found

    def _picture(self, picture: Any, number: int) -> np.ndarray:
        if isinstance(picture, np.ndarray | jax.Array):
            return np.asarray(picture, np.float32)
        if self.processor is None:
            raise InputError("this checkpoint has no preprocessor_config.json; give arrays of pixels, not pictures")
        if isinstance(picture, str | os.PathLike):
            try:
                picture = open_image(Path(picture).expanduser())
            except Unreadable as error:
                raise InputError(f"picture {number}, {picture}: {error}") from None
        return self.processor(picture)

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Prompts as ids, checked: in range, and something in each beside special tokens."""
        prompts = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
        if prompts and isinstance(prompts[0], int | np.integer):
            raise InputError("prompts are texts or lists of ids, got a bare list of ids; wrap it in a list")
        alone = isinstance(self.model, ALONE)
        encoded = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise InputError("this checkpoint has no tokenizer files; give lists of ids instead of texts")
                # A Transformer-VQ was trained on texts as they are, where "</s>" is four characters.
                ids = self.tokenizer.encode(prompt, eos=not alone, specials=not isinstance(self.model, VQLM))
            else:
                ids = self._checked(prompt, f"prompt {i}", axes=1).tolist()
            if isinstance(self.model, VQLM) and isinstance(prompt, str):
                ids = [self.config.start_id, *ids]  # as every text that it was trained on begins
            if alone:
                encoded.append(ids or [self.config.start_id])
                continue
            blank = isinstance(prompt, str) and self.tokenizer is not None and not self.tokenizer.decode(ids)
            if blank or not set(ids) - {self.config.pad_id, *self.config.eos_ids}:
                what = "is empty" if not len(prompt) else "holds only special tokens"
                raise InputError(f"prompt {i} {what}; there is nothing to generate from")
            encoded.append(ids)
        return encoded

    def save(self, directory: str | os.PathLike[str], shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face checkpoint that transformers 4 and 5 load with equal logits: all of it, or nothing."""
        with files.whole_directory(Path(directory)) as fresh:
            families.write(self.model, fresh, self.generation, shard_bytes)
            for name, content in (self.tokenizer.files if self.tokenizer else {}).items():
                (fresh / name).write_bytes(content)
            if self.processor is not None:
                files.write_json(fresh / "preprocessor_config.json", self.processor.to_json())

    @cached_property
    def _decoder(self) -> Decoder:
        """Prepared by the first call that generates, for all that follow: it takes as long as some tokens do."""
        return prepare(DECODERS[type(self.model)], self.model)

    def _generator(self, given: dict[str, Any]) -> Generator:
        if type(self.model) not in DECODERS:
            raise InputError(f"a {type(self.model).__name__} writes nothing; it is the half of a captioner that sees")
        options = make_options(given, self.generation)
        forced = (options.forced_bos_token_id, options.forced_eos_token_id)
        for one in (*forced, *(options.eos_token_id or ()), *(i for word in options.bad_words_ids for i in word)):
            if one is not None and not 0 <= one < self.config.vocab_size:
                raise InputError(f"token id {one} in the options is not in 0 … {self.config.vocab_size - 1}")
        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        return Generator(self._decoder, options, self.config.pad_id, eos)

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


def _sizes(n: int, block: int) -> Iterator[int]:
    """n tokens in pieces of few different sizes, each of which is a program to compile: 64, 32, … 1 blocks, and then
    less than one."""
    while n:
        size = block << min((n // block).bit_length() - 1, 6) if n >= block else 1 << (n.bit_length() - 1)
        yield size
        n -= size


@partial(jax.jit, static_argnames="block")
def _read(model: VQLM, block: int, ids: jax.Array, state: vq_lm.State) -> vq_lm.State:
    """The state behind some tokens, which block does not change."""
    return vq_lm.recast(model, dataclasses.replace(model.config, block=block))(ids, state)[1]


@jax.jit
def _logits(model: Any, inputs: jax.Array, decoder_ids: jax.Array | None, *valid: jax.Array | None) -> jax.Array:
    return model.logits(inputs, decoder_ids, *valid)


def load(
    source: str | os.PathLike[str],
    dtype: str = "float32",
    compute: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Pretrained:
    """A checkpoint directory or hub id, with a LoRA adapter of PEFT's form added. Weights are kept in `dtype`; products
    are computed in `compute`, or `dtype`."""
    for name in (dtype, compute or dtype):
        if name not in DTYPES:
            raise InputError(f"dtype and compute must be one of {', '.join(DTYPES)}, got {name!r}")
    cache_compilations()
    directory = files.locate(source)
    stored = families.read(directory)
    config = families.computing(stored.config, compute=compute or dtype)
    tokenizer = load_tokenizer(directory)
    if tokenizer is not None and tokenizer.size > getattr(config, "vocab_size", tokenizer.size):
        raise InputError(
            f"{directory}: the tokenizer has {tokenizer.size} ids and the model only {config.vocab_size}; "
            "they do not belong together"
        )
    model = stored.load(config, DTYPES[dtype])
    if adapter is not None:
        model = lora.merge(model, peft.read(files.locate(adapter), model, dict(lora.linears(model))), 1.0)
    return Pretrained(model, tokenizer, stored.generation, Processor.read(directory))


def create(
    config: Any, seed: int = 0, tokenizer: Tokenizer | None = None, processor: Processor | None = None
) -> Pretrained:
    """A model with random weights."""
    cache_compilations()
    return Pretrained(initialise(families.of_config(config)(config), seed), tokenizer, {}, processor)


def cache_compilations() -> None:
    """Keep compiled programs on disk between runs, unless JAX_COMPILATION_CACHE_DIR says where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(base / "flaxen" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def compose(encoder: Pretrained, decoder: Pretrained, seed: int = 0) -> Pretrained:
    """A captioner of a ViT and a GPT-2. What neither has (cross-attention, a bridge between widths) is random."""
    if not isinstance(encoder.model, ViT) or not isinstance(decoder.model, GPT2):
        got = f"{type(encoder.model).__name__} and {type(decoder.model).__name__}"
        raise InputError(f"a captioner is made of a ViT and a GPT-2, got {got}")
    config = PairConfig(encoder.config, dataclasses.replace(decoder.config, cross=True))
    halves = (("encoder", encoder.model), ("decoder", decoder.model))
    known = {f"{half}.{path}": leaf for half, model in halves for path, leaf in leaves(model).items()}
    fresh = initialise(Captioner(config), seed)
    model = map_leaves(lambda path, leaf: known.get(path, leaf), fresh)
    processor = encoder.processor or Processor.default(encoder.config.image_size)
    return Pretrained(model, decoder.tokenizer, {}, processor)
