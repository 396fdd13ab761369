"""Make report.png, a picture of the report of the recording that comes with the package.

    pip install -e ".[report]" selenium
    python docs/scripts/report.py

The script needs Chromium and its driver (``apt install chromium chromium-driver``).
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait
from sklearn.datasets import load_sample_image

import tcnn_probe

DOCS = Path(__file__).parents[1]
SIZE = 1200, 1000  # pixels
CHOICE = 0, 4  # row and column of a head whose attention is not at the middle
CHOOSE = """const heads = document.getElementById("grids")
    const press = key => heads.dispatchEvent(new KeyboardEvent("keydown", {key}))
    for (let i = 0; i < arguments[0]; i++) press("ArrowDown")
    for (let i = 0; i < arguments[1]; i++) press("ArrowRight")"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DOCS / "report.png")
    out = parser.parse_args(arguments).out
    # As in timm for this model, the smaller side is resized to 146 pixels, and the middle is
    # cropped to 128 x 128.
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    scale = 146 / min(photograph.size)
    width, height = (round(length * scale) for length in photograph.size)
    left, top = (width - 128) // 2, (height - 128) // 2
    resized = photograph.resize((width, height), Image.Resampling.BICUBIC)
    square = resized.crop((left, top, left + 128, top + 128))
    image = np.asarray(square).transpose(2, 0, 1)[None] / 255
    report = tcnn_probe.report(
        {"Transformed CNN on photographs": tcnn_probe.load_example()}, images=image
    )
    with tempfile.TemporaryDirectory() as folder:
        page = report.save(Path(folder) / "report.html")
        take_picture(page, out)
    print(f"wrote {out}")


def take_picture(
    page: Path,
    out: Path,
    choice: tuple[int, int] = CHOICE,
    size: tuple[int, int] = SIZE,
) -> None:
    """Open a page in a headless browser, choose a head
    with the arrow keys, and save a screenshot.
    """
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        width, height = size
        metrics = {"width": width, "height": height}
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            metrics | {"deviceScaleFactor": 1, "mobile": False},
        )
        driver.get(page.as_uri())
        wait = WebDriverWait(driver, 120)
        wait.until(lambda d: d.execute_script("return document.body.dataset.ready"))
        driver.execute_script(CHOOSE, *choice)
        finished = "return Bokeh.index.roots.every(view => view.has_finished())"
        wait.until(lambda d: d.execute_script(finished))
        driver.save_screenshot(str(out))
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
