"""Import rules: which package may import which, and which dependencies are never imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "flaxen"
# Package of flaxen -> other packages of flaxen that it may import.
ALLOWED = {
    "tree": set(),
    "errors": set(),
    "malloc": set(),
    "host": {"malloc"},
    "inputs": {"errors"},
    "strict_json": {"errors", "inputs"},
    "atomic": {"errors", "inputs"},
    "manifest": {"errors", "inputs", "strict_json", ""},
    "atomic_directory": {"errors", "atomic", "manifest", ""},
    "metrics": {"errors"},
    "nn": {"tree"},
    "models": {"nn", "tree"},
    "data": {"errors", "atomic", "inputs", "strict_json"},
    "generate": {"errors", "strict_json"},
    "families": {"data", "errors", "hf", "models", "nn"},
    "hf": {"models", "nn", "tree", "errors", "atomic", "atomic_directory", "inputs", "strict_json"},
    "tasks": {"models", "nn", "data", "generate", "metrics", "tree", "errors", "atomic", "inputs", "strict_json"},
    "train": {"tasks", "data", "nn", "tree", "errors", "atomic", "atomic_directory", "inputs", "strict_json"},
    "pretrained": {
        "families",
        "hf",
        "models",
        "nn",
        "data",
        "generate",
        "train",
        "tree",
        "errors",
        "atomic_directory",
        "strict_json",
    },
    "cli": {
        "families",
        "pretrained",
        "hf",
        "models",
        "nn",
        "data",
        "generate",
        "tasks",
        "train",
        "metrics",
        "tree",
        "errors",
        "malloc",
        "atomic",
        "atomic_directory",
        "manifest",
        "inputs",
        "strict_json",
        "",
    },
    "": {"pretrained", "generate", "errors"},
}


def imports(path: Path) -> set[str]:
    """Return the names of all modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "flaxen"}
    return names


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_layering(path: Path) -> None:
    home = path.relative_to(SOURCE).parts[0].removesuffix(".py").replace("__init__", "")
    used = imports(path)
    internal = {[*name.split("."), ""][1] for name in used if name.split(".")[0] == "flaxen" and name != "flaxen"}
    if path.name == "vq.py" and home == "hf":
        internal.discard("pretrained")  # load_original returns a Pretrained, and imports it when called
    assert internal <= ALLOWED[home] | {home}
    assert not {name.split(".")[0] for name in used} & {"torch", "transformers", "tensorflow"}
    if home == "data":
        assert not any(name.split(".")[0] in ("jax", "flax") for name in used)


def test_help_and_data_import_no_heavy_packages() -> None:
    script = "import flaxen, flaxen.cli.main, flaxen.data.tokenizers, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "jax",
        "flax",
        "numpy",
        "torch",
        "transformers",
        "huggingface_hub",
        "tokenizers",
        "sentencepiece",
        "datasets",
    }
    assert not heavy & set(modules)
