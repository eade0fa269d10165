// A test tool: an NCCL RMA plugin whose network is memory of this machine. With it NCCL's GIN proxy backend runs without a network card, and
// NCCL_LSA_TEAM_SIZE splits ranks of one GPU into several teams, as on several nodes.
//
//   NCCL_RMA_PLUGIN=/path/to/libloopback_rma.so NCCL_LSA_TEAM_SIZE=2 ...
//
// Ranks of one process: a put is a copy. Ranks of several processes: the bytes travel through a ring in shared memory that the receiver empties.
// Interface: NCCL's RMA plugin version 14, declared here by hand from its public description (NCCL 2.30 to 2.32 take it).
//
// The copies are the CUDA driver's. A copy to pageable memory that must wait (`tensor.cpu()` behind a kernel) holds the driver meanwhile, and the network
// stands still: wait for the stream first.
//
// Environment, read when NCCL calls `init` (tests call `loopback_configure` instead):
//   LOOPBACK_DELAY_US     a put or signal waits up to so many microseconds (0: none), and again between reading its bytes and writing them
//   LOOPBACK_REORDER=1    puts pass each other and land in pieces; only a signal waits, for all earlier puts of its (source, context, target)
//   LOOPBACK_SEED         of the delays
//   LOOPBACK_RECEIVES     NCCL lets 32 times as many requests of a context and peer be under way (default 64)
//   LOOPBACK_LOSE_RANK    puts and signals from and to this rank of a connection vanish,
//   LOOPBACK_LOSE_AFTER   after so many of them,
//   LOOPBACK_LOSE=ack     yet are acknowledged at the source (default); LOOPBACK_LOSE=never: their requests never complete
#include <cuda.h>
#include <nccl.h>
#include <nccl_device/net_device.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int kHostPointer = 1, kCudaPointer = 2, kSignalIncrement = 1, kHandleBytes = 128;
constexpr size_t kRingBytes = size_t(4) << 20, kPieceBytes = size_t(256) << 10;

// ---- the GPU, if any of the memory is there ------------------------------------------------------------------------------
// libcuda is looked up at run time: tests on host memory run where there is none.
struct Driver {
  decltype(&cuInit) init; decltype(&cuDeviceGet) device; decltype(&cuDevicePrimaryCtxRetain) retain; decltype(&cuCtxSetCurrent) set; decltype(&cuCtxGetCurrent) get;
  decltype(&cuMemHostAlloc) pinned; decltype(&cuStreamCreateWithPriority) stream; decltype(&cuStreamSynchronize) wait; decltype(&cuMemcpyAsync) copy;
  CUresult (*write64)(CUstream, CUdeviceptr, cuuint64_t, unsigned); decltype(&cuPointerGetAttribute) attribute;
  CUresult (*event)(CUevent*, unsigned); CUresult (*record)(CUevent, CUstream); CUresult (*query)(CUevent); CUresult (*destroy)(CUevent);
  bool ready = false;

  template <typename F> bool find(void* library, const char* name, F& to) { return (to = reinterpret_cast<F>(dlsym(library, name))) != nullptr; }
  bool load() {
    if (ready) return true;
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    return ready = library && find(library, "cuInit", init) && find(library, "cuDeviceGet", device) && find(library, "cuDevicePrimaryCtxRetain", retain) &&
                   find(library, "cuCtxSetCurrent", set) && find(library, "cuCtxGetCurrent", get) && find(library, "cuMemHostAlloc", pinned) && find(library, "cuStreamCreateWithPriority", stream) && find(library, "cuStreamSynchronize", wait) &&
                   find(library, "cuMemcpyAsync", copy) && find(library, "cuStreamWriteValue64_v2", write64) &&
                   find(library, "cuPointerGetAttribute", attribute) && find(library, "cuEventCreate", event) && find(library, "cuEventRecord", record) &&
                   find(library, "cuEventQuery", query) && find(library, "cuEventDestroy_v2", destroy) && init(0) == CUDA_SUCCESS;
  }
} driver;

