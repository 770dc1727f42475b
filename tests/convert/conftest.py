import pytest
from conversions import in_forks


@pytest.fixture(autouse=True)
def forked(pytorch):
    with in_forks(pytorch):
        yield
