"""flaxen generate MODEL --text … | --image … | --file … | --sample-images …: generate text or images."""

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

from flaxen.atomic import atomic_file, check_output
from flaxen.atomic_directory import check_directory
from flaxen.cli.prompts import checkpoint_stamps, file_stamps, progress, read_prompts, windows
from flaxen.cli.resumable import ResumableLines
from flaxen.data.files import kind_of, stamps
from flaxen.data.tables import READERS
from flaxen.errors import InputError
from flaxen.generate.options import Options, make_options

if TYPE_CHECKING:
    from flaxen.hf.vq_memory import Memory
    from flaxen.pretrained import Generated, Pretrained


@dataclass(frozen=True)
class Generate:
    """Generate text with a T5, GPT-2 or Transformer-VQ model, captions with a captioner, or images with a pixel model.

    Example: flaxen generate google/flan-t5-small --text "translate English to German: Good morning."
    """

    model: tyro.conf.Positional[str]
    """Checkpoint directory or Hugging Face hub id."""
    text: tuple[str, ...] = ()
    """Prompts, each given as a separate argument."""
    image: tuple[Path, ...] = ()
    """Image files to caption."""
    file: str | None = None
    """File with the prompts: one per line, or one per row of a .jsonl, .json, .csv, .tsv or .parquet table; '-' reads
    standard input. Default: none."""
    column: str = "text"
    """Table column with the prompt, or a template of columns such as 'summarize: {document}'. For a captioner, the
    column holds image paths relative to the table's folder."""
    sample_images: int = 0
    """Number of images to sample from a Transformer-VQ model trained on pixels; they are written to the directory given
    by --out."""
    memory: Path | None = None
    """Continue from the Transformer-VQ memory in this .npz file, saved with --save-memory; --text, if given, is read
    after it. Default: empty memory."""
    save_memory: Path | None = None
    """Read --text with a Transformer-VQ model, save its memory to this .npz file, and generate nothing. Default:
    off."""
    adapter: str | None = None
    """Directory or hub id of a LoRA adapter to merge into the model. Default: none."""
    out: Path | None = None
    """Output file, or directory for sampled images; it appears once all output is written. If interrupted while
    writing JSON lines, rerun the command to resume. Default: standard output."""
    overwrite: bool = False
    """Replace the directory given by --out even if it contains files that Flaxen did not write; all of them are deleted
    (--sample-images only)."""
    json: bool = False
    """Output JSON lines with text, tokens, logprobs, score, and the prompt's index and id, instead of plain text.
    Implied if --out ends in .jsonl."""
    stream: bool = False
    """Print the output of a single prompt token by token as it is generated."""
    batch_size: int = 16
    """Number of prompts per batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in memory and of matrix products."""
    bad_words: tuple[str, ...] = ()
    """Words that must not be generated."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    def run(self, given_flags: set[str]) -> None:
        if self.batch_size < 1:
            raise InputError(f"--batch-size must be at least 1, got {self.batch_size}")
        if "column" in given_flags and (self.file is None or kind_of(Path(self.file)) not in READERS):
            raise InputError("--column requires a table; pass one with --file")
        if "sample_images" in given_flags:
            self._sample_images(given_flags)
            return
        if self.memory and not self.text and not self.file and not self.image:
            dataclasses.replace(self, text=("",)).run(given_flags)
            return
        if bool(self.text) + bool(self.image) + (self.file is not None) != 1:
            raise InputError("exactly one of --text, --image and --file is required")
        if (self.memory or self.save_memory) and len(self.text) != 1:
            raise InputError("--memory and --save-memory require exactly one --text")
        # Options that were not set are left to the checkpoint's generation config.
        options = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options) if f.name in given_flags}
        if self.save_memory and (options or self.out or self.json or self.stream):
            raise InputError(
                "--save-memory cannot be combined with --out, --json, --stream or generation options; remove them"
            )
        if self.stream and (len(self.text) + len(self.image) != 1 or self.json or self.out):
            raise InputError("--stream requires a single --text or --image and cannot be combined with --json or --out")
        if self.overwrite:
            raise InputError("--overwrite requires --sample-images; other outputs replace only a regular file")
        for out in (self.out, self.save_memory):
            if out is not None:  # now, not after hours of work
                files = (*self.image, *((self.file,) if self.file else ()), *((self.memory,) if self.memory else ()))
                check_output(out, files)
        prompts, n = self._prompts()

        import flaxen

        pretrained = flaxen.load(self.model, dtype=self.dtype, adapter=self.adapter)
        reads_images = pretrained.family.prompting.reads == "image"
        if (reads_images and self.text) or (self.image and not reads_images):
            expected = "images; pass --image" if reads_images else "text; pass --text"
            raise InputError(f"{self.model} expects {expected} or --file")
        if reads_images and self.file is not None:
            folder = Path(self.file).parent
            prompts = ((id, str(folder / path)) for id, path in prompts)
        if self.bad_words:
            if pretrained.tokenizer is None:
                raise InputError("--bad-words requires a checkpoint with a tokenizer")
            options["bad_words_ids"] = [pretrained.tokenizer.encode(word, eos=False) for word in self.bad_words]
        memory = None
        if self.memory:
            from flaxen.hf.vq_memory import Memory as Stored

            memory = Stored.load(self.memory, pretrained.config)
        if self.save_memory:
            pretrained.remember(self.text[0], memory).save(self.save_memory)
            print(f"wrote {self.save_memory} ({self.save_memory.stat().st_size / 1e6:,.2f} MB)", file=sys.stderr)
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

    def _sample_images(self, given_flags: set[str]) -> None:
        """Sample images and write them to a directory as .png files, plus grid.png, which shows all of them."""
        if self.text or self.image or self.file is not None or self.out is None or self.sample_images < 1:
            raise InputError(
                "--sample-images must be at least 1, requires a directory as --out, and cannot be combined with prompts"
            )
        text_flags = ("memory", "save_memory", "json", "stream", "bad_words")
        if ignored := [name for name in text_flags if getattr(self, name)]:
            raise InputError(f"--{ignored[0].replace('_', '-')} cannot be combined with --sample-images")
        import flaxen
        from flaxen.cli.sample_images import draw

        check_directory(self.out, self.overwrite, (self.model, *((self.adapter,) if self.adapter else ())))
        pretrained = flaxen.load(self.model, dtype=self.dtype, adapter=self.adapter)
        options = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options) if f.name in given_flags}
        draw(pretrained, self.sample_images, self.out, self.batch_size, options, self.overwrite)

    def _prompts(self) -> tuple[Iterable[tuple[str | None, str]], int]:
        """Return the (id, prompt) pairs and their number. The prompt of a captioner is the path of an image."""
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
        """Write the outputs to a file. JSON lines can be resumed after the last complete prompt; plain text cannot."""
        if not self.lines:
            with atomic_file(out) as file:
                for window in self._generate(pretrained, prompts, n, 0, options, memory):
                    file.writelines(line + "\n" for line in window)
            return
        key = {
            "model": checkpoint_stamps(self.model), "adapter": checkpoint_stamps(self.adapter), "dtype": self.dtype,
            "prompts": [*self.text, self.file], "images": stamps(self.image), "column": self.column,
            "options": {name: repr(value) for name, value in options.items()},
            "file": file_stamps(self.file, prompts),
            "memory": stamps((self.memory,)) if self.memory else None,
        }  # fmt: skip
        per_prompt = make_options(options, pretrained.generation).num_return_sequences
        with closing(ResumableLines(out, key, per_prompt)) as written:
            if written.items:
                print(f"resuming after prompt {written.items:,} of {n:,}", file=sys.stderr)
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
        """Yield the output lines for a few batches at a time.

        `generate` sorts the prompts of a window by length, so that batches have little padding.
        """
        stride = 8 * self.batch_size
        with progress("generating", n, done, n > self.batch_size) as report:
            first = done
            for window in windows(islice(prompts, done, None), stride):
                ids, texts = zip(*window)
                outputs = pretrained.generate(
                    list(texts), batch_size=self.batch_size, memory=memory, first=first, **options
                )
                yield [self._line(output, ids[output.index - first]) for output in outputs]
                first += len(window)
                report(first)

    @property
    def lines(self) -> bool:
        """Whether to write JSON lines rather than plain text."""
        return self.json or (self.out is not None and self.out.suffix == ".jsonl")

    def _line(self, output: "Generated", id: str | None) -> str:
        if self.lines:
            named = {} if id is None else {"id": id}
            return json.dumps(named | dataclasses.asdict(output), ensure_ascii=False)
        return " ".join(map(str, output.tokens)) if output.text is None else output.text
