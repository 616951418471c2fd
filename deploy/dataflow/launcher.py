"""Entry of the flex templates (FLEX_TEMPLATE_PYTHON_PY_FILE): of streams; where the parameter
``ticket`` is given, of a session's batches; where ``out_folder`` alone is, of tables.  See
`pipelines.launch.stream`, `launch_batch` and `launch_tables` there."""

import sys

from dpstream.pipelines.launch.stream import main

if __name__ == "__main__":
    if any(argument.startswith("--ticket") for argument in sys.argv):
        from dpstream.pipelines.launch.batch import main as batch

        sys.exit(batch())
    if any(argument.startswith("--out_folder") for argument in sys.argv):
        from dpstream.pipelines.launch.census import main as tables

        sys.exit(tables())
    sys.exit(main())
