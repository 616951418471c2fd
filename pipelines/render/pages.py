"""Templates of pages: all texts are escaped but `Markup`, and what is missing is an error."""

from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

from dpstream.accounting.figures import human, human_up, percent


def pages() -> Environment:
    """Where templates are found by name; they may include each other."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_text),
    )
    environment.filters.update(human=human, human_up=human_up, percent=percent)
    return environment


def _text(name: str) -> str:
    return resources.files("dpstream.pipelines").joinpath("templates", name).read_text("utf-8")
