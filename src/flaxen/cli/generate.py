"""flaxen generate MODEL --text … | --image … | --file … | --sample-images …"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from flaxen.atomic import atomic_file
from flaxen.cli.prompts import ResumableLines, checkpoint_stamps, progress, read_prompts, windows
from flaxen.data.files import kind_of, stamps
from flaxen.data.tables import READERS
from flaxen.errors import InputError
from flaxen.generate.options import Options, make_options

if TYPE_CHECKING:
    from flaxen.hf.vq_memory import Memory
    from flaxen.pretrained import Generated, Pretrained


@dataclass(frozen=True)
class Generate:
    """Generate: answers of a T5, continuations of a GPT-2 or a Transformer-VQ, captions of a captioner, pictures."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    text: tuple[str, ...] = ()
    """Prompts."""
    image: tuple[Path, ...] = ()
    """Pictures, for a captioner."""
    file: str | None = None
    """Prompts from a file: one per line, or the rows of .jsonl .json .csv .tsv .parquet; '-' reads standard input."""
    column: str = "text"
    """Column of a table that holds the prompt, or a template such as 'summarize: {document}'. For a captioner, the path
    of a picture, from the folder of the table."""
    sample_images: int = 0
    """Draw so many pictures with a Transformer-VQ of pixels, into the directory --out, with a grid of them all."""
    memory: Path | None = None
    """Go on from what a Transformer-VQ had read when this file was written; --text is then what follows it."""
    save_memory: Path | None = None
    """Write what a Transformer-VQ has read behind --text to this .npz file, and generate nothing."""
    adapter: str | None = None
    """Directory or hub id of a LoRA adapter to add to the model."""
    out: Path | None = None
    """Write here instead of to standard output; appears when complete. After a kill, the same command goes on."""
    json: bool = False
    """JSON lines with text, tokens, logprobs, score, index and id of the prompt, instead of plain text. So are files
    whose name ends in .jsonl."""
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
        if self.batch_size < 1:
            raise InputError(f"--batch-size must be at least 1, got {self.batch_size}")
        if "column" in given and (self.file is None or kind_of(Path(self.file)) not in READERS):
            raise InputError("--column is of a table: give one with --file")
        if "sample_images" in given:
            self._draw(given)
            return
        if self.memory and not self.text and not self.file and not self.image:
            dataclasses.replace(self, text=("",)).run(given)
            return
        if bool(self.text) + bool(self.image) + (self.file is not None) != 1:
            raise InputError("give prompts either with --text, with --image or with --file")
        if (self.memory or self.save_memory) and len(self.text) != 1:
            raise InputError("--memory and --save-memory are for one --text")
        # What was not typed is left to the checkpoint's own defaults.
        options = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options) if f.name in given}
        if self.save_memory and (options or self.out or self.json or self.stream):
            raise InputError("--save-memory generates nothing: leave out --out, --json, --stream and search options")
        if self.stream and (len(self.text) + len(self.image) != 1 or self.json or self.out):
            raise InputError("--stream shows one prompt as plain text: give one --text, and neither --json nor --out")
        prompts, n = self._prompts()

        import flaxen

        pretrained = flaxen.load(self.model, dtype=self.dtype, adapter=self.adapter)
        sees = pretrained.family.prompting.reads == "image"
        if (sees and self.text) or (self.image and not sees):
            want = "sees pictures: give --image" if sees else "reads texts: give --text"
            raise InputError(f"{self.model} {want}, or --file")
        if sees and self.file is not None:
            folder = Path(self.file).parent
            prompts = ((id, str(folder / path)) for id, path in prompts)
        if self.bad_words:
            if pretrained.tokenizer is None:
                raise InputError("--bad-words needs a checkpoint with a tokenizer")
            options["bad_words_ids"] = [pretrained.tokenizer.encode(word, eos=False) for word in self.bad_words]
        memory = None
        if self.memory:
            from flaxen.hf.vq_memory import Memory as Stored

            memory = Stored.load(self.memory, pretrained.config)
        if self.save_memory:
            pretrained.remember(self.text[0], memory).save(self.save_memory)
            print(f"memory in {self.save_memory}: {self.save_memory.stat().st_size / 1e6:,.2f} MB", file=sys.stderr)
            return
        if self.stream:
            for piece in pretrained.stream((*self.text, *self.image)[0], memory, **options):
                print(piece, end="", flush=True)
            print()
        elif self.out is None:
            for window in self._generate(pretrained, prompts, n, 0, options, memory):
                for line in window:
                    print(line, flush=True)
        else:
            self._to_file(self.out, pretrained, prompts, n, options, memory)

    def _draw(self, given: set[str]) -> None:
        """Pictures one by one as .png, and all of them in grid.png."""
        if self.text or self.image or self.file is not None or self.out is None or self.sample_images < 1:
            raise InputError("--sample-images needs a positive number, --out, a directory, and no prompts")
        others = ("memory", "save_memory", "json", "stream", "bad_words")
        if ignored := [name for name in others if getattr(self, name)]:
            raise InputError(f"--{ignored[0].replace('_', '-')} is not for --sample-images")
        import flaxen
        from flaxen.cli.sample_images import draw

        pretrained = flaxen.load(self.model, dtype=self.dtype, adapter=self.adapter)
        options = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options) if f.name in given}
        draw(pretrained, self.sample_images, self.out, self.batch_size, options)

    def _prompts(self) -> tuple[Iterable[tuple[str | None, str]], int]:
        if self.image:
            return [(str(path), str(path)) for path in self.image], len(self.image)
        return read_prompts(self.text, self.file, self.column)

    def _to_file(
        self,
        out: Path,
        pretrained: "Pretrained",
        prompts: Iterable[tuple[str | None, str]],
        n: int,
        options: dict,
        memory: "Memory | None",
    ) -> None:
        """JSON lines survive a kill: the same command goes on behind the last whole window of prompts."""
        if not self.lines:
            with atomic_file(out) as file:
                for window in self._generate(pretrained, prompts, n, 0, options, memory):
                    file.writelines(line + "\n" for line in window)
            return
        key = {
            "model": checkpoint_stamps(self.model), "adapter": checkpoint_stamps(self.adapter), "dtype": self.dtype,
            "prompts": [*self.text, self.file], "images": stamps(self.image), "column": self.column,
            "options": {name: repr(value) for name, value in options.items()},
            "file": stamps((Path(self.file),)) if self.file not in (None, "-") else None,
            "memory": stamps((self.memory,)) if self.memory else None,
        }  # fmt: skip
        each = make_options(options, pretrained.generation).num_return_sequences
        with closing(ResumableLines(out, key, each)) as written:
            if written.items:
                print(f"going on behind prompt {written.items:,} of {n:,}", file=sys.stderr)
            for window in self._generate(pretrained, prompts, n, written.items, options, memory):
                written.write(window)
            written.finish()

    def _generate(
        self,
        pretrained: "Pretrained",
        prompts: Iterable[tuple[str | None, str]],
        n: int,
        done: int,
        options: dict,
        memory: "Memory | None",
    ) -> Iterator[list[str]]:
        """Lines of some batches at a time, whose prompts are sorted by length among themselves."""
        stride = 8 * self.batch_size
        with progress("generating", n, done, n > self.batch_size) as report:
            first = done
            for window in windows(islice(prompts, done, None), stride):
                ids, texts = zip(*window)
                found = pretrained.generate(
                    list(texts), batch_size=self.batch_size, memory=memory, first=first, **options
                )
                yield [self._line(one, ids[one.index - first]) for one in found]
                first += len(window)
                report(first)

    @property
    def lines(self) -> bool:
        """Whether outputs are JSON lines."""
        return self.json or (self.out is not None and self.out.suffix == ".jsonl")

    def _line(self, one: "Generated", id: str | None) -> str:
        if self.lines:
            named = {} if id is None else {"id": id}
            return json.dumps(named | dataclasses.asdict(one), ensure_ascii=False)
        return " ".join(map(str, one.tokens)) if one.text is None else one.text
