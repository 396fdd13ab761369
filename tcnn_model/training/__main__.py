"""``python -m tcnn_model.training``: the command ``tcnn-finetune``."""

import sys

from tcnn_model.training.command import main

sys.exit(main())
