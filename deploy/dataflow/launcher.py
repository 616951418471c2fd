"""Entry of the flex template (FLEX_TEMPLATE_PYTHON_PY_FILE): see `pipelines.operate.launch`."""

import sys

from dpstream.pipelines.operate.launch import main

if __name__ == "__main__":
    sys.exit(main())
