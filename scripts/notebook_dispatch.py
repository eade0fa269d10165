# %% [markdown]
# # A dispatch and a combine, step by step
#
# Four ranks, eight experts, six tokens each; in the simulator, so it runs anywhere. Open it in an editor that knows percent cells (VS Code, PyCharm,
# Jupyter with jupytext), or run it as a script: `python3 scripts/notebook_dispatch.py`. Pictures are written beside it into `FOLDER`.

# %%
import os
import pathlib
import tempfile
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld
from ncclep_py.timeline import operations

RANKS, EXPERTS, TOKENS, TOPK, HIDDEN = 4, 8, 6, 2, 16
FOLDER = pathlib.Path(os.environ.get("NOTEBOOK_FOLDER") or tempfile.mkdtemp())

# %% [markdown]
# ## 1. Who wants whom
#
# A router gives every token two experts. Rank r hosts experts 2r and 2r + 1. The picture: tokens from each rank (row) to each expert (column).

# %%
torch.manual_seed(0)
ids = [torch.rand(TOKENS, EXPERTS).topk(TOPK, 1).indices for _ in range(RANKS)]
counts = torch.stack([torch.bincount(i.flatten(), minlength=EXPERTS) for i in ids])

figure, axes = plt.subplots(figsize=(6, 3))
axes.imshow(counts.tolist(), cmap="Greys", vmin=0)
for rank in range(RANKS):
    for expert in range(EXPERTS):
        axes.text(expert, rank, int(counts[rank, expert]), ha="center", va="center", color="white" if counts[rank, expert] > 2 else "black")
axes.set(xlabel="expert", ylabel="source rank", title="rows each rank sends to each expert", xticks=range(EXPERTS), yticks=range(RANKS))
figure.savefig(FOLDER / "1-counts.png", dpi=80)
assert counts.sum() == RANKS * TOKENS * TOPK

# %% [markdown]
# ## 2. Where every row goes
#
# All ranks tell each other these counts. Now each of them can compute, without asking, where its rows stand in the plane of an expert: after the rows
# of all lower ranks. That is a running sum down each column.

# %%
first_row = counts.cumsum(0) - counts
print("first row of each rank (row) in the plane of each expert (column):\n", first_row)

# %% [markdown]
# ## 3. Dispatch
#
# Every rank stores its rows straight into their final places at the experts' ranks. Rows carry their source in their first two numbers.


# %%
def program(comm: Any) -> tuple:
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, dtype=torch.float32, trace=True)
    with Group.create(comm, config) as group:
        tokens = torch.zeros(TOKENS, HIDDEN)
        tokens[:, 0], tokens[:, 1] = comm.rank, torch.arange(TOKENS)
        handle = group.create_handle(Layout.EXPERT_MAJOR, ids[comm.rank])
        received = handle.dispatch(tokens)
        planes, numbers = received.tokens.clone(), received.layout_info.expert_counters.clone()
        received.tokens.mul_(2)                                                     # the experts
        combined = handle.combine(received.tokens, topk_weights=torch.full((TOKENS, TOPK), 0.5))
        group.check()
        return planes, numbers, tokens, combined, group.timeline()


with LocalWorld(RANKS, "sim") as world:
    results = world.run(program)

for rank, (planes, numbers, *_) in enumerate(results):
    for local in range(EXPERTS // RANKS):
        expert = rank * EXPERTS // RANKS + local
        sources = planes[local, : numbers[local], 0].int().tolist()
        print(f"expert {expert} on rank {rank} received rows of ranks {sources}")
        assert sources == sorted(sources) and len(sources) == int(counts[:, expert].sum())
        for source in range(RANKS):
            assert sources.count(source) == int(counts[source, expert])

# %% [markdown]
# ## 4. Who waited for whom
#
# Kernels note when a phase begins (of the simulator: steps of its scheduler, an order and no time). A bar per block; light bars are waiting.

# %%
figure, axes = plt.subplots(figsize=(9, 4))
labels = []
for rank, (*_, events) in enumerate(results):
    for operation in operations(events)[rank][:2]:
        for event in operation.events:
            row = rank * 2 + event.block
            shade = "0.85" if event.waits else "0.3"
            axes.barh(row, event.end_ns - event.begin_ns, left=event.begin_ns, color=shade, edgecolor="black", linewidth=0.3)
    labels += [f"rank {rank} block {block}" for block in range(2)]
axes.set(yticks=range(len(labels)), yticklabels=labels, xlabel="scheduler steps x 1000", title="a dispatch and a combine (simulated; light: waits)")
axes.invert_yaxis()
figure.tight_layout()
figure.savefig(FOLDER / "4-timeline.png", dpi=80)
assert all(events for *_, events in results)

# %% [markdown]
# ## 5. Combine
#
# Each rank pulls the rows of its tokens and adds them with the router's weights. Experts doubled, weights are a half each: twice the token comes
# back.

# %%
for _, _, tokens, combined, _ in results:
    assert torch.equal(combined, 2 * tokens)
print("every token came back, doubled; pictures are in", FOLDER)