struct Gpu { CUcontext context; CUstream stream; };   // one stream each: what is issued in order happens in order
auto& gpus = *new std::map<int, Gpu>;   // this and what is below is never destroyed: NCCL's threads may still be here when the process ends

Gpu* gpu_of(int ordinal) {
  if (!driver.load()) return nullptr;
  auto found = gpus.find(ordinal);
  if (found == gpus.end()) {
    Gpu made{};
    CUdevice device;
    if (driver.device(&device, ordinal) || driver.retain(&made.context, device) || driver.set(made.context) ||
        driver.stream(&made.stream, CU_STREAM_NON_BLOCKING, -5))
      return nullptr;
    found = gpus.emplace(ordinal, made).first;
  }
  return driver.set(found->second.context) ? nullptr : &found->second;
}

// NCCL's threads keep the context they came with, also where ranks of several GPUs share this process.
struct KeepContext {
  CUcontext before = nullptr;
  bool kept;
  KeepContext() : kept(driver.ready && driver.get(&before) == CUDA_SUCCESS) {}
  ~KeepContext() { if (kept) driver.set(before); }
};

// Bytes on their way. A copy between a GPU and pageable memory would wait, and everybody with it, so they lie in pinned memory; it is allocated once,
// before kernels run, since the driver waits for these when it allocates.
constexpr size_t kArenaBytes = size_t(64) << 20;
struct Arena {
  char* memory = nullptr;
  size_t used = 0;
  std::map<size_t, std::vector<char*>> free{};   // by size

  void open() {
    void* made = nullptr;
    if (!memory && !driver.pinned(&made, kArenaBytes, 0)) memory = static_cast<char*>(made);
  }
  static size_t rounded(size_t bytes) { size_t n = 64; while (n < bytes) n *= 2; return n; }
  char* take(size_t bytes) {
    size_t n = rounded(bytes);
    auto& same = free[n];
    if (!same.empty()) { char* p = same.back(); same.pop_back(); return p; }
    if (memory && used + n <= kArenaBytes) { used += n; return memory + used - n; }
    return static_cast<char*>(malloc(n));
  }
  void give(char* p, size_t bytes) { free[rounded(bytes)].push_back(p); }
};
auto& arena = *new Arena;
struct Held {
  char* data = nullptr;
  size_t bytes = 0;
  Held() = default;
  Held(const Held&) = delete;
  ~Held() { if (data) arena.give(data, bytes); }
  void resize(size_t n) { data = arena.take(bytes = n); }
};

// ---- ranks, memory -------------------------------------------------------------------------------------------------------
struct Region { char* address; size_t bytes; int kind; int device; int index; };

struct Ring {   // in shared memory: messages to one rank, in the order in which they are to land
  std::atomic<uint32_t> lock;
  std::atomic<uint64_t> head, tail;   // bytes ever written and read
  char data[kRingBytes];
};
struct Message { uint64_t bytes, region, offset, value, signal_region, signal_offset; uint32_t op, total; };   // then the payload, then padding

struct Handle { char magic[8]; int64_t process; char ring[64]; uint64_t number; };   // what ranks tell each other; at most kHandleBytes
static_assert(sizeof(Handle) <= kHandleBytes, "handle");

struct Listener { std::string name; Ring* ring; };

struct Endpoint {   // one per rank and connection
  int rank, ranks;
  std::vector<Region*> regions;
  std::vector<Endpoint*>* group;      // of those in this process, by rank
  std::vector<Ring*> rings;           // of those in other processes, by rank
  std::string ring_name;
  Ring* inbox;
  uint64_t number;
};

enum class State { kWaiting, kReading, kHolding, kWriting };
struct Request { bool done = false; int parts = 0; };
struct Op {
  uint64_t sequence, due;
  State state;
  Endpoint* source; int context; uint32_t target;
  Region* from; uint64_t from_offset; size_t bytes; int region; uint64_t offset;
  bool signal; int signal_region; uint64_t signal_offset, value; uint32_t op;
  CUevent event = nullptr;
  Held held{};
  Request* request = nullptr;
  bool completed = false;
};

struct Settings { uint64_t delay_us = 0; bool reorder = false; uint64_t seed = 0; int lose_rank = -1; uint64_t lose_after = 0; bool lose_never = false; };

