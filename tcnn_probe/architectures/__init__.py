"""Facts about layers of timm, transformers and torchvision
that attention calls do not show, recorded by class.
"""
