"""One thread for every test, and the same examples in every run. To look further: pytest --hypothesis-profile deep"""

import gc
import os

import pytest
from hypothesis import settings

# first imported here, by Python: pytest's own import of a subpackage would bind `oomguard.estimate` to it
import oomguard  # noqa: F401

# set here, before anything imports torch: most tests never do, so torch.set_num_threads(1) would cost them the import
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=1000, deadline=None, database=None)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def empty_card(request: pytest.FixtureRequest) -> None:
    """A test on a card finds nothing there that the one before it has left."""
    if request.node.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()
