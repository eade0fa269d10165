// Just enough of a GPU to run the package's device sources on a CPU: every thread is a fiber, threads of a warp wait for each other at shuffles and votes,
// those of a block at barriers. What a warp does together it must do at the same place of the code: anything else is an error, as on a GPU.
// The network between teams delivers puts late and in any order, signals after the puts before them. Who runs next is drawn from a seed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <ucontext.h>
#include <vector>
using std::isinf;
using std::max;
using std::min;
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
#define __device__
#define NI __attribute__((noinline)) static
#define HERE __builtin_return_address(0)

struct Index { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct Barrier { int arrived = 0; unsigned turn = 0; void* where = nullptr; };
struct Block { Barrier barrier; int any = 0, told_any = 0, count = 0, told_count = 0; std::vector<u32> shared; };
struct Warp { Barrier barrier; u64 slot[32]; };
struct Fiber { ucontext_t context; std::vector<char> stack; Index thread, block_index, block_size, grid; int rank; Block* block; Warp* warp; bool done; };

static Fiber* cur;
static ucontext_t host;
static long steps;
static u64 random_state;
static char failure[200];
static int team;
static u64 bases[64][8];   // of each rank's windows
#define threadIdx (cur->thread)
#define blockIdx (cur->block_index)
#define blockDim (cur->block_size)
#define gridDim (cur->grid)
#define ep_shared (cur->block->shared.data())

static u64 draw() { random_state ^= random_state << 13; random_state ^= random_state >> 7; return random_state ^= random_state << 17; }
static void yield() { swapcontext(&cur->context, &host); }
static void fail(const char* text, int a, int b) {
  if (!failure[0]) snprintf(failure, sizeof failure, text, a, b);
  for (;;) yield();
}

// ---- together ----
static void meet(Barrier& b, int count, void* where) {
  if (b.arrived == 0) b.where = where;
  else if (where != b.where) fail("lanes of a warp of rank %d meet at different places", cur->rank, 0);
  unsigned turn = b.turn;
  if (++b.arrived == count) b.arrived = 0, ++b.turn;
  else while (b.turn == turn) yield();
}
static void meet_warp(void* where) { meet(cur->warp->barrier, 32, where); }
static void meet_block() { meet(cur->block->barrier, int(blockDim.x), nullptr); }
static bool last_of_block() { return cur->block->barrier.arrived + 1 == int(blockDim.x); }
template <class T> static void show(T v, void* where) {
  u64& slot = cur->warp->slot[threadIdx.x & 31];
  slot = 0;
  memcpy(&slot, &v, sizeof(T));
  meet_warp(where);
}
template <class T> static T exchange(T v, int from, void* where) {
  show(v, where);
  T got;
  memcpy(&got, &cur->warp->slot[from & 31], sizeof(T));
  meet_warp(where);
  return got;
}
static unsigned lanes_with(u64 v, void* where) {
  unsigned lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= unsigned(cur->warp->slot[i] == v) << i;
  meet_warp(where);
  return lanes;
}
NI void __syncwarp(unsigned = ~0u) { meet_warp(HERE); }
template <class T> NI T __shfl_sync(unsigned, T v, int from) { return exchange(v, from, HERE); }
template <class T> NI T __shfl_xor_sync(unsigned, T v, int mask) { return exchange(v, int(threadIdx.x & 31) ^ mask, HERE); }
template <class T> NI T __shfl_up_sync(unsigned, T v, int step) { int l = int(threadIdx.x & 31); return exchange(v, l >= step ? l - step : l, HERE); }
NI unsigned __ballot_sync(unsigned, bool v) { show(v, HERE); return lanes_with(1, HERE); }
NI bool __any_sync(unsigned, bool v) { show(v, HERE); return lanes_with(1, HERE) != 0; }
template <class T> NI unsigned __match_any_sync(unsigned, T v) { show(v, HERE); return lanes_with(cur->warp->slot[threadIdx.x & 31], HERE); }
NI unsigned __reduce_or_sync(unsigned, unsigned v) {
  show(v, HERE);
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= unsigned(cur->warp->slot[i]);
  meet_warp(HERE);
  return all;
}
static void __syncthreads() { meet_block(); }
static int __syncthreads_or(int v) {
  Block* b = cur->block;
  b->any |= v != 0;
  if (last_of_block()) b->told_any = b->any, b->any = 0;
  meet_block();
  int told = b->told_any;
  meet_block();
  return told;
}
static int __syncthreads_count(int v) {
  Block* b = cur->block;
  b->count += v != 0;
  if (last_of_block()) b->told_count = b->count, b->count = 0;
  meet_block();
  int told = b->told_count;
  meet_block();
  return told;
}

// ---- alone ----
template <class T, class U> static T atomicAdd(T* p, U v) { T old = *p; *p += T(v); return old; }
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.f / a; }
static unsigned __vmaxu2(unsigned a, unsigned b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static void __threadfence_system() {}
static u32 to_bf16(float f) { u32 u = __float_as_uint(f); return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16; }
static u32 to_e4m3(float f) {   // nearest even, held within +-448
  u32 sign = __float_as_uint(f) >> 31 << 7;
  if (std::isnan(f)) return sign | 127;
  float size = fminf(fabsf(f), 448.f);
  int exponent = size > 0 ? max(std::ilogb(size), -6) : -6, steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));
  return sign | u32(steps < 8 ? steps : (exponent + 7) * 8 + steps - 8);
}
static u32 to_fp16(float f) { _Float16 h = _Float16(f); unsigned short u; memcpy(&u, &h, 2); return u; }
static float from_fp16(u32 u) { unsigned short s = (unsigned short)u; _Float16 h; memcpy(&h, &s, 2); return float(h); }

