"""What pyproject.toml cannot say: the description of the package is README.md without the pictures
and links that lead into a clone, which an index of packages would show broken."""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = text.partition("## Documentation")[0]  # a list of links
text = re.sub(r"## Keys against error\n.*?(?=## )", "", text, flags=re.S)  # a picture
text = re.sub(r"\[([^]]+)\]\((?!https:)[^)]+\)", r"\1", text)
setup(long_description=text, long_description_content_type="text/markdown")
