"""Who sends what to whom: seeded routings, and routings recorded from a model."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ncclep_py.bench.case import Case

__all__ = ["ROUTINGS", "Recorder", "check_routing", "expert_load", "record", "recorded_weights", "routing", "traffic"]

ROUTINGS = {
    "uniform": "distinct experts, all alike",
    "zipf": "distinct experts by Zipf's law (exponent 1), in an order all ranks share",
    "one_rank": "distinct experts of rank 0 only",
    "group_limited": "DeepSeek-V3's gating on random scores: the best 4 of 8 groups by their two best scores, then the best experts of these",
}
GROUPS, CHOSEN_GROUPS = 8, 4


def routing(case: Case, rank: int) -> torch.Tensor:
    """Expert ids ``[T, K]`` int64 of one rank; the same for every implementation and machine."""
    return _seeded(case, rank).clone() if case.routing in ROUTINGS else _recorded(Path(case.routing), case, rank)


def check_routing(routing: str, ranks: int, experts: int, topk: int) -> None:
    """``ValueError`` for a routing that is none, or that does not fit."""
    if routing == "one_rank" and topk > experts // ranks:
        raise ValueError(f"routing one_rank needs topk to be at most the {experts // ranks} experts of a rank, got {topk}")
    if routing == "group_limited":
        _check_groups(experts, topk)
    if routing not in ROUTINGS:
        _check_recorded(Path(routing), _held(Path(routing)), experts, topk)


@functools.lru_cache(maxsize=64)
def _seeded(case: Case, rank: int) -> torch.Tensor:
    import torch

    from ncclep_py.testing import random_routing

    tokens, topk, experts = case.tokens, case.topk, case.experts
    if case.routing in ROUTINGS:
        check_routing(case.routing, case.ranks, experts, topk)
    if case.routing == "one_rank":
        experts = case.local_experts
    if case.routing in ("uniform", "one_rank"):
        if tokens <= 4096 and case.algorithm == "ll":
            return random_routing(rank, tokens, topk, experts)
        return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank + 1)).topk(topk, 1).indices
    if case.routing == "zipf":
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(7))
        noise = _gumbel(torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank + 99)))
        return order[(noise - torch.log(torch.arange(1, experts + 1).float())).topk(topk, 1).indices]
    return _group_limited(torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank + 5)), topk)


def _check_groups(experts: int, topk: int) -> None:
    if experts % GROUPS or experts // GROUPS < 2 or topk > CHOSEN_GROUPS * experts // GROUPS:
        raise ValueError(f"routing group_limited needs experts in {GROUPS} groups of at least 2 and topk within {CHOSEN_GROUPS} of them, "
                         f"got {experts} experts and topk {topk}")


def _gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel noise: the top k of it plus log-weights are k draws without replacement."""
    return -(-uniform.clamp(1e-9, 1 - 1e-7).log()).log()


