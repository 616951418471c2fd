"""``python -m dpstream``: the command, with the interpreter that is named."""

from dpstream.pipelines.cli.main import main

main()
