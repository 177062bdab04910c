"""Captioning on the command line: train, evaluate, resume, LoRA; and how unreadable images are handled."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import command
from PIL import Image
from vision_models import GPT2, VIT, make_gpt2, make_vit

import flaxen
from flaxen.cli.demo_caption import COLOURS, Scene, _write_vocabulary, picture
from flaxen.hf.safetensors_files import Safetensors

DROPPED = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one shape above another, their captions, and a configuration."""
    directory, draw = tmp_path_factory.mktemp("material"), random.Random(0)
    (directory / "images").mkdir()
    lines = []
    for number in range(40):
        scene = Scene(draw.choice(list(COLOURS)), "circle", "above", draw.choice(list(COLOURS)), "square")
        picture(scene, draw).save(directory / "images" / f"{number}.png")
        captions = [scene.caption, f"{scene.colour} circle"][: 1 + number % 2]
        lines += [{"image": f"images/{number}.png", "caption": caption} for caption in captions]
    (directory / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    halves = {"encoder": {"model_type": "vit", **VIT}, "decoder": {"model_type": "gpt2", **GPT2, **DROPPED}}
    config = {"model_type": "vision-encoder-decoder", "is_encoder_decoder": True, **halves}
    (directory / "config.json").write_text(json.dumps(config))
    _write_vocabulary(directory / "vocabulary")
    return directory


def flags(material: Path, out: Path, *more: object) -> list[object]:
    return [
        "train", "caption", "--out", out, "--model.config", material / "config.json",
        "--model.tokenizer", material / "vocabulary", "--data.train", material / "captions.jsonl",
        "--data.validation-percent", "20", "--objective.length", "16", "--optimizer.learning-rate", "3e-3",
        "--training.batch-size", "8", "--training.steps", "8", "--training.log-every", "1",
        "--training.eval-every", "4", "--training.save-every", "3", "--training.keep-best", "cider",
        "--generation.examples", "8", "--generation.batch-size", "4", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    done = command(*flags(material, out))
    assert done.code == 0, done.err
    assert "32 training images with 48 captions" in done.err
    assert "8 validation images with 12 captions" in done.err
    return out


def records(run: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def test_run_writes_metrics_and_predictions(trained: Path) -> None:
    evaluations = records(trained, "eval")
    assert [record["step"] for record in evaluations] == [4, 8]
    assert {"loss", "cider", "bleu1", "bleu4", "rougeL", "exact_match"} <= evaluations[0].keys()
    lines = [json.loads(line) for line in (trained / "predictions" / "step-8.jsonl").read_text().splitlines()]
    assert [line["image"] for line in lines] == [f"images/{i}.png" for i in range(8)]
    assert [len(line["references"]) for line in lines] == [1, 2] * 4
    assert lines[1]["references"][1] == " ".join(lines[1]["references"][0].split()[1:3])
    page = (trained / "predictions" / "step-8.html").read_text()
    assert page.count("data:image/jpeg;base64") == 8
    losses = [record["loss"] for record in records(trained, "train")]
    assert losses[-1] < losses[0]


def test_transformers_loads_the_model_and_its_processor(trained: Path, material: Path) -> None:
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(trained / "model").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(trained / "model", backend="pil")
    image = material / "images" / "3.png"
    pixels = torch.as_tensor(np.asarray(processor(Image.open(image), return_tensors="np")["pixel_values"]))
    tokens = theirs.generate(pixels, max_new_tokens=10, num_beams=3, do_sample=False)[0, 1:].tolist()
    ours = flaxen.load(trained / "model").generate([image], max_new_tokens=10, num_beams=3)[0].tokens
    assert tokens[: len(ours)] == ours


def test_generate_and_eval(trained: Path, material: Path, tmp_path: Path) -> None:
    images = [material / "images" / f"{i}.png" for i in range(3)]
    done = command("generate", trained / "model", "--image", *images, "--json", "--max-new-tokens", "9")
    assert done.code == 0, done.err
    assert [json.loads(line)["id"] for line in done.out.splitlines()] == [str(path) for path in images]
    table = tmp_path / "prompts.jsonl"
    table.write_text("".join(json.dumps({"text": os.path.relpath(path, tmp_path)}) + "\n" for path in images))
    from_table = command("generate", trained / "model", "--file", table, "--json", "--max-new-tokens", "9")
    assert [json.loads(line)["text"] for line in from_table.out.splitlines()] == [
        json.loads(line)["text"] for line in done.out.splitlines()
    ]
    streamed = command("generate", trained / "model", "--image", images[0], "--stream", "--max-new-tokens", "9")
    assert streamed.out.strip() == json.loads(done.out.splitlines()[0])["text"].strip()

    data = ["--data.validation", material / "captions.jsonl", "--objective.length", "16"]
    sheet, out = tmp_path / "sheet.html", tmp_path / "out.jsonl"
    done = command("eval", "caption", trained / "model", *data, "--out", out, "--sheet", sheet, "--batch-size", "7")
    assert done.code == 0, done.err
    assert "40 images" in done.err
    assert len(out.read_text().splitlines()) == sheet.read_text().count("data:image/jpeg") == 40
    other = command("eval", "caption", trained / "model", *data, "--loss-only", "--batch-size", "16")
    assert json.loads(other.out)["loss"] == pytest.approx(json.loads(done.out)["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a"], "expects images; pass --image or --file"),
        (["--image", "{tmp}/none.png"], "none.png"),
        (["--image", "{tmp}/empty.png"], "empty.png"),
    ],
)
def test_unusable_prompts_are_reported(trained: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty.png").touch()
    done = command("generate", trained / "model", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.code == 1
    assert message in done.message


def test_preview_and_replay(trained: Path, material: Path) -> None:
    arguments = flags(material, Path("x"))
    settings = arguments[4 : arguments.index("--optimizer.learning-rate")]
    done = command("preview", "caption", *settings, "--training.batch-size", "8", "--examples", "2")
    assert done.code == 0, done.err
    assert "images/" in done.out
    assert "circle" in done.out
    replayed = command("replay", trained, "--step", "5", "--examples", "1")
    assert replayed.code == 0, replayed.err
    loss = float(replayed.out.split("loss ")[1].split(",")[0])
    assert loss == pytest.approx(records(trained, "train")[4]["loss"], rel=1e-6)


@pytest.mark.optimised
def test_resumed_run_equals_uninterrupted_run(trained: Path, material: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [sys.executable, "-m", "flaxen.cli.main", *map(str, flags(material, out))]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    while not list(out.glob("checkpoints/3/_CHECKPOINT_METADATA")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = command(*flags(material, out))
    assert done.code == 0, done.err
    resumed, uninterrupted = Safetensors(out / "model"), Safetensors(trained / "model")
    assert set(resumed) == set(uninterrupted)
    for name in resumed:
        np.testing.assert_array_equal(resumed[name], uninterrupted[name])


def test_unreadable_images_do_not_stop_a_run(material: Path, tmp_path: Path) -> None:
    """Missing and empty files are reported before training, damaged ones when read; blank captions are skipped."""
    good = [json.loads(line) for line in (material / "captions.jsonl").read_text().splitlines()]
    complete = (material / "images" / "0.png").read_bytes()
    (material / "images" / "cut.png").write_bytes(complete[: len(complete) // 2])
    (material / "images" / "empty.png").touch()
    Image.new("RGB", (1, 1)).save(material / "images" / "dot.png")
    bad = [("cut.png", "a"), ("empty.png", "a"), ("none.png", "a"), ("dot.png", "red"), ("1.png", " ")]
    rows = [*good, good[0], *({"image": f"images/{name}", "caption": text} for name, text in bad)]
    rows.append({"image": "images/0.png", "caption": "red " * 5000})
    (material / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--data.train", material / "bad.jsonl", "--data.validation", material / "captions.jsonl"]
    once = ["--training.eval-every", "0", "--generation.examples", "0", "--training.keep-best", "loss"]
    done = command(*flags(material, tmp_path / "run", *more, *once))
    assert done.code == 0, done.err
    for words in ("cut.png", "empty.png", "none.png", "1 duplicate training captions", "captions to 16 tokens"):
        assert words in done.message
    strict = command(*flags(material, tmp_path / "strict", *more, "--data.unreadable", "error"))
    assert strict.code == 1
    assert "empty.png" in strict.message
    assert not (tmp_path / "strict").exists()


def test_unsupported_models_and_unknown_columns_are_reported(material: Path, byt5: Path, tmp_path: Path) -> None:
    arguments = flags(material, tmp_path / "run")
    wrong = command(*arguments, "--data.caption", "captoin")
    assert wrong.code == 1
    assert "captoin" in wrong.message
    assert "caption" in wrong.message
    place = arguments.index("--model.config")
    other = command(*arguments[:place], "--model.init", byt5, *arguments[place + 4 :])
    assert other.code == 1
    assert "the task caption requires a model of type ViT + GPT-2 captioner, got a T5" in other.message
    assert not (tmp_path / "run").exists()


def test_compose_then_lora_then_merge(material: Path, tmp_path: Path) -> None:
    """Combine two checkpoints into a captioner, then train, use and merge an adapter."""
    vit, gpt2 = make_vit(tmp_path / "vit"), make_gpt2(tmp_path / "gpt2", n_embd=24)
    done = command("compose", tmp_path / "vit", tmp_path / "gpt2", tmp_path / "pair")
    assert done.code == 0, done.err
    assert "cross-attention and the bridge" in done.out
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "pair")
    decoder_weights = theirs.decoder.state_dict()
    for name, tensor in gpt2.model.state_dict().items():
        assert torch.equal(decoder_weights[name], tensor), name
    for name, tensor in vit.model.state_dict().items():
        assert torch.equal(theirs.encoder.state_dict()[name], tensor), name

    arguments = flags(material, tmp_path / "run", "--lora.rank", "2", "--lora.targets", "*.attention.*", "*.kv")
    place = arguments.index("--model.config")
    arguments[place : place + 2] = ["--model.init", tmp_path / "pair"]
    done = command(*arguments)
    assert done.code == 0, done.err
    adapter = tmp_path / "run" / "model"
    names = {"adapter_config.json", "adapter_model.safetensors", "flaxen_manifest.json"}
    assert {path.name for path in adapter.iterdir()} == names
    images = [material / "images" / f"{i}.png" for i in range(2)]
    merged = command("merge", tmp_path / "pair", adapter, tmp_path / "merged")
    assert merged.code == 0, merged.err
    options = ["--image", *images, "--json", "--max-new-tokens", "6"]
    with_adapter = command("generate", tmp_path / "pair", "--adapter", adapter, *options)
    assert with_adapter.code == 0, with_adapter.err
    assert with_adapter.out == command("generate", tmp_path / "merged", *options).out
    assert with_adapter.out != command("generate", tmp_path / "pair", *options).out


def test_training_at_another_image_size(trained: Path, material: Path, tmp_path: Path) -> None:
    """A checkpoint for 32 pixels is trained with 48: positions are interpolated, and the saved model is for 48."""
    arguments = flags(material, tmp_path / "run", "--model.image-size", "48", "--training.steps", "1")
    place = arguments.index("--model.config")
    arguments[place : place + 4] = ["--model.init", trained / "model"]
    done = command(*arguments)
    assert done.code == 0, done.err
    assert flaxen.load(tmp_path / "run" / "model").config.encoder.image_size == (48, 48)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model")
    assert config.encoder.image_size == 48
