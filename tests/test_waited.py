"""Time waited for each rank: counted for who is slow, in every group of one team that asks for it, and no instruction where nobody does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ncclep_py import Algorithm, EpClosedError, EpError, EpRefusedError, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.config import CombineConfig, DispatchConfig
from ncclep_py.kernels.ll_combine import make_ll_combine
from ncclep_py.kernels.ll_dispatch import make_ll_dispatch
from ncclep_py.simulator import Faults
from ncclep_py.testing import random_routing, weights_like

RANKS, TOKENS = 3, 5
COMMON = dict(num_experts=6, max_dispatch_tokens_per_rank=TOKENS, hidden=16, num_topk=2)
WAYS: dict[str, tuple[dict[str, Any], Layout]] = {
    "LL expert major": ({}, Layout.EXPERT_MAJOR),
    "LL rank major": ({}, Layout.RANK_MAJOR),
    "LL staged": ({"num_staging_slots": 2}, Layout.EXPERT_MAJOR),
    "LL staged rank major": ({"num_staging_slots": 2}, Layout.RANK_MAJOR),
    "LL masked": ({"enable_mask": True}, Layout.EXPERT_MAJOR),
    "HT flat": ({"algorithm": Algorithm.HIGH_THROUGHPUT}, Layout.FLAT),
    "HT expert major": ({"algorithm": Algorithm.HIGH_THROUGHPUT}, Layout.EXPERT_MAJOR),
}


def rounds(group: Group, layout: Layout, steps: int = 4) -> list[torch.Tensor]:
    """Dispatch and combine, a few times; what came back."""
    comm, out = group.comm, []
    ids = random_routing(comm.rank, TOKENS, 2, 6, seed=comm.rank)
    x, weights = torch.full((TOKENS, 16), comm.rank + 1.0, dtype=torch.bfloat16), weights_like(ids)
    staged = group.config.num_staging_slots > 0
    sends_weights = group.config.algorithm is Algorithm.HIGH_THROUGHPUT or layout is Layout.RANK_MAJOR
    with group.create_handle(layout, ids) as handle:
        for _ in range(steps):
            received = handle.dispatch(x, topk_weights=weights if sends_weights else None, config=DispatchConfig(send_only=staged))
            if staged:
                handle.complete()
            combined = handle.combine(received.tokens, topk_weights=None if sends_weights else weights, config=CombineConfig(send_only=staged))
            if staged:
                handle.complete()
            out.append(combined.clone())
    return out


def run(way: str, slow: int | None = 1, seed: int = 1, **more: Any) -> list[Any]:
    """Every rank's waits and results where rank `slow` runs when nobody else can."""
    config, layout = WAYS[way]

    def program(comm: Any) -> Any:
        with Group.create(comm, GroupConfig(**COMMON, **({"count_waits": True} | config | more))) as group:
            group.waited_ns(reset=True) if group.config.count_waits else None
            out = rounds(group, layout)
            waited = group.waited_ns(reset=True) if group.config.count_waits else None
            assert waited is None or not group.waited_ns().any()
            return waited, out

    with LocalWorld(RANKS, "sim", seed=seed) as world:
        fair = world.simulator.policy.pick
        if slow is not None:
            world.simulator.policy.pick = lambda ready, step: fair([t for t in ready if t.rank != slow] or ready, step)
        return world.run(program)


@pytest.mark.parametrize("way", WAYS)
def test_the_slow_rank_is_waited_for(way: str) -> None:
    waited = [w for w, _ in run(way)]
    assert all(w.shape == (RANKS,) and w.dtype == torch.int64 for w in waited)
    assert all(int(waited[rank][1]) > 2 * int(waited[rank][2 - rank]) for rank in (0, 2)), waited
    assert int(waited[1].max()) < min(int(waited[0][1]), int(waited[2][1])) // 3, waited


@pytest.mark.parametrize("way", ["LL expert major", "LL staged", "HT flat"])
def test_counting_changes_neither_schedule_nor_result(way: str) -> None:
    def seen(count: bool) -> Any:
        config, layout = WAYS[way]

        def program(comm: Any) -> Any:
            with Group.create(comm, GroupConfig(**COMMON, **config, count_waits=count)) as group:
                return rounds(group, layout)

        with LocalWorld(RANKS, "sim", seed=5) as world:
            return world.run(program), world.simulator.scheduler.step

    (with_it, steps), (without, plain_steps) = seen(True), seen(False)
    assert steps == plain_steps and torch.equal(torch.stack([torch.stack(o) for o in with_it]), torch.stack([torch.stack(o) for o in without]))


