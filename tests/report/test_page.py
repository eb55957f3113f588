"""The page as a document: complete, self-contained, escaped and in order."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from report.pages import ATTACKS, MAKERS, page_of, plan_called

import oomguard
from oomguard._cli.app import run
from oomguard._report.draw import DARK, LIGHT
from oomguard._report.page import SCRIPT, STYLE
from oomguard._report.plan import explain

Capture = pytest.CaptureFixture[str]
SMALL = plan_called("a processor, nothing measured")
each_kind = pytest.mark.parametrize("kind", MAKERS)


class Reader(HTMLParser):
    """Tags with their attributes, and the text that is seen."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._inside not in ("script", "style") else ""

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


@each_kind
def test_a_page_has_every_word_of_the_screen(kind: str) -> None:
    page = Reader(page_of(kind)).text
    for part in explain(plan_called(kind))[1:]:
        rows = () if part.table is None else part.table.rows
        wanted = [part.title, *part.sentences, *part.lines, *(cell for row in rows for cell in row)]
        assert [each for each in wanted if each not in page] == []


@each_kind
def test_a_page_is_complete_in_itself(kind: str) -> None:
    page = Reader(page_of(kind))
    assert not page.all("link", "img", "iframe", "base", "object", "embed", "form")
    assert not [tag for tag in page.tags if "src" in tag[1]]
    assert all(str(tag["href"]).startswith("#") for tag in page.all("a"))
    assert all(str(tag["href"]).startswith("#") for tag in page.all("use"))
    assert not re.search(r"@import|url\(", STYLE.read_text())
    assert not re.search(r"https?:|@import|url\((?!#)", page_of(kind))


def test_a_page_is_small_enough_to_send() -> None:
    assert len(page_of("a processor").encode()) < 1_500_000


