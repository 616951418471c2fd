"""Photograph pages of `dpstream report` for the guide.

`python -m docs.pictures.shoot demo/report.html`, of the demo's run.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import DESKTOP, PHONE, browser

HERE = Path(__file__).parent
#: Name, screen, first and last row of pixels.
SHOTS = (
    ("report", DESKTOP, 0, 1390),
    ("report-phone", PHONE, 0, 1480),
    ("report-reading", DESKTOP, 2290, 3250),
)


def shoot(page: Path) -> None:
    """Write the pictures, in few colours."""
    with browser(Path(tempfile.mkdtemp())) as running:
        for name, screen, top, bottom in SHOTS:
            tab = running.open(page.absolute().as_uri(), screen)
            screenshot = Image.open(io.BytesIO(tab.picture()))
            part = screenshot.crop(
                (0, top, screenshot.width, min(bottom, screenshot.height))
            ).convert("RGB")
            part.quantize(48).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    shoot(Path(sys.argv[1]))
