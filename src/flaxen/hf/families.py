"""The architectures that Hugging Face's files can hold, and which one a directory does."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from flaxen.errors import InputError
from flaxen.hf import captioner, files, gpt2, t5, vit, vq, weightmap
from flaxen.models.captioner import Captioner
from flaxen.models.captioner import Config as PairConfig
from flaxen.models.gpt2 import GPT2
from flaxen.models.t5 import T5
from flaxen.models.vit import ViT
from flaxen.models.vq_lm import VQLM

Model = T5 | GPT2 | ViT | Captioner | VQLM


@dataclass(frozen=True)
class Family:
    """How one architecture is read and written."""

    model: type
    config: type
    read_config: Callable[[dict[str, Any], files.Tensors | None], Any]
    write_config: Callable[[Any, str], dict[str, Any]]
    rows: Callable[[Any, files.Tensors | None], list[weightmap.Row]]
    spare: Callable[[str, files.Tensors], bool]
    special: tuple[str, ...] = ()  # ids that config.json and generation_config.json both hold
    special_ids: Callable[[Any], dict[str, Any]] = lambda config: {}
    with_copies: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, tensors: tensors


def _family(model: type, module: Any) -> Family:
    named = ("read_config", "write_config", "rows", "spare", "special_ids", "with_copies")
    parts = {name: getattr(module, name) for name in named if hasattr(module, name)}
    return Family(model, module.Config, special=getattr(module, "SPECIAL", ()), **parts)


_T5 = _family(T5, t5)
FAMILIES: dict[str, Family] = {  # by model_type
    **dict.fromkeys(t5.MODEL_TYPES, _T5),
    "gpt2": _family(GPT2, gpt2),
    "vit": _family(ViT, vit),
    "vision-encoder-decoder": _family(Captioner, captioner),
    vq.MODEL_TYPE: _family(VQLM, vq),
}


def family_of(model: Any) -> Family:
    """The family of a model or of a class of models."""
    kind = model if isinstance(model, type) else type(model)
    return next(family for family in FAMILIES.values() if family.model is kind)


def of_config(config: Any) -> type:
    """The class of models that a configuration is for."""
    return next(family.model for family in FAMILIES.values() if family.config is type(config))


def family_named(json: dict[str, Any], where: Any) -> Family:
    kind = json.get("model_type", "t5")
    if kind not in FAMILIES:
        raise InputError(f"{where}: model_type {kind!r}; supported: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


@dataclass(frozen=True)
class Stored:
    """What a checkpoint directory says of its model, before any weight is read."""

    family: Family
    config: Any
    tensors: files.Tensors
    generation: dict[str, Any]  # generation_config.json, empty if there is none

    def load(self, config: Any, dtype: Any) -> Any:
        """The weights, in a model with this configuration."""
        rows = self.family.rows(config, self.tensors)
        spare = lambda name: self.family.spare(name, self.tensors)  # noqa: E731
        return weightmap.load(self.family.model(config), rows, self.tensors, dtype, spare)


def read(directory: Path) -> Stored:
    json = files.read_json(directory / "config.json")
    family = family_named(json, directory)
    tensors = files.Tensors(directory)
    path = directory / "generation_config.json"
    generation = files.read_json(path) if path.exists() else {}
    # Its ids win over config.json's, as in transformers.
    own = {name: value for name in family.special if (value := generation.get(name)) is not None}
    return Stored(family, family.read_config({**json, **own}, tensors), tensors, generation)


def write(model: Any, directory: Path, generation: dict[str, Any], shard_bytes: int) -> None:
    """config.json, generation_config.json and the weights."""
    family, config = family_of(model), model.config
    dtype = str(jax.tree.leaves(model)[0].dtype)
    tensors = family.with_copies(config, weightmap.save(model, family.rows(config, None)))
    files.write_json(directory / "config.json", family.write_config(config, dtype))
    if family.special:
        ids = {name: value for name, value in family.special_ids(config).items() if value is not None}
        files.write_json(directory / "generation_config.json", {**ids, **generation})
    files.write_tensors(directory, tensors, shard_bytes)


def computing(config: Any, **changes: Any) -> Any:
    """The configuration with other ways to compute the same: compute, remat, scan, in both halves of a pair."""
    if isinstance(config, PairConfig):
        return PairConfig(computing(config.encoder, **changes), computing(config.decoder, **changes))
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise InputError(f"the model's configuration: {error}") from None


def with_dropout(config: Any, rate: float) -> Any:
    """The configuration with this rate wherever it has dropout."""
    if isinstance(config, PairConfig):
        return PairConfig(with_dropout(config.encoder, rate), with_dropout(config.decoder, rate))
    names = [field.name for field in dataclasses.fields(config) if field.name.endswith("dropout")]
    return dataclasses.replace(config, **dict.fromkeys(names, rate))
