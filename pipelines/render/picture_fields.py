"""A picture as a template takes it."""

from collections.abc import Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from dpstream.pipelines.render.charts import Picture


def picture_fields(picture: Picture, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The picture, its words, and what each of its places says (as JSON, which is escaped).

    Args:
        labels: a text for each of the picture's places; none: nothing can be pointed at.
    """
    tips = ""
    if labels and picture.places is not None:
        places = zip(picture.places.tolist(), labels, strict=True)
        tips = msgspec.json.encode([(*place, text) for place, text in places]).decode()
    # The picture's text is matplotlib's numbers and an escaped label.
    return {"svg": Markup(picture.svg), "text": picture.caption, "tips": tips}
