"""Entry of the flex template (FLEX_TEMPLATE_PYTHON_PY_FILE): see `pipelines.operating.launch`."""

import sys

from dpstream.pipelines.operating.launch import main

if __name__ == "__main__":
    sys.exit(main())
