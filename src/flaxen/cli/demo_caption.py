"""flaxen demo caption: train a captioner on generated images of shapes, in a few minutes on a CPU."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flaxen.atomic import atomic_file
from flaxen.atomic_directory import atomic_directory
from flaxen.cli.demo import create_directory
from flaxen.cli.settings import CaptionSettings, ModelSettings
from flaxen.cli.train import Train
from flaxen.data.captions import Captions
from flaxen.tasks.objective import CaptionObjective, EvalGeneration
from flaxen.train.run import RunFiles
from flaxen.train.settings import Optimizer, Schedule, Training

if TYPE_CHECKING:
    import PIL.Image

COLOURS = {
    "red": (214, 48, 49), "green": (46, 160, 67), "blue": (32, 90, 200), "yellow": (240, 200, 30),
    "black": (30, 30, 30),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
RELATIONS = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}  # where the large shape is, seen from the small one
SIZE, N_IMAGES, HELD_OUT = 48, 6000, 120
SPECIAL = ("<pad>", "</s>", "<unk>")


class Scene(NamedTuple):
    """A large and a small shape. The large one is always named first, so each image has exactly one correct caption."""

    colour: str
    shape: str
    relation: str
    other_colour: str
    other_shape: str

    @property
    def caption(self) -> str:
        return f"large {self.colour} {self.shape} {self.relation} small {self.other_colour} {self.other_shape}"


@dataclass(frozen=True)
class DemoCaption:
    """Train a small captioner on generated images and let it describe new ones (about 3 minutes on a CPU).

    Example: flaxen demo caption --out flaxen-demo-caption
    """

    out: Path = Path("flaxen-demo-caption")
    """Directory for the images, the vocabulary and the run. If it already contains a finished run, the demo only shows
    the results again."""
    steps: int = 1400
    """Number of training steps."""

    def run(self, given_flags: set[str]) -> None:
        from rich.console import Console
        from rich.table import Table

        console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
        create_directory(self.out, ("images", "vocabulary", "tokens", "run"))
        tables = {name: self.out / "images" / f"{name}.jsonl" for name in ("train", "validation")}
        vocabulary, run = self.out / "vocabulary", self.out / "run"
        files = RunFiles(run)

        console.print("\n[bold]1. Images: a large and a small shape[/bold]")
        train, held_out = scenes()
        if not tables["validation"].exists():  # written last, so it exists only if all images do
            _draw_images(tables["train"], train)
            _draw_images(tables["validation"], held_out)
        kinds = len(set(train))
        console.print(
            f"{len(train):,} training images of {kinds:,} scenes. {len(held_out)} scenes are held out, such as\n"
            f"“{held_out[0].caption}”: the model sees each shape in training, but never this combination."
        )
        if not vocabulary.exists():
            _write_vocabulary(vocabulary)

        console.print("\n[bold]2. Training: generate the caption of an image[/bold]")
        settings = CaptionSettings(
            out=run,
            model=ModelSettings(preset="vit-tiny+gpt2-tiny", tokenizer=str(vocabulary), image_size=SIZE, dropout=0.0),
            data=Captions(train=(str(tables["train"]),), validation=(str(tables["validation"]),)),
            objective=CaptionObjective(length=16),
            generation=EvalGeneration(examples=HELD_OUT, batch_size=50),
            optimizer=Optimizer("adamw", learning_rate=2e-3),
            schedule=Schedule("cosine"),
            training=Training(steps=self.steps, batch_size=32, log_every=100, eval_every=350, save_every=350),
        )
        console.print(f"$ flaxen train caption --recipe {files.config}", style="dim", markup=False)
        Train(settings).run(set())

        console.print("\n[bold]3. Scenes that the model has not seen[/bold]")
        records = files.records()
        records = [record for record in records if record["kind"] == "eval"]
        table = Table("step", "loss", "CIDEr", "exact match", "exact match (bar)", box=None)
        for record in records:
            bar = "█" * round(0.4 * record["exact_match"])
            numbers = f"{record['loss']:.3f}", f"{record['cider']:.2f}", f"{record['exact_match']:.1f} %"
            table.add_row(str(record["step"]), *numbers, bar)
        console.print(table)
        path = files.new_predictions(records[-1]["step"])
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        correct = [line for line in lines if line["prediction"] in line["references"]]
        wrong = [line for line in lines if line["prediction"] not in line["references"]]
        table = Table("image", "model", "caption", box=None)
        for line in correct[:4] + wrong[:4]:
            mark = "[green]" if line in correct else "[yellow]"
            table.add_row(line["image"], f"{mark}{line['prediction']}[/]", line["references"][0])
        console.print(table)
        console.print(f"\n{len(correct)} of {len(lines)} captions are exactly right.")

        console.print(f"\n[bold]4. Results[/bold] after {time.monotonic() - started:.0f} s")
        console.print(
            f"{path.with_suffix('.html')}  the images with their captions; open it in a browser\n"
            f"{files.model}  the trained model in Hugging Face format (VisionEncoderDecoderModel)\n\n"
            "Next:\n"
            f"  flaxen generate {files.model} --image {tables['train'].parent / lines[0]['image']} --num-beams 4\n"
            "  flaxen compose google/vit-base-patch16-224-in21k gpt2 my-captioner\n"
            "  flaxen train caption --out my-run --model.init my-captioner --data.train my-images/ --lora.rank 8",
            markup=False,
        )


def scenes() -> tuple[list[Scene], list[Scene]]:
    """Split all possible scenes into training scenes, repeated to make N_IMAGES images, and held-out ones."""
    objects = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    combinations = [
        Scene(*large, relation, *small)
        for large in objects
        for relation in RELATIONS
        for small in objects
        if large != small
    ]
    draw = random.Random(0)
    draw.shuffle(combinations)
    held_out, training = combinations[:HELD_OUT], combinations[HELD_OUT:]
    return [training[i % len(training)] for i in range(N_IMAGES)], held_out


def _draw_images(table: Path, scenes: list[Scene]) -> None:
    """Draw an image of each scene and write a table of images and captions."""
    folder = table.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(table.stem)
    with atomic_file(table) as file:
        for number, scene in enumerate(scenes):
            path = folder / f"{number:05}.png"
            picture(scene, draw).save(path)
            line = {"image": str(path.relative_to(table.parent)), "caption": scene.caption}
            file.write(json.dumps(line) + "\n")


def picture(scene: Scene, draw: random.Random) -> "PIL.Image.Image":
    """Draw a scene with a random background, and with random offsets and sizes of its shapes."""
    from PIL import Image, ImageDraw

    light = draw.randint(215, 255)
    image = Image.new("RGB", (SIZE, SIZE), (light, light, light))
    canvas = ImageDraw.Draw(image)
    dx, dy = RELATIONS[scene.relation]
    objects = ((1, 10.0, scene.colour, scene.shape), (-1, 5.0, scene.other_colour, scene.other_shape))
    for side, radius, colour, shape in objects:
        x = SIZE / 2 + side * dx * 11 + draw.randint(-2, 2)
        y = SIZE / 2 + side * dy * 11 + draw.randint(-2, 2)
        radius = radius + draw.uniform(-1, 1)
        for points in _outline(shape, x, y, radius):
            canvas.polygon(points, fill=COLOURS[colour])
        if shape == "circle":
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    return image


def _outline(shape: str, x: float, y: float, r: float) -> Iterator[list[tuple[float, float]]]:
    """Yield the polygons that make up a shape; none for a circle."""
    if shape == "square":
        yield [(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)]
    elif shape == "triangle":
        yield [(x, y - r), (x + r, y + r), (x - r, y + r)]
    elif shape == "cross":
        for wide, high in ((r, r / 3), (r / 3, r)):
            yield [(x - wide, y - high), (x + wide, y - high), (x + wide, y + high), (x - wide, y + high)]


def _write_vocabulary(directory: Path) -> None:
    """Save a word-level tokenizer for the words in the captions."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from flaxen.hf.files import write_json

    words = {word for scene in scenes()[0] for word in scene.caption.split()}
    ids = {word: number for number, word in enumerate((*SPECIAL, *sorted(words)))}
    backend = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL))
    with atomic_directory(directory) as fresh:
        backend.save(str(fresh / "tokenizer.json"))
        names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        write_json(fresh / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
