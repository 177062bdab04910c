"""Settings survive the conversion to TOML and back, and mistakes in a recipe are reported."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
import tomli_w
import tyro

from flaxen.cli import recipe
from flaxen.cli.settings import DenoiseSettings as Settings
from flaxen.cli.settings import ModelSettings
from flaxen.data.corpus import Corpus
from flaxen.errors import InputError
from flaxen.tasks.objective import DenoiseObjective
from flaxen.train.settings import Optimizer, Schedule, Tracking, Training

# No field has its default value, so that the test notices if one gets lost.
EVERYTHING = Settings(
    out=Path("runs") / "a run",
    model=ModelSettings(init="some/model", tokenizer="bytes", compute="bfloat16", dropout=0.25, remat=True),
    data=Corpus(
        train=("a.txt", "b *.jsonl"),
        validation=("c.txt",),
        validation_percent=2.5,
        dataset="set",
        dataset_config="en",
        split="half",
        streaming=True,
        column="body",
        unit="paragraph",
        invalid="replace",
        cache=Path("some/tokens"),
    ),
    objective=DenoiseObjective(input_length=96, noise_density=0.3, mean_span=4.5, z_loss=1e-4),
    optimizer=Optimizer(
        "muon",
        3e-4,
        weight_decay=0.1,
        b1=0.8,
        b2=0.95,
        eps=1e-6,
        momentum=0.9,
        clip=0.5,
        codebook=0.9,
        restart=0.1,
        reference=True,
        freeze=("head.*",),
    ),
    schedule=Schedule("warmup-stable-decay", warmup=7, floor=0.1, decay=0.3, steps=90, reference=True),
    training=Training(
        epochs=2.5,
        batch_size=12,
        accumulate=3,
        seed=5,
        log_every=2,
        eval_every=9,
        eval_batch_size=6,
        eval_examples=40,
        save_every=11,
        keep=4,
        keep_best="accuracy",
        on_damage="stop",
    ),
    tracking=Tracking(tensorboard=True, wandb="w", trackio="t", name="n"),
)
LEAST = Settings(out=Path("run"), model=ModelSettings(preset="t5-small"))


@pytest.mark.parametrize("settings", [EVERYTHING, LEAST], ids=["everything", "defaults"])
def test_settings_survive_toml(settings: Settings) -> None:
    read = tomllib.loads(tomli_w.dumps(recipe.to_dict(settings)))
    assert recipe.from_dict(Settings, read, "here") == settings


def test_everything_differs_from_the_defaults() -> None:
    """Otherwise the test above would miss a lost field. Settings that exclude each other cannot all be set."""
    same = []
    for part in ("data", "objective", "optimizer", "schedule", "training", "tracking"):
        ours = getattr(EVERYTHING, part)
        same += [f.name for f in dataclasses.fields(ours) if getattr(ours, f.name) == getattr(type(ours)(), f.name)]
    assert same == ["validation_split", "steps"]


@dataclasses.dataclass(frozen=True)
class Command(Settings):
    """The settings without the type checker of the tests, which does not accept tyro.MISSING."""


def test_recipe_sets_defaults_and_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[model]\npreset = "t5-small"\n[data]\ntrain = "one.txt"\n[optimizer]\nlearning_rate = 1\n')
    read = recipe.read(Command, path)
    assert read.out is tyro.MISSING
    assert read.data.train == ("one.txt",)  # a single file may be written without a list
    assert isinstance(read.optimizer.learning_rate, float)  # integers are converted
    flags = ["--out", "run", "--optimizer.learning-rate", "2.5"]
    parsed = tyro.cli(Command, args=flags, default=read)
    assert (parsed.out, parsed.optimizer.learning_rate) == (Path("run"), 2.5)
    assert parsed.model == ModelSettings(preset="t5-small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainig]\nsteps = 5", r"unknown setting 'trainig' \(did you mean 'training'\?\); available: model, out, "),
        ("[training]\nstep = 5", r"r\.toml, \[training\]: unknown setting 'step' \(did you mean 'steps'\?\)"),
        ("[training]\nsteps = 5.5", r"\[training\]: steps must be of type int, got 5\.5"),
        ("[training]\nsteps = true", "steps must be of type int, got True"),
        ("[training]\nkeep_best = 3", "keep_best must be of type str, got 3"),
        ("[model]\nremat = 1", "remat must be of type bool, got 1"),
        ("[objective]\nnoise_density = true", "noise_density must be of type float, got True"),
        ('[objective]\nnoise_density = "much"', "noise_density must be of type float, got 'much'"),
        ("[data]\ntrain = [3]", "train must be of type str, got 3"),
        ("[data]\ncache = 3", "cache must be of type Path, got 3"),
        ("training = 5", "training must be a table, got 5"),
        ('[schedule]\nname = "cosin"', r"name must be one of linear, .*, got 'cosin' \(did you mean 'cosine'\?\)"),
        ("[training]\nbatch_size = 3\naccumulate = 2", "batch_size=3 must be a multiple of training.accumulate=2"),
        ("[training\n", r"r\.toml is not valid TOML"),
    ],
)
def test_mistakes_in_a_recipe_are_reported(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        recipe.read(Settings, path)


def test_unreadable_recipes_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml does not exist; --recipe expects a TOML file"):
        recipe.read(Settings, tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="binary is not valid TOML"):
        recipe.read(Settings, tmp_path / "binary")
