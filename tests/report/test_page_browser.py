"""The page in a browser: what is seen, what is done, and that nothing leaves it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from report.pages import MAKERS, TRADEOFFS, page_of, plan_called

from oomguard._core.units import format_seconds, parse_bytes
from oomguard._report.page import LONGEST_BAR


@dataclass
class Opened:
    """A page, and what it did that it should not."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[[str], Opened]


@pytest.fixture(scope="session")
def open_plan(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens the page of a plan by its name, once for all tests: each leaves it as it found it."""
    folder, known = tmp_path_factory.mktemp("pages"), dict[str, Opened]()

    def open_plan(name: str) -> Opened:
        if name not in known:
            known[name] = opened = Opened(browser.new_page(viewport={"width": 1280, "height": 800}))
            page = opened.page
            page.on("console", lambda message: opened.errors.append(message.text))
            page.on("pageerror", lambda error: opened.errors.append(str(error)))
            page.on("request", lambda request: opened.requests.append(request.url))
            file = folder / f"{name}.html"
            file.write_text(page_of(name), encoding="utf-8")
            page.goto(file.as_uri())
        return known[name]

    return open_plan


each_kind = pytest.mark.parametrize("kind", MAKERS)
CURVE = "[data-curve=microbatch]"
POINT = """([curve, text]) => {
  const plot = document.querySelector(`[data-curve=${curve}] .plot:not([hidden])`), edge = plot.getBoundingClientRect();
  const point = pointsOf(plot).find((one) => one.text.startsWith(text));
  return [edge.left + point.x, edge.top + point.y, point.text];
}"""
SHAPES = f"() => document.querySelector('{CURVE} .plot:not([hidden]) .wide').innerHTML"
LOOK_AT_EVERY_CHOICE = """(look) => {
  const found = [];
  for (const figure of document.querySelectorAll(".curve")) {
    const menu = figure.querySelector("select");
    for (let choice = menu ? menu.length - 1 : 0; choice >= 0; choice--) {
      if (menu) { menu.selectedIndex = choice; menu.dispatchEvent(new Event("change")); }
      const picture = [...figure.querySelectorAll(".plot svg")].find((one) => one.getClientRects().length);
      found.push(...look(picture).map((words) => [figure.dataset.curve, choice, words]));
    }
  }
  return found;
}"""
BEYOND = f"""() => ({LOOK_AT_EVERY_CHOICE})((picture) => {{
  const edge = picture.getBoundingClientRect();
  return [...picture.querySelectorAll("text")].filter((one) => {{
    const box = one.getBoundingClientRect();
    return box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1;
  }}).map((one) => one.textContent);
}})"""
TOUCHING = f"""() => ({LOOK_AT_EVERY_CHOICE})((picture) => {{
  const touch = (one, other) => {{
    const [a, b] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
    return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  }};
  const labels = [...picture.querySelectorAll(".label text")];
  const straight = (one) => !(one.getAttribute("transform") || "").includes("rotate(-45");
  const ticks = [...picture.querySelectorAll(".xtick text")].filter(straight);
  const pairs = labels.flatMap((one, place) => [...labels.slice(place + 1), ...ticks].map((other) => [one, other]));
  pairs.push(...ticks.flatMap((one, place) => ticks.slice(place + 1).map((other) => [one, other])));
  const met = pairs.filter(([one, other]) => touch(one, other));
  return met.map(([one, other]) => `${{one.textContent}} / ${{other.textContent}}`);
}})"""
PAPER = "() => getComputedStyle(document.body).backgroundColor"
WORDS = "() => getComputedStyle(document.querySelector('.plot .label text')).fill"
WHITE, NIGHT, PALE = "rgb(255, 255, 255)", "rgb(20, 24, 29)", "rgb(232, 235, 239)"


PLAN = plan_called("a processor")


@pytest.fixture
def page(open_plan: Open) -> Iterator[Page]:
    """The page of PLAN."""
    opened = open_plan("a processor")
    yield opened.page
    assert opened.errors == []


@pytest.fixture
def dark_page(page: Page) -> Iterator[Page]:
    """The same where the system prefers dark."""
    page.emulate_media(color_scheme="dark")
    yield page
    page.emulate_media(color_scheme="light", media="screen")


def fact(page: Page, name: str) -> tuple[str, str]:
    """A figure of the summary, and the words below it."""
    target = page.locator(".facts > div", has=page.locator(f"dt:text-is('{name}')"))
    return target.locator("b").inner_text(), target.locator("small").inner_text()


@each_kind
def test_a_page_opens_without_an_error_and_asks_nobody(kind: str, open_plan: Open) -> None:
    opened = open_plan(kind)
    assert opened.page.locator(".plot svg").count() == 2 * opened.page.locator(".plot").count() > 0
    assert opened.page.locator(".plot svg:visible").count() == opened.page.locator(".curve").count() == 6
    assert opened.page.locator(".plot svg a").count() == 0
    assert opened.page.evaluate("window.hacked") is None
    assert opened.errors == []
    assert [request for request in opened.requests if not request.startswith(("file:", "data:", "blob:"))] == []


def test_the_figures_are_those_of_the_plan(page: Page) -> None:
    plan = PLAN
    sizes = [plan.peak_bytes, plan.plain.expected.peak_bytes]
    assert [*map(parse_bytes, page.locator(".bar b").all_inner_texts())] == pytest.approx(sizes, rel=0.01)
    assert parse_bytes(page.locator(".edge").inner_text().removeprefix("budget ")) == plan.budget_bytes
    assert fact(page, "Microbatch")[0] == f"{plan.candidate.microbatch} × {plan.candidate.accumulation}"
    assert fact(page, "Segments")[0] == f"{plan.candidate.segments}"
    assert fact(page, "Precision")[0] == plan.candidate.precision
    assert fact(page, "Gradient")[0] == "exact"
    assert plan.seconds_per_step is not None
    assert fact(page, "A step")[0] == format_seconds(plan.seconds_per_step)
    assert fact(page, "Speed")[0].endswith("sequences/s")
    assert page.locator("dt:text-is('An epoch')").count() == 0, "nobody knows the size of the data"


def test_the_command_that_starts_the_training_is_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("[data-copy]").click()
    page.locator("[data-copy]", has_text="Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == "oomguard train plan.json --data FILE"


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<svg "), ("png", b"\x89PNG")])
def test_a_chart_is_saved_as_a_file(kind: str, start: bytes, page: Page) -> None:
    figure = page.locator("[data-curve=front]")
    with page.expect_download() as download:
        figure.locator(f"[data-save={kind}]").click()
    assert download.value.suggested_filename == f"front.{kind}"
    content = Path(download.value.path()).read_bytes()
    assert content.startswith(start)
    assert len(content) > 10_000
    if kind == "svg":
        assert b"var(--" not in content.split(b">", 1)[1]
        assert b"http" not in content.replace(b"http://www.w3.org/2000/svg", b"")


def test_bars_are_as_long_as_their_sizes(page: Page) -> None:
    tracks, bars = page.locator(".track").all(), page.locator(".track i").all()
    boxes = [(bar.bounding_box(), track.bounding_box()) for bar, track in zip(bars, tracks, strict=True)]
    ours, theirs = (bar["width"] / track["width"] for bar, track in boxes if bar and track)
    budget = 1 / 2.5  # plain PyTorch is cut off there
    assert ours == pytest.approx(budget * PLAN.peak_bytes / PLAN.budget_bytes, rel=0.01)
    assert theirs > 0.6
    assert page.locator(".bar.over.cut").count() == 1


def test_all_records_and_rungs_are_listed(page: Page) -> None:
    rows = page.locator("section:has(#evidence) tbody tr")
    assert rows.count() == len(PLAN.records)
    assert rows.locator("td:last-child").all_inner_texts() == [
        record.verdict.name + (" *" if record == PLAN.record else "") for record in PLAN.records
    ]
    assert page.locator("section:has(#fallbacks) tbody tr").count() == len(PLAN.fallbacks)


def test_what_was_not_measured_is_not_said_to_be(open_plan: Open) -> None:
    page = open_plan("a card, nothing measured").page
    assert "expected to fit" in page.locator(".answer").inner_text()
    assert fact(page, "A step") == ("–", "nothing was timed")


def test_a_lossy_plan_says_so_on_top(open_plan: Open) -> None:
    assert fact(open_plan("hostile").page, "Gradient")[0] == "lossy"


def test_pointing_at_a_curve_shows_its_values(page: Page) -> None:
    page.locator(CURVE).scroll_into_view_if_needed()
    x, y, words = page.evaluate(POINT, ["microbatch", "fp32, microbatch 4:"])
    page.mouse.move(x + 3, y + 3)
    assert page.locator("#tip span").inner_text() == words
    page.mouse.move(x, 2)
    assert not page.locator("#tip span").is_visible()


@pytest.mark.parametrize(
    ("curve", "start", "words"),
    [
        ("region", "microbatch 32:", r"microbatch 32: up to [\d,]+ steps with(?:out)? segments"),
        ("segments", "16 segments:", r"16 segments: [\d.]+ (?:s|[MG]iB)"),
        ("terms", "4,1", r"4,1\d\d steps: [a-z ]+ [\d.]+ [KMG]iB"),
        ("front", "the plan", r"the plan, measured"),
    ],
)
def test_every_kind_of_point_says_what_it_is(curve: str, start: str, words: str, page: Page) -> None:
    page.locator(f"[data-curve={curve}] .plot:visible").scroll_into_view_if_needed()
    x, y, _ = page.evaluate(POINT, [curve, start])
    page.mouse.move(x, y)
    assert re.fullmatch(words, page.locator("#tip span").inner_text())
    edge = page.locator(f"[data-curve={curve}] .plot:visible").bounding_box()
    tip = page.locator("#tip span").bounding_box()
    assert edge is not None
    assert tip is not None
    assert edge["x"] <= tip["x"]
    assert tip["x"] + tip["width"] <= edge["x"] + edge["width"]
    page.mouse.move(2, 2)


def test_the_arrow_keys_go_through_the_points(page: Page) -> None:
    plot = page.locator(f"{CURVE} .plot:visible")
    assert plot.get_attribute("role") == "img"
    plot.focus()
    tips = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        tips.append(page.locator(f"{CURVE} #tip span").inner_text())
    assert tips[0] == tips[2] != tips[1]
    assert all(tips)
    page.keyboard.press("Escape")
    assert not page.locator("#tip span").is_visible()


def test_choosing_a_knob_draws_another_curve(page: Page) -> None:
    curve, words = page.locator(CURVE), "h3:visible, p:visible"
    before, texts = page.evaluate(SHAPES), curve.locator(words).all_inner_texts()
    curve.locator("select").select_option("1 segment")
    assert page.evaluate(SHAPES) != before
    assert curve.locator(".plot:visible").count() == 1
    chosen = f"{PLAN.candidate.segments} segments"
    assert chosen in texts[1]
    assert chosen not in " ".join(curve.locator(words).all_inner_texts())
    curve.locator("select").select_option("the plan")
    assert (page.evaluate(SHAPES), curve.locator(words).all_inner_texts()) == (before, texts)


def test_the_button_switches_the_theme_of_page_and_curves(page: Page) -> None:
    button = page.locator("#theme")
    light = page.evaluate(WORDS)
    assert page.evaluate(PAPER) == WHITE
    button.click()
    assert page.evaluate(PAPER) == NIGHT
    assert page.evaluate(WORDS) != light
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert (page.evaluate(PAPER), page.evaluate(WORDS)) == (WHITE, light)


def test_a_system_that_prefers_dark_gets_it_and_may_change_its_mind(dark_page: Page) -> None:
    assert dark_page.evaluate(PAPER) == NIGHT
    dark_page.wait_for_function(f"() => ({WORDS})() === '{PALE}'")
    dark_page.emulate_media(color_scheme="light")
    assert dark_page.evaluate(PAPER) == WHITE
    dark_page.wait_for_function(f"() => ({WORDS})() !== '{PALE}'")


def test_on_paper_the_page_is_light(dark_page: Page) -> None:
    dark_page.wait_for_function(f"() => ({WORDS})() === '{PALE}'")
    dark_page.emulate_media(media="print")
    assert dark_page.evaluate(PAPER) == WHITE
    dark_page.wait_for_function(f"() => ({WORDS})() !== '{PALE}'")
    assert not dark_page.locator("nav").is_visible()
    assert not dark_page.locator("#theme").is_visible()


def test_on_paper_a_curve_is_as_wide_as_the_text_and_tips_are_gone(dark_page: Page) -> None:
    dark_page.set_viewport_size({"width": 660, "height": 900})
    dark_page.emulate_media(media="print")
    assert dark_page.evaluate("document.documentElement.scrollWidth") == 660
    widths = [tag.bounding_box() for tag in dark_page.locator(".plot svg:visible").all()]
    assert {round(width["width"]) for width in widths if width} == {660}
    assert dark_page.locator(".plot .narrow:visible, #tip span:visible").count() == 0
    dark_page.set_viewport_size({"width": 1280, "height": 800})


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", ["a processor", "a card, nothing measured", TRADEOFFS])
def test_words_in_a_curve_are_not_cut_off_nor_run_into_each_other(kind: str, width: int, open_plan: Open) -> None:
    page = open_plan(kind).page
    page.set_viewport_size({"width": width, "height": 844})
    assert page.locator(".narrow:visible").count() == (6 if width == 390 else 0)
    assert page.evaluate(BEYOND) == []
    assert page.evaluate(TOUCHING) == []
    page.set_viewport_size({"width": 1280, "height": 800})


def test_on_a_phone_no_tip_goes_beyond_the_edge(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    beyond = """(plot) => pointsOf(plot).filter((point) => {
      showTip(plot, point);
      const box = tip.firstElementChild.getBoundingClientRect();
      return box.left < 0 || box.right > 390;
    }).map((point) => point.text)"""
    visible = "[...document.querySelectorAll('.plot')].filter((plot) => plot.getClientRects().length)"
    assert page.evaluate(f"() => {visible}.flatMap({beyond})") == []
    page.evaluate("hideTip()")
    page.set_viewport_size({"width": 1280, "height": 800})


@each_kind
def test_on_a_phone_nothing_goes_beyond_the_edge(kind: str, open_plan: Open) -> None:
    page = open_plan(kind).page
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > 390.5)"
    inside = "one.closest('.plot') || one.closest('thead')"
    assert page.evaluate(f"{beyond}.filter((one) => !({inside})).map((one) => one.outerHTML.slice(0, 80))") == []
    page.set_viewport_size({"width": 1280, "height": 800})


@each_kind
def test_no_width_makes_a_page_scroll_sideways(kind: str, open_plan: Open) -> None:
    page = open_plan(kind).page
    for width in range(340, 1400, 53):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_bar_that_is_cut_off_is_full(open_plan: Open) -> None:
    page = open_plan("a processor").page
    shares = page.evaluate("""() => [...document.querySelectorAll(".track > span")].map((track) =>
        [...track.children].map((part) => part.getBoundingClientRect().width / track.getBoundingClientRect().width))""")
    (own, _), (plain, margin) = shares
    assert PLAN.plain.expected.peak_bytes > LONGEST_BAR * PLAN.budget_bytes
    assert own == pytest.approx(PLAN.peak_bytes / PLAN.budget_bytes / LONGEST_BAR, abs=0.01)
    assert (plain, margin) == (pytest.approx(1.0), pytest.approx(0.0))
