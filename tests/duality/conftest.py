"""One thread and a fixed hypothesis profile: the problems are tiny, and a slow machine must not make a test flaky."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("duality", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("duality")


@pytest.fixture(autouse=True)
def _single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
