import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"

sys.path.append(str(SCRIPTS))  # for `import bench`
