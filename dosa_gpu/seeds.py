"""Seeds: keys likely to win, from which each row's ``tau`` is had. Their choice changes speed only.

Neighbouring rows share winners, so rows go in groups that share one list: winners of pilot rows near the group, the
newest keys, and an even sample. A row that sees too few keys of its group's list gets a list of its own.
"""

from __future__ import annotations

import torch

from dosa_ref.spec import PAD_INDEX


def group_seeds(
    winners: torch.Tensor, pilot: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, near: int, newest: int, spread: int
) -> torch.Tensor:
    """One list of distinct keys per group of rows.

    Args:
        winners: ``[pilots, n]`` int32 key columns, distinct within a row, negative where there is none.
        pilot: ``[groups]`` int64, the first of the ``near`` pilots whose winners a group takes.
        ks, ke: ``[groups]`` int64, smallest start and largest end of the group's windows.
        near: pilots per group.
        newest: keys just before ``ke``.
        spread: keys spread evenly over the window.

    Returns:
        ``[groups, near * n + newest + spread]`` int32, ascending and distinct but for places that hold -1.

    Exactness: heuristic; distinctness is exact.
    """
    groups = len(ks)
    taken = winners[(pilot[:, None] + torch.arange(near, device=ks.device)).clamp(max=len(winners) - 1)]
    last = ke[:, None] - 1 - torch.arange(newest, device=ks.device)
    even = ks[:, None] + torch.arange(spread, device=ks.device) * (ke - ks)[:, None] // max(spread, 1)
    visible = torch.cat([last, even], dim=1)
    visible = torch.where((visible >= ks[:, None]) & (visible < ke[:, None]), visible, PAD_INDEX)
    found = torch.cat([taken.reshape(groups, -1), visible.to(torch.int32)], dim=1).sort(dim=1).values
    again = torch.zeros_like(found, dtype=torch.bool)
    again[:, 1:] = found[:, 1:] == found[:, :-1]
    return torch.where(again, PAD_INDEX, found)


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
