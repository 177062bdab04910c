"""flaxen demo"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """Train a small T5 on text that Python carries, and let it fill blanks."""

    out: Path = Path("flaxen-demo")
    """Directory for the vocabulary, the corpus and the run."""

    def run(self, given: set[str]) -> None:
        from flaxen.demo import main

        main(self.out)
