"""A headless browser without network access."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.extras import need

__all__ = ["errors", "needs_browser", "open_browser", "requests", "until"]

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium or no chromedriver (apt install chromium chromium-driver)",
)


@contextmanager
def open_browser() -> Iterator[Any]:
    webdriver = need("selenium.webdriver")

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    # Containers have no user namespaces for Chromium's sandbox, and little memory in /dev/shm.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1400,1200",
    ):
        options.add_argument(argument)
    # No name resolves, so a page that requests anything fails.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(driver: Any, condition: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 60, poll_frequency=0.05).until(
        lambda driver: driver.execute_script(f"return {condition}")
    )


def errors(driver: Any) -> list[dict[str, Any]]:
    """Return the errors that scripts logged since the last call."""
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requests(driver: Any) -> list[str]:
    """Return the addresses that were requested since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
