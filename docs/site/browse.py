"""Check the built site in a browser without network: on a phone and a desktop, light and dark.

    python docs/site/browse.py build/site screenshots

This takes a minute, and needs selenium and Chrome or Chromium with its driver (``apt install
chromium chromium-driver``). Pages are opened as files. The check fails if a page, a title or a
table of names is wider than the screen, an image is missing, a script reports an error, dark pages
are light, or the search finds nothing.
"""

import argparse
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PAGES = (
    "README",
    "docs/recording",
    "docs/site/api",
    "docs/site/generated/tcnn_probe.plot.evolution",
    "docs/site/generated/gallery",
    "studies/pages/content_or_mixing",
)
SCREENS = {"phone": (390, 844), "desktop": (1400, 1000)}
SCHEMES = ("light", "dark")
QUERY = "attention_maps"
SECONDS = 30  # limit for a page, which may be slow on a machine with other work
MISSING_IMAGES = """return [...document.images]
    .filter(image => image.complete && !image.naturalWidth)
    .map(image => image.src)"""
OVERFLOW = """return [...document.querySelectorAll("html, h1, table.autosummary")]
    .filter(element => element.scrollWidth > element.clientWidth
        || element.clientWidth > window.innerWidth)
    .map(element => element.tagName)"""
LIGHTNESS = {"light": (200, 255), "dark": (0, 80)}
"""Range of the mean of red, green and blue at the lower left corner, which is background."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("screenshots", type=Path)
    options = parser.parse_args(arguments)
    options.screenshots.mkdir(parents=True, exist_ok=True)
    faults = []
    for (screen, size), scheme in itertools.product(SCREENS.items(), SCHEMES):
        browser = open_browser(size, scheme)
        try:
            for page in PAGES:
                address = (options.site / f"{page}.html").resolve().as_uri()
                picture = options.screenshots / f"{Path(page).name}-{screen}-{scheme}.png"
                place = f"{page}, {screen}, {scheme}"
                page_faults = look_at(browser, address, scheme, picture)
                faults += [f"{place}: {fault}" for fault in page_faults]
            if not search(browser, options.site):
                faults.append(f"search, {screen}, {scheme}: nothing found")
        finally:
            browser.quit()
    if faults:
        raise SystemExit("\n".join(faults))


def open_browser(size: tuple[int, int], scheme: str) -> Any:
    """Open a browser that finds no network,
    with a screen of width x height pixels and a colour scheme.
    """
    options = webdriver.ChromeOptions()
    # Hosted runners have Chrome and a driver of the same version, and perhaps a Chromium of another
    # version.
    binary = shutil.which("google-chrome") or shutil.which("chromium")
    options.binary_location = binary or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",  # containers do not have a sandbox
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    width, height = size
    # A window is never narrower than 500 pixels; an emulated screen is.
    screen = {"width": width, "height": height, "deviceScaleFactor": 1}
    screen["mobile"] = width < 500
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    return browser


def look_at(browser: Any, address: str, scheme: str, picture: Path) -> list[str]:
    """Open a page, save a screenshot, and return the faults of the page."""
    browser.get(address)
    faults = []
    wide = browser.execute_script(OVERFLOW)
    faults += [f"{tag} is wider than its place" for tag in wide]
    missing = browser.execute_script(MISSING_IMAGES)
    faults += [f"no image {source}" for source in missing]
    for entry in browser.get_log("browser"):
        if entry["level"] == "SEVERE":
            faults.append(entry["message"])
    browser.save_screenshot(str(picture))
    with Image.open(picture) as image:
        corner = image.convert("RGB").getpixel((3, image.height - 3))
    lightness = sum(corner) / 3
    lowest, highest = LIGHTNESS[scheme]
    if not lowest <= lightness <= highest:
        faults.append(f"background {corner}")
    return faults


def search(browser: Any, site: Path) -> bool:
    """Return whether the search finds the page of a name."""
    browser.get((site / "search.html").resolve().as_uri() + f"?q={QUERY}")

    def results(browser: Any) -> list[str]:
        links = browser.find_elements(By.CSS_SELECTOR, "#search-results a")
        return [link.get_attribute("href") for link in links]

    addresses = WebDriverWait(browser, SECONDS).until(results)
    return any(f"tcnn_probe.{QUERY}" in address for address in addresses)


if __name__ == "__main__":
    main()
