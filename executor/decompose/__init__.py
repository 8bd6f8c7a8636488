"""From a model to layers: export, name the layers, split, check the whole against the cut."""

from executor.decompose.cut import decompose
from executor.decompose.layers import Boundary, DecomposeError, Decomposition, Layer

__all__ = ["Boundary", "DecomposeError", "Decomposition", "Layer", "decompose"]
