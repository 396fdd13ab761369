import pytest
import torch


@pytest.fixture(autouse=True)
def same_images_each_time() -> None:
    # Models and images of this folder are drawn at random, many from the global generator.
    torch.manual_seed(11)
