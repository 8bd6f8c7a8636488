"""What a cut changes of a model or leaves out, said in a line each."""

from __future__ import annotations

from torch import nn


def switch_off_checkpointing(model: nn.Module) -> list[str]:
    """A model's own gradient checkpointing would recompute within what the schedule recomputes."""
    switched = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True
    ]
    for module in switched:
        vars(module)["gradient_checkpointing"] = False
    if not switched:
        return []
    return [
        f"gradient checkpointing of {type(switched[0]).__name__} is switched off: the schedule says what is recomputed"
    ]


def lost_hooks(model: nn.Module) -> list[str]:
    """Hooks of the user's: layers are functions of tensors, and nobody calls the modules that hooks hang on."""
    forward, backward = [], []
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            forward.append(name or type(module).__name__)
        if module._backward_hooks or module._backward_pre_hooks:
            backward.append(name or type(module).__name__)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            backward.append(name)
    found = []
    if forward:
        found.append(
            f"forward hooks of {_some(forward)} are traced once: what they do to tensors stays, anything else is lost"
        )
    if backward:
        found.append(f"backward hooks of {_some(backward)} are not called")
    return found


def _some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
