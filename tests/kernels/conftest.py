"""Put this folder's helpers on the path: tests have no packages (see pyproject's import mode)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
