"""Plots of codebook usage and of benchmark results. Requires matplotlib."""

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
    """Plot each codebook: usage per code, effective number of codes, and cosine similarity of the codes."""
    parameters = leaves(model)
    books: list[tuple[str, np.ndarray, np.ndarray]] = []
    names = [name for name in parameters if name.endswith("codebook.sum")]
    for layer in range(len(parameters[names[0]])):
        for name in names:
            sums, counts = (parameters[part][layer] for part in (name, name.replace(".sum", ".count")))
            codes, counts = np.asarray(vectors(sums, counts)), np.asarray(counts)
            half = "ab"[names.index(name)] if len(names) > 1 else ""
            for head in range(len(codes)):
                number = f".{head}" if len(codes) > 1 else ""
                books.append((f"{layer + 1}{half}{number}", codes[head], counts[head]))
    shown = books[:: -(-len(books) // 8)]  # at most eight similarity matrices; the curves show all codebooks
    figure = plt.figure(figsize=(14, 6.5), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    top, bottom = halves
    left, right = top.subplots(1, 2)
    for name, _, counts in books:
        left.plot(range(1, len(counts) + 1), np.sort(counts / counts.sum())[::-1], lw=0.8, label=name)
    if len(books) <= 16:
        left.legend(fontsize=7, ncols=2, title="codebook", title_fontsize=7)
    left.set(xscale="log", yscale="log", xlabel="code, by rank", ylabel="fraction of keys", title="code usage")
    entropy = []
    for _, _, counts in books:
        fraction = np.maximum(counts, 1e-12) / np.maximum(counts, 1e-12).sum()
        entropy.append(float(np.exp(-(fraction * np.log(fraction)).sum())))
    right.bar(range(len(books)), entropy, color="tab:blue")
    right.axhline(len(books[0][2]), color="grey", lw=0.8, ls="--")
    right.set(title="effective number of codes: exp(entropy); dashed: all codes", xlabel="codebook")
    right.set_xticks(range(len(books)), [name for name, *_ in books], rotation=90, fontsize=7)
    for axes, (name, codes, counts) in zip(np.atleast_1d(bottom.subplots(1, len(shown))), shown):
        order = np.argsort(-counts)
        unit = codes[order] / np.maximum(np.linalg.norm(codes[order], axis=1, keepdims=True), 1e-2)
        image = axes.imshow(unit @ unit.T, vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set(title=name, xticks=[], yticks=[])
    bottom.colorbar(image, ax=bottom.axes, shrink=0.8, label="cosine similarity of codes, most used first")
    _save(figure, path)


def throughput(records: list[dict[str, Any]], path: Path) -> None:
    """Plot training speed, peak memory of training and decoding time per token against sequence length."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    panels = (
        ("train", "tokens_per_second", "training speed, tokens per second"),
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
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write the figure as PNG. The file appears only when it is complete."""
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png")
    plt.close(figure)
    write_bytes(path, png.getvalue())
