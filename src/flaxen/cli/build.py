"""From settings to the things that train: tokenizer, model, data, task."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flaxen.cli.settings import DenoiseSettings, Seq2SeqSettings, Settings, Start
from flaxen.data.pair_store import open_pairs
from flaxen.data.store import open_corpus
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from flaxen.errors import InputError, nearest
from flaxen.hf import files, t5
from flaxen.models.t5 import PRESETS, T5, Config
from flaxen.nn.param import initialise
from flaxen.pretrained import Pretrained, cache_compilations, load, read_config
from flaxen.tasks.denoise import Denoise
from flaxen.tasks.seq2seq import Seq2Seq
from flaxen.train.optim import frozen
from flaxen.train.step import Stepper
from flaxen.tree import leaves, map_leaves


@dataclass(frozen=True)
class Built:
    """All that a run needs."""

    config: Config
    tokenizer: Tokenizer
    task: Denoise | Seq2Seq
    stepper: Stepper
    initial: Callable[[], T5]  # the weights to start from, made when they are needed
    generation: dict[str, Any]  # generation_config.json of the checkpoint it starts from
    facts: dict[str, Any]  # what the settings came to: data, lengths, sizes

    @property
    def abstract(self) -> T5:
        return T5(self.config)

    def export(self, model: Any, directory: Path) -> None:
        Pretrained(model, self.tokenizer, self.generation).save(directory)


def build(settings: Settings) -> Built:
    cache_compilations()
    config, tokenizer, generation = start(settings.model)
    initial = partial(_initial, settings.model, config, settings.training.seed)
    task = make_task(settings, config, tokenizer)
    stepper = Stepper(task, settings.optimizer, settings.schedule, settings.training)
    frozen(settings.optimizer, T5(config))  # globs that match nothing fail now
    facts = task.facts | {"steps": stepper.steps, "model": dataclasses.asdict(config)}
    return Built(config, tokenizer, task, stepper, initial, generation, facts)


def make_task(settings: Settings, config: Config, tokenizer: Tokenizer) -> Denoise | Seq2Seq:
    """The data of a run, joined to its model."""
    seed = settings.training.seed
    if isinstance(settings, DenoiseSettings):
        return Denoise(config, settings.objective, tokenizer, *open_corpus(settings.data, tokenizer), seed)
    assert isinstance(settings, Seq2SeqSettings)
    pairs = open_pairs(settings.data, tokenizer)
    return Seq2Seq(config, settings.objective, settings.writing, tokenizer, *pairs, seed)


def start(model: Start) -> tuple[Config, Tokenizer, dict[str, Any]]:
    """The configuration, the tokenizer and generation_config.json; no weights are read or made."""
    generation: dict[str, Any] = {}
    if model.init is not None:
        directory = files.locate(model.init)
        config, _, generation = read_config(directory)
        tokenizer = named_tokenizer(model.tokenizer) if model.tokenizer else load_tokenizer(directory)
        if tokenizer is None:
            raise InputError(f"{model.init} has no tokenizer files; name a tokenizer with --model.tokenizer")
        if tokenizer.size > config.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.size:,} ids and the model of {model.init} only {config.vocab_size:,}; "
                "they do not belong together"
            )
    else:
        config = _preset(model.preset) if model.preset else _config_file(model.config)
        if model.tokenizer is None and not (model.preset or "").startswith("byt5"):
            raise InputError(
                "a model that starts from nothing needs --model.tokenizer: a directory, a hub id, or bytes"
            )
        tokenizer = named_tokenizer(model.tokenizer or "bytes")
        # Rows of the table come in multiples of 128, as T5's 32,128 for 32,100 ids do: products like it.
        ids: dict[str, Any] = {"pad_id": tokenizer.pad_id, "eos_ids": (tokenizer.eos_id,), "start_id": tokenizer.pad_id}
        config = dataclasses.replace(config, vocab_size=-(-tokenizer.size // 128) * 128, **ids)
    changes: dict[str, Any] = {"compute": model.compute, "remat": model.remat}
    changes |= {} if model.dropout is None else {"dropout": model.dropout}
    return dataclasses.replace(config, **changes), tokenizer, generation


def named_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    tokenizer = load_tokenizer(files.locate(name))
    if tokenizer is None:
        raise InputError(f"{name} holds no tokenizer (tokenizer.json, spiece.model or tokenizer_config.json)")
    return tokenizer


def _preset(name: str) -> Config:
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _config_file(path: Path | None) -> Config:
    assert path is not None
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError(f"no file {path}; --model.config is a config.json")
    return t5.read_config(files.read_json(path), None)


def _initial(model: Start, config: Config, seed: int) -> T5:
    if model.init is None:
        return initialise(T5(config), seed)
    weights = leaves(load(model.init).model)
    return map_leaves(lambda path, _: weights[path], T5(config))