std::mutex lock;
Settings settings;
std::mt19937_64 draw;
bool manual_clock = false;
uint64_t manual_now = 0, sequence = 0, concerned = 0;
uint64_t counts[6];   // puts, signals, delivered, lost, passed (landed before an earlier one of its source and target), through rings
auto& groups = *new std::map<std::string, std::vector<Endpoint*>>;
auto& endpoints = *new std::vector<Endpoint*>;
auto& signal_value = *new std::map<uint64_t, uint64_t>;   // last value of each signal word on a GPU; this process is its only writer
auto& pending = *new std::deque<std::unique_ptr<Op>>;     // by sequence
using Lane = std::tuple<Endpoint*, uint32_t, int>;          // source, target, context
auto& unwritten = *new std::map<Lane, std::set<uint64_t>>;   // sequences of what has not been written yet
uint64_t last_progress = 0;

uint64_t now_us() {
  if (manual_clock) return manual_now;
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
uint64_t some_delay() { return settings.delay_us ? draw() % (settings.delay_us + 1) : 0; }
bool on_gpu(const Region* r) { return r && r->kind == kCudaPointer; }

// ---- writing at the target -----------------------------------------------------------------------------------------------
ncclResult_t add_signal(Region* region, uint64_t offset, uint32_t op, uint64_t value) {
  char* word = region->address + offset;
  uint64_t add = op == kSignalIncrement ? 1 : value;
  if (!on_gpu(region)) {
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(word), add, __ATOMIC_RELEASE);
    return ncclSuccess;
  }
  Gpu* gpu = gpu_of(region->device);
  if (!gpu) return ncclUnhandledCudaError;
  signal_value[uint64_t(word)] += add;
  return driver.write64(gpu->stream, CUdeviceptr(word), signal_value[uint64_t(word)], 0) ? ncclUnhandledCudaError : ncclSuccess;
}

// Copies without waiting where a GPU is concerned; `gpu` is then set to the one whose stream does it.
ncclResult_t move(char* to, const Region* to_region, const char* from, const Region* from_region, size_t bytes, Gpu** gpu) {
  *gpu = nullptr;
  if (!bytes) return ncclSuccess;
  if (!on_gpu(to_region) && !on_gpu(from_region)) {
    memcpy(to, from, bytes);
    return ncclSuccess;
  }
  *gpu = gpu_of(on_gpu(to_region) ? to_region->device : from_region->device);
  if (!*gpu) return ncclUnhandledCudaError;
  bool word = bytes == 8 && uint64_t(to) % 8 == 0 && on_gpu(to_region) && !on_gpu(from_region);   // a value put lands at once
  if (word) {
    uint64_t value;
    memcpy(&value, from, 8);
    return driver.write64((*gpu)->stream, CUdeviceptr(to), value, 0) ? ncclUnhandledCudaError : ncclSuccess;
  }
  return driver.copy(CUdeviceptr(to), CUdeviceptr(from), bytes, (*gpu)->stream) ? ncclUnhandledCudaError : ncclSuccess;
}

