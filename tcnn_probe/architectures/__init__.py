"""Facts about layers of timm, transformers and torchvision that no attention call shows: a record for each class."""
