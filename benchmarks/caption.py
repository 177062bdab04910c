"""Measure captioning with ViT + GPT-2 in Flaxen, torch and Flax, in the same way as run.py. See README.md."""

from __future__ import annotations

from run import PEERS_PYTHON, System, main
from workers.workloads import caption_sizes_and_works

WORKLOADS = ("loss", "train", "beam")
SYSTEMS = {
    "torch": System("torch_caption.py", needs="torch", workloads=WORKLOADS),
    "flax": System("flax_caption.py", needs="transformers", python=PEERS_PYTHON, workloads=WORKLOADS),
    "flaxen": System("flaxen_caption.py", needs="flaxen", workloads=WORKLOADS),
    "flaxen-bf16": System("flaxen_caption.py", needs="flaxen", precision="bf16", workloads=WORKLOADS),
}

if __name__ == "__main__":
    main(__doc__, SYSTEMS, WORKLOADS, caption_sizes_and_works)
