"""Entry of the flex template (FLEX_TEMPLATE_PYTHON_PY_FILE); see `pipelines.launch.launcher`."""

import sys

from dpstream.pipelines.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
