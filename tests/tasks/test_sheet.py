"""Contact sheet: the page is complete or absent, has a card per row, and escapes all text."""

import base64
import io
from html.parser import HTMLParser

import pytest
from PIL import Image

from flaxen.tasks.sheet import SheetEntry, write_sheet

EVIL = "<script>alert('x')</script> & \"quoted\" <b>"


class Page(HTMLParser):
    """The elements of a page in order: name, attributes, and direct text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in ("meta", "img", "input"):
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1][2].append(data)

    def all(self, tag, **attributes):
        """Attributes and text of all elements with this name and these attributes."""
        required = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            (a, "".join(t).strip()) for name, a, t in self.elements if name == tag and required.items() <= a.items()
        ]


def gradient_image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.linear_gradient("L").convert(mode).resize((width, height))


ROWS = [
    SheetEntry(gradient_image(640, 480), "wide.jpg", "a dog runs", ("A dog is running .", "Ein Hund läuft"), 1.234567),
    SheetEntry(gradient_image(300, 900), "tall.jpg", "", (), 0.0),
    SheetEntry(None, "lost.jpg", "a cat", ("a cat",), None),
    SheetEntry(gradient_image(60, 30), EVIL, EVIL, (EVIL, "plain"), -0.5),
]


def write(path, rows=ROWS, title="Captions", note="") -> Page:
    write_sheet(path, iter(rows), title, note)
    return Page(path.read_text(encoding="utf-8"))


def test_every_row_has_a_card(tmp_path) -> None:
    page = write(tmp_path / "sheet.html", title="Captions, step 10", note="CIDEr 0.9")
    cards = page.all("article")
    assert len(cards) == len(ROWS)
    assert [card.get("data-score") for card, _ in cards] == ["1.23457", "0", None, "-0.5"]
    assert all(card["tabindex"] == "0" for card, _ in cards)
    assert [text for _, text in page.all("span", class_="score")] == ["1.23", "0.00", "-0.50"]
    assert [text for _, text in page.all("p", class_="prediction")] == [row.prediction for row in ROWS]
    assert [text for _, text in page.all("li")] == [reference for row in ROWS for reference in row.references]
    assert [text for _, text in page.all("p", class_="name")] == [row.name for row in ROWS]
    assert [text for _, text in page.all("h1") + page.all("title")] == ["Captions, step 10"] * 2
    assert "CIDEr 0.9" in [text for _, text in page.all("p")]
    assert page.all("output")[0][1] == "4 images"


def test_text_is_escaped(tmp_path) -> None:
    page = write(tmp_path / "sheet.html", title=EVIL, note=EVIL)
    assert len(page.all("script")) == 1
    assert not page.all("b")
    assert page.all("img")[-1][0]["alt"] == EVIL
    assert page.all("h1")[0][1] == page.all("title")[0][1] == EVIL


def test_images_are_small_and_embedded(tmp_path) -> None:
    page = write(tmp_path / "sheet.html")
    images = []
    for attributes, _ in page.all("img"):
        kind, data = attributes["src"].split(",")
        assert kind == "data:image/jpeg;base64"
        images.append(Image.open(io.BytesIO(base64.b64decode(data, validate=True))))
    assert [(image.format, image.mode, image.size) for image in images] == [
        ("JPEG", "RGB", (224, 168)), ("JPEG", "RGB", (75, 224)), ("JPEG", "RGB", (60, 30)),
    ]  # fmt: skip
    assert [attributes["alt"] for attributes, _ in page.all("img")] == ["A dog is running .", "tall.jpg", EVIL]
    assert ROWS[0].image.size == (640, 480)
    text = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert "http" not in text
    assert "url(" not in text
    assert not page.all("link")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_all_image_modes(tmp_path, mode: str) -> None:
    rows = [SheetEntry(Image.new(mode, (300, 200)), "one", "one", (), None)]
    assert len(write(tmp_path / "sheet.html", rows).all("img")) == 1


def test_transparent_areas_become_white(tmp_path) -> None:
    rows = [SheetEntry(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "clear.png", "one", (), None)]
    source = write(tmp_path / "sheet.html", rows).all("img")[0][0]["src"]
    image = Image.open(io.BytesIO(base64.b64decode(source.split(",")[1])))
    assert image.getpixel((4, 4)) == (255, 255, 255)


def test_empty_page_and_unusual_names(tmp_path) -> None:
    assert write(tmp_path / "none.html", []).all("output")[0][1] == "0 images"
    page = write(tmp_path / "odd.html", [SheetEntry(None, "a\udcff.jpg", "ein Käfer 狗", (), None)])
    assert page.all("p", class_="name")[0][1] == "a?.jpg"
    assert page.all("p", class_="prediction")[0][1] == "ein Käfer 狗"
    assert page.all("output")[0][1] == "1 image"


def test_header_has_room_for_large_counts(tmp_path) -> None:
    page = write(tmp_path / "sheet.html", [SheetEntry(None, "one", "one", (), None)] * 1200)
    assert page.all("output")[0][1] == "1,200 images"
    assert len(page.all("article")) == 1200


def test_failure_keeps_the_old_page(tmp_path) -> None:
    def failing():
        yield from ROWS
        raise RuntimeError("no more")

    path = tmp_path / "sheet.html"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="no more"):
        write_sheet(path, failing(), "Captions")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["sheet.html"]