@pytest.mark.parametrize("way", ["LL expert major", "LL rank major", "HT flat", "HT expert major"])
def test_rows_that_come_late_are_waited_for(way: str) -> None:
    """All come at once, and rank 1 has more to send: what is waited for is ARRIVED."""
    config, layout = WAYS[way]

    def program(comm: Any) -> torch.Tensor:
        with Group.create(comm, GroupConfig(**COMMON | {"max_dispatch_tokens_per_rank": 60}, **config, count_waits=True)) as group:
            tokens = 60 if comm.rank == 1 else 1
            ids = random_routing(comm.rank, tokens, 2, 6, seed=1)
            with group.create_handle(layout, ids) as handle:
                comm.barrier()
                group.waited_ns(reset=True)
                weights = None if way == "LL expert major" else torch.ones(tokens, 2)
                handle.dispatch(torch.ones(tokens, 16, dtype=torch.bfloat16), topk_weights=weights)
            return group.waited_ns()

    with LocalWorld(RANKS, "sim", seed=2) as world:
        waited = world.run(program)
    assert int(waited[0][1]) > 2 * int(waited[0][2]) and int(waited[2][1]) > 2 * int(waited[2][0]), waited


def test_without_it_a_sentence_says_how_to_have_it() -> None:
    def program(comm: Any) -> None:
        with Group.create(comm, GroupConfig(**COMMON)) as group:
            with pytest.raises(EpError, match=r"^waited_ns\(\) needs kernels that count how long they wait: create the group with GroupConfig"):
                group.waited_ns()
        with pytest.raises(EpClosedError, match="cannot waited_ns: the group is closed"):
            group.waited_ns()

    with LocalWorld(2, "sim") as world:
        world.run(program)


def test_one_rank_may_count_alone() -> None:
    def program(comm: Any) -> Any:
        with Group.create(comm, GroupConfig(**COMMON, count_waits=comm.rank == 0)) as group:
            rounds(group, Layout.EXPERT_MAJOR, 1)
            return group.waited_ns().tolist() if comm.rank == 0 else None

    with LocalWorld(2, "sim") as world:
        mine, theirs = world.run(program)
    assert any(mine) and theirs is None


def test_a_rank_that_never_came_is_not_counted() -> None:
    def program(comm: Any) -> Any:
        group = Group.create(comm, GroupConfig(**COMMON, count_waits=True, timeout_ns=1000))
        handle = group.create_handle(Layout.EXPERT_MAJOR, torch.zeros(1, 2, dtype=torch.int64))
        if comm.rank == 1:
            comm.sit_out()
            return None
        handle.dispatch(torch.zeros(1, 16, dtype=torch.bfloat16))
        with pytest.raises(EpError, match="rank 1 did not come"):
            group.check()
        return group.waited_ns().tolist()

    with LocalWorld(2, "sim", faults=Faults(timeouts=True)) as world:
        assert world.run(program)[0][1] == 0


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_several_teams_are_refused_on_every_rank(algorithm: Algorithm) -> None:
    def program(comm: Any) -> str:
        try:
            Group.create(comm, GroupConfig(**COMMON | {"num_experts": 4}, algorithm=algorithm, count_waits=comm.rank == 2))
        except (ValueError, EpRefusedError) as e:
            return f"{type(e).__name__} {e}"
        return "created"

    with LocalWorld(4, "sim", team_size=2) as world:
        told = world.run(program)
    why = "count_waits must be False for ranks in several teams, whose waits are not counted; there are 2 teams"
    assert told[2] == f"ValueError {why}" and set(told[:2] + told[3:]) == {f"EpRefusedError rank 2 refused to create the group: {why}"}


def test_count_waits_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="^count_waits must be a bool, got int: 1$"):
        GroupConfig(**COMMON, count_waits=1)   # type: ignore[arg-type]


# ---- compiled ------------------------------------------------------------------------------------------------------------
SAMPLE = ("ll_dispatch", "ll_combine", "ll_rank_major_dispatch", "ll_nvfp4_combine", "ll_combine_send", "ll_combine_complete", "ht_prepare",
          "ht_dispatch", "ht_combine")


def without_counters(source: str) -> str:
    """The device sources with all that counts deleted."""
    source = re.sub(r"INLINE void add_at.*\n", "", source)
    source = re.sub(r"// Where the nanoseconds waited for each rank.*?\n}\n", "", source, count=1, flags=re.DOTALL)
    source = re.sub(r"#ifdef EP_WAITS\n.*?#endif\n", "", source, flags=re.DOTALL)
    source = re.sub(r", waits_at\(fail, \w+\)|, u64 waits = 0|,\s+waits(?=\);)", "", source)
    assert "waits" not in re.sub(r"//.*", "", source).replace("ends_wait", "")
    return source


