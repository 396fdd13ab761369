import pytest
import torch


@pytest.fixture(autouse=True)
def same_images_each_time() -> None:
    torch.manual_seed(11)
