"""The page of the explorer in a browser, its server, and the widget of notebooks."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page

import oomguard
from oomguard._core.units import format_bytes

ARGUMENTS = ["--model", "gru", "--seq", "500", "--hidden", "64", "--budget", "700MiB"]
SETTINGS: dict[str, Any] = {"cell": "gru", "seq": 500, "hidden": 64, "budget": "700MiB"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a running explorer."""
    command = [sys.executable, "-m", "oomguard", "explore", *ARGUMENTS, "--allow-probes"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield process.stderr.readline().split()[2]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)


@pytest.fixture(scope="module")
def page(address: str, browser: Browser) -> Iterator[Page]:
    errors, hosts = list[str](), set[str | None]()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.goto(address)
    yield page
    page.close()
    assert not errors
    assert hosts == {"127.0.0.1"}


def shown(page: Page, term: str) -> str:
    return page.inner_text(f'tr[data-term="{term}"] td.r >> nth=0')


def answered(page: Page, field: str, value: int) -> None:
    """Wait until the page shows the answer for a value."""
    page.wait_for_selector(f'.copied + pre:has-text("--{field} {value}")')


def test_a_slider_and_a_box_change_the_figures_to_those_of_the_command(page: Page) -> None:
    page.fill('input[name="hidden"]', "320")
    answered(page, "hidden", 320)
    assert shown(page, "total") == format_bytes(printed("--hidden", "320"))
    slider = page.locator('.control:has(input[name="layers"]) input[type="range"]')
    slider.focus()
    slider.press("End")
    answered(page, "layers", 16)
    assert shown(page, "total") == format_bytes(printed("--hidden", "320", "--layers", "16"))
    page.fill('input[name="layers"]', "2")
    page.fill('input[name="hidden"]', "64")
    answered(page, "hidden", 64)


def printed(*words: str) -> int:
    """The peak that the command prints."""
    usual = ["--model", "gru", "--seq", "500", "--budget", "700MiB", "--json"]
    command = [sys.executable, "-m", "oomguard", "estimate", *usual, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return int(json.loads(done.stdout)["total_bytes"])


def test_a_cell_of_the_region_is_chosen_by_keyboard(page: Page) -> None:
    page.locator(".region button").first.press("Enter")
    answered(page, "microbatch", 1)
    assert page.input_value('input[name="microbatch"]') == "1"


def test_a_point_of_the_front_is_chosen_by_keyboard(page: Page) -> None:
    point = page.locator("circle.point").first
    words = point.get_attribute("aria-label") or ""
    point.focus()
    point.press("Enter")
    rows = words.removeprefix("microbatch ").split(",")[0]
    answered(page, "microbatch", int(rows))
    assert page.input_value('input[name="microbatch"]') == rows
    page.fill('input[name="segments"]', "1")


def test_copied_texts_are_those_that_are_shown(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for button, text in zip(page.locator(".copied button").all(), page.locator(".copied + pre").all(), strict=True):
        button.click()
        page.locator('.copied button:text-is("Copied")').first.wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text.inner_text()
    page.click("#link")
    page.locator('#link:text-is("Copied")').wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_a_second_explorer_compares_and_a_link_keeps_both(page: Page, address: str) -> None:
    page.click("#compare")
    second = page.locator(".explorer").nth(1)
    second.locator('select[name="device"]').select_option("a100-80gb")
    second.locator('.copied + pre:has-text("a100-80gb")').first.wait_for()
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.locator(".explorer").nth(1).locator('.copied + pre:has-text("a100-80gb")').first.wait_for()
    page.click("#compare")
    assert page.locator(".explorer").count() == 1


def test_a_wrong_setting_is_told_and_the_last_answer_stays(page: Page) -> None:
    page.fill('input[name="budget"]', "much")
    page.locator('.verdict:has-text("much")').wait_for()
    assert "MiB" in shown(page, "total")
    page.fill('input[name="budget"]', "700MiB")
    page.locator(".answers:not(.stale)").wait_for()


def test_measuring_shows_a_verdict_beside_the_estimate(page: Page) -> None:
    page.fill('input[name="seq"]', "20")
    answered(page, "seq", 20)
    page.click('button:has-text("Measure this")')
    verdict = page.locator('[role="status"]:has-text("measured peak")')
    verdict.wait_for(timeout=60_000)
    assert verdict.inner_text().startswith("FITS, measured peak ")
    page.locator('h3:has-text("Measured")').wait_for()
    assert "× 20" in page.inner_text(".answers")


def request(address: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(address)
    usual = {"Content-Type": "application/json"} if body is not None else {}
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        connection.request("GET" if body is None else "POST", path, body, usual | headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


def test_the_server_answers_json_about_settings(address: str) -> None:
    status, body = request(address, f"{urlsplit(address).path}answer", json.dumps(SETTINGS).encode())
    assert status == 200
    assert json.loads(body)["estimate"]["total_bytes"] == oomguard.estimate(**SETTINGS).total_bytes


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/", None, {}, 404),
        ("/answer", b"{}", {}, 404),
        ("/measure", b"{}", {}, 404),
        (f"/{'A' * 22}/answer", b"{}", {}, 404),
        (f"/{'A' * 22}/", None, {}, 404),
        ("{own}answer", b"{}", {"Host": "evil.example"}, 400),
        ("{own}answer", b"{}", {"Content-Type": "text/plain"}, 415),
        ("{own}answer", b"[1", {}, 400),
        ("{own}answer", b"[" * 60_000, {}, 400),
        ("{own}answer", b" " * 70_000, {}, 413),
        ("{own}answer", None, {}, 405),
        ("{own}../../etc/passwd", None, {}, 404),
    ],
)
def test_other_requests_are_refused(
    address: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    assert request(address, path.replace("{own}", urlsplit(address).path), body, **headers)[0] == status


def test_the_widget_answers_the_messages_of_its_view() -> None:
    widget = oomguard.explore(**SETTINGS)
    sent = list[dict[str, Any]]()
    widget.send = sent.append
    widget._reply(widget, {"id": 7, "kind": "answer", "settings": SETTINGS | {"seq": 900}}, [])
    widget._reply(widget, {"id": 8, "kind": "measure", "settings": SETTINGS}, [])
    assert sent[0]["id"] == 7
    assert sent[0]["reply"]["estimate"]["total_bytes"] == oomguard.estimate(**SETTINGS | {"seq": 900}).total_bytes
    assert "--allow-probes" in sent[1]["reply"]["error"]


def test_a_taken_port_and_an_unknown_task_are_told(address: str) -> None:
    for words, message in (
        (["--port", str(urlsplit(address).port)], "cannot be used"),
        (["--model", "package.module:task"], "there is no module package"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "oomguard", "explore", *(ARGUMENTS if "--port" in words else []), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