def test_nothing_but_the_script_may_run() -> None:
    page = Reader(page_of("hostile"))
    (policy,) = [str(tag["content"]) for tag in page.all("meta") if tag.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.read_bytes()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    assert page.all("script") == [{}]
    assert page_of("hostile").count(f"<script>{SCRIPT.read_text()}</script>") == 1


def test_a_hostile_plan_adds_no_tag_and_no_attribute() -> None:
    plain, spoiled = Reader(page_of("a processor")), Reader(page_of("hostile"))
    assert {tag for tag, _ in spoiled.tags} == {tag for tag, _ in plain.tags}
    assert {name for _, tag in spoiled.tags for name in tag} == {name for _, tag in plain.tags for name in tag}
    assert all(attack in spoiled.text for attack in ATTACKS)  # what it says is read, as it was written


@each_kind
def test_headings_are_in_order_and_sections_have_names(kind: str) -> None:
    levels = [int(tag[1]) for tag, _ in Reader(page_of(kind)).tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    named = {tag.get("id") for _, tag in Reader(page_of(kind)).tags}
    assert {tag["aria-labelledby"] for tag in Reader(page_of(kind)).all("section") if "aria-label" not in tag} <= named
    assert {str(tag["href"])[1:] for tag in Reader(page_of(kind)).all("a")} <= named


@each_kind
def test_every_table_has_a_caption_and_every_head_a_scope(kind: str) -> None:
    page = Reader(page_of(kind))
    assert len(page.all("table")) == len(page.all("caption")) > 0
    assert {tag.get("scope") for tag in page.all("th")} == {"row", "col"}


def colours() -> Iterator[tuple[str, str, str]]:
    """Each colour of the page with its light and its dark value."""
    yield from re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", STYLE.read_text())


def brightness(colour: str) -> float:
    """Relative luminance, as WCAG 2 has it."""
    parts = [int(colour[target : target + 2], 16) / 255 for target in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("behind", ["paper", "track"])
@pytest.mark.parametrize("name", ["ink", "soft", "accent", "over"])
def test_words_stand_out_from_what_is_behind_them(name: str, behind: str, theme: int) -> None:
    known = {colour: pair[theme] for colour, *pair in colours()}
    darker, lighter = sorted(map(brightness, (known[name], known[behind])))
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


def test_pictures_have_the_colours_of_the_page() -> None:
    known = {name: pair for name, *pair in colours()}
    for name in ("paper", "ink", "soft", "line"):
        assert known[name] == [getattr(LIGHT, name), getattr(DARK, name)]
    slots = dict(re.findall(r"--slot(\d): (light-dark\([^)]*\))", page_of("a processor")))
    pairs = zip(LIGHT.colors, DARK.colors, strict=True)
    assert slots == {f"{slot}": f"light-dark({light}, {dark})" for slot, (light, dark) in enumerate(pairs)}
    pictures = re.findall(r"<svg.*?</svg>", page_of("a processor"), flags=re.DOTALL)
    assert len(pictures) > 16
    assert [picture for picture in pictures if re.search(r"#[0-9a-f]{6}\b", picture)] == []


def test_no_two_pictures_share_an_id() -> None:
    named = [tag["id"] for _, tag in Reader(page_of("a processor")).tags if "id" in tag]
    assert len({*named}) == len(named)


def test_what_looks_the_same_is_no_choice() -> None:
    page = page_of("a processor")
    figures = re.findall(r"<figure.*?</figure>", page, flags=re.DOTALL)
    pictures = [re.findall(r'<div class="wide".*?</svg>', figure, flags=re.DOTALL) for figure in figures]
    shapes = [[re.sub(r"[mpCh][0-9a-f]{6,}", "", each) for each in picture] for picture in pictures]  # without ids
    assert max(map(len, shapes)) > 2
    assert all(len({*picture}) == len(picture) for picture in shapes)
    assert page.count("<option>") == sum(len(picture) for picture in shapes if len(picture) > 1)


def test_every_picture_says_in_words_what_it_shows() -> None:
    plots = [tag for tag in Reader(page_of("a processor")).all("div") if tag.get("class") == "plot"]
    assert all(plot["role"] == "img" and str(plot["aria-label"]).endswith(".") for plot in plots)
    points = [json.loads(str(plot["data-points"])) for plot in plots]
    assert all(text and 0 <= panel <= 1 for point in points for panel, _, _, text in point)
    assert min(map(len, points)) > 2


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_page_is_written_from_the_command_line(more: list[str], tmp_path: Path, capsys: Capture) -> None:
    expected = msgspec.structs.replace(SMALL.expected, seconds_per_step=0.5)
    timed = msgspec.structs.replace(SMALL, expected=expected)
    plan, page = oomguard.save_plan(timed, tmp_path / "plan.json"), tmp_path / "new" / "report.html"
    assert run(["show", str(plan), "--html", str(page), "--sequences", "64_000", "--quiet", *more]) == 0
    assert capsys.readouterr() == (plan.read_text() if more else f"{page}\n", "")
    assert "An epoch of 64,000 sequences (8,000 steps) takes about 1 h 7 min." in page.read_text()


def test_a_page_does_not_take_the_place_of_its_plan(tmp_path: Path, capsys: Capture) -> None:
    plan = oomguard.save_plan(SMALL, tmp_path / "plan.json")
    before = plan.read_bytes()
    assert run(["show", str(plan), "--html", str(plan)]) == 2
    assert "--html must be another file than the plan" in capsys.readouterr().err
    assert plan.read_bytes() == before


def test_a_page_that_cannot_be_written_is_a_misuse_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(oomguard.MisuseError, match="A page needs a writable file"):
        oomguard.save_page(SMALL, tmp_path / "report.html")
    assert [*tmp_path.rglob("*")] == [tmp_path / "report.html"]


@pytest.mark.parametrize("name", ["report.txt", "report", "report.HTML", "report.htm"])
def test_a_page_has_the_ending_of_a_page(name: str, tmp_path: Path, capsys: Capture) -> None:
    plan, page = oomguard.save_plan(SMALL, tmp_path / "plan.json"), tmp_path / name
    code, written = (0, True) if ".ht" in name.lower() else (2, False)
    assert run(["show", str(plan), "--html", str(page)]) == code
    refusal = f"A page is written as .html or .htm, but got {name!r}. Give the file one of these endings"
    assert (refusal in capsys.readouterr().err, page.exists()) == (not written, written)
