"""Plain torch on one process, which steps on ranks are compared with."""

import torch


def trained_by_torch(model, batches, max_norm=None):
    """The losses, and the parameters after all steps, of SGD with momentum. `max_norm`: to which gradients are
    clipped.
    """
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.detach() for k, v in model.named_parameters()}
