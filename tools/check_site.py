"""Open the built documentation in a browser, use it as a reader does, and write pictures of it.

    python tools/check_site.py [--site site] [--pictures build/site-pictures]

Needs Debian's packages chromium and chromium-driver, and nothing else. Everything is done at the
width of a desktop and of a phone, in a light and in a dark colour scheme. The browser may reach no
other machine, and no page may ask for anything of another machine.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
PATIENCE = 20.0
"""How long the browser may take for anything [s]."""
SEARCH = "redshift space"
PAGES = {
    "home": "index.html",
    "tutorial": "tutorials/first_universe.html",
    "how_to": "howto/simulate.html",
    "run_file": "reference/run_files/simulate.html",
    "commands": "reference/commands.html",
    "python": "reference/python/flowpm_dist.html",
    "explanation": "explanations/reconstruction.html",
    "measurements": "measurements/accuracy.html",
}
"""Name of a picture -> page."""


class CheckError(Exception):
    """The site does not work; the message says what does not."""


class Browser:
    """A headless browser, steered by the protocol of WebDriver.

    Args:
        width, height: the size of its window [px].
        scheme: the colour scheme that its user prefers, "light" or "dark".
    """

    def __init__(self, width: int, height: int, scheme: str) -> None:
        program = shutil.which("chromedriver")
        if program is None or shutil.which("chromium") is None:
            raise CheckError("no browser: apt-get install chromium chromium-driver")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._at = f"http://127.0.0.1:{port}/session"
        self._profile = tempfile.TemporaryDirectory(prefix="check-site-")
        self._driver = subprocess.Popen(
            [program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--disable-background-networking", "--disable-component-update",
            f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}",
        ]  # fmt: skip
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        try:
            wait_for(lambda: self._is_up(port), "the browser does not start")
            answer = self._ask("", {"capabilities": {"alwaysMatch": wanted}})
            self._at += f"/{answer['sessionId']}"
            self._tell("Emulation.setDeviceMetricsOverride", width=width, height=height,
                       deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self._tell("Emulation.setEmulatedMedia", features=features)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _is_up(port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=2) as answer:
                return bool(json.load(answer)["value"]["ready"])
        except OSError:
            return False

    def _ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._at}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise CheckError(f"{path}: {json.load(error)['value']['message']}") from None

    def _tell(self, command: str, **parameters: Any) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._ask("/goog/cdp/execute", body)

    def open(self, address: str) -> None:
        """Open a page and wait until all of it is there."""
        self._ask("/url", {"url": address})
        self.wait("document.readyState === 'complete'", "the page does not load")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in JavaScript."""
        body = {"script": f"return ({expression});", "args": []}
        return self._ask("/execute/sync", body)

    def wait(self, expression: str, problem: str) -> None:
        """Wait until an expression is true.

        Raises:
            CheckError: it is not after `PATIENCE`.
        """
        wait_for(lambda: bool(self.evaluate(expression)), problem)

    def picture(self, path: Path) -> None:
        """Write a picture of the window."""
        path.write_bytes(base64.b64decode(self._ask("/screenshot", method="GET")))

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since the last call."""
        entries = self._ask("/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """Returns the errors of scripts and of missing files since the last call."""
        entries = self._ask("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError, CheckError):
            self._ask("", method="DELETE")
        self._driver.terminate()
        self._driver.wait(10)
        self._profile.cleanup()


def wait_for(is_true: Callable[[], bool], problem: str) -> None:
    """Wait until a function returns True.

    Raises:
        CheckError: it does not within `PATIENCE`.
    """
    end = time.monotonic() + PATIENCE
    while not is_true():
        if time.monotonic() > end:
            raise CheckError(problem)
        time.sleep(0.1)


@contextlib.contextmanager
def server(site: Path) -> Iterator[str]:
    """Serve a folder to this machine; yields its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def check(browser: Browser, home: str, name: str, pictures: Path, phone: bool) -> None:
    """Use the site as a reader does.

    Args:
        browser: the browser.
        home: address of the site.
        name: beginning of the names of pictures.
        pictures: folder of the pictures.
        phone: whether the window is as narrow as a phone.

    Raises:
        CheckError: something does not work.
    """
    for picture, page in PAGES.items():
        browser.open(f"{home}/{page}")
        if browser.evaluate("document.documentElement.scrollWidth > innerWidth + 1"):
            raise CheckError(f"{page} is wider than the window")
        browser.picture(pictures / f"{name}_{picture}.png")
    _follow_navigation(browser, home, phone)
    _search(browser, home, pictures / f"{name}_search.png")
    _equation(browser, home, pictures / f"{name}_equation.png")
    _tutorial(browser, home, pictures / f"{name}_tutorial_figure.png")
    if name.endswith(SCHEMES[1]):
        ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        if max(browser.evaluate(ground)[:3]) > 128:
            raise CheckError("the page is not dark where its reader prefers dark pages")
    if problems := browser.errors():
        raise CheckError("\n".join(problems))


