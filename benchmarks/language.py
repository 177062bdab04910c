"""Measure Transformer-VQ against sequence length: both forms, full attention, and a torch GPT-2 of equal size.

The configuration is the preset vq-mini, in which the original implementation was measured too: width 256, 4 layers of
two gated units, one head, keys of 64, values of 512, 256 codes, block = window = 256, batch 1, bytes.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flaxen.cli.bench import FORMS, BenchLanguage, write_numbers

TORCH = Path(__file__).parent / "workers" / "torch_gpt2.py"
# Tokens per CPU second of the original implementation, measured on another machine: 104 GFLOP/s in f32 matmuls.
ORIGINAL = {"train": "620-740", "forward": "3,400-3,670", "decode": "130"}


def torch_gpt2(kind: str, length: int, repeats: int, cores: int | None) -> dict[str, Any]:
    """Measure GPT-2 in torch, in a process of its own."""
    request = json.dumps({"kind": kind, "length": length, "repeats": repeats, "cores": cores})
    done = subprocess.run([sys.executable, TORCH, request], capture_output=True, text=True, check=False)
    about = {"model": "gpt2 (torch)", "kind": kind, "length": length}
    if done.returncode:
        return about | {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:160]}
    return about | json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--models", nargs="+", default=["vq", "vq-parallel", "full", "gpt2"])
    parser.add_argument("--kinds", nargs="+", default=["train", "forward", "decode"])
    parser.add_argument("--longest-quadratic", type=int, default=8192, help="train quadratic models up to this length")
    parser.add_argument("--fields", nargs="*", default=[], help="changes to the preset, as name=value")
    parser.add_argument("--update", type=int, help="tokens per optimizer step (default: the sequence length)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to check that everything runs; the figures mean nothing"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="plot the figures to this file")
    flags = parser.parse_args()
    fields = tuple(flags.fields)
    if flags.tiny:
        flags.lengths = [128, 256]
        fields = ("d_model=32", "d_k=8", "d_v=32", "n_layers=1", "n_codes=16", "block=32", "window=32")
    bench = BenchLanguage(fields=fields, update=flags.update, repeats=flags.repeats, cores=flags.cores)
    records = []
    titles = f"{'tokens/CPU s':>13s} {'ms/token':>9s} {'peak GB':>8s} {'compile':>8s}"
    print(f"{'model':14s} {'kind':8s} {'length':>7s} {titles}")
    for kind in flags.kinds:
        for length in flags.lengths:
            for model in flags.models:
                quadratic = model in ("full", "gpt2")
                if (quadratic and kind != "decode" and length > flags.longest_quadratic) or (
                    model == "vq-parallel" and kind == "decode"
                ):
                    continue
                if model == "gpt2":
                    record = torch_gpt2(kind, length, flags.repeats, flags.cores)
                else:
                    assert model in FORMS
                    record = bench.measure(model, kind, length)
                records.append(record)
                if "error" in record:
                    print(f"{record['model']:14s} {kind:8s} {length:7,d} failed: {record['error']}", flush=True)
                    continue
                per_token = f"{record.get('milliseconds', float('nan')):9.3f}"
                figures = f"{record['tokens_per_cpu_second']:13,.0f} {per_token} {record['peak_gb']:8.2f}"
                print(
                    f"{record['model']:14s} {kind:8s} {length:7,d} {figures} {record['compile_cpu']:8.1f}", flush=True
                )
    print("tokens per CPU second of the original implementation, on another machine:", ORIGINAL)
    if flags.json:
        write_numbers(records, flags.json)
    if flags.plot:
        from flaxen.cli.plots import throughput

        write_numbers(records, flags.plot.with_suffix(".json"))
        throughput(records, flags.plot)


if __name__ == "__main__":
    main()