struct Spin {   // of a ring; processes share it
  std::atomic<uint32_t>& word;
  explicit Spin(std::atomic<uint32_t>& w) : word(w) { while (word.exchange(1, std::memory_order_acquire)) usleep(1); }
  ~Spin() { word.store(0, std::memory_order_release); }
};
void ring_copy(Ring* ring, uint64_t at, void* data, size_t bytes, bool in) {
  size_t begin = at % kRingBytes, first = std::min(bytes, kRingBytes - begin);
  char* p = static_cast<char*>(data);
  if (in) { memcpy(ring->data + begin, p, first); memcpy(ring->data, p + first, bytes - first); }
  else { memcpy(p, ring->data + begin, first); memcpy(p + first, ring->data, bytes - first); }
}
bool push(Ring* ring, const Op& op, const char* payload) {
  Message m{op.bytes, uint64_t(op.region), op.offset, op.value, op.signal ? uint64_t(op.signal_region) : ~uint64_t(0), op.signal_offset, op.op, 0};
  m.total = uint32_t((sizeof m + op.bytes + 7) / 8 * 8);
  Spin hold(ring->lock);
  uint64_t head = ring->head.load(std::memory_order_relaxed);
  if (head + m.total - ring->tail.load(std::memory_order_acquire) > kRingBytes) return false;   // full: later
  ring_copy(ring, head, &m, sizeof m, true);
  if (op.bytes) ring_copy(ring, head + sizeof m, const_cast<char*>(payload), op.bytes, true);
  ring->head.store(head + m.total, std::memory_order_release);
  return true;
}
ncclResult_t empty_inbox(Endpoint* me) {
  std::vector<char> payload;
  while (me->inbox && me->inbox->tail.load(std::memory_order_relaxed) < me->inbox->head.load(std::memory_order_acquire)) {
    uint64_t tail = me->inbox->tail.load(std::memory_order_relaxed);
    Message m;
    ring_copy(me->inbox, tail, &m, sizeof m, false);
    bool there = (!m.bytes || m.region < me->regions.size()) && (m.signal_region == ~uint64_t(0) || m.signal_region < me->regions.size());
    if (!there) return ncclSuccess;   // its sender registered the memory earlier than I do
    payload.resize(m.bytes);
    if (m.bytes) ring_copy(me->inbox, tail + sizeof m, payload.data(), m.bytes, false);
    Region* region = m.bytes ? me->regions[m.region] : nullptr;
    if (region) {
      Gpu* gpu;
      if (move(region->address + m.offset, region, payload.data(), nullptr, m.bytes, &gpu)) return ncclUnhandledCudaError;
      if (gpu && driver.wait(gpu->stream)) return ncclUnhandledCudaError;   // the payload's memory is used again
    }
    if (m.signal_region != ~uint64_t(0) && me->regions[m.signal_region])
      if (add_signal(me->regions[m.signal_region], m.signal_offset, m.op, m.value)) return ncclUnhandledCudaError;
    me->inbox->tail.store(tail + m.total, std::memory_order_release);
    ++counts[2];
  }
  return ncclSuccess;
}

// ---- the network: what waits, and when it may go on ----------------------------------------------------------------------
bool lost(const Endpoint* source, uint32_t target) {
  if (settings.lose_rank < 0 || (source->rank != settings.lose_rank && int(target) != settings.lose_rank)) return false;
  return concerned++ >= settings.lose_after;
}
void complete(Op& op) {
  if (!op.completed && op.request && --op.request->parts == 0) op.request->done = true;
  op.completed = true;
}
// A signal waits for what is earlier of its source, context and target; without reordering everything does.
Lane lane_of(const Op& op) { return {op.source, op.target, op.context}; }
bool may_write(const Op& op) { return (settings.reorder && !op.signal) || *unwritten[lane_of(op)].begin() == op.sequence; }
bool passes_another(const Op& op) {   // of its source and target, on any context
  for (auto lane = unwritten.lower_bound({op.source, op.target, 0}); lane != unwritten.end(); ++lane) {
    if (std::get<0>(lane->first) != op.source || std::get<1>(lane->first) != op.target) break;
    if (!lane->second.empty() && *lane->second.begin() < op.sequence) return true;
  }
  return false;
}
ncclResult_t record(Op& op, Gpu* gpu) {
  if (!gpu) return ncclSuccess;
  if (!op.event && driver.event(&op.event, CU_EVENT_DISABLE_TIMING)) return ncclUnhandledCudaError;
  return driver.record(op.event, gpu->stream) ? ncclUnhandledCudaError : ncclSuccess;
}
bool finished(const Op& op) { return !op.event || driver.query(op.event) == CUDA_SUCCESS; }

