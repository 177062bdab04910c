"""flaxen generate MODEL --text … | --file …"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from flaxen.errors import InputError
from flaxen.generate.options import Options

if TYPE_CHECKING:
    from flaxen.pretrained import Generated, Pretrained


@dataclass(frozen=True)
class Generate:
    """Generate text from prompts."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    text: tuple[str, ...] = ()
    """Prompts."""
    file: str | None = None
    """Prompts from a file: one per line, or JSON lines with --column; '-' reads standard input."""
    column: str = "text"
    """Field of a .jsonl file that holds the prompt."""
    out: Path | None = None
    """Write here instead of to standard output; appears only when complete."""
    json: bool = False
    """JSON lines with text, tokens, logprobs, score and index of the prompt, instead of plain text."""
    stream: bool = False
    """Show the text of a single prompt as it is made."""
    batch_size: int = 16
    """Prompts computed together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in memory and of the products."""
    bad_words: tuple[str, ...] = ()
    """Words that must not occur in the output."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    def run(self, given: set[str]) -> None:
        prompts = self._prompts()
        if self.stream and (len(prompts) != 1 or self.json or self.out):
            raise InputError("--stream shows one prompt as plain text: give one --text, and neither --json nor --out")
        # What was not typed is left to the checkpoint's own defaults.
        options = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options) if f.name in given}

        import flaxen

        pretrained = flaxen.load(self.model, dtype=self.dtype)
        if self.bad_words:
            if pretrained.tokenizer is None:
                raise InputError("--bad-words needs a checkpoint with a tokenizer")
            options["bad_words_ids"] = [pretrained.tokenizer.encode(word, eos=False) for word in self.bad_words]
        if self.stream:
            for piece in pretrained.stream(prompts[0], **options):
                print(piece, end="", flush=True)
            print()
            return
        with _output(self.out) as file:
            for one in self._generate(pretrained, prompts, options):
                print(self._line(one), file=file)

    def _prompts(self) -> list[str]:
        if bool(self.text) == (self.file is not None):
            raise InputError("give prompts either with --text or with --file")
        if self.text:
            return list(self.text)
        assert self.file is not None
        content = sys.stdin.read() if self.file == "-" else _read(Path(self.file))
        lines = content.splitlines()
        if not lines:
            raise InputError(f"{self.file} is empty; expected a prompt on each line")
        if not self.file.endswith(".jsonl"):
            return lines
        prompts = []
        for number, line in enumerate(lines, 1):
            try:
                prompts.append(json.loads(line)[self.column])
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{self.file}, line {number}: expected a JSON object with {self.column!r}") from None
            if not isinstance(prompts[-1], str):
                raise InputError(f"{self.file}, line {number}: {self.column!r} must be a string")
        return prompts

    def _generate(self, pretrained: "Pretrained", prompts: list[str], options: dict) -> Iterator["Generated"]:
        """Some batches at a time, so that there is progress to show."""
        from rich.console import Console
        from rich.progress import Progress

        pretrained.encode(prompts)  # a wrong prompt fails now, not after an hour
        stride = 4 * self.batch_size
        with Progress(console=Console(stderr=True), disable=len(prompts) <= stride or not sys.stderr.isatty()) as bar:
            task = bar.add_task("generating", total=len(prompts))
            for first in range(0, len(prompts), stride):
                part = prompts[first : first + stride]
                for one in pretrained.generate(part, batch_size=self.batch_size, **options):
                    yield dataclasses.replace(one, index=first + one.index)
                bar.advance(task, len(part))

    def _line(self, one: "Generated") -> str:
        if self.json:
            return json.dumps(dataclasses.asdict(one), ensure_ascii=False)
        return " ".join(map(str, one.tokens)) if one.text is None else one.text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that takes its name when it is complete."""
    if path is None:
        yield sys.stdout
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
