"""What no attention call shows of the layers of timm, transformers, torchvision and torch: a record for each class."""
