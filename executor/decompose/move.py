"""Bring the code of layers to a device: export writes down where tensors are made, and where constants lie."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_map

from executor.decompose.autocast import is_entering
from executor.decompose.layers import Decomposition


def move_code(decomposition: Decomposition, device: torch.device) -> None:
    """From now on the layers make their tensors on that device. Parameters and inputs are the caller's."""
    for layer in decomposition.layers:
        for node in layer.code.graph.nodes:
            if node.op == "call_function":
                node.args = _moved(node.args, device)
                node.kwargs = _moved(node.kwargs, device)
            if is_entering(node) and node.args[0] == "cpu":
                node.args = (device.type, *node.args[1:])
        layer.code.to(device)
        layer.code.recompile()


def _moved(arguments: fx.node.Argument, device: torch.device) -> fx.node.Argument:
    return tree_map(lambda value: device if isinstance(value, torch.device) else value, arguments)  # type: ignore[no-any-return]
