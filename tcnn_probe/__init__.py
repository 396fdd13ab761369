"""See, while a vision model trains, which of its heads convolve and which attend to content.

Every public name is listed in ``__init__.pyi``, beside this file, and imported when it is first used: reading a
recording needs neither torch nor timm.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
