"""Pictures of numbers, for people. Needs matplotlib."""

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from flaxen.atomic import write_bytes
from flaxen.nn.codebook import vectors
from flaxen.tree import leaves

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator


def codebooks(model: Any, path: Path) -> None:
    """Of every codebook: how often its codes are used, how evenly, and how alike they are."""
    found = leaves(model)
    books: list[tuple[str, np.ndarray, np.ndarray]] = []
    names = [name for name in found if name.endswith("codebook.sum")]
    for layer in range(len(found[names[0]])):
        for name in names:
            sums, counts = (found[part][layer] for part in (name, name.replace(".sum", ".count")))
            codes, counts = np.asarray(vectors(sums, counts)), np.asarray(counts)
            half = "ab"[names.index(name)] if len(names) > 1 else ""
            for head in range(len(codes)):
                number = f".{head}" if len(codes) > 1 else ""
                books.append((f"{layer + 1}{half}{number}", codes[head], counts[head]))
    shown = books[:: -(-len(books) // 8)]  # a row of eight at most: the rest is in the curves
    figure = plt.figure(figsize=(14, 6.5), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    top, bottom = halves
    left, right = top.subplots(1, 2)
    for name, _, counts in books:
        left.plot(range(1, len(counts) + 1), np.sort(counts / counts.sum())[::-1], lw=0.8, label=name)
    if len(books) <= 16:
        left.legend(fontsize=7, ncols=2, title="codebook", title_fontsize=7)
    left.set(xscale="log", yscale="log", xlabel="code, by rank", ylabel="share of keys", title="usage of codes")
    entropy = []
    for _, _, counts in books:
        share = np.maximum(counts, 1e-12) / np.maximum(counts, 1e-12).sum()
        entropy.append(float(np.exp(-(share * np.log(share)).sum())))
    right.bar(range(len(books)), entropy, color="tab:blue")
    right.axhline(len(books[0][2]), color="grey", lw=0.8, ls="--")
    right.set(title="codes in effect: exp(entropy); dashed: all", xlabel="codebook")
    right.set_xticks(range(len(books)), [name for name, *_ in books], rotation=90, fontsize=7)
    for axes, (name, codes, counts) in zip(np.atleast_1d(bottom.subplots(1, len(shown))), shown):
        order = np.argsort(-counts)
        unit = codes[order] / np.maximum(np.linalg.norm(codes[order], axis=1, keepdims=True), 1e-2)
        image = axes.imshow(unit @ unit.T, vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set(title=name, xticks=[], yticks=[])
    bottom.colorbar(image, ax=bottom.axes, shrink=0.8, label="cosine of two codes, the most used first")
    _saved(figure, path)


def throughput(records: list[dict[str, Any]], path: Path) -> None:
    """Training tokens per second, peak memory and time per decoded token against length."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    panels = (
        ("train", "tokens_per_second", "training tokens per second"),
        ("train", "peak_gb", "peak memory of training, GB"),
        ("decode", "milliseconds", "milliseconds per decoded token"),
    )
    for axis, (kind, field, title) in zip(axes, panels):
        for name in dict.fromkeys(record["model"] for record in records):
            points = [
                (r["length"], r[field]) for r in records if r["model"] == name and r["kind"] == kind and field in r
            ]
            if points:
                axis.plot(*zip(*sorted(points)), "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        lengths = sorted({record["length"] for record in records})
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], minor=False)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3, which="both")
        if axis.lines:
            axis.legend()
    _saved(figure, path)


def _saved(figure: Any, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    plt.close(figure)
    write_bytes(path, drawn.getvalue())
