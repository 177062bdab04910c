"""As a library, Flaxen does not change global state: JAX settings, loggers, hooks, signals, environment."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, logging, os, signal, sys, warnings
from contextlib import closing
from pathlib import Path

import absl.logging, jax, orbax.checkpoint

def snapshot():
    numbers = [one for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
    names = ["", "absl", "asyncio", "jax", "orbax", "flaxen", *sorted(logging.root.manager.loggerDict)]
    return {
        "jax": {name: repr(value) for name, value in jax.config.values.items()},
        "loggers": {name: (logging.getLogger(name).level, len(logging.getLogger(name).handlers)) for name in names},
        "signals": {one.name: repr(signal.getsignal(one)) for one in numbers},
        "hooks": [repr(one) for one in (sys.excepthook, sys.unraisablehook, sys.displayhook)],
        "environment": dict(os.environ),
        "warnings": repr(warnings.filters),
        "directory": os.getcwd(),
    }

import flaxen
import flaxen.train.loop
from flaxen import families
from flaxen.data.corpus import Corpus
from flaxen.data.store import open_corpus
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.nn.param import initialise
from flaxen.models.t5 import T5, Config
from flaxen.tasks.denoise import Denoise
from flaxen.tasks.objective import DenoiseObjective
from flaxen.train.run import Run
from flaxen.train.settings import Optimizer, Schedule, Training
from flaxen.train.step import Stepper

before = snapshot()
flaxen.train.loop.peak = lambda: None
config = Config(vocab_size=384, d_model=16, d_head=4, d_ff=16, n_layers=1, n_decoder_layers=1, n_heads=2)
pretrained = flaxen.create(config, tokenizer=ByteTokenizer())
pretrained.save("model")
loaded = flaxen.load("model")
loaded.generate(["a b"], max_new_tokens=2)
list(loaded.stream("a b", max_new_tokens=2))
Path("text.txt").write_text("a text of some words\\n" * 50)
parts = open_corpus(Corpus(train=("text.txt",), cache=Path("cache")), ByteTokenizer())
task = Denoise(families.T5, config, DenoiseObjective(input_length=32), ByteTokenizer(), *parts, 0)
training = Training(steps=2, batch_size=4)
stepper = Stepper(task, Optimizer("adamw"), Schedule("constant", warmup=0), training)
with closing(Run(Path("run"), {}, {})) as run:
    initial = initialise(T5(config), 0)
    flaxen.train.loop.train(run, stepper, T5(config), lambda: initial, [], lambda model, path: None, quiet=True)
after = snapshot()
for one in (before, after):  # flatten to one table
    for kind in [kind for kind in one if isinstance(one[kind], dict)]:
        one |= {f"{kind} {name}": value for name, value in one.pop(kind).items()}
new_loggers = {name for name in after if name.startswith("loggers ") and name not in before}  # from other packages
changed = {name: (before.get(name), value) for name, value in after.items() if value != before.get(name)}
print(json.dumps({name: both for name, both in changed.items() if name not in new_loggers}))
"""


def test_library_does_not_change_its_host_process(tmp_path: Path) -> None:
    """Load, generate, stream, save, and train with checkpoints. Only the `flaxen` command may change its process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"
