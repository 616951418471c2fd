"""Photograph pages of `dpstream report` for the guide.

`python -m docs.pictures.shoot demo/report.html demo/both.html`, of the demo's run and of one with
half its epsilon.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import DESK, PHONE, browser

HERE = Path(__file__).parent
#: Name, which page, screen, first and last row of pixels.
SHOTS = (
    ("report", 0, DESK, 0, 1090),
    ("report-phone", 0, PHONE, 0, 1480),
    ("report-keys", 0, DESK, 1530, 2330),
    ("comparison", 1, DESK, 0, 1200),
)


def shoot(pages: list[Path]) -> None:
    """Write the pictures, in few colours."""
    with browser(Path(tempfile.mkdtemp())) as running:
        for name, page, screen, top, bottom in SHOTS:
            tab = running.open(pages[page].absolute().as_uri(), screen)
            whole = Image.open(io.BytesIO(tab.picture()))
            part = whole.crop((0, top, whole.width, min(bottom, whole.height))).convert("RGB")
            part.quantize(48).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    shoot([Path(name) for name in sys.argv[1:]])
