"""Options of the group `optim`: adding an optimizer is one class here and one YAML in conf/optim/."""

from trainer.training.optimizers import adam, from_library, matrices  # noqa: F401  (registers the options)
from trainer.training.optimizers.optim import Optim

__all__ = ["Optim"]
