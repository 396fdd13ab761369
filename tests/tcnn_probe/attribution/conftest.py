import pytest
import torch


@pytest.fixture(autouse=True)
def same_images_each_time() -> None:
    # Tests in this folder draw models and images at random, many of them from the global generator.
    torch.manual_seed(11)