ncclResult_t write(Op& op) {
  Endpoint* peer = (*op.source->group)[op.target];
  const char* from = op.held.data ? op.held.data : op.from ? op.from->address + op.from_offset : nullptr;
  const Region* from_region = op.held.data ? nullptr : op.from;
  Gpu* gpu = nullptr;
  Ring* ring = op.source->rings[op.target];
  if (ring) {   // another process
    if (!push(ring, op, from)) return ncclInProgress;
    ++counts[5];
  } else if (!peer) {   // it has gone
    ++counts[3];
  } else {
    if (op.bytes) {
      if (op.region >= int(peer->regions.size()) || !peer->regions[op.region]) return ncclInvalidArgument;
      Region* region = peer->regions[op.region];
      if (op.offset + op.bytes > region->bytes) return ncclInvalidArgument;
      if (auto error = move(region->address + op.offset, region, from, from_region, op.bytes, &gpu)) return error;
    }
    if (op.signal) {
      if (op.signal_region >= int(peer->regions.size()) || !peer->regions[op.signal_region]) return ncclInvalidArgument;
      Region* region = peer->regions[op.signal_region];
      if (auto error = add_signal(region, op.signal_offset, op.op, op.value)) return error;
      if (on_gpu(region)) gpu = gpu_of(region->device);
    }
    ++counts[2];
  }
  if (passes_another(op)) ++counts[4];
  unwritten[lane_of(op)].erase(op.sequence);
  op.state = State::kWriting;
  return record(op, gpu);
}

// One step of one operation; true in `moved` if it went on.
ncclResult_t step(Op& op, uint64_t now, bool* moved) {
  *moved = false;
  if (op.state == State::kWaiting) {
    if (op.due > now) return ncclSuccess;
    bool hold = settings.delay_us || settings.reorder || op.source->rings[op.target];   // bytes leave the source before they land
    if (hold && op.bytes) {
      op.held.resize(op.bytes);
      Gpu* gpu;
      if (auto error = move(op.held.data, nullptr, op.from->address + op.from_offset, op.from, op.bytes, &gpu)) return error;
      op.state = State::kReading;
      *moved = true;
      return record(op, gpu);
    }
    op.state = State::kHolding;
    *moved = true;
  }
  if (op.state == State::kReading && finished(op)) {
    op.state = State::kHolding;
    op.due = now + some_delay();
    complete(op);   // the source may be overwritten from now on
    *moved = true;
  }
  if (op.state == State::kHolding && op.due <= now && may_write(op)) {
    auto error = write(op);
    if (error && error != ncclInProgress) return error;
    *moved = !error;
  }
  return ncclSuccess;
}
ncclResult_t progress_all() {
  for (auto* me : endpoints)
    if (auto error = empty_inbox(me)) return error;
  if (pending.empty()) return ncclSuccess;
  uint64_t now = last_progress = now_us();
  std::vector<Op*> order;
  for (auto& op : pending) order.push_back(op.get());
  if (settings.reorder) std::shuffle(order.begin(), order.end(), draw);
  for (Op* op : order) {
    bool moved = true;
    while (moved)
      if (auto error = step(*op, now, &moved)) return error;
  }
  for (auto& op : pending) {   // in order of issue on each stream: a later event is never finished before an earlier one of the stream
    if (op->state != State::kWriting || !finished(*op)) continue;
    complete(*op);
    if (op->event) driver.destroy(op->event);
    op.reset();
  }
  pending.erase(std::remove(pending.begin(), pending.end(), nullptr), pending.end());
  return ncclSuccess;
}

// NCCL's threads ask far more often than anything can have happened.
ncclResult_t progress_now_and_then() { return manual_clock || now_us() - last_progress >= 10 ? progress_all() : ncclSuccess; }

// ---- NCCL's interface ----------------------------------------------------------------------------------------------------
uint64_t number_of(const char* name) { const char* text = getenv(name); return text ? strtoull(text, nullptr, 10) : 0; }

ncclResult_t init(void** ctx, uint64_t, void*) {
  std::lock_guard<std::mutex> hold(lock);
  if (!manual_clock) {
    const char* loser = getenv("LOOPBACK_LOSE_RANK");
    const char* how = getenv("LOOPBACK_LOSE");
    settings = {number_of("LOOPBACK_DELAY_US"), number_of("LOOPBACK_REORDER") != 0, number_of("LOOPBACK_SEED"), loser ? atoi(loser) : -1,
                number_of("LOOPBACK_LOSE_AFTER"), how && !strcmp(how, "never")};
    draw.seed(settings.seed);
  }
  *ctx = calloc(1, 8);
  return ncclSuccess;
}
ncclResult_t devices(int* count) { *count = 1; return ncclSuccess; }

