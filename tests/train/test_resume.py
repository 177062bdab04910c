"""A run that is killed at any moment and resumed equals an uninterrupted run, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import child

STEPS = 60
KILLS = 5
CONFIG = {
    "model_type": "t5", "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS = {
    "plain": [],
    "accumulation, dropout, bf16": [
        "--training.accumulate", "2", "--model.dropout", "0.1", "--model.compute", "bfloat16",
        "--optimizer.name", "adafactor", "--schedule.warmup", "10", "--training.keep-best", "loss",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    (directory / "text.txt").write_text("\n".join(topics[name] for name in sorted(topics))[:60_000])
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def flags(material: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "denoise", "--out", str(out), "--quiet",
        "--model.config", str(material / "config.json"), "--model.tokenizer", "bytes",
        "--data.train", str(material / "text.txt"), "--data.cache", str(material / "cache"),
        "--objective.input-length", "64", "--training.batch-size", "8", "--training.steps", str(STEPS),
        "--training.log-every", "1", "--training.eval-every", "20", "--training.save-every", "7", *more,
    ]  # fmt: skip


def command(material: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "flaxen.cli.main", *flags(material, out, *more)]


@pytest.fixture(scope="module")
def uninterrupted(material: Path) -> dict[str, Path]:
    """Each variant without interruption, all in one process, because starting a process takes most of the time."""
    outs = {variant: material / f"uninterrupted {number}" for number, variant in enumerate(VARIANTS)}
    for done in child(*(flags(material, out, *VARIANTS[variant]) for variant, out in outs.items())):
        assert done.code == 0, done.err
    return outs


def records(out: Path) -> list[dict]:
    """All records of metrics.jsonl, without timings."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    complete = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in record.items() if k not in ("tokens_per_second", "mfu")} for record in complete]


def state(out: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, including the optimizer state."""
    with ocp.CheckpointManager(out / "checkpoints", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        arrays = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    return {name: np.asarray(array) for name, array in arrays.items()}


def kill_after(arguments: list[str], out: Path, step: int, delay: float) -> int:
    """Run a command, send SIGKILL `delay` seconds after `step` is recorded, and return the last recorded step."""
    process = subprocess.Popen(arguments)
    try:
        while process.poll() is None and max((record["step"] for record in records(out)), default=0) < step:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL, "the process ended before it was killed"
    return records(out)[-1]["step"]


def assert_same(one: Path, other: Path) -> None:
    assert records(one) == records(other)
    ours, theirs = state(one, STEPS), state(other, STEPS)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer") for name in ours)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    for directory in ("model", "best"):
        assert (one / directory).exists() == (other / directory).exists()
        if (one / directory).exists():
            files = [(place / directory / "model.safetensors").read_bytes() for place in (one, other)]
            assert files[0] == files[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_and_resumed_run_equals_uninterrupted_run(
    variant: str, material: Path, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    resumed = tmp_path / "resumed"
    draw = random.Random(os.environ.get("FLAXEN_KILL_SEED", variant))  # must pass with any seed
    kills = []
    for step in sorted(draw.sample(range(1, STEPS - 2), KILLS)):
        kills.append(kill_after(command(material, resumed, *VARIANTS[variant]), resumed, step, draw.uniform(0, 0.02)))
    assert len(kills) == KILLS
    subprocess.run(command(material, resumed, *VARIANTS[variant]), check=True)
    assert_same(uninterrupted[variant], resumed)


def test_sigterm_saves_and_the_next_run_resumes(material: Path, uninterrupted: dict[str, Path], tmp_path: Path) -> None:
    """This run saves only on SIGTERM, the uninterrupted one every few steps: saving must not change any number."""
    resumed = tmp_path / "resumed"
    never = ["--training.save-every", "0"]
    process = subprocess.Popen(command(material, resumed, *never))
    while max((record["step"] for record in records(resumed)), default=0) < 5:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    saved = [int(path.name) for path in (resumed / "checkpoints").iterdir() if path.name.isdigit()]
    assert saved == [records(resumed)[-1]["step"]]
    assert saved[0] >= 5
    subprocess.run(command(material, resumed, *never), check=True)
    assert_same(uninterrupted["plain"], resumed)
