"""flaxen bench language: measure training speed, peak memory and decoding time at several sequence lengths.

Each measurement runs in its own process, `python -m flaxen.cli.bench JSON`, because peak memory is per process.
"""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxen import strict_json
from flaxen.atomic import atomic_file
from flaxen.errors import InputError
from flaxen.malloc import restart_with_tuned_malloc

# Changes to the preset's configuration for each value of --models.
FORMS = {"vq": ("form=scan",), "vq-parallel": ("form=parallel",), "full": ("attention=full",)}


@dataclass(frozen=True)
class BenchLanguage:
    """Measure how the speed and memory use of VQ and full attention scale with sequence length.

    Example: flaxen bench language --preset vq-tiny --lengths 1024 4096 --out bench.png
    """

    out: Path = Path("bench-language.png")
    """Plot to write. Each measurement is saved as soon as it finishes, to a .json file with the same base name."""
    preset: str = "vq-mini"
    """Transformer-VQ preset to measure."""
    fields: tuple[str, ...] = ()
    """Changes to the preset's configuration, as name=value, such as n_layers=4."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    """Sequence lengths in tokens."""
    models: tuple[str, ...] = ("vq", "vq-parallel", "full")
    """Models to measure: vq (VQ attention, block by block), vq-parallel (all blocks at once), full (quadratic)."""
    longest_full: int = 32768
    """Longest sequence, in tokens, for which training with full attention is measured."""
    update: int | None = None
    """Number of tokens per training step (VQ only). Default: the sequence length."""
    repeats: int = 2
    """Number of timed repetitions; the fastest is reported."""
    cores: int | None = None
    """Number of CPU cores to use. Default: all."""

    def run(self, given_flags: set[str]) -> None:
        from importlib.util import find_spec

        self.check()
        numbers = self.out.with_suffix(".json")
        records: list[dict[str, Any]] = []
        for length in self.lengths:
            for name in self.models:
                for kind in ("train", "decode"):
                    if (name == "full" and kind == "train" and length > self.longest_full) or (
                        name == "vq-parallel" and kind == "decode"  # decodes with the same program as vq
                    ):
                        continue
                    records.append(self.measure(name, kind, length))
                    write_numbers(records, numbers)
                    print(json.dumps(records[-1]), file=sys.stderr)
        _print_table(records)
        print(f"wrote {numbers}", file=sys.stderr)
        if all("error" in record for record in records):
            raise InputError(
                f"all measurements failed, so there is nothing to plot (first error: {records[0]['error']})"
            )
        if find_spec("matplotlib") is None:
            print(
                "skipped the plot: plotting requires matplotlib; install it with: pip install 'flaxen[plots]'",
                file=sys.stderr,
            )
            return
        from flaxen.cli.plots import throughput

        throughput(records, self.out)
        print(f"wrote {self.out}", file=sys.stderr)

    def check(self) -> None:
        """Check all settings first: measuring takes minutes to hours."""
        from flaxen import families
        from flaxen.cli.build import changed

        unknown = [name for name in self.models if name not in FORMS]
        if unknown or not self.models:
            raise InputError(f"--models must be one or more of {', '.join(FORMS)}, got {', '.join(unknown) or 'none'}")
        reserved = [field for field in self.fields if field.split("=")[0].strip() in ("attention", "form")]
        if reserved:
            raise InputError(
                f"--fields cannot contain {' '.join(reserved)}, because --models sets this; remove it from --fields"
            )
        for name in ("repeats", "update", "cores"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < 1:
            got = " ".join(map(str, self.lengths)) or "none"
            raise InputError(f"--lengths must be one or more integers, each at least 1, got {got}")
        preset = families.preset(self.preset)
        if families.of_config(preset) is not families.TRANSFORMER_VQ:
            available = ", ".join(families.TRANSFORMER_VQ.presets)
            raise InputError(f"preset {self.preset!r} is not a Transformer-VQ; available: {available}")
        for name in self.models:
            config = changed(preset, (*self.fields, *FORMS[name]))
            for length in self.lengths:
                self._check_length(length, config.block)
        self._check_out()

    def _check_length(self, length: int, block: int) -> None:
        update = min(self.update or length, length)
        if update % block:
            flag = "--update" if update == self.update else "--lengths"
            raise InputError(
                f"{flag} {update} must be a multiple of the model's block length {block}; change it, "
                f"or set --fields block={math.gcd(update, block)}"
            )
        if length % update:
            raise InputError(f"--lengths {length} must be a multiple of --update {update}; change one of them")

    def _check_out(self) -> None:
        """Create the output directory and an empty .json file, to fail early if they cannot be written."""
        if self.out.suffix.lower() == ".json":
            example = self.out.with_suffix(".png").name
            raise InputError(f"--out must name an image file such as {example}, got {self.out}")
        if self.out.is_dir():
            raise InputError(f"--out {self.out} is a directory; expected the name of an image file")
        numbers = self.out.with_suffix(".json")
        if numbers.exists() and not _is_benchmark(numbers):
            raise InputError(f"{numbers} already exists and is not a result of this benchmark; choose another --out")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_numbers([], numbers)
        except OSError as error:
            raise InputError(f"cannot write {self.out}: {error}; choose another --out") from None

    def measure(self, name: str, kind: str, length: int) -> dict[str, Any]:
        """Run one measurement in a new process and return its record, with 'error' if it failed."""
        # Full attention carries no state from one update to the next, so one update takes the whole sequence.
        update = length if name == "full" else min(self.update or length, length)
        request = {
            "preset": self.preset, "fields": [*self.fields, *FORMS[name]], "kind": kind, "length": length,
            "update": update, "repeats": self.repeats, "cores": self.cores,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "flaxen.cli.bench", json.dumps(request)], capture_output=True, text=True, check=False
        )
        labels = {"model": name, "kind": kind, "length": length}
        if done.returncode:
            return labels | {"error": _failure(done.returncode, done.stderr)[:200]}
        return labels | json.loads(done.stdout)


def _is_benchmark(path: Path) -> bool:
    """Return whether a file holds records of an earlier benchmark, which may be replaced."""
    try:
        records = strict_json.read(path)
    except (InputError, OSError):
        return False
    return isinstance(records, list) and all(isinstance(record, dict) and "length" in record for record in records)


def write_numbers(records: list[dict[str, Any]], path: Path) -> None:
    with atomic_file(path) as file:
        file.write(strict_json.dumps(records, indent=1))


def _failure(code: int, stderr: str) -> str:
    """Return why a process failed: the signal that ended it, or its exception. (JAX may print more after that.)"""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, probably out of memory"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return ": ".join([f"killed by {name}", *lines[-1:]])
    errors = [line for line in lines if re.fullmatch(r"[\w.]*(Error|Exception|Interrupt|Exit)(: .*)?", line)]
    return (errors or lines or [f"exit code {code}"])[-1]


def _print_table(records: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("model", "kind", "length", "CPU s", "wall s", "tokens / CPU s", "peak GB", "compile CPU s", "note")
    for r in records:
        note = r.get("error") or (f"state {r['state_bytes'] / 1e6:.2f} MB" if "state_bytes" in r else "")
        numbers = [f"{r[k]:{f}}" if k in r else "" for k, f in (("cpu", ".3f"), ("wall", ".3f"),
                   ("tokens_per_cpu_second", ",.0f"), ("peak_gb", ".2f"), ("compile_cpu", ".1f"))]  # fmt: skip
        table.add_row(r["model"], r["kind"], f"{r['length']:,}", *numbers, escape(note))
    Console(soft_wrap=True).print(table)


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Make one measurement in this process: training, one forward pass, or decoding."""
    if request["cores"]:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: request["cores"]]))
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flaxen import families
    from flaxen.cli.build import changed
    from flaxen.models import vq_config, vq_lm
    from flaxen.nn.param import initialise

    jax.config.update("jax_enable_compilation_cache", False)
    config = changed(families.preset(request["preset"]), tuple(request["fields"]))
    length, update = request["length"], request["update"]
    model = initialise(vq_lm.VQLM(config), 0)
    draw = np.random.default_rng(0)
    ids = jnp.asarray(draw.integers(3, config.vocab_size, (1, length + 1)), jnp.int32)
    if request["kind"] == "train":
        figures = _train(model, ids, update, request["repeats"])
        tokens = length
    elif request["kind"] == "forward":
        run = jax.jit(lambda model: model.loss(ids[:, :-1], ids[:, 1:])[0])
        figures, tokens = _timed(lambda: run(model), request["repeats"]), length
    else:
        tokens = 256
        figures = _decode(model, ids[:, :-1], tokens, request["repeats"])
        figures["milliseconds"] = 1e3 * figures["wall"] / tokens
    if config.attention == "vq":
        figures["state_bytes"] = vq_lm.state_bytes(jax.eval_shape(lambda: vq_lm.initial_state(config, 1)))
    figures["tokens_per_second"] = tokens / figures["wall"]
    figures["tokens_per_cpu_second"] = tokens / figures["cpu"]
    figures["gflops_per_cpu_second"] = (
        vq_config.flops(config, length) * 3 / figures["cpu"] / 1e9 if request["kind"] == "train" else 0
    )
    figures["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return figures


def _timed(step: Any, repeats: int) -> dict[str, float]:
    """Return the time of the fastest of `repeats` calls to `step`, and the compile time.

    The compile time is the extra CPU time of the first call.
    """
    import jax

    times = []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(step())
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (min(pair[i] for pair in times[1:]) for i in (0, 1))
    return {"cpu": cpu, "wall": wall, "compile_cpu": times[0][0] - cpu}


def _train(model: Any, ids: Any, update: int, repeats: int) -> dict[str, float]:
    """Time training on one sequence: several updates, each of which passes its state to the next."""
    import jax
    import jax.numpy as jnp
    import optax

    from flaxen.models import vq_lm
    from flaxen.train import optim
    from flaxen.train.settings import Optimizer
    from flaxen.train.step import compiled

    transform = optim.make_optimizer(Optimizer("adamw"), lambda step: jnp.asarray(1e-4))

    def loss(model: Any, inputs: Any, labels: Any, state: Any) -> Any:
        sums, state, _ = model.loss(inputs, labels, state, commit=1e-4, learn=True)
        return sums.loss / sums.weight, state

    def step(model: Any, memory: Any, inputs: Any, labels: Any, state: Any) -> Any:
        (_, state), gradient = jax.value_and_grad(loss, has_aux=True)(model, inputs, labels, state)
        changes, memory = transform.update(gradient, memory, model)
        return optax.apply_updates(model, changes), memory, state

    update_once = compiled(step, donate_argnums=(0, 1, 4))
    current = [model, jax.jit(transform.init)(model)]

    def sequence() -> Any:
        state = vq_lm.initial_state(model.config, 1)
        for first in range(0, ids.shape[1] - 1, update):
            part = slice(first, first + update)
            current[0], current[1], state = update_once(*current, ids[:, :-1][:, part], ids[:, 1:][:, part], state)
        return current

    return _timed(sequence, repeats)


def _decode(model: Any, ids: Any, tokens: int, repeats: int) -> dict[str, float]:
    """Time greedy decoding after a context. Reading the context is not timed."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from flaxen.generate.search import prepare
    from flaxen.models.vq_decoding import VQDecoder

    prepared = prepare(VQDecoder, model)
    start = jax.jit(lambda decoder: decoder.start((ids, jnp.ones(ids.shape, bool), None), tokens + 1, 1, False)[1])
    state = jax.block_until_ready(start(prepared))

    @jax.jit
    def run(decoder: Any, state: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            token, state = carry
            logits, state = decoder.step(token, state)
            return jnp.argmax(logits, -1).astype(jnp.int32), state

        return lax.fori_loop(0, tokens, body, (ids[:, -1:], state))[0]

    return _timed(lambda: run(prepared, state), repeats)


if __name__ == "__main__":
    restart_with_tuned_malloc()
    print(json.dumps(main(json.loads(sys.argv[1]))))
