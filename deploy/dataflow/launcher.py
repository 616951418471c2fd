"""Entry of the flex templates (FLEX_TEMPLATE_PYTHON_PY_FILE): of streams; where the parameter
``ticket`` is given, of a session's batches; where ``out_folder`` alone is, of tables.  See
`pipelines.operate.launch`, `launch_batch` and `launch_tables` there."""

import sys

from dpstream.pipelines.operate.launch import main

if __name__ == "__main__":
    if any(argument.startswith("--ticket") for argument in sys.argv):
        from dpstream.pipelines.operate.launch_batch import main as batch

        sys.exit(batch())
    if any(argument.startswith("--out_folder") for argument in sys.argv):
        from dpstream.pipelines.operate.launch_tables import main as tables

        sys.exit(tables())
    sys.exit(main())
