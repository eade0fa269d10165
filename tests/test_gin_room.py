"""Room in the network's queues (``kernels/gin_room.cu``), run on the CPU under many schedules: nothing issued has to wait in the queue, and nobody
waits for a queue that does not move any more. That its accesses have the strength they name is seen in ``test_net_ptx``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ncclep_py import toolchain

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

DEADLINE = 3000   # steps of the scheduler
INLINE = {"u64 load_relaxed": "yield(); return *p;", "u64 load_acquire": "yield(); return *p;", "void store_relaxed": "yield(); *p = v;",
          "u64 take_number": "yield(); return (*p)++;", "void raise_to": "yield(); if (*p < v) *p = v;", "void count_after": "yield(); ++*p;",
          "void add_to": "yield(); *p += v;",
          "u64 nanoseconds": "return steps;"}
FIBERS = """
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <deque>
#include <vector>
typedef unsigned long long u64;
struct Fiber { ucontext_t context; std::vector<char> stack; void (*run)(); bool done = false; };
static std::deque<Fiber> fibers;
static Fiber* cur;
static ucontext_t host;
static u64 random_state, steps;
static u64 draw() { random_state ^= random_state << 13; random_state ^= random_state >> 7; return random_state ^= random_state << 17; }
static void yield() { swapcontext(&cur->context, &host); }
static void entry() { cur->run(); cur->done = true; yield(); }
static void start(void (*run)()) {
  fibers.emplace_back();
  Fiber& f = fibers.back();
  f.stack.resize(65536), f.run = run;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = &host;
  makecontext(&f.context, entry, 0);
}
static bool running() { for (Fiber& f : fibers) if (!f.done) return true; return false; }
static void resume_one() {
  do cur = &fibers[draw() % fibers.size()]; while (cur->done);
  for (u64 n = draw() % 4 ? 1 : draw() % 30; n && !cur->done; --n) swapcontext(&host, &cur->context);
}
"""


def built(folder: Path, old: str = "", new: str = "") -> Path:
    """The program, after a change of ``gin_room.cu``."""
    text = (toolchain.KERNEL_FOLDER / "gin_room.cu").read_text()
    assert old in text
    text = text.replace(old, new, 1)
    for name, body in INLINE.items():
        text, times = re.subn(rf"(INLINE {re.escape(name)}\([^)]*\)) \{{.*\n", rf"\1 {{ {body} }}\n", text)
        assert times == 1
    assert "asm" not in text
    text = text.replace("static __device__ __forceinline__", "static inline").replace("typedef unsigned long long u64;", "")
    source, program = folder / "room.cc", folder / "room"
    harness = (Path(__file__).parent / "native" / "room.h").read_text().replace("DEADLINE", str(DEADLINE))
    source.write_text(FIBERS + text + harness)
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-o", str(program), str(source)], check=True)
    return program


def run(program: Path, seed: int, posters: int, requests: int, room: int, length: int, stops: int = 1 << 40, again: int = 0,
        peers: int = 1) -> list[int]:
    """(issued, waited, given up, issued by who had given up, peers lost, steps)."""
    words = [str(n) for n in (seed, posters, requests, room, length, stops, again, peers)]
    done = subprocess.run([str(program), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    return [int(word) for word in done.stdout.split()]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("room"))


SHAPES = ((1, 40, 1), (3, 20, 1), (3, 20, 2), (7, 30, 4), (16, 9, 32), (40, 5, 32))


@pytest.mark.parametrize(("posters", "requests", "room"), SHAPES)
def test_nothing_issued_waits_and_everything_is_issued(program: Path, posters: int, requests: int, room: int) -> None:
    for seed in range(60):
        assert run(program, seed, posters, requests, room, room)[:5] == [posters * requests, 0, 0, 0, 0]
        assert run(program, seed, posters, requests, room, room, peers=3)[:5] == [posters * requests, 0, 0, 0, 0]


@pytest.mark.parametrize(("posters", "requests", "room"), SHAPES[:5])
def test_a_queue_that_stops_moving_holds_nobody_up(program: Path, posters: int, requests: int, room: int) -> None:
    for seed in range(40):
        stops = seed % 9
        issued, waited, given_up, out_of_order, lost, _ = run(program, seed, posters, requests, room, room, stops)
        assert waited == 0 and issued + given_up == posters * requests and issued <= stops + room
        assert lost == (given_up > 0) and (lost or posters * requests <= stops + room) and out_of_order == 0


MUTANTS = {"one more than there is room for": ("< i64(room)", "<= i64(room)"),
           "done without a good ticket": ("if (good) raise_to", "raise_to"),
           "the ticket before the count": ("    u64 issued = load_acquire(&queue->issued);\n    auto ticket = take();",
                                           "    auto ticket = take();\n    u64 issued = load_acquire(&queue->issued);"),
           "as many done as began": ("load_acquire(&queue->issued)", "load_acquire(&queue->begun)"),
           "done put back": ("raise_to(&queue->done, issued)", "store_relaxed(&queue->done, issued)")}


@pytest.mark.parametrize("what", [m for m in MUTANTS if m != "done put back"])
def test_mutants_let_requests_wait(what: str, tmp_path: Path) -> None:
    broken = built(tmp_path, *MUTANTS[what])
    waited = sum(run(broken, seed, posters, requests, room, room, stops)[1] for seed in range(40) for posters, requests, room in SHAPES[1:4]
                 for stops in (20, 1 << 40))
    assert waited > 0


def test_counts_that_go_back_hold_requests_up(tmp_path: Path) -> None:
    """Not wrong, but slower: the reason why `done` is raised and not set."""
    broken = built(tmp_path, *MUTANTS["done put back"])
    assert all(run(broken, seed, 7, 30, 4, 4)[:2] == [210, 0] for seed in range(20))


def test_a_wait_without_a_deadline_is_endless(tmp_path: Path) -> None:
    broken = built(tmp_path, "late = waited > timeout", "late = false")
    done = subprocess.run([str(broken), "1", "3", "20", "2", "2", "5", "0", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "endless\n"


def test_nothing_follows_what_was_left_out(tmp_path: Path, program: Path) -> None:
    """A signal that got through would speak for puts that did not: also if the queue moves again."""
    broken = built(tmp_path, "  if (load_relaxed(lost)) return false;\n", "")
    cases = [(seed, 2, 30, 4, 4, seed % 9, 1) for seed in range(60)]
    ends = [[run(p, *case) for case in cases] for p in (program, broken)]
    assert all(lost and given_up and not out_of_order for _, _, given_up, out_of_order, lost, _ in ends[0])
    assert any(out_of_order for _, _, _, out_of_order, _, _ in ends[1])


def test_many_lost_peers_take_little_longer_than_one(program: Path, tmp_path: Path) -> None:
    """One after another, by who puts to all of them."""
    broken = built(tmp_path, "    if (late) add_to(&limits->vain, waited);\n", "")
    for peers in (1, 4, 16):
        for seed in range(5):
            ends = [run(p, seed, 1, 3 * peers, 2, 2, 0, peers=peers) for p in (program, broken)]
            assert all(end[4] == peers and end[2] == peers for end in ends)
            assert ends[0][5] < 2 * DEADLINE and ends[1][5] > peers * DEADLINE - 100