def _group_limited(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """The gating of the DeepSeek-V3 report (arXiv 2412.19437, 2.1.2), without its bias."""
    tokens, experts = scores.shape
    by_group = scores.view(tokens, GROUPS, -1)
    chosen = by_group.topk(2, 2).values.sum(2).topk(CHOSEN_GROUPS, 1).indices
    open_to = by_group.new_full((tokens, GROUPS), float("-inf")).scatter(1, chosen, 0.0)
    return (by_group + open_to[:, :, None]).view(tokens, experts).topk(topk, 1).indices


def record(path: str | Path, topk_idx: torch.Tensor, num_experts: int, *, topk_weights: torch.Tensor | None = None) -> None:
    """Keep what a model's router chose, for ``--routing FILE``.

    Args:
        path: a ``.pt`` file (a dict of tensors) or ``.npz`` (numpy arrays), with ``topk_idx``, ``num_experts`` and maybe ``topk_weights``.
        topk_idx: ``[N, K]`` ids in [0, num_experts) or -1, in the order in which the model saw its tokens; an expert once per token.
        num_experts: E.
        topk_weights: ``[N, K]`` float32 router weights.
    """
    import torch

    path = Path(path)
    if path.suffix not in (".pt", ".npz"):
        raise ValueError(f"path must end in .pt or .npz, got {path}")
    if topk_idx.ndim != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_idx must be [N, K] int32 or int64, got {list(topk_idx.shape)} {topk_idx.dtype}")
    if topk_idx.numel() and (int(topk_idx.max()) >= num_experts or int(topk_idx.min()) < -1):
        raise ValueError(f"topk_idx must hold -1 or ids in [0, {num_experts}), got {int(topk_idx.min())} to {int(topk_idx.max())}")
    if topk_weights is not None and (topk_weights.shape != topk_idx.shape or topk_weights.dtype != torch.float32):
        raise ValueError(f"topk_weights must be {list(topk_idx.shape)} float32, got {list(topk_weights.shape)} {topk_weights.dtype}")
    ids = topk_idx.detach().cpu()
    ordered = ids.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        token, column = twice[0].tolist()
        raise ValueError(f"topk_idx must name an expert once per token, token {token} has {int(ordered[token, column])} twice")
    held: dict[str, Any] = {"topk_idx": ids} | ({} if topk_weights is None else {"topk_weights": topk_weights.detach().cpu()})
    if path.suffix == ".pt":
        torch.save({**held, "num_experts": num_experts}, path)
        return
    import numpy as np

    with path.open("wb") as file:
        np.savez_compressed(file, num_experts=num_experts, **{name: tensor.numpy() for name, tensor in held.items()})


class Recorder:
    """Collects a router's choices over many calls: ``add`` after each, ``save`` at the end.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.ids: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def add(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None) -> None:
        """One call's ids ``[T, K]`` and maybe weights; copied to the CPU."""
        if self.ids and (topk_weights is None) == bool(self.weights):
            raise ValueError("topk_weights must be given in every call of add or in none")
        self.ids.append(topk_idx.detach().cpu().clone())
        if topk_weights is not None:
            self.weights.append(topk_weights.detach().cpu().clone())

    def save(self, path: str | Path) -> None:
        """All of it into one file, see `record`."""
        import torch

        if not self.ids:
            raise ValueError("nothing was recorded: add was never called")
        record(path, torch.cat(self.ids), self.num_experts, topk_weights=torch.cat(self.weights) if self.weights else None)


def _held(path: Path) -> dict[str, Any]:
    """What is in a recorded file, as tensors."""
    import torch

    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                held: Any = {name: torch.from_numpy(arrays[name]) if arrays[name].ndim else int(arrays[name]) for name in arrays.files}
        else:
            held = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as e:
        why = (str(e).strip() or type(e).__name__).splitlines()[0]   # torch's have paragraphs
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)} or a file of bench.routing.record, got {path}: {why}") from e
    if not isinstance(held, dict) or not {"topk_idx", "num_experts"} <= held.keys():
        raise ValueError(f"{path} must hold topk_idx and num_experts (bench.routing.record writes them)")
    return held


def _check_recorded(path: Path, held: dict[str, Any], experts: int, topk: int) -> None:
    ids = held["topk_idx"]
    if (held["num_experts"], ids.shape[1]) != (experts, topk) or not len(ids):
        raise ValueError(f"{path} holds {len(ids)} tokens with {ids.shape[1]} of {held['num_experts']} experts, the case has {topk} of {experts}")


def _part(case: Case, rank: int, tokens: int) -> torch.Tensor:
    """Which of `tokens` recorded tokens are a rank's: consecutive ones, from the start again where the recording ends."""
    import torch

    return (torch.arange(case.tokens) + rank * case.tokens) % tokens


def _recorded(path: Path, case: Case, rank: int) -> torch.Tensor:
    import torch

    held = _held(path)
    _check_recorded(path, held, case.experts, case.topk)
    ids = held["topk_idx"].to(torch.int64)
    return ids[_part(case, rank, len(ids))]


def recorded_weights(case: Case, rank: int) -> torch.Tensor | None:
    """A rank's router weights ``[T, K]`` float32 of a recorded routing; None where none were recorded."""
    weights = None if case.routing in ROUTINGS else _held(Path(case.routing)).get("topk_weights")
    return None if weights is None else weights[_part(case, rank, len(weights))]


def expert_load(case: Case) -> list[int]:
    """Rows each expert receives from all ranks, ``[E]``."""
    import torch

    ids = torch.cat([routing(case, r).flatten() for r in range(case.ranks)])
    return torch.bincount(ids[ids >= 0], minlength=case.experts).tolist()


def traffic(case: Case) -> list[list[int]]:
    """Distinct tokens each rank (row) sends to each rank (column), ``[R][R]``."""
    import torch

    rows = []
    for rank in range(case.ranks):
        ids = routing(case, rank)
        hosts = torch.where(ids >= 0, ids // case.local_experts, -1)
        rows.append([int((hosts == p).any(1).sum()) for p in range(case.ranks)])
    return rows
