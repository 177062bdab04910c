"""ViT + GPT-2 in Flaxen. bf16 means the same as in flaxen_t5.py."""

from flaxen_t5 import run
from measure import Worker
from workloads import caption_sizes_and_works

PIECES = 1  # number of pieces in which the gradient of a batch is accumulated

if __name__ == "__main__":
    run(Worker(__doc__, precisions=("f32", "bf16"), works=caption_sizes_and_works), PIECES)