struct Properties {   // of one adapter; what NCCL calls the properties of a network device, version 12
  const char* name; const char* pci_path; uint64_t guid;
  int pointer_kinds, registration_is_global, force_flush, speed_mbps, port;
  float latency;
  int max_comms, max_receives;
  ncclNetDeviceType device_type;
  int device_version;
  struct { int count; int devices[8]; } virtual_devices;
  size_t max_p2p_bytes, max_collective_bytes;
  int max_multi_request;
  int16_t rail, plane;
};
ncclResult_t properties(int, Properties* p) {
  const int receives = number_of("LOOPBACK_RECEIVES") ? int(number_of("LOOPBACK_RECEIVES")) : 64;
  *p = Properties{"loopback", nullptr, 42, kHostPointer | kCudaPointer, 0, 0, 100000, 0, 1.0f, 65536, receives, NCCL_NET_DEVICE_GIN_PROXY, 0,
                  {1, {0}}, size_t(1) << 30, size_t(1) << 29, 1, -1, -1};
  return ncclSuccess;
}
ncclResult_t listen(void*, int, void* handle, void** listener) {
  static uint64_t next = 1;
  std::lock_guard<std::mutex> hold(lock);
  Handle mine{{'l', 'o', 'o', 'p', 'b', 'a', 'c', 'k'}, getpid(), {}, next++};
  snprintf(mine.ring, sizeof mine.ring, "/loopback-rma-%d-%llu", int(getpid()), static_cast<unsigned long long>(mine.number));
  int file = shm_open(mine.ring, O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Ring))) return ncclSystemError;
  void* memory = mmap(nullptr, sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  *listener = new Listener{mine.ring, static_cast<Ring*>(memory)};   // fresh shared memory is zero, which is an empty ring
  memset(handle, 0, kHandleBytes);
  memcpy(handle, &mine, sizeof mine);
  return ncclSuccess;
}
ncclResult_t connect(void*, void* handles[], int ranks, int rank, void* listener, void** endpoint) {
  std::lock_guard<std::mutex> hold(lock);
  auto* heard = static_cast<Listener*>(listener);
  auto* first = static_cast<Handle*>(handles[0]);
  auto& group = groups[std::string(first->ring)];
  group.resize(ranks);
  auto* me = new Endpoint{rank, ranks, {}, &group, std::vector<Ring*>(ranks), heard->name, heard->ring, first->number};
  for (int r = 0; r < ranks; ++r) {
    Handle peer;
    memcpy(&peer, handles[r], sizeof peer);
    if (memcmp(peer.magic, "loopback", 8)) return ncclInvalidArgument;
    if (peer.process == getpid()) continue;
    int file = shm_open(peer.ring, O_RDWR, 0600);
    if (file < 0) return ncclSystemError;
    void* memory = mmap(nullptr, sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return ncclSystemError;
    me->rings[r] = static_cast<Ring*>(memory);
  }
  group[rank] = me;
  endpoints.push_back(me);
  *endpoint = me;
  return ncclSuccess;
}
struct ContextConfig { int contexts, traffic_class; };
ncclResult_t create_context(void* endpoint, ContextConfig*, void** ctx) { *ctx = endpoint; return ncclSuccess; }

// Registration is collective and in the same order on every rank: the peer's region has the index of mine.
ncclResult_t register_region(void* endpoint, void* data, size_t bytes, int kind, uint64_t, void** region) {
  std::lock_guard<std::mutex> hold(lock);
  auto* me = static_cast<Endpoint*>(endpoint);
  int device = 0;
  if (kind == kCudaPointer && !driver.load()) return ncclUnhandledCudaError;
  if (kind == kCudaPointer) {
    KeepContext keep;
    if (driver.attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CUdeviceptr(data))) device = 0;
    if (gpu_of(device)) arena.open();
  }
  auto* r = new Region{static_cast<char*>(data), bytes, kind, device, int(me->regions.size())};
  me->regions.push_back(r);
  signal_value.erase(signal_value.lower_bound(uint64_t(data)), signal_value.lower_bound(uint64_t(data) + bytes));   // memory that is used again
  *region = r;
  return ncclSuccess;
}
ncclResult_t register_dmabuf(void* e, void* data, size_t n, int kind, uint64_t, int, uint64_t flags, void** region) {
  return register_region(e, data, n, kind, flags, region);
}
ncclResult_t deregister(void* endpoint, void* region) {
  std::lock_guard<std::mutex> hold(lock);
  auto* me = static_cast<Endpoint*>(endpoint);
  auto* r = static_cast<Region*>(region);
  me->regions[r->index] = nullptr;   // later regions keep their index; the record stays, since a late put may name it
  return ncclSuccess;
}
ncclResult_t nothing(void*) { return ncclSuccess; }
ncclResult_t close_endpoint(void* endpoint) {
  std::lock_guard<std::mutex> hold(lock);
  auto* me = static_cast<Endpoint*>(endpoint);
  for (auto& op : pending)
    if (op->source == me || (op->source->group == me->group && int(op->target) == me->rank)) op.reset();
  pending.erase(std::remove(pending.begin(), pending.end(), nullptr), pending.end());
  unwritten.clear();
  for (auto& op : pending)
    if (op->state != State::kWriting) unwritten[lane_of(*op)].insert(op->sequence);
  (*me->group)[me->rank] = nullptr;
  endpoints.erase(std::remove(endpoints.begin(), endpoints.end(), me), endpoints.end());
  shm_unlink(me->ring_name.c_str());
  return ncclSuccess;
}
ncclResult_t close_listener(void*) { return ncclSuccess; }   // the ring is the endpoint's now

