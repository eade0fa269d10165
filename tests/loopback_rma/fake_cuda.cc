// A stand-in for libcuda.so.1 in tests of the loopback plugin: device memory is host memory, and a stream does its work late, one piece at each query.
#include <cuda.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace {
struct Stream { std::deque<std::function<void()>> work; uint64_t queued = 0, finished = 0; };
struct Event { Stream* stream = nullptr; uint64_t at = 0; };
std::recursive_mutex lock;
thread_local CUcontext current = nullptr;
std::map<int, int> contexts;
uint64_t events_alive = 0;

void advance(Stream* s) {
  if (s->work.empty()) return;
  s->work.front()();
  s->work.pop_front();
  ++s->finished;
}
void queue(CUstream stream, std::function<void()> work) {
  auto* s = reinterpret_cast<Stream*>(stream);
  s->work.push_back(std::move(work));
  ++s->queued;
}
}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) CUresult
#define HOLD std::lock_guard<std::recursive_mutex> hold(lock)
#undef cuStreamWriteValue64
#undef cuEventDestroy
FAKE cuInit(unsigned) { return CUDA_SUCCESS; }
FAKE cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { *context = reinterpret_cast<CUcontext>(&contexts[device]); return CUDA_SUCCESS; }
FAKE cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
FAKE cuCtxGetCurrent(CUcontext* context) { *context = current; return CUDA_SUCCESS; }
FAKE cuMemHostAlloc(void** to, size_t bytes, unsigned) { *to = malloc(bytes); return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
FAKE cuStreamCreateWithPriority(CUstream* stream, unsigned, int) { *stream = reinterpret_cast<CUstream>(new Stream); return CUDA_SUCCESS; }
FAKE cuStreamSynchronize(CUstream stream) { HOLD; while (!reinterpret_cast<Stream*>(stream)->work.empty()) advance(reinterpret_cast<Stream*>(stream)); return CUDA_SUCCESS; }
FAKE cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  HOLD;
  queue(stream, [=] { memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
  return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
FAKE cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned) {
  HOLD;
  if (to % 8) return CUDA_ERROR_INVALID_VALUE;
  queue(stream, [=] { *reinterpret_cast<volatile uint64_t*>(to) = value; });
  return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
FAKE cuPointerGetAttribute(void* to, CUpointer_attribute, CUdeviceptr) { *static_cast<int*>(to) = 0; return CUDA_SUCCESS; }
FAKE cuEventCreate(CUevent* event, unsigned) { HOLD; *event = reinterpret_cast<CUevent>(new Event); ++events_alive; return CUDA_SUCCESS; }
FAKE cuEventRecord(CUevent event, CUstream stream) {
  HOLD;
  auto* e = reinterpret_cast<Event*>(event);
  e->stream = reinterpret_cast<Stream*>(stream);
  e->at = e->stream->queued;
  return CUDA_SUCCESS;
}
FAKE cuEventQuery(CUevent event) {
  HOLD;
  auto* e = reinterpret_cast<Event*>(event);
  if (e->stream && e->stream->finished < e->at) advance(e->stream);
  return !e->stream || e->stream->finished >= e->at ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
FAKE cuEventDestroy_v2(CUevent event) { HOLD; delete reinterpret_cast<Event*>(event); --events_alive; return CUDA_SUCCESS; }
extern "C" __attribute__((visibility("default"))) uint64_t fake_events() { return events_alive; }
extern "C" __attribute__((visibility("default"))) void* fake_current() { return current; }
