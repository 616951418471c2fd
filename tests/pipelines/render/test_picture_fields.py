"""A picture for a template: its SVG as it is, what its points say as text to be escaped."""

import json

import numpy as np
from markupsafe import Markup

from dpstream.pipelines.render.charts import Picture
from dpstream.pipelines.render.picture_fields import picture_fields


def test_points_and_what_they_say() -> None:
    picture = Picture("<svg></svg>", "words", np.array([[0.1, 0.2], [0.3, 0.4]]))
    view = picture_fields(picture, ["<b>", "two"])
    assert isinstance(view["svg"], Markup) and not isinstance(view["tips"], Markup)
    assert json.loads(view["tips"]) == [[0.1, 0.2, "<b>"], [0.3, 0.4, "two"]]
    assert (
        picture_fields(picture)["tips"]
        == picture_fields(Picture("<svg></svg>", "w"), ["one"])["tips"]
        == ""
    )
