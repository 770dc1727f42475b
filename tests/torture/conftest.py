import random

import box
import pytest


@pytest.fixture
def empty(tmp_path):
    """A box for the commands of a test."""
    (tmp_path / "box").mkdir()
    return box.Box(random.Random(1), tmp_path / "box", tmp_path, isolated=False)