def _follow_navigation(browser: Browser, home: str, phone: bool) -> None:
    """Go from the home page to another page as the navigation leads."""
    browser.open(f"{home}/index.html")
    if phone:
        browser.evaluate("document.querySelector('label[for=__drawer]').click()")
        browser.wait("document.querySelector('#__drawer').checked", "the drawer does not open")
        links = ".md-nav--primary a.md-nav__link[href*='how']"
    else:
        links = ".md-tabs__link[href*='how']"
    browser.evaluate(f"document.querySelector({json.dumps(links)}).click()")
    browser.wait("location.pathname.includes('/howto/')", "the navigation leads nowhere")


def _search(browser: Browser, home: str, picture: Path) -> None:
    """Search the site, and follow the first result."""
    browser.open(f"{home}/index.html")
    browser.evaluate("document.querySelector('label[for=__search]').click()")
    text = json.dumps(SEARCH)
    browser.evaluate(
        "(() => { const field = document.querySelector('input[data-md-component=search-query]');"
        f" field.focus(); field.value = {text};"
        " field.dispatchEvent(new Event('input', {bubbles: true}));"
        " field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
    )
    results = "document.querySelectorAll('.md-search-result__link')"
    browser.wait(f"{results}.length > 0", f"nothing is found for {SEARCH}")
    titles = browser.evaluate(f"[...{results}].map((each) => each.innerText)")
    if not any(SEARCH.split()[0] in title.lower() for title in titles):
        raise CheckError(f"the results of {SEARCH} do not hold its words: {titles}")
    time.sleep(0.5)  # the list fades in
    browser.picture(picture)
    browser.evaluate(f"{results}[0].click()")
    browser.wait("!location.pathname.endsWith('/index.html')", "a result leads nowhere")


def _equation(browser: Browser, home: str, picture: Path) -> None:
    """Look at an equation of an explanation."""
    browser.open(f"{home}/{PAGES['explanation']}")
    find = "document.querySelector('math[display=block]')"
    if not browser.evaluate(f"{find} !== null"):
        raise CheckError(f"{PAGES['explanation']} has no equation in a line of its own")
    browser.evaluate(f"{find}.scrollIntoView({{block: 'center'}})")
    browser.evaluate("document.fonts.load('16px \"STIX Two Math\"', 'x').then(() => true)")
    browser.wait("document.fonts.check('16px \"STIX Two Math\"')", "the font does not load")
    width, height = browser.evaluate(
        f"((box) => [box.width, box.height])({find}.getBoundingClientRect())"
    )
    if width < 20 or height < 10:
        raise CheckError(f"an equation is {width} x {height} px")
    if "\\" in browser.evaluate(
        "[...document.querySelectorAll('math')].map((e) => e.innerText).join()"
    ):
        raise CheckError("an equation shows LaTeX")
    browser.picture(picture)


def _tutorial(browser: Browser, home: str, picture: Path) -> None:
    """Look at a picture that a tutorial drew."""
    browser.open(f"{home}/{PAGES['tutorial']}")
    find = "document.querySelector('img.figure')"
    browser.wait(f"{find} !== null && {find}.complete", "a tutorial has no picture")
    if browser.evaluate(f"{find}.naturalWidth") < 300:
        raise CheckError("a tutorial's picture is not there")
    browser.evaluate(f"{find}.scrollIntoView({{block: 'center'}})")
    browser.picture(picture)


def foreign(addresses: list[str], home: str) -> list[str]:
    """Returns the addresses that are not of the site."""
    own = (home, "data:", "blob:", "chrome", "about:", "file:")
    return [each for each in addresses if not each.startswith(own)]


def main() -> int:
    """Check the site, write pictures, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    parser.add_argument("--pictures", type=Path, default=ROOT / "build" / "site-pictures")
    options = parser.parse_args()
    if not (options.site / "index.html").exists():
        print(f"{options.site} has no index.html: run make docs", file=sys.stderr)
        return 1
    options.pictures.mkdir(parents=True, exist_ok=True)
    failed = 0
    with server(options.site) as served:
        homes = {"served": served, "from files": options.site.resolve().as_uri()}
        for width, (across, down) in WIDTHS.items():
            for scheme in SCHEMES:
                # From files on a desktop alone: nobody carries the site on a phone.
                for how in homes if (width, scheme) == ("desktop", "light") else ["served"]:
                    name = f"{width}_{scheme}" if how == "served" else "files_light"
                    browser = Browser(across, down, scheme)
                    try:
                        phone = width == "phone"
                        check(browser, homes[how], name, options.pictures, phone)
                        if found := foreign(browser.requests(), homes[how]):
                            raise CheckError(f"other machines are asked: {', '.join(found)}")
                        print(f"{name}: fine", flush=True)
                    except CheckError as error:
                        failed += 1
                        print(f"{name}: {error}", flush=True)
                        browser.picture(options.pictures / f"{name}_failed.png")
                    finally:
                        browser.close()
    print(f"pictures: {options.pictures}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
