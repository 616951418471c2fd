"""Entry of the flex templates (FLEX_TEMPLATE_PYTHON_PY_FILE): of streams, and, where the parameter
``out_folder`` is given, of tables; see `pipelines.operate.launch` and `launch_tables` there."""

import sys

from dpstream.pipelines.operate.launch import main

if __name__ == "__main__":
    if any(argument.startswith("--out_folder") for argument in sys.argv):
        from dpstream.pipelines.operate.launch_tables import main as tables

        sys.exit(tables())
    sys.exit(main())
