"""Photograph pages of `dpstream report` for the guides.

`python -m docs.pictures.shoot demo/report.html`, of the demo's run, and
`python -m docs.pictures.shoot runs/flagship/publication/departments/index.html flagship`.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import DESKTOP, PHONE, browser

HERE = Path(__file__).parent
#: Name, screen, first and last row of pixels.
SHOTS = {
    "report": (
        ("report", DESKTOP, 0, 1390),
        ("report-phone", PHONE, 0, 1480),
        ("report-reading", DESKTOP, 2290, 3250),
    ),
    "flagship": (("flagship", DESKTOP, 0, 1480),),
}


def shoot(page: Path, name: str) -> None:
    """Write the pictures of a page, in few colours."""
    with browser(Path(tempfile.mkdtemp())) as running:
        for picture, screen, top, bottom in SHOTS[name]:
            tab = running.open(page.absolute().as_uri(), screen)
            screenshot = Image.open(io.BytesIO(tab.picture()))
            part = screenshot.crop(
                (0, top, screenshot.width, min(bottom, screenshot.height))
            ).convert("RGB")
            part.quantize(48).save(HERE / f"{picture}.png", optimize=True)


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), *(sys.argv[2:] or ["report"]))
