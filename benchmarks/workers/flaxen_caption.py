"""Flaxen: a ViT and a GPT-2. bf16 is as in flaxen_t5.py."""

from flaxen_t5 import run
from measure import Worker
from workloads import caption_sizes_and_works

PIECES = 1  # that a batch is computed in

if __name__ == "__main__":
    run(Worker(__doc__, precisions=("f32", "bf16"), works=caption_sizes_and_works), PIECES)
