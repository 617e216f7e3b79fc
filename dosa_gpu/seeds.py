"""Seeds of a row's own, for a row that sees too few keys of its group's list. Their choice changes speed only."""

from __future__ import annotations

import torch

from dosa_ref.spec import PAD_INDEX


def own_seeds(ks: torch.Tensor, ke: torch.Tensor, budget: int) -> torch.Tensor:
    """For each row the newest half of ``budget`` keys and an even sample of those before.

    Args:
        ks, ke: ``[rows]`` int32.
        budget: seeds per row.

    Returns:
        ``[rows, budget]`` int32, distinct visible keys, -1 elsewhere. A row whose window is no longer than the budget
        gets all its keys.

    Exactness: heuristic; distinctness is exact.
    """
    start = ks.long().unsqueeze(1)
    end = torch.maximum(ke.long().unsqueeze(1), start)
    length = end - start
    place = torch.arange(budget, device=ks.device)
    newest = budget - budget // 2
    older = (place - newest).clamp(min=0) * (length - newest).clamp(min=0) // max(budget // 2, 1)
    seed = torch.where(place < newest, end - 1 - place, start + older)
    seed = torch.where(length <= budget, torch.where(place < length, start + place, PAD_INDEX), seed)
    return seed.to(torch.int32)
