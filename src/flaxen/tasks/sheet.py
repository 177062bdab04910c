"""Contact sheet: images with generated and reference captions, in one self-contained HTML file."""

import base64
import io
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flaxen.atomic import atomic_file

if TYPE_CHECKING:
    import PIL.Image

SIDE, QUALITY = 224, 80
ROOM = 24  # characters reserved in the header for the number of images, which is known only at the end

STYLE = """
:root { color-scheme: light dark; --page: #f5f5f3; --card: #fff; --tile: #ecebe8; --ink: #1d1d1b; --soft: #6b6a66;
  --line: #dddbd6; --accent: #2b5fd9; --shadow: 0 1px 2px #0000000d, 0 4px 14px #0000000d; }
@media (prefers-color-scheme: dark) { :root { --page: #131416; --card: #1d1f22; --tile: #26282c; --ink: #ececea;
  --soft: #9b9da1; --line: #33363b; --accent: #86aaff; --shadow: none; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
header, nav, main { max-width: 1520px; margin: auto; padding-inline: clamp(16px, 3vw, 40px); }
header { padding-top: 36px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
header p { margin: 8px 0 0; max-width: 80ch; color: var(--soft); white-space: pre-line; overflow-wrap: anywhere; }
.bar { position: sticky; top: 0; z-index: 1; margin-top: 18px; background: var(--page);
  border-bottom: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: 10px 16px; align-items: center; padding-block: 12px; }
nav div { display: flex; border: 1px solid var(--line); border-radius: 9px; background: var(--card); overflow: clip; }
button, input { font: inherit; font-size: 14px; color: inherit; border: 0; background: none; padding: 7px 13px; }
button { cursor: pointer; color: var(--soft); }
button + button { border-left: 1px solid var(--line); }
button:hover { color: var(--ink); }
button[aria-pressed=true] { background: var(--ink); color: var(--card); }
input { flex: 1 1 180px; max-width: 320px; border: 1px solid var(--line); border-radius: 9px;
  background: var(--card); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
button:focus-visible { outline-offset: -3px; }
output { margin-left: auto; color: var(--soft); font-size: 14px; font-variant-numeric: tabular-nums; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 228px), 1fr)); gap: 20px;
  padding-block: 22px 60px; }
article { position: relative; display: flex; flex-direction: column; background: var(--card); overflow: clip;
  border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow);
  content-visibility: auto; contain-intrinsic-size: auto 400px; scroll-margin-top: 90px; }
.image { position: relative; aspect-ratio: 4 / 3; display: grid; place-items: center; background: var(--tile);
  color: var(--soft); font-size: 13px; }
.image img { position: absolute; width: 100%; height: 100%; object-fit: contain; }
.score { position: absolute; top: 9px; right: 9px; padding: 1px 9px; border-radius: 99px; color: #fff; font-size: 13px;
  font-weight: 600; font-variant-numeric: tabular-nums; background: hsl(var(--hue, 220) 48% 32%);
  box-shadow: 0 0 0 1.5px #ffffffb3; }
.text { display: flex; flex-direction: column; flex: 1; gap: 9px; padding: 13px 15px 11px; overflow-wrap: anywhere; }
.text p, .text ul { margin: 0; }
.prediction { font-weight: 650; line-height: 1.35; }
.prediction:empty::before { content: "nothing generated"; font-weight: 400; font-style: italic; color: var(--soft); }
ul { padding: 9px 0 0; border-top: 1px solid var(--line); list-style: none; color: var(--soft); font-size: 13px;
  line-height: 1.4; }
li { text-wrap: pretty; }
li + li { margin-top: 5px; }
.name { margin-top: auto !important; padding-top: 3px; color: var(--soft); opacity: .85;
  font: 11px/1.4 ui-monospace, monospace; }
@media print { .bar { display: none; } article { break-inside: avoid; content-visibility: visible; } }
"""

