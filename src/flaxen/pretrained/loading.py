"""Load and create models; read and write Hugging Face checkpoint directories."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flaxen import families
from flaxen.data.images import ImageProcessor
from flaxen.data.tokenizers import Tokenizer, load_tokenizer
from flaxen.errors import InputError
from flaxen.families import Family
from flaxen.hf import files, peft, sentence, weightmap
from flaxen.hf.safetensors_files import Safetensors, write_tensors
from flaxen.hf.sentence import Modules
from flaxen.hf.tensors import Tensors
from flaxen.models.config import with_options
from flaxen.nn.param import initialise
from flaxen.pretrained.model import Pretrained
from flaxen.train import lora

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Stored:
    """An open checkpoint directory: everything but the weights, which are read on demand."""

    directory: Path
    family: Family
    config: Any
    tensors: Tensors | None  # None: a directory without weights
    generation: dict[str, Any]  # generation_config.json; empty if there is none
    processor: ImageProcessor | None  # preprocessor_config.json
    modules: Modules | None  # modules.json, for families with embeddings

    def tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer, from the directory or (for the text encoder of a diffusion model) a sibling folder."""
        sibling = files.tokenizer_folder(self.directory)
        return load_tokenizer(self.directory) or (load_tokenizer(sibling) if sibling else None)

    def weights(
        self, config: Any = None, dtype: Any = jnp.float32, adapter: str | os.PathLike[str] | None = None
    ) -> Any:
        """Load the model, with its configuration replaced by an equivalent one and a LoRA adapter merged if given."""
        assert self.tensors is not None
        stored, form = self.config, self.family.format
        rows = form.rows(stored, self.tensors)
        model = weightmap.load(self.family.model(stored), rows, self.tensors, dtype, form.unneeded)
        model = model if config is None else self.family.with_config(model, config)
        return model if adapter is None else with_adapter(model, adapter)


def read(directory: Path, has_weights: bool = True) -> Stored:
    """Open a checkpoint directory and read its configuration; no weights are read."""
    top, directory = directory, sentence.transformer(directory)
    json = files.read_json(directory / "config.json")
    family = families.of_json(json, directory)
    tensors = Safetensors(directory) if has_weights else None
    path = directory / "generation_config.json"
    generation = files.read_json(path) if path.exists() else {}
    # Special token ids in generation_config.json override those in config.json, as in transformers.
    special = {name: value for name in family.format.special if (value := generation.get(name)) is not None}
    config = family.format.read_config({**json, **special}, tensors)
    modules = sentence.read(top) if family.encode else None
    return Stored(directory, family, config, tensors, generation, ImageProcessor.read(directory), modules)


def write_all_but_weights(saved: Pretrained, directory: Path) -> None:
    """Write configurations, tokenizer and other small files of a model, which may be abstract."""
    config, form = saved.config, saved.family.format
    dtype = str(jax.tree.leaves(saved.model)[0].dtype)
    files.write_json(directory / "config.json", form.write_config(config, dtype))
    if form.special:
        ids = {name: value for name, value in form.special_ids(config).items() if value is not None}
        files.write_json(directory / "generation_config.json", {**ids, **saved.generation})
    for name, content in (saved.tokenizer.files if saved.tokenizer else {}).items():
        (directory / name).write_bytes(content)
    if saved.processor is not None:
        files.write_json(directory / "preprocessor_config.json", saved.processor.to_json())
    if saved.modules is not None:
        sentence.write(saved.modules, config.d_model, directory)


def write_weights(model: Any, directory: Path, shard_bytes: int) -> None:
    """Write the weights of a model into an existing directory."""
    config, form = model.config, families.of_model(model).format
    write_tensors(directory, form.with_copies(config, weightmap.save(model, form.rows(config, None))), shard_bytes)


def load(
    source: str | os.PathLike[str],
    dtype: str = "float32",
    compute: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    subfolder: str | None = None,
) -> Pretrained:
    """Load a checkpoint from a local directory or from the Hugging Face hub ('google/flan-t5-small').

    Args:
        source: checkpoint directory or hub id.
        dtype: dtype of the weights in memory, 'float32' or 'bfloat16'.
        compute: dtype of matrix products; `dtype` if None.
        adapter: directory or hub id of a LoRA adapter in PEFT's format, which is merged into the weights.
        subfolder: folder of `source` that holds the model, such as 'text_encoder_2' of a diffusion model.
    """
    for name in (dtype, compute or dtype):
        if name not in DTYPES:
            raise InputError(f"dtype and compute must be one of {', '.join(DTYPES)}, got {name!r}")
    stored = read(files.locate(source, subfolder))
    config = computed_in(stored.config, compute or dtype)
    # Checked before the weights are read, which takes longest.
    tokenizer = stored.tokenizer()
    check_tokenizer(tokenizer, config, stored.directory)
    model = stored.weights(config, DTYPES[dtype], adapter)
    return Pretrained(model, tokenizer, stored.generation, stored.processor, stored.modules)


def create(
    config: Any, seed: int = 0, tokenizer: Tokenizer | None = None, processor: ImageProcessor | None = None
) -> Pretrained:
    """Create a model with random weights from a configuration, such as `flaxen.models.t5.Config()`."""
    return Pretrained(initialise(families.of_config(config).model(config), seed), tokenizer, {}, processor)


def with_adapter(model: Any, adapter: str | os.PathLike[str]) -> Any:
    """Merge a LoRA adapter, given as a directory or hub id, into the weights of a model."""
    rows = families.of_model(model).format.rows(model.config, None)
    return lora.merge(model, peft.read(files.locate(adapter), rows, dict(lora.linears(model))), 1.0)


def computed_in(config: Any, compute: str, **options: Any) -> Any:
    """Return the configuration with a compute dtype and other options set."""
    try:
        return with_options(config, compute=compute, **options)
    except ValueError as error:
        raise InputError(f"invalid model configuration: {error}") from None


def check_tokenizer(tokenizer: Tokenizer | None, config: Any, where: Any) -> None:
    """Raise an error if the tokenizer has more ids than the model has embeddings."""
    rows = getattr(config, "vocab_size", None)
    if tokenizer is not None and rows is not None and tokenizer.size > rows:
        raise InputError(
            f"{where}: the tokenizer has {tokenizer.size:,} ids, but the model has only {rows:,}; "
            "use a matching tokenizer"
        )
