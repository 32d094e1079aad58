"""A PyTorch trainer library, independent of any orchestrator. Importing it does not import torch.

`__init__.pyi` lists every public name by its module, which is imported when the name is first used.
"""

from trainer_lib.base.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