void add(Endpoint* me, int c, uint32_t target, Region* from, uint64_t from_off, size_t bytes, int region, uint64_t off, bool signal, int signal_region,
         uint64_t signal_off, uint64_t value, uint32_t op, Request* request) {
  std::unique_ptr<Op> made(new Op{sequence++, now_us() + some_delay(), State::kWaiting, me, c, target, from, from_off, bytes, region, off, signal,
                                  signal_region, signal_off, value, op});
  made->request = request;
  ++request->parts;
  unwritten[lane_of(*made)].insert(made->sequence);
  pending.push_back(std::move(made));
}
ncclResult_t put_signal(void* ctx, int c, uint64_t from_off, void* from, size_t bytes, uint64_t to_off, void* to, uint32_t rank,
                        uint64_t signal_off, void* signal, uint64_t value, uint32_t op, bool, void** request) {
  std::lock_guard<std::mutex> hold(lock);
  KeepContext keep;
  auto* me = static_cast<Endpoint*>(ctx);
  if (int(rank) >= me->ranks) return ncclInvalidArgument;
  auto* made = new Request;
  *request = made;
  counts[bytes || !signal ? 0 : 1] += 1;
  if (bytes && signal) ++counts[1];
  if (lost(me, rank)) {
    ++counts[3];
    made->done = !settings.lose_never;
    return ncclSuccess;
  }
  auto* source = static_cast<Region*>(from);
  int region = to ? static_cast<Region*>(to)->index : 0;
  if (bytes && (!source || from_off + bytes > source->bytes)) return ncclInvalidArgument;
  size_t piece = me->rings[rank] ? kPieceBytes : bytes;
  if (settings.reorder && bytes > 8) piece = std::min<size_t>(piece, std::max<size_t>(8, bytes / (1 + draw() % 4) / 8 * 8));
  for (size_t at = 0; at < bytes; at += piece)   // several pieces of a put land in any order, too
    add(me, c, rank, source, from_off + at, std::min(piece, bytes - at), region, to_off + at, false, 0, 0, 0, 0, made);
  if (signal) add(me, c, rank, nullptr, 0, 0, 0, 0, true, static_cast<Region*>(signal)->index, signal_off, value, op, made);
  if (!made->parts) made->done = true;   // nothing to do
  return settings.delay_us || settings.reorder || manual_clock ? ncclSuccess : progress_all();
}
ncclResult_t put(void* ctx, int c, uint64_t from_off, void* from, size_t bytes, uint64_t to_off, void* to, uint32_t rank, void** request) {
  return put_signal(ctx, c, from_off, from, bytes, to_off, to, rank, 0, nullptr, 0, 0, false, request);
}
ncclResult_t get(void* ctx, int, uint64_t from_off, void* from, size_t bytes, uint64_t to_off, void* to, uint32_t rank, void** request) {
  std::lock_guard<std::mutex> hold(lock);
  KeepContext keep;
  auto* me = static_cast<Endpoint*>(ctx);
  Endpoint* peer = int(rank) < me->ranks ? (*me->group)[rank] : nullptr;
  if (!peer) return ncclInvalidUsage;   // no gets between processes
  Region *theirs = peer->regions[static_cast<Region*>(from)->index], *mine = static_cast<Region*>(to);
  Gpu* gpu;
  if (auto error = move(mine->address + to_off, mine, theirs->address + from_off, theirs, bytes, &gpu)) return error;
  if (gpu && driver.wait(gpu->stream)) return ncclUnhandledCudaError;
  *request = new Request{true};
  return ncclSuccess;
}
ncclResult_t flush(void*, int, void*, uint32_t, void** request) { *request = nullptr; return ncclSuccess; }   // what was got is there
ncclResult_t test(void*, void* request, int* done) {
  std::lock_guard<std::mutex> hold(lock);
  KeepContext keep;
  auto* r = static_cast<Request*>(request);
  if (!r->done)
    if (auto error = progress_now_and_then()) return error;
  *done = r->done;
  if (*done) delete r;
  return ncclSuccess;
}
ncclResult_t progress(void*) {
  std::lock_guard<std::mutex> hold(lock);
  KeepContext keep;
  return progress_now_and_then();
}
ncclResult_t last_error(void*, bool* failed) { *failed = false; return ncclSuccess; }

}  // namespace

