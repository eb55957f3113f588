"""One browser for all tests of pages: the system's, without a window."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from page.kinds import page_of
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page, and what it did that it should not."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[[str], Opened]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"there is no browser here ({', '.join(NAMES)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


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
