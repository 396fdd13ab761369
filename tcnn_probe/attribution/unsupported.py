"""A model without what a method needs."""

__all__ = ["WITHOUT_CLASS_TOKEN", "UnsupportedMethodError"]

WITHOUT_CLASS_TOKEN = "'gradcam', 'integrated_gradients', 'input_x_gradient' and 'occlusion' need no class token"


class UnsupportedMethodError(ValueError):
    """The model lacks what the method needs; another method may do."""