SCRIPT = """
const find = name => document.querySelector(name), grid = find("main"), input = find("input"), output = find("output");
const cards = [...grid.children], buttons = [...document.querySelectorAll("button")];
const score = card => parseFloat(card.dataset.score), scored = cards.filter(card => !isNaN(score(card)));
const ranked = [...scored].sort((a, b) => score(a) - score(b)), others = cards.filter(card => isNaN(score(card)));
let hue = 130;
[...ranked].reverse().forEach((card, i) => {
  if (i && score(card) < score(ranked.at(-i))) hue = Math.round(130 * (1 - i / (ranked.length - 1)));
  card.style.setProperty("--hue", hue);
});
const orders = { given: cards, best: [...ranked].reverse().concat(others), worst: ranked.concat(others) };
for (const button of buttons) button.onclick = () => {
  grid.append(...orders[button.value]);
  buttons.forEach(other => other.setAttribute("aria-pressed", other === button));
};
const total = output.textContent.trim();
const texts = new Map(cards.map(card => [card, card.lastElementChild.textContent.toLowerCase()]));
input.oninput = () => {
  const words = input.value.toLowerCase().split(/\\s+/);
  for (const card of cards) card.hidden = !words.every(word => texts.get(card).includes(word));
  const shown = cards.filter(card => !card.hidden).length;
  output.textContent = shown < cards.length ? `${shown} of ${total}` : total;
};
find("nav div").hidden = !scored.length;
"""


class SheetEntry(NamedTuple):
    """An image (None if it cannot be read), its generated caption, its reference captions, and the caption's score."""

    image: "PIL.Image.Image | None"
    name: str
    prediction: str
    references: tuple[str, ...]
    score: float | None


def write_sheet(path: Path, rows: Iterable[SheetEntry], title: str, note: str = "") -> None:
    """Write a page with a card per row, which can be sorted by score and filtered by words.

    Rows are written one at a time, so that not all images are in memory at once.
    """
    with atomic_file(path) as file:
        file.write(
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{safe(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            f"<header><h1>{safe(title)}</h1>{f'<p>{safe(note)}</p>' if note else ''}</header>\n"
            '<div class="bar"><nav aria-label="Order and filter"><div role="group" aria-label="Order">'
            '<button value="given" aria-pressed="true">As given</button>'
            '<button value="best" aria-pressed="false">Score ↓</button>'
            '<button value="worst" aria-pressed="false">Score ↑</button></div>'
            '<input type="search" autocomplete="off" placeholder="Filter by words" aria-label="Filter by words">'
            '<output aria-live="polite">'
        )
        count_position = file.tell()
        file.write(" " * ROOM + "</output></nav></div>\n<main>\n")
        count = 0
        for row in rows:
            file.write(card(row))
            count += 1
        file.write(f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n")
        # Overwrites the first of the reserved spaces; the script trims the others.
        file.seek(count_position)
        file.write(f"{count:,} image{'s' * (count != 1)}")


def card(row: SheetEntry) -> str:
    """Return the HTML of a card: image, score, prediction, references and name, in this order."""
    image = "<span>no image</span>"
    if row.image is not None:
        source = base64.b64encode(thumbnail(row.image)).decode()
        alt = safe(row.references[0] if row.references else row.name)
        image = f'<img src="data:image/jpeg;base64,{source}" alt="{alt}" decoding="async">'
    scored, badge = "", ""
    if row.score is not None:
        scored, badge = f' data-score="{row.score:.6g}"', f'<span class="score" title="score">{row.score:.2f}</span>'
    references = "".join(f'<li dir="auto">{safe(reference)}</li>' for reference in row.references)
    return (
        f'<article tabindex="0"{scored}><div class="image">{image}</div>{badge}'
        f'<div class="text"><p class="prediction" dir="auto">{safe(row.prediction)}</p>'
        f'{f"<ul>{references}</ul>" if references else ""}<p class="name">{safe(row.name)}</p></div></article>\n'
    )


def thumbnail(image: "PIL.Image.Image") -> bytes:
    """Encode an image as a JPEG whose longest side is at most SIDE; transparent areas become white."""
    from PIL import Image

    small = image.convert("RGBA")
    small.thumbnail((SIDE, SIDE))
    opaque = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    opaque.convert("RGB").save(data := io.BytesIO(), "JPEG", quality=QUALITY)
    return data.getvalue()


def safe(text: str) -> str:
    """Escape text for HTML. Lone surrogates, from file names that are not UTF-8, become question marks."""
    return escape(text.encode(errors="replace").decode())
