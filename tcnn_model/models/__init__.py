"""Model families of the papers, in timm's registry: T-ResNet and PatchConvNet."""