struct RmaPlugin14 {
  const char* name;
  decltype(&init) init_; decltype(&devices) devices_; decltype(&properties) properties_; decltype(&listen) listen_;
  decltype(&connect) connect_; decltype(&create_context) create_context_; decltype(&register_region) register_;
  decltype(&register_dmabuf) register_dmabuf_; decltype(&deregister) deregister_;
  decltype(&nothing) destroy_context; decltype(&close_endpoint) close_endpoint_; decltype(&close_listener) close_listener_;
  decltype(&put) put_; decltype(&put_signal) put_signal_; decltype(&get) get_; decltype(&flush) flush_; decltype(&test) test_;
  decltype(&progress) progress_; decltype(&last_error) last_error_; decltype(&nothing) finalize;
};
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED RmaPlugin14 ncclRmaPlugin_v14;
RmaPlugin14 ncclRmaPlugin_v14 = {"loopback", init, devices, properties, listen, connect, create_context, register_region, register_dmabuf, deregister,
                                 nothing, close_endpoint, close_listener, put, put_signal, get, flush, test, progress, last_error, nothing};

// ---- for tests -----------------------------------------------------------------------------------------------------------
EXPORTED void loopback_configure(uint64_t delay_us, int reorder, uint64_t seed, int lose_rank, uint64_t lose_after, int lose_never) {
  std::lock_guard<std::mutex> hold(lock);
  manual_clock = true;   // and `init` leaves the settings alone
  settings = {delay_us, reorder != 0, seed, lose_rank, lose_after, lose_never != 0};
  draw.seed(seed);
  manual_now = concerned = 0;
  memset(counts, 0, sizeof counts);
}
EXPORTED int loopback_advance(uint64_t us) {
  std::lock_guard<std::mutex> hold(lock);
  KeepContext keep;
  manual_now += us;
  return progress_all();
}
EXPORTED uint64_t loopback_pending() { std::lock_guard<std::mutex> hold(lock); return pending.size(); }
EXPORTED void loopback_counts(uint64_t* to) { std::lock_guard<std::mutex> hold(lock); memcpy(to, counts, sizeof counts); }
