"""The page in a browser: what is seen, what is done, and that nothing leaves it."""

import re
from collections.abc import Iterator

import pytest
from page.conftest import Open
from page.kinds import MAKERS, TRADEOFFS, plan_called
from playwright.sync_api import Page

from oomguard.units import format_seconds, parse_bytes

each_kind = pytest.mark.parametrize("kind", MAKERS)
CURVE = "[data-curve=microbatch]"
PIXEL = """([name, place]) => {
  const plot = document.querySelector("[data-curve=microbatch] .plot"), box = plot.getBoundingClientRect();
  const trace = plot._fullData.find((one) => one.name === name && one.text), { xaxis, yaxis } = plot._fullLayout;
  return [box.left + xaxis._offset + xaxis.d2p(trace.x[place]), box.top + yaxis._offset + yaxis.d2p(trace.y[place]),
    trace.text[place]];
}"""
PLOT = f"document.querySelector('{CURVE} .plot')"
RANGE = f"() => {PLOT}._fullLayout.xaxis.range.map((one) => Math.round(1e6 * one))"
HEIGHTS = f"() => {PLOT}.data.map((one) => [one.name, Array.from(one.y)])"
BEYOND = """() => {
  const found = [], look = (place) => {
    const edge = place.querySelector(".plot").getBoundingClientRect();
    for (const words of place.querySelectorAll(".annotation-text")) {
      const box = words.getBoundingClientRect(), inside = box.left >= edge.left && box.right <= edge.right;
      if (!inside || box.top < edge.top) found.push([place.dataset.curve, words.textContent]);
    }
  };
  for (const place of document.querySelectorAll(".curve")) {
    look(place);
    const menu = place.querySelector("select");
    for (let choice = menu ? menu.length - 1 : -1; choice >= 0; choice--) {
      menu.selectedIndex = choice;
      menu.dispatchEvent(new Event("change"));
      look(place);
    }
  }
  return found;
}"""
TOUCHING = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const straight = (one) => !one.getAttribute("transform").includes("rotate(-45");
  const words = [...plot.querySelectorAll(".xtick text")].filter(straight);
  const boxes = words.map((one) => one.getBoundingClientRect());
  return words.slice(1).filter((_, place) => boxes[place + 1].left < boxes[place].right).map((one) => one.textContent);
})"""
PAPER = "() => getComputedStyle(document.body).backgroundColor"
WORDS = "() => getComputedStyle(document.querySelector('.plot .xtitle')).fill"
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
    place = page.locator(".facts > div", has=page.locator(f"dt:text-is('{name}')"))
    return place.locator("b").inner_text(), place.locator("small").inner_text()


@each_kind
def test_a_page_opens_without_an_error_and_asks_nobody(kind: str, open_plan: Open) -> None:
    opened = open_plan(kind)
    assert opened.page.locator(".plot .main-svg").count() >= opened.page.locator(".plot").count() > 0
    assert opened.page.locator(".plot svg a").count() == 0
    assert opened.page.evaluate("window.hacked") is None
    assert opened.errors == []
    assert [one for one in opened.requests if not one.startswith(("file:", "data:", "blob:"))] == []


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
    assert fact(page, "An epoch")[0] == format_seconds(plan.seconds_per_step * 1000 / plan.spec.batch)


def test_bars_are_as_long_as_their_sizes(page: Page) -> None:
    tracks, bars = page.locator(".track").all(), page.locator(".track i").all()
    boxes = [(bar.bounding_box(), track.bounding_box()) for bar, track in zip(bars, tracks, strict=True)]
    ours, theirs = (bar["width"] / track["width"] for bar, track in boxes if bar and track)
    budget = 1 / 2.5  # plain PyTorch is cut off there
    assert ours == pytest.approx(budget * PLAN.peak_bytes / PLAN.budget_bytes, rel=0.01)
    assert theirs > 0.8
    assert page.locator(".bar.over.cut").count() == 1


def test_all_records_and_rungs_are_listed(page: Page) -> None:
    rows = page.locator("section:has(#evidence) tbody tr")
    assert rows.count() == len(PLAN.records)
    assert rows.locator("td:last-child").all_inner_texts() == [
        one.verdict.name + (" *" if one == PLAN.record else "") for one in PLAN.records
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
    x, y, words = page.evaluate(PIXEL, ["fp32", 3])
    page.mouse.move(x, y)
    assert page.locator(f"{CURVE} .hovertext").text_content() == words


@pytest.mark.parametrize(
    ("curve", "words"),
    [("region", r"microbatch 32: up to [\d,]+ steps in segments"), ("segments", r"[\d,]+ segments: [\d.]+ s")],
)
def test_every_line_says_what_it_is_pointed_at_for(curve: str, words: str, page: Page) -> None:
    said = page.evaluate(
        """(curve) => document.querySelector(`[data-curve=${curve}] .plot`)._fullData
          .filter((one) => one.mode === "lines" && one.hoverinfo !== "skip")
          .map((one) => [one.text.at(-1), one.hovertemplate])""",
        curve,
    )
    assert {template for _, template in said} == {"%{text}<extra></extra>"}
    assert [one for one, _ in said if re.fullmatch(words, one)]


def test_dragging_zooms_and_a_double_click_goes_back(page: Page) -> None:
    page.locator(CURVE).scroll_into_view_if_needed()
    before = page.evaluate(RANGE)
    box = page.locator(f"{CURVE} .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    page.mouse.up()
    low, high = page.evaluate(RANGE)
    assert before[0] < low < high < before[1]
    page.locator("#theme").click()
    assert page.evaluate(RANGE) == [low, high]  # another theme is the same view
    page.locator(f"{CURVE} .nsewdrag").dblclick()
    page.wait_for_function(f"() => ({RANGE})()[0] === {before[0]}")
    page.locator("#theme").click()


def test_choosing_a_knob_draws_another_curve(page: Page) -> None:
    curve = page.locator(CURVE)
    before, said = page.evaluate(HEIGHTS), curve.locator("h3, p").all_inner_texts()
    curve.locator("select").select_option("1 segment")
    assert page.evaluate(HEIGHTS) != before
    chosen = f"{PLAN.candidate.segments} segments"
    assert chosen in said[1]
    assert chosen not in " ".join(curve.locator("h3, p").all_inner_texts())
    curve.locator("select").select_option("the plan")
    assert (page.evaluate(HEIGHTS), curve.locator("h3, p").all_inner_texts()) == (before, said)


def test_the_button_switches_the_theme_of_page_and_curves(page: Page) -> None:
    plots, button = page.locator(".plot .main-svg").count(), page.locator("#theme")
    light = page.evaluate(WORDS)
    assert page.evaluate(PAPER) == WHITE
    button.click()
    assert page.evaluate(PAPER) == NIGHT
    assert page.evaluate(WORDS) != light
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator(".plot .main-svg").count() == plots
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


def test_a_curve_is_drawn_for_paper_and_then_again_for_the_screen(dark_page: Page) -> None:
    width = dark_page.evaluate(f"{PLOT}._fullLayout.width")
    for event, wanted, colour in (("beforeprint", 660, False), ("afterprint", width, True)):
        dark_page.evaluate(f"() => {{ dispatchEvent(new Event('{event}')); }}")
        dark_page.wait_for_function(f"() => {PLOT}._fullLayout.width === {wanted}")
        assert (dark_page.evaluate(WORDS) == PALE) == colour


def test_no_button_sends_a_curve_away(page: Page) -> None:
    titles = [one.get_attribute("data-title") for one in page.locator(f"{CURVE} .modebar-btn").all()]
    assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", ["a processor", "a card, nothing measured", TRADEOFFS])
def test_words_in_a_curve_are_not_cut_off_nor_run_into_each_other(kind: str, width: int, open_plan: Open) -> None:
    page = open_plan(kind).page
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_function(f"() => {PLOT}._fullLayout.width {'<' if width == 390 else '>'} 390")
    assert page.evaluate(BEYOND) == []
    assert page.evaluate(TOUCHING) == []
    page.set_viewport_size({"width": 1280, "height": 800})


@each_kind
def test_on_a_phone_nothing_goes_beyond_the_edge(kind: str, open_plan: Open) -> None:
    page = open_plan(kind).page
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("() => [...document.querySelectorAll('.plot')].every((one) => one._fullLayout.width < 390)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > 390.5)"
    inside = "one.closest('.plot') || one.closest('thead')"
    assert page.evaluate(f"{beyond}.filter((one) => !({inside})).map((one) => one.outerHTML.slice(0, 80))") == []
    page.set_viewport_size({"width": 1280, "height": 800})
