"""``python -m dpstream``: the command, with the interpreter that is named."""

from dpstream.pipelines.commands.main import main

main()