@pytest.fixture(scope="module")
def device() -> dict[str, bytes]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    pytest.importorskip("numba.cuda", reason="needs an extra cu12 or cu13")
    from ncclep_py import toolchain

    source = toolchain.device_source()
    return {"off": toolchain.compile_device("sm_90"), "on": toolchain.compile_device("sm_90", waits=True),
            "deleted": toolchain.compile_device("sm_90", source=without_counters(source))}


@pytest.mark.parametrize("name", SAMPLE)
def test_counters_change_nothing_unless_compiled_in(name: str, device: dict[str, bytes]) -> None:
    from test_trace_compile import machine_code, shape_of

    from ncclep_py import cubin, toolchain
    from ncclep_py.compiled import KERNELS

    factory, parameters = KERNELS[name]
    kernel = toolchain.kernel_ltoir(factory, shape_of(name), parameters, "sm_90")
    built = {how: toolchain.link([kernel, code], "sm_90") for how, code in device.items()}
    assert machine_code(built["off"]) == machine_code(built["deleted"]) != machine_code(built["on"])
    assert cubin.resources(built["on"])["stack"] == 0 and cubin.resources(built["on"])["registers"] <= 128


def test_device_functions_that_count(device: dict[str, bytes]) -> None:
    from test_trace_compile import bodies

    from ncclep_py import toolchain

    off, on = (bodies(toolchain.compile_device("sm_90", "ptx", waits=waits).decode()) for waits in (False, True))
    for name in ("wait_heads", "wait_arrived"):
        assert set(re.findall(r"(?:atom|red)[\w.]*\.add\.u64", on[name])) == {"red.relaxed.gpu.global.add.u64"}
        assert not re.search(r"(atom|red)[\w.]*\.add\.u64", off[name])
        for kind in (r"bar\.[\w.]+", r"fence[\w.]+", r"ld\.acquire[\w.]+", r"ld\.relaxed[\w.]+"):
            assert set(re.findall(kind, on[name])) == set(re.findall(kind, off[name])), kind
    assert {name for name in off if off[name] != on[name]} == {"wait_heads", "wait_arrived"}
    assert "%ctaid" in on["wait_heads"] and "%ctaid" not in off["wait_heads"] + on["wait_arrived"]   # of all blocks one counts


def test_the_key_of_a_kernel_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    from ncclep_py.compiled import KernelSpec, fingerprint
    from ncclep_py.kernels.shape import KernelShape

    spec = KernelSpec("ll_combine", KernelShape.build(GroupConfig(**COMMON), 2, 2, 8, Layout.EXPERT_MAJOR))
    keys: list[Callable[[], dict[str, str]]] = [lambda: fingerprint(spec, "sm_90"), lambda: fingerprint(spec, "sm_90", waits=True)]
    assert {k for k in keys[0]() if keys[0]()[k] != keys[1]()[k]} == {"waits"}


# ---- the CUDA code on the CPU ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("numba", reason="needs an extra cu12 or cu13")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    from native.machine import Machine

    return Machine(tmp_path_factory.mktemp("native"), more=("-DEP_WAITS",))


def test_cuda_operations_count(machine: Any) -> None:
    """Rank 1 has more to send; rank 2 counts nothing. A step of any thread is a nanosecond."""
    from ncclep_py.memory_map import WAITS
    from ncclep_py.simulator import Simulator
    from ncclep_py.simulator.program import Program

    sim = Simulator(3, 1, "fair", blocks=2)
    sim.poison = False
    p = Program(sim, GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=40, hidden=16, num_topk=2), (1, 40, 1))
    counters = [torch.zeros(4, dtype=torch.int64) for _ in range(3)]   # the last word is nobody's
    for rank in (0, 1):
        for offset in WAITS:
            p.local[rank][p.shape.local.fail + offset:][:8].view("u8")[0] = counters[rank].data_ptr()
    for _ in range(2):
        p.combine(p.dispatch())
    machine.run(sim, 3, {"dispatch": make_ll_dispatch, "combine": make_ll_combine}, [p.shape] * 3)
    for done in p.combined:
        assert all(torch.equal(out, expected) for out, expected in zip(done.out, done.expected, strict=True))
    assert int(counters[0][1]) > 5 * int(counters[0][2]) and int(counters[0][1]) > int(counters[1].max()), counters
    assert not counters[2].any() and not any(int(c[3]) for c in counters)
