// Room in the network's queues, kept so that no request waits for it without a deadline. Included before gin_ops.cu; knows nothing of NCCL.
//
// NCCL waits for room in the queue of a (context, peer) for ever, and if the network has failed there never is any again. So requests are counted, and
// one is issued only when it cannot have to wait: of all that began before it, fewer than `room` may still be in the queue. Counts grow only. Of those
// issued, `done` are known to have left; the n-th to begin may go if n - done < room. If m is the largest n that went, the queue holds requests
// 0 .. m at most, less the done of that moment: no more than `room`. Who finds none takes a ticket, which is good once all that was issued before has
// left, and moves `done` there. `issued` is counted after the request by a release and read before the ticket by an acquire, so the ticket knows of all.
//
// Who waits longer than the deadline says that the peer is lost, to everybody and for good: nothing is put to it any more, on any context. A signal comes
// after what it speaks for, so it is left out if any of that was, and the peer learns of the loss by its own deadline, as of one in the network.
// A kernel may put to many peers one after another, and they may all be lost: what was waited in vain shortens later waits, down to `least`, so that
// together they last little longer than one.
typedef long long i64;
typedef unsigned long long u64;
#define INLINE static __device__ __forceinline__

struct Queue { u64 begun, issued, done, lost; };           // of a (context, peer); `lost` is used in that of context 0
struct Limits { u64 timeout, ranks, room, least, vain, unused[11]; };   // stands before the communicator; before it queues [contexts][ranks], the last one first

INLINE u64 load_relaxed(const u64* p) { u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
INLINE u64 load_acquire(const u64* p) { u64 v; asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
INLINE void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
INLINE u64 take_number(u64* p) { u64 v; asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(v) : "l"(p) : "memory"); return v; }
INLINE void raise_to(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
INLINE void count_after(u64* p) { asm volatile("red.release.gpu.global.add.u64 [%0], 1;" :: "l"(p) : "memory"); }
INLINE void add_to(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
INLINE u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }

INLINE Limits* limits_of(i64 comm) { return (Limits*)comm - 1; }
INLINE Queue* queue_of(i64 comm, i64 context, i64 peer) {
  Limits* limits = limits_of(comm);
  return (Queue*)limits - 1 - (context * i64(limits->ranks) + peer);
}

// Whether a request may be issued now. `take()` makes a ticket: an object whose `good()` looks once.
template <class Take>
INLINE bool claim(Queue* queue, u64* lost, Limits* limits, Take take) {
  if (load_relaxed(lost)) return false;
  u64 room = limits->room;
  u64 mine = take_number(&queue->begun);
  auto may = [&] { return i64(mine - load_relaxed(&queue->done)) < i64(room); };
  if (may()) return true;
  u64 vain = load_relaxed(&limits->vain), timeout = vain + limits->least < limits->timeout ? limits->timeout - vain : limits->least;
  u64 started = nanoseconds(), waited = 0;
  for (;;) {
    u64 issued = load_acquire(&queue->issued);
    auto ticket = take();
    bool good, late;
    do waited = nanoseconds() - started, late = waited > timeout, good = ticket.good(); while (!good && !late && !may() && !load_relaxed(lost));
    if (good) raise_to(&queue->done, issued);
    if (may()) return true;
    if (!late && !load_relaxed(lost)) continue;
    store_relaxed(lost, 1);
    if (late) add_to(&limits->vain, waited);
    return false;
  }
}