// ---- the network ----
struct Request { int kind; char* to; const char* from; size_t size; u64 value; u64* counter = nullptr; };   // 0: put, 1: word, 2: signal
static std::map<std::tuple<int, int, int>, std::deque<Request>> wires;             // by context, source, target
static std::map<std::tuple<int, i64, i64>, u64> signals, put_counts;               // by rank, context, number
static void issue(i64 peer, i64 context, Request r) {
  if (peer / team == cur->rank / team) fail("rank %d puts to rank %d of its own team", cur->rank, int(peer));
  wires[{int(context), cur->rank, int(peer)}].push_back(r);
}
extern "C" {
void gin_put(i64, i64 window, i64 peer, i64 context, i64 target, i64 source_window, i64 source, i64 size) {
  issue(peer, context, {0, (char*)bases[peer][window] + target, (char*)bases[cur->rank][source_window] + source, size_t(size), 0});
}
void gin_put_value(i64, i64 window, i64 peer, i64 context, i64 target, u64 value) {
  issue(peer, context, {1, (char*)bases[peer][window] + target, nullptr, 8, value});
}
void gin_signal(i64, i64 peer, i64 context, i64 signal, i64 amount) {
  issue(peer, context, {2, (char*)&signals[{int(peer), context, signal}], nullptr, 8, u64(amount)});
}
void gin_put_signal(i64 comm, i64 window, i64 peer, i64 context, i64 target, i64 source_window, i64 source, i64 size, i64 signal, i64 amount) {
  gin_put(comm, window, peer, context, target, source_window, source, size);
  gin_signal(comm, peer, context, signal, amount);
}
void gin_put_counted(i64, i64 window, i64 peer, i64 context, i64 target, i64 source_window, i64 source, i64 size, i64 counter) {
  issue(peer, context, {0, (char*)bases[peer][window] + target, (char*)bases[cur->rank][source_window] + source, size_t(size), 0,
                        &put_counts[{cur->rank, context, counter}]});
}
u64 gin_counter_value(i64, i64 context, i64 counter) { yield(); return put_counts[{cur->rank, context, counter}]; }
u64 gin_signal_value(i64, i64 context, i64 signal) { yield(); return signals[{cur->rank, context, signal}]; }
int gin_flushed(i64, i64 context) {
  yield();
  for (auto& [wire, queue] : wires)
    for (Request& r : queue)
      if (r.kind == 0 && std::get<0>(wire) == context && std::get<1>(wire) == cur->rank) return 0;
  return 1;
}
}
static void deliver() {
  for (auto& [wire, queue] : wires) {
    if (queue.empty() || draw() % 3) continue;
    size_t before = 0;
    while (before < queue.size() && queue[before].kind != 2) ++before;
    size_t i = before ? draw() % before : 0;
    Request r = queue[i];
    queue.erase(queue.begin() + long(i));
    if (r.kind == 0) memcpy(r.to, r.from, r.size);
    else if (r.kind == 1) memcpy(r.to, &r.value, 8);
    else *(u64*)r.to += r.value;
    if (r.counter) ++*r.counter;
  }
}
static u64 window_at(i64 window, i64 offset, i64 peer) {
  if (peer / team != cur->rank / team) fail("rank %d addresses memory of rank %d, of another team", cur->rank, int(peer));
  return bases[peer][window] + u64(offset);
}
